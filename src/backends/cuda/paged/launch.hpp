#ifndef OCTOPAGE_BACKENDS_CUDA_PAGED_LAUNCH_HPP_
#define OCTOPAGE_BACKENDS_CUDA_PAGED_LAUNCH_HPP_

// The only way into the portable attention kernel.

#include <cstdint>

#include "backends/cuda/paged/params.hpp"
#include "octopage/tensor.hpp"

namespace octopage::cuda {

/// The compiled kernels: every query type by every cache type by every head dim of this list.
struct PagedKernelKey {
  DType query;
  DType cache;
  int64_t dim;
};

/// Warps of a CTA that fit `shared_bytes` of shared memory: 4, 2, 1, or 0 where none does. Also 0
/// where no kernel is compiled for the key.
int32_t paged_warps(const PagedKernelKey& key, int shared_bytes);

/// Shared memory of a CTA of `warps` warps.
int paged_shared_bytes(const PagedKernelKey& key, int32_t warps);

/// Launches `units` = rows * groups * head_tiles CTAs. `stream` is a cudaStream_t.
void launch_paged_attention(const PagedKernelKey& key, const PagedAttentionParams& params,
                            int64_t units, int32_t warps, void* stream);

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_PAGED_LAUNCH_HPP_
