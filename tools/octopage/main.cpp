// octopage: sparse prefill attention over a paged KV cache, from the command line.

#include <CLI/CLI.hpp>
#include <cstring>
#include <exception>
#include <new>
#include <sstream>
#include <string>

#include "octopage/error.hpp"
#include "octopage/version.h"
#include "tools/octopage/output.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

bool is_verb(const CLI::App& app, const std::string& name) {
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (verb->get_name() == name) return true;
  }
  return false;
}

/// What --help and --version print.
int print_help(const CLI::App& app, const CLI::Success& success, bool json) {
  try {
    std::ostringstream text;
    const int code = app.exit(success, text, text);
    write_out(text.str());
    flush_out();
    return code;
  } catch (const Error& error) {
    return report_failure(name_of(error.code()), error.what(), json);
  }
}

int run(int argc, char** argv) {
  prepare_streams();
  bool json = false;  // as far as failures go, before the line is parsed
  const bool json_is_file = argc > 1 && std::strcmp(argv[1], "inspect") == 0;
  for (int i = 1; i < argc; ++i) json |= !json_is_file && std::strcmp(argv[i], "--json") == 0;

  CLI::App app("Sparse prefill attention over a paged KV cache, at eight-token granularity.",
               "octopage");
  app.set_version_flag("--version", "octopage " OCTOPAGE_VERSION_STRING);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  octopage attend examples/step.safetensors --check\n"
      "  octopage make-step step.safetensors --rows 256 --context 32768\n"
      "  octopage info step.safetensors\n"
      "  octopage inspect step.safetensors -o report.html\n"
      "  octopage attend --help\n\n"
      "Exit codes: 0 ok; 1 over tolerance or not as the file expects; 2 bad file, bad usage or\n"
      "an error.");
  Action action;
  add_attend(app, action);
  add_make_step(app, action);
  add_info(app, action);
  add_inspect(app, action);
  add_bench(app, action);
  add_backends(app, action);
  add_completion(app, action);

  try {
    if (argc > 1 && argv[1][0] != '-' && !is_verb(app, argv[1])) {
      return report_failure(
          "usage", std::string(argv[1]) + ": is not a verb; octopage --help lists them", json);
    }
    app.parse(argc, argv);
    const int code = action();
    flush_out();
    return code;
  } catch (const CLI::Success& success) {  // --help, --version
    return print_help(app, success, json);
  } catch (const CLI::ParseError& error) {
    return report_failure("usage", error.what(), json);
  } catch (const Error& error) {
    return report_failure(name_of(error.code()), error.what(), json);
  } catch (const std::bad_alloc&) {
    return report_failure(name_of(ErrorCode::out_of_memory), "memory: not enough for this step",
                          json);
  } catch (const std::exception& error) {
    return report_failure(name_of(ErrorCode::internal), error.what(), json);
  }
}

}  // namespace
}  // namespace octopage::cli

int main(int argc, char** argv) {
  return octopage::cli::run(argc, argv);
}
