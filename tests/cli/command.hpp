#ifndef OCTOPAGE_TESTS_CLI_COMMAND_HPP_
#define OCTOPAGE_TESTS_CLI_COMMAND_HPP_

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "step/temporary_directory.hpp"

extern char** environ;

namespace octopage::testing {

struct CommandResult {
  int exit_code;  ///< -1 where a signal ended it
  std::string out;
  std::string err;
};

/// Runs the octopage binary with these arguments, without a shell.
inline CommandResult octopage(std::vector<std::string> args) {
  const TemporaryDirectory directory;
  const std::string out = directory / "out";
  const std::string err = directory / "err";
  args.insert(args.begin(), OCTOPAGE_CLI);
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT, 0600);
  pid_t child = 0;
  const int error = posix_spawn(&child, OCTOPAGE_CLI, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot run " OCTOPAGE_CLI);
  int status = 0;
  if (waitpid(child, &status, 0) != child)
    throw std::runtime_error("cannot wait for " OCTOPAGE_CLI);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

}  // namespace octopage::testing

#endif  // OCTOPAGE_TESTS_CLI_COMMAND_HPP_
