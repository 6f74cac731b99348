#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_TRAITS_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_TRAITS_CUH_

// Sizes and shared memory of the union attention kernel.
//
// A slot holds K or V of a batch: eight pages, each cut into chunks of 64 elements of 16 bits,
//
//   slot   | page 0                     | page 1 | ... | page 7 |
//   page   | chunk 0 | chunk 1 | ... |                              dim / 64 chunks
//   chunk  | token 0: 128 bytes | ... | token 7 |                   1024 bytes, 128-byte swizzle
//
// which is what one tensor copy per page writes, and what the matrix unit reads: as K (tokens by
// elements) the next eight tokens are one page further, as V (elements by tokens) the next 64
// elements one chunk and the next eight tokens one page further.
//
// An f8 cache is copied to raw slots first, K and V of a batch in one (with head dim 256 in one
// each): pages of dim / 64 (dim / 128) chunks of 128 codes, swizzled alike. Converter warps turn
// them into slots.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/union/params.hpp"

namespace octopage::cuda {

inline constexpr int kConsumerWarpgroups = 2;
/// Lanes that arrive at a barrier for their warp, after a __syncwarp() where all of them wrote or
/// read. One is enough. racecheck does not follow the order from lane to lane to barrier; a build
/// for it (OCTOPAGE_RACECHECK) has all of them arrive.
#ifdef OCTOPAGE_RACECHECK
inline constexpr int kArrivingLanes = 32;
#else
inline constexpr int kArrivingLanes = 1;
#endif
inline constexpr int kBatchTokens = kBatchPages * static_cast<int>(kPageTokens);

/// Tag of an f8_e4m3fn cache. Its products are f16's, in which every code is exact; so Q is scaled
/// into f16's range by a power of two, one for the heads that share a lane.
struct F8 {};

/// kRowsOfLane: how many rows of the tile the two matrix rows of a lane belong to; 1 where groups
/// have more than 8 heads.
template <int kHeadDim, typename Cache, int kRowsOfLane>
struct UnionTraits {
  static constexpr bool kF8 = std::is_same_v<Cache, F8>;
  using Element = std::conditional_t<kF8, __half, Cache>;  ///< of the products
  static constexpr int kRows = kRowsOfLane;
  /// Factors of a lane's scores. With f8 each row of the tile has its own, since Q is scaled.
  static constexpr int kScales = kF8 ? kRows : 1;
  static constexpr int kDim = kHeadDim;
  static constexpr int kChunks = kDim / 64;
  static constexpr int kPageBytes = kChunks * 1024;
  static constexpr int kSlotBytes = kBatchPages * kPageBytes;
  static constexpr int kRawSlotsOfBatch = f8_copies(kDim);
  static constexpr int kRawPageBytes = kPageBytes / kRawSlotsOfBatch;
  static constexpr int kRawSlotBytes = kBatchPages * kRawPageBytes;
  /// Where sums and masks leave no registers for Q.
  static constexpr bool kQueryInShared = kDim > 192 || (kDim == 192 && kRows == 2);
  /// 256 sums leave none for a second set of probabilities either: softmax runs beside the products
  /// of the other half only.
  static constexpr bool kOneProbabilitySet = kDim > 192;
  static constexpr int kQueryBytes = kQueryInShared ? kMatrixRows * kDim * 2 : 0;
  /// Probabilities of two batches do not fit beside scores that are kept for a second look: those
  /// are computed once more for it.
  static constexpr bool kScoresAgain = kF8 && kDim == 192;
  static constexpr int kBarrierBytes = 512;
  static constexpr int kStaticBytes = 1024;  // a word or two, and the alignment of what follows
  static constexpr int kSlotsThatFit =
      (kSharedBytesOfCta - kStaticBytes - kBarrierBytes - kQueryBytes) / kSlotBytes;
  static constexpr int kRawSlots = !kF8 ? 0 : kSlotsThatFit >= 12 ? 4 : 2;
  static constexpr int kSlotsLeft = kSlotsThatFit - kRawSlots / kRawSlotsOfBatch;
  static constexpr int kSlots = kSlotsLeft < 16 ? kSlotsLeft : 16;
  // A half that holds V of one batch waits for K of the next but one at most: four slots.
  static_assert(kSlots >= 4, "the ring would lock up");
  static_assert(2 * (kSlots + kRawSlots) * 8 <= kBarrierBytes);
  static constexpr int kSharedBytes =
      kSlots * kSlotBytes + kRawSlots * kRawSlotBytes + kQueryBytes + kBarrierBytes;

  /// Warps behind the consumers: they copy pages; with f8 others convert them.
  static constexpr int kProducerWarps = kF8 ? 1 : 2;
  static constexpr int kConverterWarps = !kF8 ? 0 : kScoresAgain ? 6 : 3;
  static constexpr int kFillerWarpgroups = (kProducerWarps + kConverterWarps + 3) / 4;
  static constexpr int kThreads = 128 * (kConsumerWarpgroups + kFillerWarpgroups);
  /// Of the warps that fill a slot. A producer announces its bytes with the only arrival it has.
  static constexpr int kFullArrivals = kF8 ? kConverterWarps * kArrivingLanes : kProducerWarps;
  static constexpr int kFillerRegisters = kF8 && kFillerWarpgroups == 1 ? 40 : 24;
  static constexpr int kConsumerRegisters = kF8 ? 232 : 240;
  /// Whether a filler prefetches the next tile's lists. The compiler spills for it at head dim 256.
  static constexpr bool kPrefetchesLists = kDim < 256 || kF8;

  /// Probabilities are relative to 2^-kHeadroom of the maximum. In f16, where nothing below 2^-25
  /// is left, it keeps those that only their number makes count.
  static constexpr float kHeadroom = std::is_same_v<Element, __half> ? 8.0f : 0.0f;
  /// Against a stale maximum they may sum up to this in a lane; beyond, the batch is looked at
  /// again. What f16 holds sums up to less: there, only what overflows is.
  static constexpr float kLargestSum = std::is_same_v<Element, __half> ? 1048576.0f : 1024.0f;
};

/// Addresses in shared memory, in this order:
///
/// - slots [kSlots, kSlotBytes]: position n of the sequence K, V, K, V, ... in n % kSlots
/// - raw [kRawSlots, kRawSlotBytes]: batch n of the CTA's (or K and V of batches, in turn) in
///   n % kRawSlots
/// - query [2 halves, kQueryBytes / 2], where Q does not lie in registers
/// - full [kSlots]: barriers, all warps that fill the slot (and all bytes) have arrived
/// - empty [kSlots]: barriers, all eight consumer warps have read the slot
/// - full_raw [kRawSlots]: barriers, the producer and all bytes have arrived
/// - empty_raw [kRawSlots]: barriers, all converter warps have read the slot
template <typename Traits>
struct UnionShared {
  uint32_t slots, raw, query, full, empty, full_raw, empty_raw;
  /// `base` is a multiple of 1024: the declaration of the memory says so.
  __device__ __forceinline__ explicit UnionShared(uint32_t base) {
    slots = base;
    raw = slots + Traits::kSlots * Traits::kSlotBytes;
    query = raw + Traits::kRawSlots * Traits::kRawSlotBytes;
    full = query + Traits::kQueryBytes;
    empty = full + Traits::kSlots * 8;
    full_raw = empty + Traits::kSlots * 8;
    empty_raw = full_raw + Traits::kRawSlots * 8;
  }
};

/// A place in a CTA's sequence of slots, in one register.
template <int kCount>
struct RingPosition {
  uint32_t slot_and_parity;
  __device__ __forceinline__ explicit RingPosition(uint32_t n)
      : slot_and_parity(n % kCount << 1 | (n / kCount & 1)) {}
  __device__ __forceinline__ uint32_t slot() const { return slot_and_parity >> 1; }
  __device__ __forceinline__ uint32_t parity() const { return slot_and_parity & 1; }
};
template <typename Traits>
using Position = RingPosition<Traits::kSlots>;

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_TRAITS_CUH_
