// octopage attend: runs a step and checks the result.

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/executor.hpp"
#include "inspect/selections.hpp"
#include "octopage/octopage.hpp"
#include "tools/octopage/compare.hpp"
#include "tools/octopage/output.hpp"
#include "tools/octopage/paths.hpp"
#include "tools/octopage/progress.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/staging_shift.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

struct AttendArgs {
  std::string step;
  std::string output;
  std::string backend;
  std::string path = "direct";
  std::string output_type = "query";
  int32_t threads = 0;
  double tolerance = 0;
  bool has_output = false;
  bool has_tolerance = false;
  bool check = false;
  bool strict = false;
  bool batch_invariant = false;
  bool json = false;
};

Path path_of(const std::string& text) {
  return text == "planned" ? Path::planned : text == "staged" ? Path::staged : Path::direct;
}

/// Reads a byte of each page of memory, so that the timed call finds the file in memory.
void touch(const TensorView& tensor) {
  const auto* bytes = static_cast<const volatile uint8_t*>(tensor.data);
  const int64_t size = tensor.size() * itemsize(tensor.dtype);
  for (int64_t i = 0; i < size; i += 4096) static_cast<void>(bytes[i]);
}

/// Compares the result with what the file expects and, if asked, with the reference backend.
///
/// NOTE: The bounds hold for the float64 result on the values that attention reads. The staged path
/// reads an f8 cache rounded to the query's type: its reference is that of the rounded cache, and
/// against the file, which knows the f8 cache only, the bounds grow by what the rounding alone
/// does.
std::vector<Comparison> compare_results(const Step& step, const PathResult& result, bool staged,
                                        bool with_reference, double tolerance) {
  const bool with_file = step.expected_output.present() || step.expected_lse.present();
  const bool rounds = staged && step.kv_cache.dtype == DType::f8_e4m3fn && step.rows() > 0;
  const Progress progress("check, reference backend");
  const Step source = rounds && (with_file || with_reference) ? rounded_step(step) : step;
  std::vector<Comparison> comparisons;
  if (with_file) {
    const StagingShift shift = rounds ? measure_staging_shift(step, source) : StagingShift{};
    Comparison& comparison = comparisons.emplace_back();
    comparison.against = "expected";
    if (step.expected_output.present()) {
      comparison.output =
          compare_output(result.output, step.expected_output, tolerance, shift.output);
    }
    if (step.expected_lse.present()) {
      comparison.lse = compare_lse(result.lse, step.expected_lse, shift.lse);
    }
  }
  if (with_reference) {
    Options options;
    options.backend = "reference";
    const PathResult wanted = run_path(source, Path::direct, DType::f32, options);
    Comparison& comparison = comparisons.emplace_back();
    comparison.against = "reference";
    comparison.output = compare_output(result.output, wanted.output, tolerance);
    comparison.lse = compare_lse(result.lse, wanted.lse);
  }
  return comparisons;
}

/// What the planned and staged paths made against what the file expects.
std::vector<ListComparison> compare_lists(const Step& step, const PathResult& result) {
  std::vector<ListComparison> lists;
  const auto add = [&lists](const char* name, const TensorView& expected,
                            const std::vector<int32_t>& actual) {
    if (expected.present()) lists.push_back(compare_list(name, expected, actual));
  };
  if (result.metadata) {
    add("expected_indptr", step.expected_indptr, result.metadata->indptr);
    add("expected_last_page_len", step.expected_last_page_len, result.metadata->last_page_len);
    if (step.expected_pages.present()) {
      // The staged path fills its list from the staged table; the file's is of its own table.
      const auto pages = result.staging ? fill_page_lists(step, *result.metadata) : result.pages;
      std::vector<int32_t> all;
      for (const auto& list : pages) all.insert(all.end(), list.begin(), list.end());
      add("expected_pages", step.expected_pages, all);
    }
  }
  if (result.staging) {
    add("expected_staged_blocks", step.expected_staged_blocks, result.staging->blocks);
    add("expected_staged_table", step.expected_staged_table, result.staging->table);
  }
  return lists;
}

/// Blocks of the staging plan that the cache does not have.
int64_t invalid_staged_blocks(const Step& step, const PathResult& result) {
  if (!result.staging) return 0;
  int64_t count = 0;
  for (const int32_t block : result.staging->blocks) {
    count += block < 0 || block >= step.kv_cache.shape[0];
  }
  return count;
}

void warn(const SelectionCount& count, int64_t staged_blocks, int32_t status) {
  std::vector<std::string> kinds;
  const auto add = [&](int32_t bit, int64_t entries, const char* kind) {
    if (entries > 0) {
      kinds.push_back(fmt::format("{} with {}", entries, kind));
    } else if ((status & bit) != 0) {
      kinds.push_back(kind);
    }
  };
  add(status_region, count.invalid_region, "an invalid region");
  add(status_owner, count.invalid_owner, "an invalid owner");
  add(status_table, count.invalid_table,
      staged_blocks > 0 && count.invalid_table == 0 ? "no block" : "an invalid table entry");
  if (staged_blocks > 0) kinds.push_back(fmt::format("{} blocks staged as zeros", staged_blocks));
  if ((status & status_range_cut) != 0) kinds.push_back("a range longer than planned");
  if (kinds.empty()) return;
  print_err("octopage: warning: skipped entries: {} (of {} entries)\n", fmt::join(kinds, ", "),
            count.entries);
}

void write_result(const AttendArgs& args, const PathResult& result) {
  write_safetensors(args.output, {{"output", result.output}, {"lse", result.lse}},
                    {{"producer", "octopage " OCTOPAGE_VERSION_STRING},
                     {"path", args.path},
                     {"backend", result.backend}});
}

int run_attend(const AttendArgs& args) {
  if (args.has_tolerance && !(std::isfinite(args.tolerance) && args.tolerance >= 0)) {
    fail_argument("--tolerance: must be a number from 0, is {}", args.tolerance);
  }
  if (args.has_output) require_file_name("-o", args.output);
  const Step step = read_step(args.step);
  const DType output_dtype = args.output_type == "f32" ? DType::f32 : step.query.dtype;
  const double tolerance =
      args.has_tolerance ? args.tolerance
                         : default_tolerance(step.query.dtype, step.kv_cache.dtype, output_dtype);
  Options options;
  options.backend = args.backend;
  options.strict = args.strict;
  options.threads = args.threads;
  options.batch_invariant = args.batch_invariant;
  const Path path = path_of(args.path);

  for (const TensorView* tensor : {&step.query, &step.kv_cache, &step.regions}) touch(*tensor);
  PathResult result;
  {
    const Progress progress("attend, " + args.path + " path");
    result = run_path(step, path, output_dtype, options);
  }
  const SelectionCount count = count_selections(step, path != Path::direct);
  const int64_t staged_blocks = invalid_staged_blocks(step, result);

  const std::vector<Comparison> comparisons =
      compare_results(step, result, path == Path::staged, args.check, tolerance);
  const std::vector<ListComparison> lists = compare_lists(step, result);
  if (!args.output.empty()) write_result(args, result);

  bool ok = true;
  for (const Comparison& comparison : comparisons) ok &= comparison.ok();
  for (const ListComparison& list : lists) ok &= list.ok;
  const bool checked = !comparisons.empty() || !lists.empty();

  const double seconds = result.timing.total();
  const double flops = 4.0 * static_cast<double>(step.dim()) *
                       static_cast<double>(count.visible_tokens) *
                       static_cast<double>(step.heads() / step.groups());
  const double gflops = seconds > 0 ? flops / seconds * 1e-9 : 0;
  const int32_t threads = Threads(options).concurrency();

  if (args.json) {
    Json json = {{"step", args.step},
                 {"path", args.path},
                 {"backend", result.backend},
                 {"threads", threads},
                 {"rows", step.rows()},
                 {"heads", step.heads()},
                 {"groups", step.groups()},
                 {"dim", step.dim()},
                 {"region_count", step.region_count()},
                 {"output_type", name(output_dtype)},
                 {"time_ms", seconds * 1e3},
                 {"timing_ms",
                  {{"plan", result.timing.plan * 1e3},
                   {"stage", result.timing.stage * 1e3},
                   {"fill", result.timing.fill * 1e3},
                   {"attention", result.timing.attention * 1e3}}},
                 {"visible_tokens", count.visible_tokens},
                 {"useful_gflops", gflops},
                 {"status", result.status},
                 {"invalid_entries",
                  {{"region", count.invalid_region},
                   {"owner", count.invalid_owner},
                   {"table", count.invalid_table},
                   {"staged_blocks", staged_blocks}}},
                 {"notes", step.notes},
                 {"checks", Json::array()},
                 {"lists", Json::array()},
                 {"checked", checked},
                 {"ok", ok}};
    for (const Comparison& comparison : comparisons) json["checks"].push_back(json_of(comparison));
    for (const ListComparison& list : lists) json["lists"].push_back(json_of(list));
    if (!args.output.empty()) json["output"] = args.output;
    print_json(json);
  } else {
    print_out("{:<10} {}: {} rows, {} heads in {} groups, dim {}, {} regions, {} query, {} cache\n",
              "step", args.step, step.rows(), step.heads(), step.groups(), step.dim(),
              step.region_count(), name(step.query.dtype), name(step.kv_cache.dtype));
    print_out("{:<10} {} path, backend {}, {} threads\n", "run", args.path, result.backend,
              threads);
    print_out("{:<10} {}, {:.2f} useful GFLOP/s\n", "time", time_text(seconds), gflops);
    if (path != Path::direct) {
      print_out("{:<10} plan {}, stage {}, fill {}, attention {}\n", "",
                time_text(result.timing.plan), time_text(result.timing.stage),
                time_text(result.timing.fill), time_text(result.timing.attention));
    }
    for (const Comparison& comparison : comparisons) print_text(comparison);
    for (const ListComparison& list : lists) {
      print_out("{:<10} {} {}\n", "list", list.ok ? "ok:" : "DIFFERS:", list.text());
    }
    if (!args.output.empty()) print_out("{:<10} {}\n", "written", args.output);
    print_out("{:<10} {}\n", "result", !ok ? "FAILED" : checked ? "ok" : "not checked");
  }
  flush_out();

  if (!args.json) {
    for (const std::string& note : step.notes) print_err("octopage: note: {}\n", note);
  }
  warn(count, staged_blocks, result.status);
  return ok ? kOk : kMismatch;
}

}  // namespace

void add_attend(CLI::App& app, Action& action) {
  auto args = std::make_shared<AttendArgs>();
  CLI::App* verb = app.add_subcommand(
      "attend", "Run a step file and check the result against what the file expects");
  verb->add_option("STEP", args->step, "Step file (.safetensors)")->required();
  CLI::Option* output = verb->add_option(
      "-o,--output", args->output,
      "Write `output` and `lse` to this .safetensors file, also where a check fails");
  verb->add_option("--backend", args->backend,
                   "Backend by name (see `octopage backends`); default: the best that can");
  verb->add_option(
          "--path", args->path,
          "direct: one call; planned: plan, fill, finish for each group; staged: copy each "
          "group into a compact cache first")
      ->check(CLI::IsMember({"direct", "planned", "staged"}))
      ->capture_default_str();
  verb->add_option("--threads", args->threads, "CPU threads; 0: all that the process may use")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  verb->add_flag("--check", args->check, "Compare with the reference backend too");
  verb->add_flag("--strict", args->strict,
                 "Fail (exit code 2) at the first invalid entry instead of skipping it");
  CLI::Option* tolerance = verb->add_option(
      "--tolerance", args->tolerance,
      "Bound of the relative error of each row and head; default 4e-3 where query, "
      "cache or output is bf16, else 1e-3");
  verb->add_option("--output-type", args->output_type, "query: the query's type; f32")
      ->check(CLI::IsMember({"query", "f32"}))
      ->capture_default_str();
  verb->add_flag("--batch-invariant", args->batch_invariant,
                 "A row's bits do not depend on the other rows");
  verb->add_flag("--json", args->json, "Print one JSON object");
  verb->footer(
      "Examples:\n"
      "  octopage attend examples/step.safetensors\n"
      "  octopage attend step.safetensors --check --backend cpu --threads 8\n"
      "  octopage attend step.safetensors --path staged -o result.safetensors\n"
      "  octopage attend step.safetensors --strict --json\n\n"
      "lse is held to 2e-3 or 1e-5 relative, whichever is larger. Exit codes: 0 ok; 1 over\n"
      "tolerance or not as the file expects; 2 bad file, bad usage or an error.");
  verb->callback([args, output, tolerance, &action] {
    args->has_output = output->count() > 0;
    args->has_tolerance = tolerance->count() > 0;
    action = [args] { return run_attend(*args); };
  });
}

}  // namespace octopage::cli
