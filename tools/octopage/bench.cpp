// octopage bench: verifies and times synthetic steps; `bench compare` puts two results side by
// side.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "core/check.hpp"
#include "core/executor.hpp"
#include "octopage/backends.hpp"
#include "octopage/version.h"
#include "octopage_revision.h"
#include "step/output_file.hpp"
#include "tools/octopage/bench_compare.hpp"
#include "tools/octopage/bench_run.hpp"
#include "tools/octopage/output.hpp"
#include "tools/octopage/progress.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

struct BenchArgs {
  std::vector<std::string> scenarios;
  std::string backend;
  std::string path = "direct";
  std::string output;
  std::optional<int64_t> rows;
  std::optional<int64_t> context;
  std::optional<int64_t> regions;
  int64_t calls = 20;
  int32_t threads = 0;
  bool list = false;
  bool json = false;
};

void check_names(const std::vector<std::string>& wanted,
                 const std::vector<BenchScenario>& scenarios) {
  for (const std::string& name : wanted) {
    const bool known = std::any_of(scenarios.begin(), scenarios.end(),
                                   [&](const BenchScenario& s) { return s.name == name; });
    if (!known) fail_argument("--scenario: {} is none; octopage bench --list shows them", name);
  }
}

std::vector<BenchScenario> chosen_scenarios(const BenchArgs& args, bool large) {
  std::vector<BenchScenario> scenarios = bench_scenarios(large);
  check_names(args.scenarios, scenarios);
  std::erase_if(scenarios, [&](const BenchScenario& scenario) {
    return !args.scenarios.empty() && std::find(args.scenarios.begin(), args.scenarios.end(),
                                                scenario.name) == args.scenarios.end();
  });
  for (BenchScenario& scenario : scenarios) {
    if (args.rows) scenario.spec.rows = *args.rows;
    if (args.context) scenario.spec.context = *args.context;
    if (args.regions) scenario.spec.region_count = *args.regions;
    if (scenario.spec.rows < 1) fail_argument("--rows: must be at least 1, is {}", *args.rows);
  }
  return scenarios;
}

Json json_of(const Spread& spread, const BenchResult& result) {
  return {{"median_ms", spread.median * 1e3},
          {"p10_ms", spread.p10 * 1e3},
          {"p90_ms", spread.p90 * 1e3},
          {"calls", spread.calls},
          {"useful_tflops", result.flops / spread.median / 1e12},
          {"gathered_gbs", result.gathered_bytes / spread.median / 1e9}};
}

Json shape_json(const SyntheticSpec& spec) {
  return {{"rows", spec.rows},
          {"requests", spec.requests},
          {"context", spec.context},
          {"groups", spec.groups},
          {"heads", spec.heads},
          {"dim", spec.dim},
          {"region_count", spec.region_count},
          {"block_size", spec.block_size},
          {"query", name(spec.query_dtype)},
          {"cache", name(spec.kv_dtype)},
          {"keep", spec.keep},
          {"seed", spec.seed}};
}

Json json_of(const BenchScenario& scenario, const BenchResult& result) {
  Json json = {{"name", scenario.name},
               {"purpose", scenario.purpose},
               {"shape", shape_json(scenario.spec)},
               {"backend", result.backend},
               {"verified",
                {{"rows", result.verified_rows},
                 {"worst_relative_error", json_number(result.verified.largest)},
                 {"bound", result.verified.bound},
                 {"ok", result.verified.over == 0}}}};
  if (result.verified.over > 0) return json;
  json["useful_flops"] = result.flops;
  json["gathered_bytes"] = result.gathered_bytes;
  json["workspace_bytes"] = result.workspace_bytes;
  json["warm"] = json_of(result.warm, result);
  json["cold"] = json_of(result.cold, result);
  if (result.plan.calls > 0) {
    json["plan"] = {{"median_ms", result.plan.median * 1e3},
                    {"p10_ms", result.plan.p10 * 1e3},
                    {"p90_ms", result.plan.p90 * 1e3},
                    {"calls", result.plan.calls}};
  }
  return json;
}

void print_text(const BenchScenario& scenario, const BenchResult& result) {
  if (result.verified.over > 0) {
    print_out("{:<16} WRONG: relative error {:.2e} at row {}, bound {:.2e}; not timed\n",
              scenario.name, result.verified.largest, result.verified.worst[0],
              result.verified.bound);
    return;
  }
  const auto rate = [](double amount, double seconds, const char* unit) {
    const double giga = amount / seconds / 1e9;
    return giga >= 1000 ? fmt::format("{:.2f} T{}", giga / 1e3, unit)
                        : fmt::format("{:.2f} G{}", giga, unit);
  };
  print_out(
      "{:<16} {:<10} warm {:>10} ({} .. {})  cold {:>10} ({} .. {})  {} useful, {} gathered\n",
      scenario.name, result.backend, time_text(result.warm.median), time_text(result.warm.p10),
      time_text(result.warm.p90), time_text(result.cold.median), time_text(result.cold.p10),
      time_text(result.cold.p90), rate(result.flops, result.warm.median, "FLOP/s"),
      rate(result.gathered_bytes, result.warm.median, "B/s"));
}

void write_json(const std::string& path, const Json& json) {
  const std::string text = json.dump(1) + '\n';
  OutputFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

int list_scenarios(bool large, bool json) {
  Json all = Json::array();
  for (const BenchScenario& scenario : bench_scenarios(large)) {
    if (json) {
      all.push_back({{"name", scenario.name},
                     {"purpose", scenario.purpose},
                     {"shape", shape_json(scenario.spec)}});
    } else {
      print_out("{:<16} {}\n", scenario.name, scenario.purpose);
    }
  }
  if (json) {
    print_json({{"rules", bench_rules()}, {"scenarios", all}});
  } else {
    for (const std::string& rule : bench_rules()) print_out("rule: {}\n", rule);
  }
  return kOk;
}

/// The command line that gives these figures again.
std::string command_of(const BenchArgs& args) {
  std::string command = "octopage bench --path " + args.path;
  if (!args.backend.empty()) command += " --backend " + args.backend;
  for (const std::string& name : args.scenarios) command += " --scenario " + name;
  if (args.threads != 0) command += fmt::format(" --threads {}", args.threads);
  command += fmt::format(" --calls {}", args.calls);
  if (args.rows) command += fmt::format(" --rows {}", *args.rows);
  if (args.context) command += fmt::format(" --context {}", *args.context);
  if (args.regions) command += fmt::format(" --regions {}", *args.regions);
  return command;
}

int run_bench(const BenchArgs& args) {
  const bool large = make_step_device(args.backend)->device().type == DeviceType::cuda;
  if (args.list) return list_scenarios(large, args.json);
  const std::vector<BenchScenario> scenarios = chosen_scenarios(args, large);
  Options options;
  options.backend = args.backend;
  options.threads = args.threads;
  const Path path = args.path == "planned" ? Path::planned : Path::direct;
  Json json = {{"format", "octopage-bench-1"},
               {"device", ""},
               {"driver", ""},
               {"threads", Threads(options).concurrency()},
               {"version", OCTOPAGE_VERSION_STRING},
               {"revision", OCTOPAGE_REVISION},
               {"command", command_of(args)},
               {"path", args.path},
               {"rules", bench_rules()},
               {"scenarios", Json::array()}};
  bool ok = true;
  for (const BenchScenario& scenario : scenarios) {
    // A device of its own for each scenario: memory is given back in between.
    const std::unique_ptr<StepDevice> device = make_step_device(args.backend);
    json["device"] = device->name();
    json["driver"] = device->driver();
    BenchResult result;
    {
      const Progress progress("bench, " + scenario.name);
      result = run_scenario(scenario.spec, path, options, args.calls, *device);
    }
    ok &= result.verified.over == 0;
    json["scenarios"].push_back(json_of(scenario, result));
    if (!args.json) print_text(scenario, result);
    flush_out();
    if (!args.output.empty()) write_json(args.output, json);
  }
  if (args.json) print_json(json);
  return ok ? kOk : kMismatch;
}

struct CompareArgs {
  std::string first;
  std::string second;
  bool json = false;
};

void add_compare(CLI::App& bench, Action& action) {
  auto args = std::make_shared<CompareArgs>();
  CLI::App* verb = bench.add_subcommand("compare", "Two results side by side, with their ratios");
  verb->add_option("A", args->first, "JSON of `octopage bench` or bench/gpu_peers.py")->required();
  verb->add_option("B", args->second, "Another of them")->required();
  verb->add_flag("--json", args->json, "Print one JSON object");
  verb->footer("Examples:\n  octopage bench compare before.json after.json");
  verb->callback([args, &action] {
    action = [args] {
      const BenchComparison comparison = compare_bench_files(args->first, args->second);
      if (args->json) {
        print_json(json_of(comparison));
      } else {
        print_text(comparison);
      }
      return kOk;
    };
  });
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto args = std::make_shared<BenchArgs>();
  CLI::App* verb = app.add_subcommand("bench", "Verify and time synthetic steps on a backend");
  verb->require_subcommand(0, 1);
  verb->add_option("--scenario", args->scenarios, "Only this one; may be repeated")
      ->allow_extra_args(false);
  verb->add_flag("--list", args->list, "What there is to run, and by which rules");
  verb->add_option("--backend", args->backend,
                   "Backend by name (see `octopage backends`); default: the best of the CPU's");
  verb->add_option("--path", args->path,
                   "direct: one call; planned: fill and finish for each group, the plan apart")
      ->check(CLI::IsMember({"direct", "planned"}))
      ->capture_default_str();
  verb->add_option("--threads", args->threads, "CPU threads; 0: all that the process may use")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  verb->add_option("--calls", args->calls, "Timed calls, warm and cold each")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  verb->add_option("--rows", args->rows, "Rows of every scenario, instead of its own");
  verb->add_option("--context", args->context, "Tokens of every request, instead of its own");
  verb->add_option("--regions", args->regions, "Selected regions of every row, instead of its own");
  verb->add_option("-o,--output", args->output,
                   "Write the JSON to this file, after every scenario");
  verb->add_flag("--json", args->json, "Print the JSON");
  verb->footer(
      "Examples:\n"
      "  octopage bench --list\n"
      "  octopage bench --scenario base --scenario keep-0.50 --threads 2\n"
      "  octopage bench --backend cuda-sm90a -o after.json\n"
      "  octopage bench compare before.json after.json\n\n"
      "Exit codes: 0 ok; 1 a result was wrong and was not timed; 2 bad usage or an error.");
  verb->callback([args, verb, &action] {
    if (verb->get_subcommand_ptr("compare")->parsed()) return;  // it has left what to do
    if (verb->count("--output") > 0) require_file_name("-o", args->output);
    action = [args] { return run_bench(*args); };
  });
  add_compare(*verb, action);
}

}  // namespace octopage::cli
