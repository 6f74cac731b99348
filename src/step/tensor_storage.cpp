#include "step/tensor_storage.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/check.hpp"
#include "step/printable.hpp"

namespace octopage {
namespace {

constexpr int64_t kAlignment = 64;

/// An open file, closed at the end of the scope.
class FileDescriptor {
 public:
  explicit FileDescriptor(int value) : value_(value) {}
  ~FileDescriptor() {
    if (value_ >= 0) close(value_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

std::string last_system_error() {
  return std::generic_category().message(errno);
}

}  // namespace

TensorStorage::~TensorStorage() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

void* TensorStorage::allocate(int64_t bytes) {
  int64_t padded = 0;
  if (bytes < 0 || __builtin_add_overflow(bytes, kAlignment, &padded)) {
    fail_argument("bytes = {}: not an allocation size", bytes);
  }
  padded = padded / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, static_cast<size_t>(padded));
  if (data == nullptr)
    fail(ErrorCode::out_of_memory, "tensor: {} bytes cannot be allocated", padded);
  owned_.emplace_back(data);
  return data;
}

TensorView TensorStorage::allocate_tensor(DType dtype, std::initializer_list<int64_t> shape) {
  int64_t bytes = itemsize(dtype);
  for (const int64_t extent : shape) bytes = checked_mul(bytes, extent, "bytes of a tensor");
  return TensorView::contiguous(allocate(bytes), dtype, shape);
}

void TensorStorage::map(const std::filesystem::path& path) {
  const auto refuse = [&path](const std::string& reason) {
    fail(ErrorCode::bad_file, "{}: file: {}", printable(path.string(), kMaxPrintedPath), reason);
  };
  if (mapped_ != nullptr) fail(ErrorCode::internal, "storage: maps one file, asked for a second");
  // O_NONBLOCK: opening a pipe without a writer must not wait.
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) refuse("cannot be opened, " + last_system_error());
  struct stat status = {};
  if (fstat(file.get(), &status) != 0) refuse("cannot be examined, " + last_system_error());
  if (S_ISDIR(status.st_mode)) refuse("must be a regular file, is a directory");
  if (!S_ISREG(status.st_mode)) refuse("must be a regular file, is a device, pipe or socket");
  if (status.st_size == 0) return;
  const auto bytes = static_cast<uint64_t>(status.st_size);
  void* data = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) refuse("cannot be mapped, " + last_system_error());
  mapped_ = static_cast<uint8_t*>(data);
  mapped_bytes_ = bytes;
}

}  // namespace octopage
