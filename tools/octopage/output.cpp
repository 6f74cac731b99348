#include "tools/octopage/output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <system_error>

#include "core/check.hpp"

namespace octopage::cli {
namespace {

[[noreturn]] void fail_out(int error) {
  fail(ErrorCode::bad_file, "standard output: cannot be written, {}",
       std::generic_category().message(error != 0 ? error : EIO));
}

}  // namespace

void prepare_streams() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number is this one. Opened for reading, writes to it fail as they would have.
    const int opened = open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    if (opened != descriptor && opened >= 0) close(opened);
  }
}

void write_out(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) fail_out(errno);
}

void flush_out() {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) fail_out(errno);
}

void write_err(std::string_view text) {
  static_cast<void>(std::fwrite(text.data(), 1, text.size(), stderr));
}

void require_file_name(std::string_view flag, const std::string& name) {
  if (name.empty()) fail_argument("{}: must be a file name, is empty", flag);
}

}  // namespace octopage::cli
