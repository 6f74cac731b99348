// octopage make-step: writes a synthetic step file.

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>

#include "step/step_file.hpp"
#include "step/synthetic.hpp"
#include "tools/octopage/expectations.hpp"
#include "tools/octopage/progress.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

struct MakeStepArgs {
  std::string output;
  SyntheticSpec spec;
  std::string query_dtype = "bf16";
  std::string kv_dtype = "bf16";
  bool no_poison = false;
  bool with_expected = false;
  bool json = false;
};

int run_make_step(MakeStepArgs args) {
  args.spec.query_dtype = dtype_of(args.query_dtype);
  args.spec.kv_dtype = dtype_of(args.kv_dtype);
  args.spec.poison = !args.no_poison;
  Step step;
  {
    const Progress progress("make-step");
    step = make_synthetic_step(args.spec);
  }
  if (args.with_expected) {
    const Progress progress("make-step, reference backend");
    add_expectations(step);
  }
  {
    const Progress progress("make-step, writing");
    write_step(args.output, step);
  }
  const auto bytes = static_cast<double>(std::filesystem::file_size(args.output));
  if (args.json) {
    print_json({{"step", args.output},
                {"bytes", bytes},
                {"rows", step.rows()},
                {"requests", step.requests()},
                {"context", args.spec.context},
                {"heads", step.heads()},
                {"groups", step.groups()},
                {"dim", step.dim()},
                {"region_count", step.region_count()},
                {"block_size", step.block_size()},
                {"blocks", step.kv_cache.shape[0]},
                {"keep", args.spec.keep},
                {"seed", args.spec.seed},
                {"with_expected", args.with_expected}});
  } else {
    fmt::print("{}: {} rows of {} requests with {} tokens, {}\n", args.output, step.rows(),
               step.requests(), args.spec.context, bytes_text(bytes));
  }
  return kOk;
}

}  // namespace

void add_make_step(CLI::App& app, Action& action) {
  auto args = std::make_shared<MakeStepArgs>();
  SyntheticSpec& spec = args->spec;
  CLI::App* verb =
      app.add_subcommand("make-step", "Write a synthetic step file with a realistic selection");
  verb->add_option("OUT", args->output, "Step file to write (.safetensors)")->required();
  const auto number = [verb](const char* flag, auto& value, const char* text) {
    verb->add_option(flag, value, text)->capture_default_str();
  };
  number("--rows", spec.rows, "Query tokens in all, the last ones of each request");
  number("--requests", spec.requests, "Requests that share the rows evenly");
  number("--context", spec.context, "Tokens of each request, its rows included");
  number("--groups", spec.groups, "KV heads");
  number("--heads", spec.heads, "Query heads in all, a multiple of --groups");
  number("--dim", spec.dim, "Head dimension");
  number("--regions", spec.region_count, "Selected regions of each row and group");
  number("--block-size", spec.block_size, "Tokens of a block, a multiple of 8");
  verb->add_option("--query-dtype", args->query_dtype, "Type of the query")
      ->check(CLI::IsMember({"bf16", "f16"}))
      ->capture_default_str();
  verb->add_option("--kv-dtype", args->kv_dtype, "Type of the cache")
      ->check(CLI::IsMember({"bf16", "f16", "f8_e4m3fn"}))
      ->capture_default_str();
  number("--keep", spec.keep, "Fraction of a row's other regions carried over from the row before");
  number("--sink", spec.sink_regions, "First regions of the context that every row selects");
  number("--local", spec.local_regions, "Regions before its own that every row selects");
  number("--seed", spec.seed, "Seed; the same arguments make the same file everywhere");
  verb->add_flag("--no-poison", args->no_poison, "Zeros instead of NaN and Inf in unwritten slots");
  verb->add_flag("--with-expected", args->with_expected,
                 "Add the results of the reference backend, page lists and staging plan");
  verb->add_flag("--json", args->json, "Print one JSON object");
  verb->footer(
      "Examples:\n"
      "  octopage make-step step.safetensors --rows 64 --context 4096\n"
      "  octopage make-step long.safetensors --rows 4096 --context 131072 --regions 512 --keep "
      "0.9\n"
      "  octopage make-step f8.safetensors --kv-dtype f8_e4m3fn --groups 4 --heads 64\n"
      "  octopage make-step small.safetensors --rows 32 --context 160 --regions 12 "
      "--with-expected\n\n"
      "keep: 0.87 to 0.97 is what measured models show, 0 is the adversarial case.");
  verb->callback([args, &action] { action = [args] { return run_make_step(*args); }; });
}

}  // namespace octopage::cli
