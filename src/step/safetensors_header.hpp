#ifndef OCTOPAGE_STEP_SAFETENSORS_HEADER_HPP_
#define OCTOPAGE_STEP_SAFETENSORS_HEADER_HPP_

// The container of a step file, without the meaning of its tensors.
//
//   | 8 bytes: N, little endian | N bytes: JSON object | data area                          |
//                               { "__metadata__": { key: string, ... },
//                                 tensor: { "dtype": "BF16", "shape": [..],
//                                           "data_offsets": [begin, end] }, ... }
//
// Offsets are bytes from the start of the data area. The tensors cover the data area exactly.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace octopage {

inline constexpr uint64_t kMaxHeaderBytes = uint64_t{64} << 20;
inline constexpr size_t kMaxTensors = 4096;
inline constexpr size_t kMaxMetadataEntries = 4096;
inline constexpr size_t kMaxTensorRank = 8;
inline constexpr size_t kMaxNameBytes = 256;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;           ///< as in the file, of a known size
  std::vector<int64_t> shape;  ///< the product of its non-zero extents fits 63 bits
  uint64_t begin = 0;          ///< bytes from the start of the data area
  uint64_t end = 0;            ///< end - begin = product of shape times element size
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  ///< by begin; they tile the data area
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  ///< bytes from the start of the file
};

/// Parses and checks the header of a file of `size` bytes. Throws Error(bad_file), "<origin>:
/// <tensor or header>: <rule>, <value>". Allocates no more than a small multiple of the header.
SafetensorsHeader parse_safetensors_header(const uint8_t* bytes, uint64_t size,
                                           std::string_view origin);

}  // namespace octopage

#endif  // OCTOPAGE_STEP_SAFETENSORS_HEADER_HPP_
