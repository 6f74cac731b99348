#ifndef OCTOPAGE_API_OVERLAP_HPP_
#define OCTOPAGE_API_OVERLAP_HPP_

// Which bytes tensors share: what a call writes must be nobody else's, and no byte twice.

#include <initializer_list>

#include "octopage/tensor.hpp"

namespace octopage {

/// Whether two elements of a tensor lie at one address. Exact for tensors whose last dimension is
/// contiguous and for up to two dimensions; other layouts count as overlapping unless each
/// dimension steps over all that lies inside it.
bool overlaps_itself(const TensorView& tensor);

/// Whether two tensors may have a byte in common. False where their byte ranges are apart, and
/// where both repeat with one of their strides and lie side by side within it (columns of one
/// buffer); true otherwise.
bool may_share_memory(const TensorView& a, const TensorView& b);

/// A tensor and what messages call it.
struct NamedTensor {
  const char* name;
  TensorView tensor;  ///< may be absent
};

/// Throws Error(invalid_argument) where an output may share memory with another output or with an
/// input.
void check_disjoint(std::initializer_list<NamedTensor> outputs,
                    std::initializer_list<NamedTensor> inputs);

}  // namespace octopage

#endif  // OCTOPAGE_API_OVERLAP_HPP_
