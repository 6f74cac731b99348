#ifndef OCTOPAGE_TESTS_CLI_COMMAND_HPP_
#define OCTOPAGE_TESTS_CLI_COMMAND_HPP_

#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
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

/// Where a command's stdout goes.
enum class Stdout {
  kept,         ///< into the result
  full,         ///< a device without room
  closed,       ///< no file at all
  broken_pipe,  ///< a pipe that nobody reads
};

/// Runs the octopage binary with these arguments, without a shell.
inline CommandResult octopage(std::vector<std::string> args, Stdout to = Stdout::kept) {
  const TemporaryDirectory directory;
  const std::string out = to == Stdout::full ? "/dev/full" : (directory / "out").string();
  const std::string err = directory / "err";
  args.insert(args.begin(), OCTOPAGE_CLI);
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  int pipe_ends[2] = {-1, -1};
  if (to == Stdout::broken_pipe && pipe2(pipe_ends, O_CLOEXEC) != 0) {
    throw std::runtime_error("no pipe");
  }
  if (to == Stdout::broken_pipe) {
    close(pipe_ends[0]);
    posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  } else if (to == Stdout::closed) {
    posix_spawn_file_actions_addclose(&actions, STDOUT_FILENO);
  } else {
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT,
                                     0600);
  }
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT, 0600);
  pid_t child = 0;
  const int error = posix_spawn(&child, OCTOPAGE_CLI, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (pipe_ends[1] >= 0) close(pipe_ends[1]);
  if (error != 0) throw std::runtime_error("cannot run " OCTOPAGE_CLI);
  int status = 0;
  if (waitpid(child, &status, 0) != child)
    throw std::runtime_error("cannot wait for " OCTOPAGE_CLI);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          to == Stdout::kept ? read_file(out) : std::string(), read_file(err)};
}

/// For its lifetime, no file may grow beyond `bytes`: of this process and of those it starts.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) throw std::runtime_error("cannot limit file sizes");
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_ = {};
};

}  // namespace octopage::testing

#endif  // OCTOPAGE_TESTS_CLI_COMMAND_HPP_
