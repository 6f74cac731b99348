#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_LAUNCH_HPP_
#define OCTOPAGE_BACKENDS_CUDA_UNION_LAUNCH_HPP_

// The only way into the kernels of the union path (sm_90a).

#include <cstdint>

#include "backends/cuda/union/params.hpp"
#include "octopage/tensor.hpp"

namespace octopage::cuda {

/// True where a CTA of `unions` has room for the lists of that many regions.
bool unions_fit(int64_t heads_per_group, int64_t region_count);

/// True where the attention kernel has an instance.
bool has_union_instance(DType query, DType cache);

/// The pages of a cache as copies see them.
struct PageSourceMap {
  const void* cache;
  DType dtype;
  int64_t dim;
  int64_t tokens;  ///< from the first of a group's first block to the last of its last one
  int64_t groups;
  int64_t stride_token;  ///< in elements
  int64_t stride_group;
};

/// A call: writes the page lists of all spans, attends, merges the splits. `multiprocessors`: of
/// the device. `stream` is a cudaStream_t. Nothing is launched where the cache cannot be mapped.
void launch_union_path(const UnionsParams& unions, int64_t selections,
                       const UnionAttentionParams& attention, const PageSourceMap& source,
                       int multiprocessors, void* stream);

// The parts of it, each in its own file.
void launch_unions(const UnionsParams& params, int64_t selections, int multiprocessors,
                   void* stream);
void launch_merge(const UnionAttentionParams& params, int64_t dim, void* stream);

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_LAUNCH_HPP_
