#include "step/safetensors_header.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "core/check.hpp"
#include "step/printable.hpp"

namespace octopage {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";

/// Bytes of an element, 0 for a type that this reader does not know.
uint64_t element_bytes(std::string_view dtype) {
  constexpr std::array<std::pair<std::string_view, uint64_t>, 15> kTypes = {{
      {"BOOL", 1},
      {"U8", 1},
      {"I8", 1},
      {"F8_E4M3", 1},
      {"F8_E5M2", 1},
      {"U16", 2},
      {"I16", 2},
      {"F16", 2},
      {"BF16", 2},
      {"U32", 4},
      {"I32", 4},
      {"F32", 4},
      {"U64", 8},
      {"I64", 8},
      {"F64", 8},
  }};
  for (const auto& [known, bytes] : kTypes) {
    if (known == dtype) return bytes;
  }
  return 0;
}

/// Receives the JSON events of a header. It holds exactly the state that a header can be in, so
/// nothing nests deeper than a header does and no document is built.
class HeaderReader {
 public:
  explicit HeaderReader(SafetensorsHeader& header) : header_(header) {}

  /// "<tensor>: <rule>, <value>" of the first fault.
  const std::string& fault() const { return fault_; }
  bool complete() const { return place_ == Place::after; }

  bool null() { return refuse_value("null"); }
  bool boolean(bool) { return refuse_value("a boolean"); }
  bool number_integer(int64_t value) { return refuse_value(fmt::format("{}", value)); }
  bool number_float(double, const std::string& text) { return refuse_value(printable(text)); }
  template <typename Binary>
  bool binary(Binary&) {
    return refuse_value("binary data");
  }

  bool number_unsigned(uint64_t value) {
    if (place_ == Place::shape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return refuse("{}: shape must fit 63 bits, has {}", printable(entry_.name), value);
      }
      if (entry_.shape.size() == kMaxTensorRank) {
        return refuse("{}: shape must have at most {} dimensions, has more", printable(entry_.name),
                      kMaxTensorRank);
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets) {
      if (offset_count_ == 2) {
        return refuse("{}: data_offsets must be two numbers, are more", printable(entry_.name));
      }
      (offset_count_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return refuse_value(fmt::format("{}", value));
  }

  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header_.metadata[key_] = value;
      return true;
    }
    if (place_ == Place::entry && key_ == "dtype") {
      entry_.dtype = value;
      return true;
    }
    return refuse_value(fmt::format("\"{}\"", printable(value)));
  }

  bool start_object(size_t) {
    if (place_ == Place::before) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = key_ == kMetadataKey ? Place::metadata : Place::entry;
      entry_ = SafetensorsEntry{};
      entry_.name = key_;
      seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    } else {
      return refuse_value("an object");
    }
    return true;
  }

  bool key(std::string& value) {
    if (value.size() > kMaxNameBytes) {
      return refuse("{}: name must have at most {} bytes, has {}", printable(value), kMaxNameBytes,
                    value.size());
    }
    key_ = value;
    switch (place_) {
      case Place::top:
        if (!names_.insert(value).second) {
          return refuse("{}: must appear once in the header, appears again", printable(value));
        }
        if (names_.size() > kMaxTensors) {
          return refuse("header: must name at most {} tensors, names more", kMaxTensors);
        }
        return true;
      case Place::metadata:
        if (header_.metadata.count(value) != 0) {
          return refuse("__metadata__: {} must appear once, appears again", printable(value));
        }
        if (header_.metadata.size() == kMaxMetadataEntries) {
          return refuse("__metadata__: must have at most {} entries, has more",
                        kMaxMetadataEntries);
        }
        return true;
      case Place::entry:
        return entry_key(value);
      default:
        return refuse_value("a key");
    }
  }

  bool end_object() {
    if (place_ == Place::top) {
      place_ = Place::after;
      return true;
    }
    if (place_ == Place::entry) {
      const char* missing = !seen_dtype_     ? "dtype"
                            : !seen_shape_   ? "shape"
                            : !seen_offsets_ ? "data_offsets"
                                             : nullptr;
      if (missing != nullptr) {
        return refuse("{}: {} is required, is missing", printable(entry_.name), missing);
      }
      header_.tensors.push_back(std::move(entry_));
    }
    place_ = Place::top;
    return true;
  }

  bool start_array(size_t) {
    if (place_ == Place::entry && key_ == "shape") {
      place_ = Place::shape;
    } else if (place_ == Place::entry && key_ == "data_offsets") {
      place_ = Place::offsets;
      offset_count_ = 0;
    } else {
      return refuse_value("an array");
    }
    return true;
  }

  bool end_array() {
    if (place_ == Place::offsets && offset_count_ != 2) {
      return refuse("{}: data_offsets must be two numbers, are {}", printable(entry_.name),
                    offset_count_);
    }
    place_ = Place::entry;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    return refuse("header: must be JSON, breaks at byte {}", position);
  }

 private:
  enum class Place { before, top, metadata, entry, shape, offsets, after };

  template <typename... Args>
  bool refuse(fmt::format_string<Args...> format, Args&&... args) {
    if (fault_.empty()) fault_ = fmt::format(format, std::forward<Args>(args)...);
    return false;
  }

  bool refuse_value(const std::string& found) {
    switch (place_) {
      case Place::top:
        return refuse("{}: must be an object, is {}", printable(key_), found);
      case Place::metadata:
        return refuse("__metadata__: {} must be a string, is {}", printable(key_), found);
      case Place::entry:
        return refuse("{}: {} must be {}, is {}", printable(entry_.name), printable(key_),
                      key_ == "dtype" ? "a string" : "an array", found);
      case Place::shape:
        return refuse("{}: shape must hold whole numbers from 0, has {}", printable(entry_.name),
                      found);
      case Place::offsets:
        return refuse("{}: data_offsets must hold whole numbers from 0, has {}",
                      printable(entry_.name), found);
      default:
        return refuse("header: must be a JSON object, is {}", found);
    }
  }

  bool entry_key(const std::string& value) {
    bool* seen = value == "dtype"          ? &seen_dtype_
                 : value == "shape"        ? &seen_shape_
                 : value == "data_offsets" ? &seen_offsets_
                                           : nullptr;
    if (seen == nullptr) {
      return refuse("{}: keys must be dtype, shape and data_offsets, has {}",
                    printable(entry_.name), printable(value));
    }
    if (*seen) {
      return refuse("{}: {} must appear once, appears again", printable(entry_.name), value);
    }
    *seen = true;
    return true;
  }

  SafetensorsHeader& header_;
  std::set<std::string> names_;
  SafetensorsEntry entry_;
  std::string key_;
  std::string fault_;
  Place place_ = Place::before;
  int offset_count_ = 0;
  bool seen_dtype_ = false;
  bool seen_shape_ = false;
  bool seen_offsets_ = false;
};

/// Type, shape and byte range of one tensor agree, and the range lies in the data area.
void check_entry(const SafetensorsEntry& entry, uint64_t data_bytes, std::string_view origin) {
  const std::string name = printable(entry.name);
  const uint64_t item = element_bytes(entry.dtype);
  if (item == 0) {
    fail(ErrorCode::bad_file, "{}: {}: dtype must be one of the format, is {}", origin, name,
         printable(entry.dtype));
  }
  // Zero extents are left out: what is derived from a shape (strides) must not overflow either.
  int64_t span = static_cast<int64_t>(item);
  bool empty = false;
  for (const int64_t extent : entry.shape) {
    empty |= extent == 0;
    if (extent != 0 && __builtin_mul_overflow(span, extent, &span)) {
      fail(ErrorCode::bad_file, "{}: {}: bytes of the shape must fit 63 bits, [{}] of {} do not",
           origin, name, fmt::join(entry.shape, ", "), entry.dtype);
    }
  }
  if (entry.begin > entry.end) {
    fail(ErrorCode::bad_file, "{}: {}: data_offsets must not fall, are [{}, {}]", origin, name,
         entry.begin, entry.end);
  }
  if (entry.end > data_bytes) {
    fail(ErrorCode::bad_file,
         "{}: {}: data_offsets must end inside the data of {} bytes, end at {}", origin, name,
         data_bytes, entry.end);
  }
  const uint64_t bytes = empty ? 0 : static_cast<uint64_t>(span);
  if (entry.end - entry.begin != bytes) {
    fail(ErrorCode::bad_file, "{}: {}: [{}] of {} must take {} bytes, data_offsets hold {}", origin,
         name, fmt::join(entry.shape, ", "), entry.dtype, bytes, entry.end - entry.begin);
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(const uint8_t* bytes, uint64_t size,
                                           std::string_view origin) {
  if (size < 8) {
    fail(ErrorCode::bad_file,
         "{}: header: must begin with 8 bytes of length, the file has {} bytes", origin, size);
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  if (length > kMaxHeaderBytes) {
    fail(ErrorCode::bad_file, "{}: header: must have at most {} bytes, says {}", origin,
         kMaxHeaderBytes, length);
  }
  if (length > size - 8) {
    fail(ErrorCode::bad_file, "{}: header: must end inside the file of {} bytes, says {} bytes",
         origin, size, length);
  }
  const uint8_t* begin = bytes + 8;
  const uint8_t* end = begin + length;
  if (length == 0 || *begin != '{') {
    fail(ErrorCode::bad_file, "{}: header: must begin with '{{', {}", origin,
         length == 0 ? std::string("is empty") : fmt::format("begins with byte {}", *begin));
  }
  // The parser takes a zero byte for the end of its input.
  if (const void* zero = std::memchr(begin, 0, length); zero != nullptr) {
    fail(ErrorCode::bad_file, "{}: header: must hold no zero byte, has one at byte {}", origin,
         static_cast<const uint8_t*>(zero) - begin);
  }

  SafetensorsHeader header;
  header.data_begin = 8 + length;
  HeaderReader reader(header);
  const bool parsed = nlohmann::json::sax_parse(begin, end, &reader);
  if (!parsed || !reader.complete()) {
    fail(ErrorCode::bad_file, "{}: {}", origin,
         reader.fault().empty() ? "header: must be one JSON object, is cut" : reader.fault());
  }

  const uint64_t data_bytes = size - header.data_begin;
  for (const SafetensorsEntry& entry : header.tensors) check_entry(entry, data_bytes, origin);
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
                   });
  uint64_t covered = 0;
  for (const SafetensorsEntry& entry : header.tensors) {
    if (entry.begin != covered) {
      fail(ErrorCode::bad_file,
           "{}: {}: must begin where the tensor before it ends, at {}, {} at {}", origin,
           printable(entry.name), covered, entry.begin < covered ? "overlaps it" : "leaves a hole",
           entry.begin);
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    fail(ErrorCode::bad_file, "{}: header: tensors must cover the data of {} bytes, cover {}",
         origin, data_bytes, covered);
  }
  return header;
}

}  // namespace octopage
