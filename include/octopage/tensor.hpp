#ifndef OCTOPAGE_TENSOR_HPP_
#define OCTOPAGE_TENSOR_HPP_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "octopage/export.h"

namespace octopage {

/// Element types. `u8` given as a cache means the codes of `f8_e4m3fn`.
enum class DType : int32_t { bf16 = 0, f16 = 1, f32 = 2, f8_e4m3fn = 3, u8 = 4, i32 = 5, i64 = 6 };

enum class DeviceType : int32_t { cpu = 0, cuda = 1 };

struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Bytes of one element.
OCTOPAGE_API int64_t itemsize(DType dtype);
/// Lower-case name, as in messages: "bf16", "f8_e4m3fn", ...
OCTOPAGE_API const char* name(DType dtype);
/// "cpu" or "cuda:0".
OCTOPAGE_API std::string name(Device device);

inline constexpr int32_t kMaxRank = 4;

/// A strided array that somebody else owns. Nothing is copied or kept beyond the call that takes
/// it; inputs are never written through.
struct OCTOPAGE_API TensorView {
  void* data = nullptr;  ///< first element; may be null where some dimension is 0
  DType dtype = DType::f32;
  Device device = {};
  int32_t rank = 0;  ///< dimensions in use, 0 .. kMaxRank; 0 means "no tensor"
  std::array<int64_t, kMaxRank> shape = {};    ///< [rank]
  std::array<int64_t, kMaxRank> strides = {};  ///< [rank] in elements; meaningless where shape is 1

  /// A row-major tensor of this shape. Throws Error on rank or a negative dimension.
  static TensorView contiguous(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                               Device device = {});

  bool present() const { return rank > 0; }
  /// Product of the shape; 1 for rank 0.
  int64_t size() const;
  /// Row-major without gaps; strides of dimensions of size 1 are ignored.
  bool is_contiguous() const;
  /// The same data restricted to `[begin, end)` of dimension `dim`. Throws Error when out of range.
  TensorView slice(int32_t dim, int64_t begin, int64_t end) const;
};

}  // namespace octopage

#endif  // OCTOPAGE_TENSOR_HPP_
