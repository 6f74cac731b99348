#include "octopage/tensor.hpp"

#include <limits>

#include "core/check.hpp"

namespace octopage {

std::string name(Device device) {
  if (device.type == DeviceType::cpu) return "cpu";
  return fmt::format("cuda:{}", device.index);
}

TensorView TensorView::contiguous(const void* data, DType dtype,
                                  std::initializer_list<int64_t> shape, Device device) {
  if (shape.size() > kMaxRank) fail_argument("shape: rank {} exceeds {}", shape.size(), kMaxRank);
  TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.device = device;
  for (const int64_t extent : shape) {
    if (extent < 0) fail_argument("shape[{}] = {} is negative", view.rank, extent);
    view.shape[static_cast<size_t>(view.rank++)] = extent;
  }
  int64_t stride = 1;
  for (int32_t i = view.rank; i-- > 0;) {
    const auto d = static_cast<size_t>(i);
    view.strides[d] = stride;
    if (view.shape[d] > 0) stride = checked_mul(stride, view.shape[d], "shape");
  }
  return view;
}

int64_t TensorView::size() const {
  int64_t product = 1;
  bool overflow = false;
  for (int32_t i = 0; i < rank; ++i) {
    const int64_t extent = shape[static_cast<size_t>(i)];
    if (extent == 0) return 0;
    overflow |= __builtin_mul_overflow(product, extent, &product);
  }
  return overflow ? std::numeric_limits<int64_t>::max() : product;
}

bool TensorView::is_contiguous() const {
  if (size() == 0) return true;
  int64_t stride = 1;
  for (int32_t i = rank; i-- > 0;) {
    const auto d = static_cast<size_t>(i);
    if (shape[d] != 1 && strides[d] != stride) return false;
    stride *= shape[d];
  }
  return true;
}

TensorView TensorView::slice(int32_t dim, int64_t begin, int64_t end) const {
  if (dim < 0 || dim >= rank)
    fail_argument("slice: dimension {} of a tensor of rank {}", dim, rank);
  const auto d = static_cast<size_t>(dim);
  if (begin < 0 || end < begin || end > shape[d]) {
    fail_argument("slice: [{}, {}) is not inside dimension {} of extent {}", begin, end, dim,
                  shape[d]);
  }
  TensorView view = *this;
  view.shape[d] = end - begin;
  if (data != nullptr && begin > 0 && end > begin) {
    view.data = static_cast<char*>(data) + begin * strides[d] * itemsize(dtype);
  }
  return view;
}

}  // namespace octopage
