#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_QUERY_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_QUERY_CUH_

// Q of a tile: from global memory to where the products read it.

#include <cfloat>
#include <cstdint>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/union/quad.cuh"
#include "backends/cuda/union/tiles.cuh"
#include "backends/cuda/union/traits.cuh"

namespace octopage::cuda {

/// Where a matrix row of the lane begins in Q. Rows and heads that do not exist take the last that
/// does; nobody reads their results.
__device__ __forceinline__ const uint32_t* query_of_lane(const UnionAttentionParams& p,
                                                         int64_t first_row, int64_t first_head,
                                                         const LaneRows& lane_rows, int h) {
  const int64_t row = min(first_row + lane_rows.row(p, h), p.rows - 1);
  const int64_t head = first_head + min(lane_rows.head(p, h), p.heads_per_group - 1);
  return reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.query) +
                                           row * p.stride_query_row + head * p.stride_query_head);
}

/// Brings matrix rows into f16's range, as IntoF16 does their largest finite element.
struct QueryScale {
  float factor;

  /// `largest`: bits of the largest magnitude. `scale` of the scores takes the factor back. It
  /// becomes positive, so that what is hidden as -inf stays so: Q takes its sign.
  __device__ __forceinline__ QueryScale(uint32_t largest, bool is_f16, float& scale) {
    // Exponents of bf16 are biased by 127, those of f16 by 15.
    const int exponent =
        is_f16 ? static_cast<int>(largest >> 10) - 15 : static_cast<int>(largest >> 7) - 127;
    const device::IntoF16 range(exponent);
    factor = range.factor;
    scale *= range.back;
    if (scale < 0.0f) {
      factor = -factor;
      scale = -scale;
    }
    if (scale < FLT_MIN) {  // no score is told from 0
      factor = 0.0f;
      scale = 1.0f;
    }
  }
  __device__ __forceinline__ uint32_t scaled(uint32_t pair, bool is_f16) const {
    const float2 values =
        is_f16 ? device::unpack(__half(), pair) : device::unpack(__nv_bfloat16(), pair);
    return device::pack(__half(), values.x * factor, values.y * factor);
  }
};

/// Bits of the largest finite magnitude so far; those of bf16 and f16 compare as integers.
struct LargestMagnitude {
  uint32_t bits = 0;
  uint32_t not_finite;  // infinity and what lies behind it

  __device__ __forceinline__ explicit LargestMagnitude(bool is_f16)
      : not_finite(is_f16 ? 0x7c00u : 0x7f80u) {}
  __device__ __forceinline__ void take(uint32_t pair) {
    const uint32_t low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu;
    bits = max(bits, max(low < not_finite ? low : 0, high < not_finite ? high : 0));
  }
  /// Of the four lanes that share matrix rows.
  __device__ __forceinline__ uint32_t of_quad() const {
    const uint32_t pair = max(bits, __shfl_xor_sync(~0u, bits, 1));
    return max(pair, __shfl_xor_sync(~0u, pair, 2));
  }
};

/// Q of the lane's rows as it is stored, eight columns out of 32 to a lane, where their fragments
/// will lie. arrange_query() moves them there.
template <typename Traits, int kCount>
__device__ __forceinline__ void load_query(const uint32_t* const (&from)[2], bool aligned, int lane,
                                           uint32_t (&query)[kCount]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t* row = from[h] + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < Traits::kDim / 32; ++i) {
      uint4 pairs;
      if (aligned) {
        pairs = __ldg(reinterpret_cast<const uint4*>(row + 16 * i));
      } else {
        pairs = make_uint4(__ldg(row + 16 * i), __ldg(row + 16 * i + 1), __ldg(row + 16 * i + 2),
                           __ldg(row + 16 * i + 3));
      }
      query[8 * i + h] = pairs.x;
      query[8 * i + h + 2] = pairs.y;
      query[8 * i + h + 4] = pairs.z;
      query[8 * i + h + 6] = pairs.w;
    }
  }
}

/// What load_query() brought becomes A fragments, 16 columns to a fragment. All lanes of the warp.
template <typename Traits, int kCount>
__device__ __forceinline__ void arrange_query(uint32_t (&query)[kCount], int lane) {
#pragma unroll
  for (int i = 0; i < Traits::kDim / 32; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[j] = query[8 * i + h + 2 * j];
      transpose_quad(pairs, lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) query[8 * i + h + 2 * j] = pairs[j];
    }
  }
}

/// Fragments as they are stored become f16; `scale`, by row of the lane, takes their factors back.
template <typename Traits, int kCount>
__device__ __forceinline__ void convert_query(bool is_f16, uint32_t (&query)[kCount],
                                              float (&scale)[Traits::kScales]) {
  constexpr int kPairs = kCount / Traits::kScales;
#pragma unroll
  for (int r = 0; r < Traits::kScales; ++r) {
    LargestMagnitude largest(is_f16);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) largest.take(query[i * Traits::kScales + r]);
    const QueryScale into_range(largest.of_quad(), is_f16, scale[r]);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint32_t& pair = query[i * Traits::kScales + r];
      pair = into_range.scaled(pair, is_f16);
    }
  }
}

/// Q of a half into shared memory, [dim / 64, 64 rows] of 128 bytes, swizzled. All threads of the
/// warpgroup. With f8 converted, see convert_query.
template <typename Traits>
__device__ __forceinline__ void share_query(const uint32_t* const (&from)[2], uint32_t shared,
                                            const LaneRows& lane_rows, bool is_f16,
                                            float (&scale)[Traits::kScales]) {
  static_assert(!Traits::kF8 || Traits::kScales == 2);
  warpgroup_barrier();  // nobody reads the tile before
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    LargestMagnitude largest(is_f16);
    if constexpr (Traits::kF8) {
#pragma unroll 4
      for (int i = 0; i < Traits::kDim / 8; ++i)
        largest.take(__ldg(from[h] + lane_rows.lane % 4 + 4 * i));
    }
    float unchanged = 1.0f;
    const QueryScale into_range(largest.of_quad(), is_f16,
                                Traits::kF8 ? scale[h % Traits::kScales] : unchanged);
    const int row = lane_rows.matrix_row % 64 + h * 8;
#pragma unroll 4
    for (int i = 0; i < Traits::kDim / 8; ++i) {  // eight columns at a time
      const uint32_t at =
          shared + i / 8 * 8192 + row * 128 + ((i % 8 ^ row % 8) << 4) + lane_rows.lane % 4 * 4;
      uint32_t pair = __ldg(from[h] + lane_rows.lane % 4 + 4 * i);
      if constexpr (Traits::kF8) pair = into_range.scaled(pair, is_f16);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair) : "memory");
    }
  }
  ptx::async_proxy_fence();
  warpgroup_barrier();
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_QUERY_CUH_
