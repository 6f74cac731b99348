#ifndef OCTOPAGE_TOOLS_VERBS_HPP_
#define OCTOPAGE_TOOLS_VERBS_HPP_

// The verbs of the command line. Each adds its subcommand, and, when it is on the command line,
// leaves what to do in `action`, so that nothing runs before the whole line is known to be right.

#include <CLI/CLI.hpp>
#include <functional>

namespace octopage::cli {

using Action = std::function<int()>;

void add_attend(CLI::App& app, Action& action);
void add_make_step(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_backends(CLI::App& app, Action& action);
void add_completion(CLI::App& app, Action& action);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_VERBS_HPP_
