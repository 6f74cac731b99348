// octopage backends: what this build and this machine can do.

#include "octopage/backends.hpp"

#include <fmt/format.h>

#include <memory>

#include "octopage/version.h"
#include "tools/octopage/output.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

int run_backends(bool json) {
  const std::vector<BackendInfo> all = backends();
  if (json) {
    Json object = {{"version", OCTOPAGE_VERSION_STRING}, {"backends", Json::array()}};
    for (const BackendInfo& backend : all) {
      object["backends"].push_back({{"name", backend.name},
                                    {"description", backend.description},
                                    {"device", backend.device == DeviceType::cpu ? "cpu" : "cuda"},
                                    {"priority", backend.priority},
                                    {"available", backend.available},
                                    {"reason", backend.reason}});
    }
    print_json(object);
    return kOk;
  }
  print_out("{:<12} {:<6} {:>8}  {:<9} {}\n", "backend", "device", "priority", "available", "");
  for (const BackendInfo& backend : all) {
    print_out("{:<12} {:<6} {:>8}  {:<9} {}\n", backend.name,
              backend.device == DeviceType::cpu ? "cpu" : "cuda", backend.priority,
              backend.available ? "yes" : "no",
              backend.available ? backend.description : backend.reason);
  }
  return kOk;
}

}  // namespace

void add_backends(CLI::App& app, Action& action) {
  auto json = std::make_shared<bool>(false);
  CLI::App* verb = app.add_subcommand(
      "backends", "List the backends, what they run on, and why one is not available");
  verb->add_flag("--json", *json, "Print one JSON object");
  verb->footer(
      "Examples:\n"
      "  octopage backends\n"
      "  octopage backends --json\n"
      "  octopage attend step.safetensors --backend reference");
  verb->callback([json, &action] { action = [json] { return run_backends(*json); }; });
}

}  // namespace octopage::cli
