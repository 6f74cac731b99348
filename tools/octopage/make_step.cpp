// octopage make-step: writes a synthetic step file.

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <system_error>

#include "core/check.hpp"
#include "step/printable.hpp"
#include "step/step_file.hpp"
#include "step/synthetic.hpp"
#include "tools/octopage/expectations.hpp"
#include "tools/octopage/output.hpp"
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

/// What was given, as a message shows it.
std::string shown(const std::string& text) {
  return text.empty() ? "empty" : printable(text);
}

/// Accepts decimal whole numbers of a range. Looks at the text, before it is converted: CLI11 would
/// take 010 for 8.
CLI::Validator whole_number(uint64_t least, uint64_t most) {
  return CLI::Validator(
      [least, most](std::string& text) {
        uint64_t value = 0;
        const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool whole = result.ec == std::errc() && result.ptr == text.data() + text.size() &&
                           (text == "0" || text[0] != '0');
        if (whole && value >= least && value <= most) return std::string();
        return fmt::format("must be a whole number {} .. {}, is {}", least, most, shown(text));
      },
      "");
}

/// Accepts decimal numbers 0 .. 1.
CLI::Validator fraction() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
        const bool number = result.ec == std::errc() && result.ptr == text.data() + text.size();
        if (number && value >= 0 && value <= 1) return std::string();
        return fmt::format("must be 0 .. 1, is {}", shown(text));
      },
      "");
}

/// Refuses a step that this machine's memory cannot hold: asked for anyway, the system would end
/// the process somewhere on the way.
void require_memory(const SyntheticSpec& spec) {
  struct Part {
    const char* tensor;
    const char* flags;
    double bytes;
  };
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const double tokens = number(spec.requests) * number(spec.context + spec.block_size);
  const std::array<Part, 4> parts = {{
      {"kv_cache", "--requests, --context, --block-size, --groups, --dim",
       tokens * number(spec.groups) * 2 * number(spec.dim) * number(itemsize(spec.kv_dtype))},
      {"query", "--rows, --heads, --dim",
       number(spec.rows) * number(spec.heads) * number(spec.dim) * 2},
      {"regions", "--rows, --groups, --regions",
       number(spec.rows) * number(spec.groups) * number(spec.region_count) * sizeof(int32_t)},
      {"block_table", "--requests, --context, --block-size",
       tokens / number(spec.block_size) * sizeof(int32_t)},
  }};
  const double memory = number(sysconf(_SC_PHYS_PAGES)) * number(sysconf(_SC_PAGESIZE));
  double total = 0;
  const Part* largest = &parts[0];
  for (const Part& part : parts) {
    total += part.bytes;
    if (part.bytes > largest->bytes) largest = &part;
  }
  if (total <= memory) return;
  fail_argument("{}: the step must fit into this machine's memory of {}, {} alone has {}",
                largest->flags, bytes_text(memory), largest->tensor, bytes_text(largest->bytes));
}

int run_make_step(MakeStepArgs args) {
  require_file_name("OUT", args.output);
  args.spec.query_dtype = dtype_of(args.query_dtype);
  args.spec.kv_dtype = dtype_of(args.kv_dtype);
  args.spec.poison = !args.no_poison;
  require_memory(args.spec);
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
    print_out("{}: {} rows of {} requests with {} tokens, {}\n", args.output, step.rows(),
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
  // Sizes are at most what an extent of a step file may be.
  const auto number = [verb](const char* flag, auto& value, const char* text, uint64_t least = 1,
                             uint64_t most = std::numeric_limits<int32_t>::max()) {
    verb->add_option(flag, value, text)->check(whole_number(least, most))->capture_default_str();
  };
  number("--rows", spec.rows, "Query tokens in all, the last ones of each request", 0);
  number("--requests", spec.requests, "Requests that share the rows evenly");
  number("--context", spec.context, "Tokens of each request, its rows included");
  number("--groups", spec.groups, "KV heads");
  number("--heads", spec.heads, "Query heads in all, a multiple of --groups");
  number("--dim", spec.dim, "Head dimension");
  number("--regions", spec.region_count, "Selected regions of each row and group", 0);
  number("--block-size", spec.block_size, "Tokens of a block, a multiple of 8");
  verb->add_option("--query-dtype", args->query_dtype, "Type of the query")
      ->check(CLI::IsMember({"bf16", "f16"}))
      ->capture_default_str();
  verb->add_option("--kv-dtype", args->kv_dtype, "Type of the cache")
      ->check(CLI::IsMember({"bf16", "f16", "f8_e4m3fn"}))
      ->capture_default_str();
  verb->add_option("--keep", spec.keep,
                   "Fraction of a row's other regions carried over from the row before")
      ->check(fraction())
      ->capture_default_str();
  number("--sink", spec.sink_regions, "First regions of the context that every row selects", 0);
  number("--local", spec.local_regions, "Regions before its own that every row selects", 0);
  number("--seed", spec.seed, "Seed; the same arguments make the same file everywhere", 0,
         std::numeric_limits<uint64_t>::max());
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
