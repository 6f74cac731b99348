#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_TRAITS_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_TRAITS_CUH_

// Sizes and shared memory of the union attention kernel.
//
// A slot holds K or V of a batch: eight pages, each cut into chunks of 64 elements,
//
//   slot   | page 0                     | page 1 | ... | page 7 |
//   page   | chunk 0 | chunk 1 | ... |                              dim / 64 chunks
//   chunk  | token 0: 128 bytes | ... | token 7 |                   1024 bytes, 128-byte swizzle
//
// which is what one tensor copy per page writes, and what the matrix unit reads: as K (tokens by
// elements) the next eight tokens are one page further, as V (elements by tokens) the next 64
// elements one chunk and the next eight tokens one page further.

#include <cstdint>
#include <type_traits>

#include "backends/cuda/union/params.hpp"

namespace octopage::cuda {

inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kAttentionThreads = 128 * (1 + kConsumerWarpgroups);
inline constexpr int kProducerWarps = 2;  // each copies half a batch
inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kBatchTokens = kBatchPages * static_cast<int>(kPageTokens);
inline constexpr int kSharedBytesOfCta = 232448;  // 227 KiB

/// kRowsOfLane: how many rows of the tile the two matrix rows of a lane belong to; 1 from 16 heads
/// on.
template <int kHeadDim, typename Element_, int kRowsOfLane>
struct UnionTraits {
  using Element = Element_;
  static constexpr int kRows = kRowsOfLane;
  static constexpr int kDim = kHeadDim;
  static constexpr int kChunks = kDim / 64;
  static constexpr int kPageBytes = kChunks * 1024;
  static constexpr int kSlotBytes = kBatchPages * kPageBytes;
  /// Where sums and masks leave no registers for Q.
  static constexpr bool kQueryInShared = kDim > 192 || (kDim == 192 && kRows == 2);
  /// 256 sums leave none for a second set of probabilities either: softmax runs beside the products
  /// of the other half only.
  static constexpr bool kOneProbabilitySet = kDim > 192;
  static constexpr int kQueryBytes = kQueryInShared ? kMatrixRows * kDim * 2 : 0;
  static constexpr int kBarrierBytes = 512;
  static constexpr int kSlotsThatFit =
      (kSharedBytesOfCta - kBarrierBytes - kQueryBytes) / kSlotBytes;
  static constexpr int kSlots = kSlotsThatFit < 16 ? kSlotsThatFit : 16;
  // A half that holds V of one batch waits for V of the next but one at most.
  static_assert(kSlots >= 5, "the ring would lock up");
  static_assert(2 * kSlots * 8 <= kBarrierBytes);
  static constexpr int kSharedBytes = kSlots * kSlotBytes + kQueryBytes + kBarrierBytes;

  /// Exponentials against a stale maximum may sum up to this in a lane; beyond, the tile is redone.
  /// Probabilities are stored in Element.
  static constexpr float kLargestSum = std::is_same_v<Element, __half> ? 32768.0f : 16777216.0f;
};

/// Addresses in shared memory.
///
///   slots    [kSlots, kSlotBytes]      position n of the CTA's sequence K, V, K, V, ... in n %
///   kSlots query    [2 halves, kQueryBytes/2] where Q does not lie in registers full     [kSlots]
///   barriers         both producer warps and all bytes have arrived empty    [kSlots] barriers all
///   eight consumer warps have read the slot
template <typename Traits>
struct UnionShared {
  uint32_t slots, query, full, empty;
  /// `base` is a multiple of 1024: the declaration of the memory says so.
  __device__ __forceinline__ explicit UnionShared(uint32_t base) {
    slots = base;
    query = slots + Traits::kSlots * Traits::kSlotBytes;
    full = query + Traits::kQueryBytes;
    empty = full + Traits::kSlots * 8;
  }
};

/// A place in the CTA's sequence of slots.
template <typename Traits>
struct Position {
  uint32_t slot, parity;
  __device__ __forceinline__ explicit Position(uint32_t n) {
    slot = n % Traits::kSlots;
    parity = n / Traits::kSlots & 1;
  }
};

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_TRAITS_CUH_
