#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_QUAD_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_QUAD_CUH_

// Four lanes that share matrix rows.

#include <cstdint>

namespace octopage::cuda {

/// Swaps pair j of lane i with pair i of lane j. A lane's pairs of columns 2 i, 8 + 2 i, 16 + 2 i
/// and 24 + 2 i, as fragments have them, become the eight columns from 8 i on, or the other way.
__device__ __forceinline__ void transpose_quad(uint32_t (&pairs)[4], int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? pairs[j] : pairs[j + 1], 1);
    (odd ? pairs[j] : pairs[j + 1]) = got;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t got = __shfl_xor_sync(~0u, upper ? pairs[j] : pairs[j + 2], 2);
    (upper ? pairs[j] : pairs[j + 2]) = got;
  }
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_QUAD_CUH_
