#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_INSTANCE_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_INSTANCE_CUH_

// Instances of one head dim: a file each, so that they compile side by side.

#include "backends/cuda/runtime/runtime.hpp"
#include "backends/cuda/union/attention.cuh"
#include "backends/cuda/union/instances.hpp"

namespace octopage::cuda {

template <typename Traits>
void launch_instance(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                     void* stream) {
  check(cudaFuncSetAttribute(union_attention<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Traits::kSharedBytes),
        "union_attention: shared memory");
  // The prologue may run beside the end of `unions`; the kernel waits for it before it reads.
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = Traits::kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, union_attention<Traits>, map, params), "union_attention");
}

template <int kDim, typename Cache>
void launch_type(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                 void* stream) {
  // Two rows to a lane is the general case. One saves registers and a few instructions per batch,
  // except with the largest head dim, where the compiler finds no better allocation for it.
  if constexpr (kDim < 256) {
    if (params.head_shift >= 4)
      return launch_instance<UnionTraits<kDim, Cache, 1>>(params, map, grid, stream);
  }
  launch_instance<UnionTraits<kDim, Cache, 2>>(params, map, grid, stream);
}

template <int kDim>
void launch_dim(DType dtype, const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                void* stream) {
  if (dtype == DType::bf16) {
    launch_type<kDim, __nv_bfloat16>(params, map, grid, stream);
  } else {
    launch_type<kDim, __half>(params, map, grid, stream);
  }
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_INSTANCE_CUH_
