#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_EPILOGUE_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_EPILOGUE_CUH_

// From sums to results.

#include <cmath>
#include <cstdint>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/union/params.hpp"
#include "backends/cuda/union/quad.cuh"
#include "backends/cuda/union/softmax.cuh"
#include "backends/cuda/union/traits.cuh"

namespace octopage::cuda {

/// Writes the lane's part of one row as f32: sums times `factor`.
template <typename Traits>
__device__ __forceinline__ void store_f32(float* to, const float (&sums)[Traits::kDim / 2], int h,
                                          float factor, bool exists, int lane) {
  if (!exists) return;
#pragma unroll
  for (int j = 0; j < Traits::kDim / 8; ++j) {
    *reinterpret_cast<float2*>(to + lane % 4 * 2 + 8 * j) =
        make_float2(sums[4 * j + 2 * h] * factor, sums[4 * j + 2 * h + 1] * factor);
  }
}

/// The same as 16 bits of the tag's type. All lanes of the warp.
template <typename Traits, typename Output>
__device__ __forceinline__ void store_16_bits(Output tag, uint16_t* to,
                                              const float (&sums)[Traits::kDim / 2], int h,
                                              float factor, bool exists, bool aligned, int lane) {
#pragma unroll
  for (int i = 0; i < Traits::kDim / 32; ++i) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = device::pack(tag, sums[16 * i + 4 * j + 2 * h] * factor,
                              sums[16 * i + 4 * j + 2 * h + 1] * factor);
    }
    if (aligned) {
      transpose_quad(pairs, lane);
      if (exists) {
        *reinterpret_cast<uint4*>(to + 32 * i + lane % 4 * 8) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    } else if (exists) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint32_t*>(to + 32 * i + 8 * j + lane % 4 * 2) = pairs[j];
    }
  }
}

/// Natural logarithm of the normaliser: of a row that sees tokens; NaN where all scores are -inf.
__device__ __forceinline__ float lse_of(float largest, float normaliser) {
  constexpr float kNaturalOfLog2 = 0.693147180559945309f;
  return normaliser == 0.0f ? NAN : (largest + log2f(normaliser)) * kNaturalOfLog2;
}

/// A (row, head) of a call, as the epilogue names it.
struct ResultPlace {
  int64_t row;   // of the call
  int64_t head;  // of all groups
  bool exists;   // padding otherwise
  bool sees;     // a token of the call, in any split
};

/// The lane's part of one row into the caller's tensors. A row without a token gives 0; one whose
/// scores are all -inf gives NaN, as the formula does.
template <typename Traits>
__device__ __forceinline__ void store_result(const UnionAttentionParams& p,
                                             const float (&sums)[Traits::kDim / 2], int h,
                                             const SoftmaxState& state, float output_scale,
                                             const ResultPlace& place, int lane) {
  const float factor = place.sees ? output_scale / state.normaliser[h] : 0.0f;
  const int64_t to = place.row * p.stride_output_row + place.head * p.stride_output_head;
  if (p.output_is_f32 != 0) {
    store_f32<Traits>(static_cast<float*>(p.output) + to, sums, h, factor, place.exists, lane);
  } else {
    auto* out = static_cast<uint16_t*>(p.output) + to;
    const bool aligned = p.aligned_output != 0;
    if constexpr (!Traits::kF8) {
      store_16_bits<Traits>(typename Traits::Element(), out, sums, h, factor, place.exists, aligned,
                            lane);
    } else if (p.query_is_f16 != 0) {
      store_16_bits<Traits>(__half(), out, sums, h, factor, place.exists, aligned, lane);
    } else {
      store_16_bits<Traits>(__nv_bfloat16(), out, sums, h, factor, place.exists, aligned, lane);
    }
  }
  if (p.lse != nullptr && place.exists && lane % 4 == 0) {
    p.lse[place.row * p.stride_lse_row + place.head * p.stride_lse_head] =
        place.sees ? lse_of(state.largest[h], state.normaliser[h]) : -INFINITY;
  }
}

/// The lane's part of one row of a split, for `merge`.
template <typename Traits>
__device__ __forceinline__ void store_partial(const UnionAttentionParams& p, int32_t split,
                                              const float (&sums)[Traits::kDim / 2], int h,
                                              const SoftmaxState& state, const ResultPlace& place,
                                              int lane) {
  const int64_t at =
      (split * p.rows + place.row) * (int64_t{p.groups} * p.heads_per_group) + place.head;
  store_f32<Traits>(p.partials.sums + at * Traits::kDim, sums, h, 1.0f, place.exists, lane);
  if (place.exists && lane % 4 == 0) {
    *reinterpret_cast<float2*>(p.partials.stats + 2 * at) =
        make_float2(state.largest[h], place.sees ? state.normaliser[h] : -1.0f);
  }
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_EPILOGUE_CUH_
