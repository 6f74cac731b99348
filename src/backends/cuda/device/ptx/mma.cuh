#ifndef OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_MMA_CUH_
#define OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_MMA_CUH_

// Matrix products of one warp (sm_80), one function per instruction.
//
// Fragments of m16n8k16, lane = 4 * g + c:
//
//   A [16, 16]: a0 = (row g,   k 2c, 2c+1)   a1 = (row g+8, k 2c, 2c+1)
//               a2 = (row g,   k 2c+8, 2c+9) a3 = (row g+8, k 2c+8, 2c+9)
//   B [16, 8]:  b0 = (k 2c, 2c+1, column g)  b1 = (k 2c+8, 2c+9, column g)
//   C [16, 8]:  c0, c1 = (row g, column 2c, 2c+1)   c2, c3 = (row g+8, column 2c, 2c+1)

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace octopage::ptx {

/// c += A B, A [16, 16] and B [16, 8] of bf16.
__device__ __forceinline__ void mma_m16n8k16(__nv_bfloat16, float (&c)[4], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The same of f16.
__device__ __forceinline__ void mma_m16n8k16(__half, float (&c)[4], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace octopage::ptx

#endif  // OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_MMA_CUH_
