// Runs octopage bench and bench compare: what they verify, time, write and refuse.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.hpp"
#include "tools/octopage/bench_spread.hpp"

namespace octopage {
namespace {

using nlohmann::json;
using testing::CommandResult;
using testing::TemporaryDirectory;

/// Small enough for any machine, on two threads.
std::vector<std::string> small(std::vector<std::string> more) {
  std::vector<std::string> args = {"bench", "--rows",    "9", "--context", "512", "--regions",
                                   "12",    "--threads", "2", "--calls",   "3"};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

void write_file(const std::string& path, const json& content) {
  std::ofstream(path) << content.dump();
}

TEST(Bench, SpreadOfTimes) {
  const cli::Spread one = cli::spread_of({2.0});
  EXPECT_EQ(one.median, 2.0);
  EXPECT_EQ(one.p10, 2.0);
  EXPECT_EQ(one.p90, 2.0);
  const cli::Spread even = cli::spread_of({4.0, 1.0});
  EXPECT_EQ(even.median, 2.5);
  EXPECT_EQ(even.p10, 1.0);
  EXPECT_EQ(even.p90, 4.0);
  std::vector<double> many;
  for (int i = 100; i >= 0; --i) many.push_back(i);
  const cli::Spread spread = cli::spread_of(many);
  EXPECT_EQ(spread.median, 50);
  EXPECT_EQ(spread.p10, 10);
  EXPECT_EQ(spread.p90, 90);
  EXPECT_EQ(spread.calls, 101);
}

class BenchPath : public ::testing::TestWithParam<std::string> {};

TEST_P(BenchPath, EveryScenarioIsVerifiedAndTimed) {
  const CommandResult listed = testing::octopage({"bench", "--list", "--json"});
  ASSERT_EQ(listed.exit_code, 0) << listed.err;
  const size_t scenarios = json::parse(listed.out).at("scenarios").size();
  EXPECT_GE(scenarios, 15u);

  const CommandResult result = testing::octopage(small({"--path", GetParam(), "--json"}));
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const json object = json::parse(result.out);
  EXPECT_EQ(object.at("format"), "octopage-bench-1");
  EXPECT_EQ(object.at("device"), "host");
  EXPECT_EQ(object.at("threads"), 2);
  EXPECT_NE(object.at("revision"), "");
  EXPECT_EQ(object.at("command"), "octopage bench --path " + GetParam() +
                                      " --threads 2 --calls 3 --rows 9 --context 512 --regions 12");
  EXPECT_GE(object.at("rules").size(), 3u);
  ASSERT_EQ(object.at("scenarios").size(), scenarios);
  for (const json& scenario : object.at("scenarios")) {
    SCOPED_TRACE(scenario.at("name"));
    EXPECT_NE(scenario.at("purpose"), "");
    EXPECT_EQ(scenario.at("backend"), "cpu");
    EXPECT_EQ(scenario.at("verified").at("ok"), true);
    EXPECT_LE(scenario.at("verified").at("worst_relative_error"),
              scenario.at("verified").at("bound"));
    EXPECT_EQ(scenario.contains("plan"), GetParam() == "planned");
    for (const char* state : {"warm", "cold"}) {
      const json& times = scenario.at(state);
      EXPECT_GT(times.at("p10_ms"), 0.0);
      EXPECT_LE(times.at("p10_ms"), times.at("median_ms"));
      EXPECT_LE(times.at("median_ms"), times.at("p90_ms"));
      EXPECT_EQ(times.at("calls"), 3);
      EXPECT_NEAR(
          times.at("useful_tflops").get<double>(),
          scenario.at("useful_flops").get<double>() / times.at("median_ms").get<double>() / 1e9,
          1e-9);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, BenchPath, ::testing::Values("direct", "planned"),
                         [](const auto& path) { return path.param; });

TEST(Bench, OnlyValidTokensCount) {
  // Rows at positions 0 .. 19 whose whole context is selected: 20 * 21 / 2 tokens.
  const CommandResult result =
      testing::octopage({"bench", "--scenario", "base", "--rows", "20", "--context", "20",
                         "--regions", "512", "--calls", "1", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const json scenario = json::parse(result.out).at("scenarios").at(0);
  EXPECT_EQ(scenario.at("useful_flops"), 4.0 * 192 * 16 * 210);
  EXPECT_EQ(scenario.at("gathered_bytes"), (8 * 1 + 8 * 2 + 4 * 3) * 8 * 384 * 2.0);
}

TEST(Bench, WritesTheFileAndText) {
  const TemporaryDirectory directory;
  const std::string out = directory / "bench.json";
  const CommandResult result = testing::octopage(
      small({"--scenario", "base", "--scenario", "f8", "--backend", "reference", "-o", out}));
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  for (const std::string part : {"base ", "f8 ", "reference", "warm", "cold", "FLOP/s useful"})
    EXPECT_NE(result.out.find(part), std::string::npos) << part << "\n" << result.out;
  EXPECT_EQ(json::parse(testing::read_file(out)).at("scenarios").size(), 2u);
}

TEST(Bench, Refusals) {
  const auto expect = [](std::vector<std::string> args, const std::string& message) {
    const CommandResult result = testing::octopage(std::move(args));
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  };
  expect(small({"--scenario", "nothing"}), "--scenario: nothing is none");
  expect(small({"--backend", "nothing"}), "nothing");
  expect({"bench", "--scenario", "base", "--rows", "0"}, "--rows: must be at least 1, is 0");
  expect({"bench", "--scenario", "base", "--rows", "10", "--context", "5"}, "context: must hold");
  expect({"bench", "--calls", "0"}, "--calls");
  expect(small({"--scenario", "base", "-o", "/no/such/folder/a.json"}), "cannot be written");
}

json timed(const std::string& name, double warm_ms, int rows) {
  return {{"name", name},
          {"shape", {{"rows", rows}}},
          {"warm", {{"median_ms", warm_ms}}},
          {"cold", {{"median_ms", 2 * warm_ms}}}};
}

json bench_file(const std::vector<json>& scenarios) {
  return {{"format", "octopage-bench-1"},
          {"device", "host"},
          {"revision", "0123456789abcdef"},
          {"command", "octopage bench"},
          {"scenarios", scenarios}};
}

TEST(BenchCompare, RatiosAndWhatIsLeftOut) {
  const TemporaryDirectory directory;
  const std::string a = directory / "a.json", b = directory / "b.json";
  write_file(a, bench_file({timed("same", 3, 8), timed("shape", 1, 8), timed("gone", 1, 8)}));
  write_file(b, bench_file({timed("same", 2, 8), timed("shape", 1, 9), timed("new", 1, 8)}));
  const CommandResult result = testing::octopage({"bench", "compare", a, b, "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json object = json::parse(result.out);
  ASSERT_EQ(object.at("scenarios").size(), 1u);
  EXPECT_EQ(object.at("scenarios").at(0).at("name"), "same");
  EXPECT_EQ(object.at("scenarios").at(0).at("speed_of_b_over_a"), 1.5);
  EXPECT_EQ(object.at("scenarios").at(0).at("cold_b_ms"), 4.0);
  EXPECT_EQ(object.at("left_out"), json({"shape: of another shape in B", "gone: timed in A only",
                                         "new: timed in B only"}));
  const CommandResult text = testing::octopage({"bench", "compare", a, b});
  EXPECT_NE(text.out.find("1.50"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("left out: gone"), std::string::npos) << text.out;
}

TEST(BenchCompare, FilesOfThePythonHarness) {
  const TemporaryDirectory directory;
  const std::string a = directory / "a.json";
  json peer = timed("", 5, 0);
  peer["peer"] = "today";
  const json other = {{"peer", "other"}, {"failed", "refused"}};
  json file = bench_file({json{
      {"name", "base"}, {"spec", {{"rows", 1}}}, {"results", std::vector<json>{peer, other}}}});
  file["format"] = "octopage-peers-1";
  write_file(a, file);
  const CommandResult result = testing::octopage({"bench", "compare", a, a, "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json scenarios = json::parse(result.out).at("scenarios");
  ASSERT_EQ(scenarios.size(), 1u);
  EXPECT_EQ(scenarios.at(0).at("name"), "base today");
  EXPECT_EQ(scenarios.at(0).at("speed_of_b_over_a"), 1.0);
}

TEST(BenchCompare, BadFilesAreNamed) {
  const TemporaryDirectory directory;
  const std::string good = directory / "good.json", bad = directory / "bad.json";
  write_file(good, bench_file({timed("same", 1, 8)}));
  const auto expect_bad = [&](const std::string& content, const std::string& message) {
    std::ofstream(bad) << content;
    const CommandResult result = testing::octopage({"bench", "compare", good, bad, "--json"});
    EXPECT_EQ(result.exit_code, 2) << content;
    EXPECT_EQ(json::parse(result.out).at("error").at("code"), "bad_file") << result.out;
    EXPECT_NE(result.err.find("bad.json"), std::string::npos) << result.err;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  };
  expect_bad("", "is no result of a benchmark");
  expect_bad("{}", "format");
  expect_bad(R"({"format": 5})", "is no result of a benchmark");
  expect_bad(R"({"format": "other"})", "is other");
  expect_bad(bench_file({timed("same", 0, 8)}).dump(),
             "warm.median_ms must be positive, 1e-9 to 1e9, is 0");
  expect_bad("{\"shape\":" + std::string(400000, '[') + std::string(400000, ']') + "}",
             "is nested too deeply");
  expect_bad(R"({"format":"\u001b[2Jx"})", "is \\x1b[2Jx");
  expect_bad(bench_file({timed("same", -1, 8)}).dump(), "must be positive");
  const CommandResult missing = testing::octopage({"bench", "compare", good, bad + "x"});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_NE(missing.err.find("cannot be read"), std::string::npos);
}

}  // namespace
}  // namespace octopage
