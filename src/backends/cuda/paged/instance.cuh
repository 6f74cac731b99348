#ifndef OCTOPAGE_BACKENDS_CUDA_PAGED_INSTANCE_CUH_
#define OCTOPAGE_BACKENDS_CUDA_PAGED_INSTANCE_CUH_

// Instances of one query and cache type: a file each, so that they compile side by side.

#include <algorithm>

#include "backends/cuda/paged/attention.cuh"
#include "backends/cuda/paged/instances.hpp"
#include "backends/cuda/runtime/runtime.hpp"

namespace octopage::cuda {

template <int kDim, typename Query, typename Cache>
PagedInstance paged_instance() {
  using Traits = PagedTraits<kDim, Query, Cache>;
  PagedInstance instance;
  instance.dim = kDim;
  for (int warps = 1; warps <= kMaxWarps; ++warps)
    instance.shared_bytes[warps] = Traits::shared_bytes(warps);
  instance.launch = [](const PagedAttentionParams& params, int grid, int warps, void* stream) {
    // The attribute belongs to the kernel: of every launch alike, since threads may launch side by
    // side. What the device has at most, or what the largest launch needs.
    int device = 0, most = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "shared memory of a CTA");
    const int bytes = Traits::shared_bytes(warps);
    check(cudaFuncSetAttribute(paged_attention<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               std::min(most, Traits::shared_bytes(kMaxWarps))),
          "paged_attention: shared memory");
    paged_attention<Traits><<<grid, warps * 32, bytes, static_cast<cudaStream_t>(stream)>>>(params);
    check_launch("paged_attention");
  };
  return instance;
}

template <typename Query, typename Cache>
PagedInstance paged_instance_of(int64_t dim) {
  switch (dim) {
    case 64:
      return paged_instance<64, Query, Cache>();
    case 128:
      return paged_instance<128, Query, Cache>();
    case 192:
      return paged_instance<192, Query, Cache>();
    case 256:
      return paged_instance<256, Query, Cache>();
    default:
      return {};
  }
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_PAGED_INSTANCE_CUH_
