#ifndef OCTOPAGE_BACKENDS_CUDA_PAGED_INSTANCES_HPP_
#define OCTOPAGE_BACKENDS_CUDA_PAGED_INSTANCES_HPP_

#include <cstdint>

#include "backends/cuda/paged/params.hpp"

namespace octopage::cuda {

/// One compiled kernel. `launch` is null where there is none for the dim.
struct PagedInstance {
  int dim = 0;
  int shared_bytes[5] = {};  ///< by warps of a CTA, 1 .. 4
  void (*launch)(const PagedAttentionParams& params, int grid, int warps, void* stream) = nullptr;
};

PagedInstance paged_bf16_bf16(int64_t dim);
PagedInstance paged_bf16_f16(int64_t dim);
PagedInstance paged_bf16_f8(int64_t dim);
PagedInstance paged_f16_bf16(int64_t dim);
PagedInstance paged_f16_f16(int64_t dim);
PagedInstance paged_f16_f8(int64_t dim);

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_PAGED_INSTANCES_HPP_
