#include "api/overlap.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.hpp"

namespace octopage {
namespace {

using Wide = __int128;  // strides are whatever a caller says: their products need not fit 64 bits

Wide magnitude(Wide value) {
  return value < 0 ? -value : value;
}

/// A dimension with more than one element; the sign of a stride does not matter here.
struct Step {
  Wide stride;
  Wide extent;
};

struct Steps {
  std::array<Step, kMaxRank> at = {};
  size_t count = 0;
};

/// The dimensions by rising stride.
Steps steps_of(const TensorView& tensor) {
  Steps steps;
  for (int32_t i = 0; i < tensor.rank; ++i) {
    const auto d = static_cast<size_t>(i);
    if (tensor.shape[d] <= 1) continue;
    const Wide stride = magnitude(tensor.strides[d]);
    size_t place = steps.count++;
    for (; place > 0 && steps.at[place - 1].stride > stride; --place)
      steps.at[place] = steps.at[place - 1];
    steps.at[place] = {stride, tensor.shape[d]};
  }
  return steps;
}

/// Each dimension steps over everything that the smaller ones reach.
bool is_nested(const Steps& steps) {
  Wide reach = 1;
  for (size_t i = 0; i < steps.count; ++i) {
    if (steps.at[i].stride < reach) return false;
    reach += (steps.at[i].extent - 1) * steps.at[i].stride;
  }
  return true;
}

/// i * a = j * b with both in range: the smallest solution is i = b / gcd, j = a / gcd.
bool two_collide(const Step& a, const Step& b) {
  Wide divisor = a.stride, rest = b.stride;
  while (rest != 0) divisor = std::exchange(rest, divisor % rest);
  return b.stride / divisor < a.extent && a.stride / divisor < b.extent;
}

/// Runs of `run` elements that begin at multiples of two strides: whether two runs meet.
bool runs_collide(Wide run, Step few, Step many) {
  if (few.extent > many.extent) std::swap(few, many);
  if (few.stride < run || many.stride < run) return true;
  for (Wide i = 1; i < few.extent; ++i) {  // |i * few - k * many| < run for some k
    const Wide distance = i * few.stride;
    const Wide first = std::max<Wide>((distance - run + many.stride) / many.stride, 0);
    const Wide last = std::min<Wide>((distance + run - 1) / many.stride, many.extent - 1);
    if (first <= last) return true;
  }
  return false;
}

/// The bytes of a tensor, first to one past the last.
struct Bytes {
  Wide begin;
  Wide end;
};

Wide stride_bytes(const TensorView& tensor, size_t dimension) {
  return Wide{tensor.strides[dimension]} * itemsize(tensor.dtype);
}

/// Of the dimensions that step by less than `period` bytes; of all where it is 0.
Bytes bytes_of(const TensorView& tensor, Wide period = 0) {
  Bytes bytes = {static_cast<Wide>(reinterpret_cast<uintptr_t>(tensor.data)), 0};
  bytes.end = bytes.begin + itemsize(tensor.dtype);
  for (int32_t i = 0; i < tensor.rank; ++i) {
    const auto d = static_cast<size_t>(i);
    const Wide stride = stride_bytes(tensor, d);
    if (tensor.shape[d] <= 1 || (period != 0 && magnitude(stride) >= period)) continue;
    const Wide reach = (tensor.shape[d] - 1) * stride;
    (reach < 0 ? bytes.begin : bytes.end) += reach;
  }
  return bytes;
}

/// Whether what steps by `period` bytes or more does so by multiples of it.
bool repeats(const TensorView& tensor, Wide period) {
  for (int32_t i = 0; i < tensor.rank; ++i) {
    const auto d = static_cast<size_t>(i);
    const Wide stride = magnitude(stride_bytes(tensor, d));
    if (tensor.shape[d] > 1 && stride >= period && stride % period != 0) return false;
  }
  return true;
}

/// Both repeat with that period, and within it they lie apart.
bool are_columns(const TensorView& a, const TensorView& b, Wide period) {
  if (!repeats(a, period) || !repeats(b, period)) return false;
  const Bytes first = bytes_of(a, period), second = bytes_of(b, period);
  const Wide offset = ((second.begin - first.begin) % period + period) % period;
  return first.end - first.begin <= offset && offset + (second.end - second.begin) <= period;
}

/// Columns of one buffer, by whichever of their strides.
bool are_columns(const TensorView& a, const TensorView& b) {
  for (const TensorView* tensor : {&a, &b}) {
    for (int32_t i = 0; i < tensor->rank; ++i) {
      const auto d = static_cast<size_t>(i);
      const Wide period = magnitude(stride_bytes(*tensor, d));
      if (tensor->shape[d] > 1 && period > 0 && are_columns(a, b, period)) return true;
    }
  }
  return false;
}

}  // namespace

bool overlaps_itself(const TensorView& tensor) {
  if (tensor.size() == 0) return false;
  const Steps steps = steps_of(tensor);
  if (is_nested(steps)) return false;
  if (steps.count > 0 && steps.at[0].stride == 0) return true;
  if (steps.count == 2) return two_collide(steps.at[0], steps.at[1]);
  if (steps.count == 3 && steps.at[0].stride == 1)
    return runs_collide(steps.at[0].extent, steps.at[1], steps.at[2]);
  return true;
}

bool may_share_memory(const TensorView& a, const TensorView& b) {
  if (!a.present() || !b.present() || a.size() == 0 || b.size() == 0) return false;
  if (a.device != b.device) return false;
  const Bytes first = bytes_of(a), second = bytes_of(b);
  if (first.end <= second.begin || second.end <= first.begin) return false;
  return !are_columns(a, b);
}

void check_disjoint(std::initializer_list<NamedTensor> outputs,
                    std::initializer_list<NamedTensor> inputs) {
  const auto check = [](const NamedTensor& output, const NamedTensor& other) {
    if (!may_share_memory(output.tensor, other.tensor)) return;
    fail_argument("{}: must not share memory with {}; they begin at {} and {}", output.name,
                  other.name, fmt::ptr(output.tensor.data), fmt::ptr(other.tensor.data));
  };
  for (const NamedTensor* output = outputs.begin(); output != outputs.end(); ++output) {
    for (const NamedTensor* other = output + 1; other != outputs.end(); ++other)
      check(*output, *other);
    for (const NamedTensor& input : inputs) check(*output, input);
  }
}

}  // namespace octopage
