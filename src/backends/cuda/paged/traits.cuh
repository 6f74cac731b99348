#ifndef OCTOPAGE_BACKENDS_CUDA_PAGED_TRAITS_CUH_
#define OCTOPAGE_BACKENDS_CUDA_PAGED_TRAITS_CUH_

// Sizes and layouts of the portable attention kernel.
//
// A CTA serves one row, one group and up to 16 of its heads. Its warps share out the row's pages in
// pairs: warp w takes pairs w, w + warps, ... through a ring of its own and keeps its own softmax
// and sums; they meet once, at the end. No warp waits for another before that.
//
// A stage holds 16 tokens (two pages). Each warp owns kStages of them:
//
//   K  [16, kKeyRowBytes]    lane (g, c) reads 8 elements 8c .. 8c+7 of each 32, token token_of(g)
//   V  [16, kValueRowBytes]  lane (g, c) reads dims 8g .. 8g+7 of each 64, tokens token_of(2c),
//   token_of(2c+1)
//
// Rows are padded, and the eight tokens of a page permuted, so that a quarter warp's 16-byte reads
// (half warp's 8-byte ones, f8) meet every bank once: K rows advance by 64 bytes modulo 128 (32,
// f8), V rows by 32. Padding is a multiple of 32 bytes: cp.async fetches a 32-byte sector twice
// where its two halves go to different sectors of shared memory.
//
// The token index of S and P, the k index of Q K^T and the n index of P V are permuted to fit those
// reads; Q and O are permuted alike, so nothing is ever transposed:
//
//   column 2c of S = token c, column 2c+1 = token 4 + (c ^ kTokenFlip)
//   k step 2i+s of dims 32i .. 32i+31:  k 2c, 2c+1 = dims 8c+4s, +1;  k 2c+8, 2c+9 = dims 8c+4s+2,
//   +3 n tile i of dims 64j .. 64j+63:     column g  = dim 64j + 8g + i

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace octopage::cuda {

inline constexpr int kMaxWarps = 4;
inline constexpr int kStepTokens = 16;
inline constexpr int kHeadsOfTile = 16;

template <int kDimension, typename QueryType, typename CacheType>
struct PagedTraits {
  static constexpr int kDim = kDimension;
  using Query = QueryType;
  using Cache = CacheType;
  static constexpr bool kCacheIsF8 = std::is_same_v<Cache, __nv_fp8_e4m3>;
  /// Both products run in this type: the cache's, or f16, in which every f8 code is exact and which
  /// is one instruction away from a pair of them.
  using Compute = std::conditional_t<kCacheIsF8, __half, Cache>;
  /// bf16 queries in f16 products: scaled by a power of two per row and head into f16's range.
  static constexpr bool kScaledQuery =
      std::is_same_v<Query, __nv_bfloat16> && std::is_same_v<Compute, __half>;
  /// f16 queries on a bf16 cache: split into two bf16 parts, which hold all 11 bits.
  static constexpr int kQueryParts =
      std::is_same_v<Query, __half> && std::is_same_v<Compute, __nv_bfloat16> ? 2 : 1;
  /// Q stays in registers where it leaves room for O.
  static constexpr bool kQueryInShared = (kQueryParts == 2 && kDim > 64) || kDim == 256;

  /// Probabilities are relative to 2^-kHeadroom of the largest so far. In f16, where nothing below
  /// 2^-25 is left, it keeps those that only their number makes count.
  static constexpr int kHeadroom = std::is_same_v<Compute, __half> ? 14 : 0;

  static constexpr int kElementBytes = sizeof(Cache);
#ifdef F8ST
  static constexpr int kStages = kCacheIsF8 ? F8ST : 2;
#else
  static constexpr int kStages = 4 / kElementBytes;
#endif
  static constexpr int kTokenBytes = kDim * kElementBytes;  // of K, and of V
  static constexpr int kKeyRowBytes = kTokenBytes + 32 * kElementBytes;
  static constexpr int kValueRowBytes = kTokenBytes + 32;
  /// Neighbouring columns must fall into K rows of different parity (2 bytes), or four columns into
  /// rows that differ modulo 4 (f8).
  static constexpr int kTokenFlip = kCacheIsF8 ? 2 : 1;
  static constexpr int token_of(int column) {
    return column % 2 == 0 ? column / 2 : 4 + ((column / 2) ^ kTokenFlip);
  }
  static constexpr int kStageBytes = kStepTokens * (kKeyRowBytes + kValueRowBytes);
  static constexpr int kLanesOfToken =
      4 * kElementBytes;  // lanes that copy one token's K, and its V
  static constexpr int kCopiesOfLane =
      kTokenBytes / 16 / kLanesOfToken;  // 16-byte copies of each for K
  static constexpr int kQuerySteps = kDim / 16;
  static constexpr int kQueryFragmentBytes =
      kQueryInShared ? kQueryParts * kQuerySteps * 32 * 16 : 0;

  static_assert(kDim % 64 == 0);
  static_assert(kKeyRowBytes % 128 ==
                (kCacheIsF8 ? (kDim % 128 + 32) % 128 : (2 * kDim + 64) % 128));
  static_assert(kValueRowBytes % 64 == 32, "V reads would meet bank conflicts");
  static_assert(kCopiesOfLane * kLanesOfToken * 16 == kTokenBytes);

  /// Shared memory of a CTA: the rings, later reused for the merge, and Q's fragments.
  static constexpr int shared_bytes(int warps) {
    const int rings = warps * kStages * kStageBytes;
    const int merge = merge_bytes(warps);
    return (rings > merge ? rings : merge) + kQueryFragmentBytes;
  }
  /// Merge: maxima and normalisers [warps, 16], then sums [warps, 16, kDim + 4] f32, then whether
  /// each warp saw a token.
  static constexpr int kSumRow = kDim + 4;
  static constexpr int merge_bytes(int warps) {
    return warps * (kHeadsOfTile * (2 + kSumRow) + 1) * static_cast<int>(sizeof(float));
  }
};

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_PAGED_TRAITS_CUH_
