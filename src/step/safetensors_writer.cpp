// Writes safetensors files so that a reader sees the old file or the whole new one.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <system_error>

#include "core/check.hpp"
#include "step/printable.hpp"
#include "step/step_file.hpp"

namespace octopage {
namespace {

constexpr size_t kDataAlignment = 16;

const char* dtype_text(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::f32:
      return "F32";
    case DType::f8_e4m3fn:
      return "F8_E4M3";
    case DType::u8:
      return "U8";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
  }
  fail(ErrorCode::internal, "dtype = {}: not a type", static_cast<int32_t>(dtype));
}

[[noreturn]] void fail_write(const std::filesystem::path& path, int error) {
  fail(ErrorCode::bad_file, "{}: file: cannot be written, {}",
       printable(path.string(), kMaxPrintedPath), std::generic_category().message(error));
}

/// A new file beside the target. Unless committed it is gone at the end of the scope.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) : target_(target) {
    std::random_device random;
    for (int attempt = 0; attempt < 100 && descriptor_ < 0; ++attempt) {
      path_ = target.parent_path() / fmt::format(".octopage-{:08x}{:08x}.tmp", random(), random());
      descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ < 0 && errno != EEXIST) break;
    }
    if (descriptor_ < 0) fail_write(target_, errno);
  }
  ~TemporaryFile() {
    if (descriptor_ >= 0) close(descriptor_);
    if (!committed_) unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const void* data, uint64_t bytes) {
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

  void commit() {
    if (fsync(descriptor_) != 0) fail_write(target_, errno);
    const int closed = close(descriptor_);
    descriptor_ = -1;
    if (closed != 0) fail_write(target_, errno);
    if (std::rename(path_.c_str(), target_.c_str()) != 0) fail_write(target_, errno);
    committed_ = true;
  }

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool committed_ = false;
};

}  // namespace

void write_safetensors(const std::filesystem::path& path,
                       const std::vector<std::pair<std::string, TensorView>>& tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    auto& object = header["__metadata__"] = nlohmann::ordered_json::object();
    for (const auto& [key, value] : metadata) object[key] = value;
  }
  std::set<std::string> names;
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    if (name.empty() || name == "__metadata__" || !names.insert(name).second) {
      fail_argument("tensors: names must be distinct and not empty, got '{}'", printable(name));
    }
    if (!tensor.present() || tensor.device.type != DeviceType::cpu || !tensor.is_contiguous()) {
      fail_argument("tensors: '{}' must be a contiguous CPU tensor", printable(name));
    }
    const int64_t bytes = checked_mul(tensor.size(), itemsize(tensor.dtype), "bytes of a tensor");
    const int64_t end = checked_add(offset, bytes, "bytes of all tensors");
    const std::vector<int64_t> shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
    header[name] = {{"dtype", dtype_text(tensor.dtype)},
                    {"shape", shape},
                    {"data_offsets", std::vector<int64_t>{offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    fail_argument("tensors: names and metadata must be UTF-8");
  }
  while ((8 + text.size()) % kDataAlignment != 0) text += ' ';

  // A rename would replace a device such as /dev/null by a file.
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    fail(ErrorCode::bad_file, "{}: file: cannot be written, exists and is not a regular file",
         printable(path.string(), kMaxPrintedPath));
  }
  TemporaryFile file(path);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(text.size() >> (8 * i));
  file.write(length, sizeof(length));
  file.write(text.data(), text.size());
  for (const auto& [name, tensor] : tensors) {
    file.write(tensor.data, static_cast<uint64_t>(tensor.size() * itemsize(tensor.dtype)));
  }
  file.commit();
}

}  // namespace octopage
