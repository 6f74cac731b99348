#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_LAUNCH_HPP_
#define OCTOPAGE_BACKENDS_CUDA_UNION_LAUNCH_HPP_

// The only way into the kernels of the union path (sm_90a).

#include <cstdint>

#include "backends/cuda/union/params.hpp"
#include "octopage/tensor.hpp"

namespace octopage::cuda {

/// Shared memory of a CTA of `unions`; INT64_MAX where no CTA could serve the shape.
int64_t unions_shared_bytes(int64_t heads_per_group, int64_t region_count);

/// Writes the page lists of all spans. `stream` is a cudaStream_t.
void launch_unions(const UnionsParams& params, int64_t selections, void* stream);

/// The pages of a cache as copies see them. Query and cache share a type: bf16 or f16.
struct PageSourceMap {
  const void* cache;
  DType dtype;
  int64_t dim;
  int64_t tokens;  ///< from the first of a group's first block to the last of its last one
  int64_t groups;
  int64_t stride_token;  ///< in elements
  int64_t stride_group;
};

/// Attention of all units. `ctas` is the number of multiprocessors.
void launch_union_attention(const UnionAttentionParams& params, const PageSourceMap& source,
                            int ctas, void* stream);

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_LAUNCH_HPP_
