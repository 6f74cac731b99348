#include "step/output_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>

#include "core/check.hpp"
#include "step/printable.hpp"

namespace octopage {
namespace {

[[noreturn]] void fail_write(const std::filesystem::path& path, int error) {
  fail(ErrorCode::bad_file, "{}: file: cannot be written, {}",
       printable(path.string(), kMaxPrintedPath), std::generic_category().message(error));
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& target) : target_(target) {
  // A rename would replace a device such as /dev/null by a file.
  std::error_code ignored;
  const auto status = std::filesystem::status(target, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    fail(ErrorCode::bad_file, "{}: file: cannot be written, exists and is not a regular file",
         printable(target.string(), kMaxPrintedPath));
  }
  std::random_device random;
  for (int attempt = 0; attempt < 100 && descriptor_ < 0; ++attempt) {
    path_ = target.parent_path() / fmt::format(".octopage-{:08x}{:08x}.tmp", random(), random());
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST) break;
  }
  if (descriptor_ < 0) fail_write(target_, errno);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!committed_) unlink(path_.c_str());
}

void OutputFile::write(const void* data, uint64_t bytes) {
  constexpr uint64_t kChunkBytes = uint64_t{1} << 30;  // write() takes less than 2^31 at once
  const auto* next = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, std::min(bytes, kChunkBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_write(target_, errno);
    next += written;
    bytes -= static_cast<uint64_t>(written);
  }
}

void OutputFile::commit() {
  if (fsync(descriptor_) != 0) fail_write(target_, errno);
  const int closed = close(descriptor_);
  descriptor_ = -1;
  if (closed != 0) fail_write(target_, errno);
  if (std::rename(path_.c_str(), target_.c_str()) != 0) fail_write(target_, errno);
  committed_ = true;
}

}  // namespace octopage
