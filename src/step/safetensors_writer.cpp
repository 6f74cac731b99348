// Writes safetensors files so that a reader sees the old file or the whole new one.

#include <nlohmann/json.hpp>
#include <set>

#include "core/check.hpp"
#include "step/output_file.hpp"
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

  OutputFile file(path);
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
