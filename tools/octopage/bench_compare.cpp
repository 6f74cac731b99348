#include "tools/octopage/bench_compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "core/check.hpp"
#include "step/printable.hpp"
#include "tools/octopage/output.hpp"

namespace octopage::cli {
namespace {

constexpr int kDeepest = 32;  // of the JSON

struct Timed {
  std::string name;
  Json shape;
  double warm_ms = 0;
  double cold_ms = 0;  // 0 where the file has none
};

struct BenchFile {
  std::string header;
  std::vector<Timed> timed;
  std::vector<std::string> untimed;
};

double median_of(const Json& record, const char* state) {
  const double median = record.at(state).at("median_ms").get<double>();
  if (!(median >= 1e-9 && median <= 1e9)) {
    throw std::invalid_argument(
        fmt::format("{}.median_ms must be positive, 1e-9 to 1e9, is {}", state, median));
  }
  return median;
}

void add_result(BenchFile& file, std::string name, const Json& shape, const Json& record) {
  if (record.contains("warm")) {
    file.timed.push_back(
        {std::move(name), shape, median_of(record, "warm"), median_of(record, "cold")});
  } else {
    file.untimed.push_back(std::move(name));
  }
}

std::string short_revision(const std::string& revision) {
  std::string text = printable(revision, 12);
  if (revision.size() > 12) text.resize(text.size() - 3);  // without the dots
  return text;
}

BenchFile parse(const Json& json) {
  const auto format = json.at("format").get<std::string>();
  const bool peers = format == "octopage-peers-1";
  if (!peers && format != "octopage-bench-1") {
    throw std::invalid_argument("format must be octopage-bench-1 or octopage-peers-1, is " +
                                printable(format));
  }
  BenchFile file;
  file.header = fmt::format("{}, revision {}, {}", printable(json.at("device").get<std::string>()),
                            short_revision(json.at("revision").get<std::string>()),
                            printable(json.at("command").get<std::string>(), 1024));
  for (const Json& scenario : json.at("scenarios")) {
    const std::string name = printable(scenario.at("name").get<std::string>());
    if (!peers) {
      add_result(file, name, scenario.at("shape"), scenario);
      continue;
    }
    for (const Json& result : scenario.at("results")) {
      add_result(file, name + " " + printable(result.at("peer").get<std::string>()),
                 scenario.at("spec"), result);
    }
  }
  return file;
}

BenchFile read_bench_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail(ErrorCode::bad_file, "{}: cannot be read", path);
  try {
    // Comparing and copying are recursive.
    const auto shallow = [](int depth, Json::parse_event_t, Json&) {
      if (depth > kDeepest) throw std::invalid_argument("is nested too deeply");
      return true;
    };
    return parse(Json::parse(file, shallow));
  } catch (const std::exception& error) {
    fail(ErrorCode::bad_file, "{}: is no result of a benchmark: {}",
         printable(path, kMaxPrintedPath), printable(error.what(), 256));
  }
}

}  // namespace

BenchComparison compare_bench_files(const std::string& first, const std::string& second) {
  const BenchFile a = read_bench_file(first);
  const BenchFile b = read_bench_file(second);
  BenchComparison comparison;
  comparison.headers = {a.header, b.header};
  const auto in = [](const BenchFile& file, const std::string& name) {
    return std::find_if(file.timed.begin(), file.timed.end(),
                        [&](const Timed& timed) { return timed.name == name; });
  };
  for (const Timed& timed : a.timed) {
    const auto other = in(b, timed.name);
    if (other == b.timed.end()) {
      comparison.left_out.push_back(timed.name + ": timed in A only");
    } else if (other->shape != timed.shape) {
      comparison.left_out.push_back(timed.name + ": of another shape in B");
    } else {
      comparison.rows.push_back(
          {timed.name, timed.warm_ms, other->warm_ms, timed.cold_ms, other->cold_ms});
    }
  }
  for (const Timed& timed : b.timed) {
    if (in(a, timed.name) == a.timed.end())
      comparison.left_out.push_back(timed.name + ": timed in B only");
  }
  return comparison;
}

Json json_of(const BenchComparison& comparison) {
  Json json = {{"a", comparison.headers[0]},
               {"b", comparison.headers[1]},
               {"scenarios", Json::array()},
               {"left_out", comparison.left_out}};
  for (const ComparedScenario& row : comparison.rows) {
    json["scenarios"].push_back(
        {{"name", row.name},
         {"a_ms", row.first_ms},
         {"b_ms", row.second_ms},
         {"speed_of_b_over_a", row.first_ms / row.second_ms},
         {"cold_a_ms", row.first_cold_ms},
         {"cold_b_ms", row.second_cold_ms},
         {"cold_speed_of_b_over_a", row.first_cold_ms / row.second_cold_ms}});
  }
  return json;
}

void print_text(const BenchComparison& comparison) {
  print_out("A: {}\nB: {}\n\n", comparison.headers[0], comparison.headers[1]);
  size_t width = 8;
  for (const ComparedScenario& row : comparison.rows) width = std::max(width, row.name.size());
  print_out("{:<{}} {:>12} {:>12} {:>9} {:>12} {:>12} {:>9}\n", "scenario", width, "A warm",
            "B warm", "speed B/A", "A cold", "B cold", "speed B/A");
  for (const ComparedScenario& row : comparison.rows) {
    print_out("{:<{}} {:>12} {:>12} {:>9.2f} {:>12} {:>12} {:>9.2f}\n", row.name, width,
              time_text(row.first_ms / 1e3), time_text(row.second_ms / 1e3),
              row.first_ms / row.second_ms, time_text(row.first_cold_ms / 1e3),
              time_text(row.second_cold_ms / 1e3), row.first_cold_ms / row.second_cold_ms);
  }
  for (const std::string& left_out : comparison.left_out) print_out("left out: {}\n", left_out);
}

}  // namespace octopage::cli
