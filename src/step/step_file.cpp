#include "step/step_file.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "octopage/page_arithmetic.hpp"
#include "step/printable.hpp"
#include "step/safetensors_header.hpp"
#include "step/tensor_storage.hpp"

namespace octopage {
namespace {

constexpr std::string_view kFormat = "octopage-step-1";
constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();
/// Requests need no bytes of the file where the table has no columns; callers allocate per request.
constexpr int64_t kMaxRequests = int64_t{1} << 24;
constexpr int64_t kCacheAlignment = 16;

/// What the format says of one tensor, apart from its shape.
struct TensorRule {
  std::string_view name;
  TensorView Step::*member;
  bool required;
  std::array<std::optional<DType>, 3> dtypes;
};

constexpr std::array<TensorRule, 14> kRules = {{
    {"query", &Step::query, true, {DType::bf16, DType::f16}},
    {"kv_cache", &Step::kv_cache, true, {DType::bf16, DType::f16, DType::f8_e4m3fn}},
    {"block_table", &Step::block_table, true, {DType::i32}},
    {"owners", &Step::owners, true, {DType::i32}},
    {"positions", &Step::positions, true, {DType::i32, DType::i64}},
    {"regions", &Step::regions, true, {DType::i32}},
    {"lengths", &Step::lengths, false, {DType::i32}},
    {"expected_output", &Step::expected_output, false, {DType::f32}},
    {"expected_lse", &Step::expected_lse, false, {DType::f32}},
    {"expected_indptr", &Step::expected_indptr, false, {DType::i32}},
    {"expected_last_page_len", &Step::expected_last_page_len, false, {DType::i32}},
    {"expected_pages", &Step::expected_pages, false, {DType::i32}},
    {"expected_staged_blocks", &Step::expected_staged_blocks, false, {DType::i32}},
    {"expected_staged_table", &Step::expected_staged_table, false, {DType::i32}},
}};
const TensorRule* find_rule(std::string_view name) {
  for (const TensorRule& rule : kRules) {
    if (rule.name == name) return &rule;
  }
  return nullptr;
}

const char* file_name_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::f32:
      return "F32";
    case DType::f8_e4m3fn:
      return "F8_E4M3";
    case DType::i32:
      return "I32";
    case DType::i64:
      return "I64";
    default:
      return "?";
  }
}

/// Turns the tensors and metadata of one file into a checked step.
class StepReader {
 public:
  StepReader(const uint8_t* bytes, uint64_t size, std::string_view origin, bool keep_mapped,
             std::shared_ptr<TensorStorage> storage)
      : bytes_(bytes),
        size_(size),
        origin_(origin),
        keep_mapped_(keep_mapped),
        storage_(std::move(storage)) {}

  Step read() {
    const SafetensorsHeader header = parse_safetensors_header(bytes_, size_, origin_);
    check_format(header);
    for (const SafetensorsEntry& entry : header.tensors) {
      const TensorRule* rule = find_rule(entry.name);
      if (rule == nullptr) {
        step_.notes.push_back(
            fmt::format("{}: not a tensor of a step, ignored", printable(entry.name)));
        continue;
      }
      step_.*rule->member = describe(entry, *rule);
    }
    for (const TensorRule& rule : kRules) {
      if (rule.required && !(step_.*rule.member).present())
        refuse(rule.name, "is required, is missing");
    }
    check_inputs();
    read_scales(header);
    // Data is read or copied only once every shape is known to be right.
    for (const SafetensorsEntry& entry : header.tensors) {
      if (const TensorRule* rule = find_rule(entry.name))
        place(entry, header.data_begin, step_.*rule->member);
    }
    check_lengths();
    check_expected();
    step_.storage = storage_;
    return std::move(step_);
  }

 private:
  template <typename... Args>
  [[noreturn]] void refuse(std::string_view tensor, fmt::format_string<Args...> rule,
                           Args&&... args) const {
    fail(ErrorCode::bad_file, "{}: {}: {}", origin_, tensor,
         fmt::format(rule, std::forward<Args>(args)...));
  }

  void check_format(const SafetensorsHeader& header) {
    const auto format = header.metadata.find("format");
    if (format == header.metadata.end()) {
      refuse("__metadata__", "format must be {}, is missing", kFormat);
    }
    if (format->second != kFormat) {
      refuse("__metadata__", "format must be {}, is {}", kFormat, printable(format->second));
    }
    for (const auto& [key, value] : header.metadata) {
      if (key != "format" && key != "scale" && key != "k_scale" && key != "v_scale") {
        step_.notes.push_back(
            fmt::format("__metadata__: {}: not metadata of a step, ignored", printable(key)));
      }
    }
  }

  /// Type and extents of a known tensor, without data.
  TensorView describe(const SafetensorsEntry& entry, const TensorRule& rule) const {
    TensorView tensor;
    std::string allowed;
    bool found = false;
    for (const std::optional<DType>& dtype : rule.dtypes) {
      if (!dtype) continue;
      allowed += fmt::format("{}{}", allowed.empty() ? "" : " or ", file_name_of(*dtype));
      if (entry.dtype == file_name_of(*dtype)) {
        tensor.dtype = *dtype;
        found = true;
      }
    }
    if (!found) refuse(rule.name, "dtype must be {}, is {}", allowed, printable(entry.dtype));
    if (entry.shape.empty() || entry.shape.size() > static_cast<size_t>(kMaxRank)) {
      refuse(rule.name, "must have 1 to {} dimensions, has {}", kMaxRank, entry.shape.size());
    }
    tensor.rank = static_cast<int32_t>(entry.shape.size());
    int64_t stride = 1;
    for (size_t d = entry.shape.size(); d-- > 0;) {
      if (entry.shape[d] > kMaxExtent) {
        refuse(rule.name, "extents must be at most {}, one is {}", kMaxExtent, entry.shape[d]);
      }
      tensor.shape[d] = entry.shape[d];
      tensor.strides[d] = stride;
      stride *= std::max<int64_t>(entry.shape[d], 1);  // fits: checked with the header
    }
    return tensor;
  }

  /// Points the tensor into the mapping, or copies it where it may not stay or is not aligned.
  void place(const SafetensorsEntry& entry, uint64_t data_begin, TensorView& tensor) {
    const uint8_t* source = bytes_ + data_begin + entry.begin;
    const auto bytes = static_cast<int64_t>(entry.end - entry.begin);
    const int64_t alignment = &tensor == &step_.kv_cache ? kCacheAlignment : itemsize(tensor.dtype);
    if (keep_mapped_ && bytes > 0 &&
        reinterpret_cast<uintptr_t>(source) % static_cast<uintptr_t>(alignment) == 0) {
      tensor.data = const_cast<uint8_t*>(source);
      return;
    }
    tensor.data = storage_->allocate(bytes);
    if (bytes > 0) std::memcpy(tensor.data, source, static_cast<size_t>(bytes));
  }

  void require_rank(const TensorView& tensor, std::string_view name, std::string_view dimensions,
                    int32_t rank) const {
    if (tensor.rank != rank) {
      refuse(name, "must have shape {}, has {}", dimensions, text_of(tensor));
    }
  }

  void require_shape(const TensorView& tensor, std::string_view name, std::string_view dimensions,
                     std::initializer_list<int64_t> shape) const {
    const bool same = static_cast<size_t>(tensor.rank) == shape.size() &&
                      std::equal(shape.begin(), shape.end(), tensor.shape.begin());
    if (!same) {
      refuse(name, "must have shape {} = [{}], has {}", dimensions, fmt::join(shape, ", "),
             text_of(tensor));
    }
  }

  static std::string text_of(const TensorView& tensor) {
    return fmt::format("[{}]",
                       fmt::join(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, ", "));
  }

  /// Shapes of the required tensors: each alone, then against each other.
  void check_inputs() const {
    require_rank(step_.query, "query", "[rows, heads, dim]", 3);
    if (step_.heads() < 1 || step_.dim() < 1) {
      refuse("query", "heads and dim must be positive, are {} and {}", step_.heads(), step_.dim());
    }
    require_rank(step_.kv_cache, "kv_cache", "[blocks, groups, block_size, 2*dim]", 4);
    if (step_.groups() < 1 || step_.heads() % step_.groups() != 0) {
      refuse("kv_cache", "groups must divide the {} heads of query, are {}", step_.heads(),
             step_.groups());
    }
    if (step_.block_size() < kPageTokens || step_.block_size() % kPageTokens != 0) {
      refuse("kv_cache", "block_size must be a positive multiple of {}, is {}", kPageTokens,
             step_.block_size());
    }
    if (step_.kv_cache.shape[3] != 2 * step_.dim()) {
      refuse("kv_cache", "last dimension must be 2 * dim = {}, is {}", 2 * step_.dim(),
             step_.kv_cache.shape[3]);
    }
    require_rank(step_.block_table, "block_table", "[requests, max_blocks]", 2);
    if (step_.requests() > kMaxRequests) {
      refuse("block_table", "requests must be at most {}, are {}", kMaxRequests, step_.requests());
    }
    require_shape(step_.owners, "owners", "[rows]", {step_.rows()});
    require_shape(step_.positions, "positions", "[rows]", {step_.rows()});
    if (step_.regions.rank == 2) {
      require_shape(step_.regions, "regions", "[rows, region_count]",
                    {step_.rows(), step_.region_count()});
    } else {
      require_rank(step_.regions, "regions", "[rows, groups, region_count]", 3);
      require_shape(step_.regions, "regions", "[rows, groups, region_count]",
                    {step_.rows(), step_.groups(), step_.region_count()});
    }
  }

  float read_scale(const SafetensorsHeader& header, const char* key, bool required) const {
    const auto entry = header.metadata.find(key);
    if (entry == header.metadata.end()) {
      if (required) refuse("__metadata__", "{} is required, is missing", key);
      return 1.0f;
    }
    const std::string& text = entry->second;
    float value = 0.0f;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size() ||
        !std::isfinite(value)) {
      refuse("__metadata__", "{} must be a finite decimal number of 32 bits, is \"{}\"", key,
             printable(text));
    }
    return value;
  }

  void read_scales(const SafetensorsHeader& header) {
    const bool f8 = step_.kv_cache.dtype == DType::f8_e4m3fn;
    step_.scale = read_scale(header, "scale", true);
    step_.k_scale = read_scale(header, "k_scale", f8);
    step_.v_scale = read_scale(header, "v_scale", f8);
  }

  int64_t position(int64_t row) const {
    return step_.positions.dtype == DType::i64
               ? static_cast<const int64_t*>(step_.positions.data)[row]
               : static_cast<const int32_t*>(step_.positions.data)[row];
  }

  /// Each length fits the table, and each row stands inside its request.
  void check_lengths() const {
    if (!step_.lengths.present()) return;
    require_shape(step_.lengths, "lengths", "[requests]", {step_.requests()});
    const auto* lengths = static_cast<const int32_t*>(step_.lengths.data);
    const int64_t capacity = step_.block_table.shape[1] * step_.block_size();
    for (int64_t i = 0; i < step_.requests(); ++i) {
      if (lengths[i] < 0 || lengths[i] > capacity) {
        refuse("lengths", "must be 0 .. {} (max_blocks * block_size), request {} has {}", capacity,
               i, lengths[i]);
      }
    }
    const auto* owners = static_cast<const int32_t*>(step_.owners.data);
    for (int64_t row = 0; row < step_.rows(); ++row) {
      if (owners[row] < 0 || owners[row] >= step_.requests())
        continue;  // an invalid owner is skipped
      if (position(row) >= lengths[owners[row]]) {
        refuse("positions", "must be below the length {} of request {}, row {} has {}",
               lengths[owners[row]], owners[row], row, position(row));
      }
    }
  }

  void check_expected() const {
    const int64_t rows = step_.rows();
    if (step_.expected_output.present()) {
      require_shape(step_.expected_output, "expected_output", "[rows, heads, dim]",
                    {rows, step_.heads(), step_.dim()});
    }
    if (step_.expected_lse.present()) {
      require_shape(step_.expected_lse, "expected_lse", "[rows, heads]", {rows, step_.heads()});
    }
    if (step_.expected_last_page_len.present()) {
      require_shape(step_.expected_last_page_len, "expected_last_page_len", "[rows]", {rows});
    }
    if (step_.expected_indptr.present()) check_indptr();
    if (step_.expected_pages.present()) {
      if (!step_.expected_indptr.present())
        refuse("expected_pages", "needs expected_indptr, is alone");
      const int64_t entries = static_cast<const int32_t*>(step_.expected_indptr.data)[rows];
      require_shape(step_.expected_pages, "expected_pages", "[groups, expected_indptr[rows]]",
                    {step_.groups(), entries});
    }
    if (step_.expected_staged_table.present()) {
      require_shape(step_.expected_staged_table, "expected_staged_table", "[requests, max_blocks]",
                    {step_.requests(), step_.block_table.shape[1]});
    }
    if (step_.expected_staged_blocks.present()) {
      require_rank(step_.expected_staged_blocks, "expected_staged_blocks", "[staged]", 1);
    }
    if (!step_.lengths.present() &&
        (step_.expected_staged_blocks.present() || step_.expected_staged_table.present())) {
      refuse("lengths", "is required by the expected staging plan, is missing");
    }
  }

  void check_indptr() const {
    require_shape(step_.expected_indptr, "expected_indptr", "[rows+1]", {step_.rows() + 1});
    const auto* indptr = static_cast<const int32_t*>(step_.expected_indptr.data);
    if (indptr[0] != 0) refuse("expected_indptr", "must begin with 0, begins with {}", indptr[0]);
    for (int64_t row = 0; row < step_.rows(); ++row) {
      if (indptr[row + 1] < indptr[row]) {
        refuse("expected_indptr", "must not fall, entry {} is {} after {}", row + 1,
               indptr[row + 1], indptr[row]);
      }
    }
  }

  const uint8_t* bytes_;  // [size_] the whole file
  uint64_t size_;
  std::string_view origin_;
  bool keep_mapped_;  // tensors may point into bytes_
  std::shared_ptr<TensorStorage> storage_;
  Step step_;
};

}  // namespace

Step read_step(const std::filesystem::path& path) {
  auto storage = std::make_shared<TensorStorage>();
  storage->map(path);
  const std::string origin = printable(path.string(), kMaxPrintedPath);
  return StepReader(storage->mapped(), storage->mapped_bytes(), origin, true, storage).read();
}

Step parse_step(const uint8_t* bytes, uint64_t size, std::string_view origin) {
  const std::string name = printable(origin, kMaxPrintedPath);
  return StepReader(bytes, size, name, false, std::make_shared<TensorStorage>()).read();
}

void write_step(const std::filesystem::path& path, const Step& step) {
  // Falling element sizes keep every tensor naturally aligned: the cache takes whole 16-byte rows,
  // and the query, of two bytes an element, comes last.
  std::vector<std::pair<std::string, TensorView>> tensors = {{"kv_cache", step.kv_cache},
                                                             {"positions", step.positions},
                                                             {"block_table", step.block_table},
                                                             {"owners", step.owners},
                                                             {"regions", step.regions}};
  const std::array<std::pair<const char*, const TensorView*>, 8> optional = {{
      {"lengths", &step.lengths},
      {"expected_output", &step.expected_output},
      {"expected_lse", &step.expected_lse},
      {"expected_indptr", &step.expected_indptr},
      {"expected_last_page_len", &step.expected_last_page_len},
      {"expected_pages", &step.expected_pages},
      {"expected_staged_blocks", &step.expected_staged_blocks},
      {"expected_staged_table", &step.expected_staged_table},
  }};
  for (const auto& [name, tensor] : optional) {
    if (tensor->present()) tensors.emplace_back(name, *tensor);
  }
  tensors.emplace_back("query", step.query);
  write_safetensors(path, tensors,
                    {{"format", std::string(kFormat)},
                     {"scale", fmt::format("{}", step.scale)},
                     {"k_scale", fmt::format("{}", step.k_scale)},
                     {"v_scale", fmt::format("{}", step.v_scale)}});
}

}  // namespace octopage
