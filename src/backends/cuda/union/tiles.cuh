#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_TILES_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_TILES_CUH_

// How the warps of a CTA find their tiles, rows and steps.

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device/ptx/bulk.cuh"
#include "backends/cuda/union/params.hpp"

namespace octopage::cuda {

/// Walks the tiles of a CTA: of units blockIdx.x, blockIdx.x + gridDim.x, ... every tile.
struct TileCursor {
  uint32_t unit;  // (group * spans + span) * splits + split
  int32_t tile;   // of the span

  __device__ __forceinline__ bool valid(const UnionAttentionParams& p) const {
    return unit < static_cast<uint32_t>(p.lists.spans) * static_cast<uint32_t>(p.groups)
                      << p.lists.split_shift;
  }
  __device__ __forceinline__ int32_t split(const UnionAttentionParams& p) const {
    return static_cast<int32_t>(unit & ((1u << p.lists.split_shift) - 1));
  }
  __device__ __forceinline__ uint32_t span_of_group(const UnionAttentionParams& p) const {
    return unit >> p.lists.split_shift;
  }
  __device__ __forceinline__ uint32_t group(const UnionAttentionParams& p) const {
    return span_of_group(p) / static_cast<uint32_t>(p.lists.spans);
  }
  __device__ __forceinline__ uint32_t span(const UnionAttentionParams& p) const {
    return span_of_group(p) % static_cast<uint32_t>(p.lists.spans);
  }
  /// Index of the span's lists.
  __device__ __forceinline__ uint32_t list(const UnionAttentionParams& p) const {
    return p.shared_selection != 0 ? span(p) : span_of_group(p);
  }
  __device__ __forceinline__ const TileHeader* header(const UnionAttentionParams& p) const {
    const uint32_t split_list = (list(p) << p.lists.split_shift) + static_cast<uint32_t>(split(p));
    return p.lists.headers + (split_list * static_cast<uint32_t>(p.lists.tile_rows) + tile);
  }
  /// First row of the span.
  __device__ __forceinline__ int32_t row(const UnionAttentionParams& p) const {
    return static_cast<int32_t>(span(p)) * p.lists.tile_rows;
  }
  __device__ __forceinline__ void advance(bool last) {
    tile = last ? 0 : tile + 1;
    unit += last ? gridDim.x : 0;
  }
};

/// What a lane owns of its warp's 16 matrix rows: rows lane / 4 and 8 further, h = 0 and 1.
struct LaneRows {
  int lane;
  int matrix_row;  // of h = 0, in the tile

  __device__ __forceinline__ LaneRows(int half, int warp, int lane_)
      : lane(lane_), matrix_row(half * 64 + warp * 16 + lane_ / 4) {}
  /// The same, computed anew: what is derived from it takes no registers in the loops before.
  __device__ static __forceinline__ LaneRows anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return LaneRows(thread / 128, thread / 32 % 4, thread % 32);
  }
  /// Row of the tile.
  __device__ __forceinline__ int row(const UnionAttentionParams& p, int h) const {
    return (matrix_row + 8 * h) >> p.head_shift;
  }
  /// Head of the group; padding where it is not below heads_per_group.
  __device__ __forceinline__ int head(const UnionAttentionParams& p, int h) const {
    return (matrix_row + 8 * h) & ((1 << p.head_shift) - 1);
  }
};

/// A barrier of this consumer warpgroup.
__device__ __forceinline__ void warpgroup_barrier() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  ptx::named_barrier(1 + thread / 128, 128);  // 0 is __syncthreads'
}

/// A step as it comes, of the lane's rows.
template <int kRows>
struct Step {
  uint32_t word[kRows];
  /// The same for all lanes of the warp.
  __device__ __forceinline__ int32_t batch() const {
    return kRows == 1 ? batch_of_step(word[0]) : __shfl_sync(~0u, batch_of_step(word[0]), 0);
  }
};

/// Where the steps of a half lie in all lists; a header's first_step counts from there.
__device__ __forceinline__ uint32_t steps_of_half(const UnionAttentionParams& p,
                                                  const TileCursor& cursor, int half) {
  return (cursor.list(p) * 2 + half) * static_cast<uint32_t>(p.lists.capacity);
}

/// Step `at` of all. `mask_row` is the lane's first row in the half.
template <int kRows>
__device__ __forceinline__ Step<kRows> load_step(const UnionAttentionParams& p, uint32_t at,
                                                 int mask_row) {
  const uint32_t* words =
      p.lists.steps + (at * static_cast<uint32_t>(p.lists.half_rows) + mask_row);
  Step<kRows> step;
  step.word[0] = words[0];
  if constexpr (kRows == 2) step.word[1] = words[8 >> p.head_shift];
  return step;
}

/// The steps of a half of a tile, one after the other. `first` and `mask_row` are functions, so
/// that what they compute takes no registers in between.
template <int kRows>
class StepReader {
 public:
  __device__ __forceinline__ void start(const UnionAttentionParams& p, uint32_t first,
                                        int32_t steps, int mask_row) {
    taken_ = 0;
    if (steps > 0) coming_ = load_step<kRows>(p, first, mask_row);
    if (steps > 1) next_ = load_step<kRows>(p, first + 1, mask_row);
  }
  __device__ __forceinline__ int32_t taken() const { return taken_; }
  /// The step that is taken next; anything where none is left, or fetch() is needed first.
  __device__ __forceinline__ Step<kRows> coming() const { return coming_; }
  template <typename First, typename MaskRow>
  __device__ __forceinline__ void take(const UnionAttentionParams& p, const First& first,
                                       int32_t steps, const MaskRow& mask_row) {
    coming_ = next_;
    ++taken_;
    if (taken_ + 1 < steps) next_ = load_step<kRows>(p, first() + taken_ + 1, mask_row());
  }
  __device__ __forceinline__ bool must_fetch() const { return false; }
  template <typename First, typename MaskRow>
  __device__ __forceinline__ void fetch(const UnionAttentionParams&, const First&, int32_t,
                                        const MaskRow&) {}

 private:
  Step<kRows> coming_, next_;
  int32_t taken_;
};

/// Where a warp's rows are one row of the tile, its lanes hold 32 steps.
template <>
class StepReader<1> {
 public:
  __device__ __forceinline__ void start(const UnionAttentionParams& p, uint32_t first,
                                        int32_t steps, int mask_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    taken_ = 0;
    if (steps > 0) words_ = load_step<1>(p, first + min(lane, steps - 1), mask_row).word[0];
  }
  __device__ __forceinline__ int32_t taken() const { return taken_; }
  __device__ __forceinline__ Step<1> coming() const { return {{__shfl_sync(~0u, words_, taken_)}}; }
  template <typename First, typename MaskRow>
  __device__ __forceinline__ void take(const UnionAttentionParams&, const First&, int32_t,
                                       const MaskRow&) {
    ++taken_;
  }
  /// Whether the steps that the lanes hold are used up.
  __device__ __forceinline__ bool must_fetch() const { return taken_ % 32 == 0; }
  template <typename First, typename MaskRow>
  __device__ __forceinline__ void fetch(const UnionAttentionParams& p, const First& first,
                                        int32_t steps, const MaskRow& mask_row) {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    words_ = load_step<1>(p, first() + min(taken_ + lane, steps - 1), mask_row()).word[0];
  }

 private:
  uint32_t words_;
  int32_t taken_;
};

/// Words of a header, and behind them what a warp adds to them.
constexpr int header_word(size_t offset) {
  return static_cast<int>(offset / sizeof(int32_t));
}
inline constexpr int kRowWord = header_word(offsetof(TileHeader, row));
inline constexpr int kRowsWord = header_word(offsetof(TileHeader, rows));
inline constexpr int kLastWord = header_word(offsetof(TileHeader, last));
inline constexpr int kBeginWord = header_word(offsetof(TileHeader, begin));
inline constexpr int kEndWord = header_word(offsetof(TileHeader, end));
inline constexpr int kFirstStepOfHalfWord = header_word(offsetof(TileHeader, first_step));
inline constexpr int kStepsWord = header_word(offsetof(TileHeader, steps));  // of two halves
inline constexpr int kTailWord = header_word(offsetof(TileHeader, tail));
inline constexpr int kLiveWord = header_word(offsetof(TileHeader, live));
inline constexpr int kCursorWord = kHeaderWords;        // two words: unit and tile
inline constexpr int kFirstStepWord = kCursorWord + 2;  // of all steps
inline constexpr int kOwnWord = kCursorWord + 3;        // where all rows of the warp are one

/// What a warp must know of a tile before it starts, loaded while the tile before is finished.
template <int kRows>
struct TileInput {
  int32_t header;  // lane l holds word l; from lane kCursorWord on, where the tile is
  int32_t own[2];  // of the lane's rows where they are two; else a word of the header
  StepReader<kRows> steps;

  /// First the header; its steps are found by what it says.
  __device__ __forceinline__ void load_header(const UnionAttentionParams& p,
                                              const TileCursor& cursor, const LaneRows& lane_rows) {
    const TileHeader* from = cursor.header(p);
    header = reinterpret_cast<const int32_t*>(from)[min(lane_rows.lane, kHeaderWords - 1)];
    if constexpr (kRows == 1) {
      if (lane_rows.lane == kOwnWord) header = from->own[lane_rows.row(p, 0)];
    } else {
      for (int r = 0; r < kRows; ++r) own[r] = from->own[lane_rows.row(p, r)];
    }
  }
  __device__ __forceinline__ void load_steps(const UnionAttentionParams& p,
                                             const TileCursor& cursor, int half, int mask_row,
                                             const LaneRows& lane_rows) {
    const uint32_t first_step =
        steps_of_half(p, cursor, half) + __shfl_sync(~0u, header, kFirstStepOfHalfWord + half);
    const int32_t count = __shfl_sync(~0u, header, kStepsWord + half);
    if (lane_rows.lane == kCursorWord) header = static_cast<int32_t>(cursor.unit);
    if (lane_rows.lane == kCursorWord + 1) header = cursor.tile;
    if (lane_rows.lane == kFirstStepWord) header = static_cast<int32_t>(first_step);
    steps.start(p, first_step, count, mask_row);
  }
};

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_TILES_CUH_
