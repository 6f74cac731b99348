#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_SOFTMAX_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_SOFTMAX_CUH_

// From scores to probabilities.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/device/ptx/bulk.cuh"
#include "backends/cuda/device/ptx/math.cuh"
#include "backends/cuda/device/ptx/wgmma.cuh"
#include "backends/cuda/union/tiles.cuh"
#include "backends/cuda/union/traits.cuh"

namespace octopage::cuda {

/// Running state of the softmax of the lane's two rows, scores in units of log2.
struct SoftmaxState {
  /// What the probabilities so far are relative to: a maximum, which may be stale, less the
  /// headroom. The four lanes of a row agree on it.
  float largest[2];
  float normaliser[2];  ///< of the lane's own columns, until the tile's last step
};

/// The lane's part of the sums of its two rows over a batch, of probabilities as they were rounded.
template <typename Traits>
__device__ __forceinline__ void sum_rows(const uint32_t (&probabilities)[16], float (&sum)[2]) {
  const typename Traits::Element tag = {};
  float odd[2] = {0.0f, 0.0f};
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 pair = device::unpack(tag, probabilities[i]);
    sum[i % 2] += pair.x;
    odd[i % 2] += pair.y;
  }
  sum[0] += odd[0];
  sum[1] += odd[1];
}

/// True where the lane's row h selected page j of a batch. `words`: a step's.
template <typename Traits>
__device__ __forceinline__ bool selected(const uint32_t (&words)[Traits::kRows], int h, int j) {
  return (mask_of_step(words[h % Traits::kRows]) >> j & 1) != 0;
}

/// Maximum over the pages of a batch that row h selected, of all four lanes, less the headroom;
/// -inf without one.
template <typename Traits>
__device__ __forceinline__ float largest_selected(const float (&scores)[32],
                                                  const uint32_t (&words)[Traits::kRows],
                                                  const float (&scale)[Traits::kScales], int h) {
  const float factor = scale[h % Traits::kScales];
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kBatchPages; ++j) {
    if (selected<Traits>(words, h, j)) {
      largest =
          fmaxf(largest, fmaxf(scores[4 * j + 2 * h] * factor, scores[4 * j + 2 * h + 1] * factor));
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) - Traits::kHeadroom;
}

/// What is added to scores whose maximum this is.
__device__ __forceinline__ float shift_of(float largest) {
  return largest == -INFINITY ? 0.0f : -largest;
}

/// Probabilities of the pages that each row selected, and their sums.
template <typename Traits>
__device__ __forceinline__ void exponentiate_selected(const float (&scores)[32],
                                                      const uint32_t (&words)[Traits::kRows],
                                                      const float (&scale)[Traits::kScales],
                                                      const float (&shift)[2],
                                                      uint32_t (&probabilities)[16],
                                                      float (&sum)[2]) {
  const typename Traits::Element tag = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = scale[h % Traits::kScales];
#pragma unroll
    for (int j = 0; j < kBatchPages; ++j) {
      const float low = ptx::exp2_approx(fmaf(scores[4 * j + 2 * h], factor, shift[h]));
      const float high = ptx::exp2_approx(fmaf(scores[4 * j + 2 * h + 1], factor, shift[h]));
      probabilities[2 * j + h] = selected<Traits>(words, h, j) ? device::pack(tag, low, high) : 0u;
    }
  }
  ptx::pin(probabilities);
  sum_rows<Traits>(probabilities, sum);
  ptx::pin(sum);
}

/// softmax() of a row's first batch, before which there was nothing.
template <typename Traits>
__device__ __forceinline__ SoftmaxState first_softmax(const float (&scores)[32],
                                                      const Step<Traits::kRows>& step,
                                                      const float (&scale)[Traits::kScales],
                                                      uint32_t (&probabilities)[16]) {
  SoftmaxState state;
  float shift[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    state.largest[h] = largest_selected<Traits>(scores, step.word, scale, h);
    shift[h] = shift_of(state.largest[h]);
  }
  exponentiate_selected<Traits>(scores, step.word, scale, shift, probabilities, state.normaliser);
  return state;
}

/// For softmax() where the scores outlive its first look.
struct ScoresKept {
  __device__ __forceinline__ void operator()() const {}
};

/// Probabilities of a batch, packed as A fragments. They are taken against the running maximum as
/// it is; only if a row's sum shows that its scores have outgrown it (or are not finite) a new
/// maximum is found, and `correction` tells by how much the older sums shrink. True where the batch
/// was looked at again. What a row did not select never decides over it. `scale`: of both rows, or
/// one of each. `bring_back`: ScoresKept, or brings the scores back for a second look, so that they
/// take no registers until then.
template <typename Traits, typename BringBack>
__device__ __forceinline__ bool softmax(const float (&scores)[32], const Step<Traits::kRows>& step,
                                        const float (&scale)[Traits::kScales], SoftmaxState& state,
                                        float (&correction)[2], uint32_t (&probabilities)[16],
                                        const BringBack& bring_back) {
  const typename Traits::Element tag = {};
#pragma unroll
  for (int j = 0; j < kBatchPages; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A page that the row did not select adds -inf: 0, or NaN where the score is not finite.
      const float shift = selected<Traits>(step.word, h, j) ? -state.largest[h] : -INFINITY;
      const float factor = scale[h % Traits::kScales];
      probabilities[2 * j + h] =
          device::pack(tag, ptx::exp2_approx(fmaf(scores[4 * j + 2 * h], factor, shift)),
                       ptx::exp2_approx(fmaf(scores[4 * j + 2 * h + 1], factor, shift)));
    }
  }
  float sum[2];
  sum_rows<Traits>(probabilities, sum);
  const bool redo =
      __any_sync(~0u, !(sum[0] <= Traits::kLargestSum) || !(sum[1] <= Traits::kLargestSum));
  if (__builtin_expect(redo, 0)) {
    // The masks once more, by way of a shuffle: else the compiler keeps the sixteen answers from
    // above in every step, for the sake of this one. 5% of the kernel's time.
    uint32_t words[Traits::kRows];
#pragma unroll
    for (int r = 0; r < Traits::kRows; ++r) words[r] = __shfl_xor_sync(~0u, step.word[r], 0);
    if constexpr (!std::is_same_v<BringBack, ScoresKept>) {
      // Where only foreign pages are too large, the scores are not needed.
#pragma unroll
      for (int i = 0; i < 16; ++i)
        probabilities[i] = selected<Traits>(words, i % 2, i / 2) ? probabilities[i] : 0u;
      sum_rows<Traits>(probabilities, sum);
      if (__all_sync(~0u, sum[0] <= Traits::kLargestSum && sum[1] <= Traits::kLargestSum)) {
        state.normaliser[0] += sum[0];
        state.normaliser[1] += sum[1];
        return false;
      }
      bring_back();
    }
    const auto exponentiate = [&](const float(&shift)[2]) {
      exponentiate_selected<Traits>(scores, words, scale, shift, probabilities, sum);
    };
    const float as_it_is[2] = {-state.largest[0], -state.largest[1]};
    exponentiate(as_it_is);
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest =
          fmaxf(state.largest[h], largest_selected<Traits>(scores, words, scale, h));
      int outgrown = sum[h] <= Traits::kLargestSum ? 0 : 1;  // by any lane of the row
      outgrown |= __shfl_xor_sync(~0u, outgrown, 1);
      outgrown |= __shfl_xor_sync(~0u, outgrown, 2);
      correction[h] = 1.0f;
      if (outgrown != 0) {
        if (largest != -INFINITY) correction[h] = exp2f(state.largest[h] - largest);
        state.largest[h] = largest;
        state.normaliser[h] *= correction[h];
      }
      shift[h] = shift_of(state.largest[h]);
    }
    exponentiate(shift);
  }
  state.normaliser[0] += sum[0];
  state.normaliser[1] += sum[1];
  return redo;
}

/// Scores of tokens behind a row's position become -inf, in the row's own page.
template <int kRows>
__device__ __forceinline__ void hide_future(float (&scores)[32], int32_t batch,
                                            const int32_t (&own)[kRows], int lane) {
  const int token = lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t mine = own[h % kRows];
    const int last = mine & 7;
    const int slot = mine >> 6 == batch ? mine >> 3 & 7 : -1;
#pragma unroll
    for (int j = 0; j < kBatchPages; ++j) {
      float& low = scores[4 * j + 2 * h];
      float& high = scores[4 * j + 2 * h + 1];
      low = slot == j && token > last ? -INFINITY : low;
      high = slot == j && token + 1 > last ? -INFINITY : high;
    }
  }
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_SOFTMAX_CUH_
