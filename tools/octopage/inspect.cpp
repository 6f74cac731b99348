// octopage inspect: pictures of a step.

#include "inspect/inspection.hpp"

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "core/check.hpp"
#include "inspect/map_png.hpp"
#include "step/output_file.hpp"
#include "tools/octopage/inspect_page.hpp"
#include "tools/octopage/output.hpp"
#include "tools/octopage/progress.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

struct InspectArgs {
  std::string step;
  std::string page;
  std::string png;
  std::string json;
  int64_t group = -1;  // all
  std::string card = known_cards().front().name;
  double matrix_tflops = 0;  // the card's
  double gather_tbps = 0;
  double memory_tbps = 0;
  bool has_page = false, has_png = false, has_json = false;
};

/// Refuses names under which one output would replace another or the step.
void check_outputs(const InspectArgs& args) {
  if (!args.has_page && !args.has_png && !args.has_json) {
    fail_argument("inspect: one of -o, --png and --json is required, none is given");
  }
  const std::pair<const char*, const std::string*> outputs[] = {
      {"-o", &args.page}, {"--png", &args.png}, {"--json", &args.json}};
  const bool given[] = {args.has_page, args.has_png, args.has_json};
  for (size_t i = 0; i < 3; ++i) {
    if (!given[i]) continue;
    require_file_name(outputs[i].first, *outputs[i].second);
    std::error_code ignored;
    if (std::filesystem::equivalent(*outputs[i].second, args.step, ignored)) {
      fail_argument("{}: must not be the step file, is {}", outputs[i].first, args.step);
    }
    for (size_t k = 0; k < i; ++k) {
      const auto place = [&](size_t at) {
        return std::filesystem::weakly_canonical(*outputs[at].second, ignored);
      };
      if (given[k] && (*outputs[k].second == *outputs[i].second || place(k) == place(i))) {
        fail_argument("{}: must differ from {}, both are {}", outputs[i].first, outputs[k].first,
                      *outputs[i].second);
      }
    }
  }
}

void replace(double& value, const char* flag, double tera) {
  if (tera == 0) return;
  if (!(tera >= 1e-6 && tera <= 1e9)) {
    fail_argument("{}: must be a positive number, 1e-6 to 1e9, is {}", flag, tera);
  }
  value = tera * 1e12;
}

Card card_of(const InspectArgs& args) {
  for (const Card& known : known_cards()) {
    if (known.name != args.card) continue;
    Card card = known;
    replace(card.matrix_flops, "--matrix-tflops", args.matrix_tflops);
    replace(card.gather_bytes, "--gather-tbps", args.gather_tbps);
    replace(card.memory_bytes, "--memory-tbps", args.memory_tbps);
    if (args.matrix_tflops != 0 || args.gather_tbps != 0 || args.memory_tbps != 0) {
      card.source += "; some replaced on the command line";
    }
    return card;
  }
  fail_argument("--card: must be {}, is {}", known_cards().front().name, args.card);
}

GroupRange groups_of(const InspectArgs& args, const Step& step) {
  if (args.group < 0) return {0, step.groups()};
  if (args.group >= step.groups()) {
    fail_argument("--group: must be below the step's {} groups, is {}", step.groups(), args.group);
  }
  return {args.group, args.group + 1};
}

void write_output(const std::string& path, const std::string& bytes) {
  OutputFile file(path);
  file.write(bytes.data(), bytes.size());
  file.commit();
  print_out("{}: {}\n", path, bytes_text(static_cast<double>(bytes.size())));
}

int run_inspect(const InspectArgs& args) {
  check_outputs(args);
  const Card card = card_of(args);
  const Step step = read_step(args.step);
  const GroupRange groups = groups_of(args, step);
  const Inspection inspection = [&] {
    const Progress progress("inspect");
    return inspect(step, groups, card);
  }();
  const Json numbers = inspection_json(args.step, step, inspection);
  if (args.has_page) write_output(args.page, inspection_page(numbers, inspection));
  if (args.has_png) write_output(args.png, map_png(inspection.map));
  if (args.has_json) {
    write_output(args.json, numbers.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }
  for (const std::string& note : step.notes) print_err("octopage: note: {}\n", note);
  const EntryCount& entries = inspection.sharing.entries;
  if (entries.skipped() > 0) {
    print_err("octopage: warning: {} of {} entries are invalid or name a region twice\n",
              entries.skipped(), entries.counted);
  }
  return kOk;
}

}  // namespace

void add_inspect(CLI::App& app, Action& action) {
  auto args = std::make_shared<InspectArgs>();
  CLI::App* verb = app.add_subcommand("inspect", "Draw a step: a page to open in a browser");
  verb->add_option("STEP", args->step, "Step file (.safetensors)")->required();
  CLI::Option* page =
      verb->add_option("-o,--output", args->page, "Write the report, one HTML file, here");
  CLI::Option* png =
      verb->add_option("--png", args->png, "Write the selection map alone, a PNG picture, here");
  CLI::Option* json = verb->add_option("--json", args->json, "Write the report's numbers here");
  verb->add_option("--group", args->group, "Only this KV head; default: all of them together")
      ->check(CLI::Range(int64_t{0}, int64_t{2147483647}));
  verb->add_option("--card", args->card, "Card whose roofs are predicted")->capture_default_str();
  verb->add_option("--matrix-tflops", args->matrix_tflops,
                   "Replaces the card's bf16 matrix rate, in 10^12 operations a second");
  verb->add_option("--gather-tbps", args->gather_tbps,
                   "Replaces the card's rate of page gathers from its L2 cache, in 10^12 bytes a "
                   "second");
  verb->add_option("--memory-tbps", args->memory_tbps,
                   "Replaces the card's memory rate, in 10^12 bytes a second");
  verb->footer(
      "Examples:\n"
      "  octopage inspect examples/step.safetensors -o report.html\n"
      "  octopage inspect step.safetensors --png map.png --json numbers.json\n"
      "  octopage inspect step.safetensors -o report.html --memory-tbps 3.35\n\n"
      "docs/inspect.md says what each picture means.");
  verb->callback([args, page, png, json, &action] {
    args->has_page = page->count() > 0;
    args->has_png = png->count() > 0;
    args->has_json = json->count() > 0;
    action = [args] { return run_inspect(*args); };
  });
}

}  // namespace octopage::cli
