#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_PARAMS_HPP_
#define OCTOPAGE_BACKENDS_CUDA_UNION_PARAMS_HPP_

// What the two kernels of the union path share: the page lists that `unions` writes and
// `union_attention` reads, and their parameter records. No CUDA in this file.
//
//   span   tile_rows() neighbouring rows, the first a multiple of it. A CTA of `unions` each.
//   tile   the rows of a span that neighbour each other and belong to one request: nearly always
//          all. Their (row, head) pairs, heads padded, are the kMatrixRows rows of the products.
//   half   the rows of a tile that one warpgroup computes: the first or the second half.
//   batch  eight pages that are loaded together: one slot of K, one of V.
//   step   a batch as one half sees it. A batch that no row of a half selected is no step of it.
//   split  a share of a tile's batches. Where tiles are too few to fill the device, CTAs take a
//   split
//          of a tile each, and `merge` puts their parts together.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "octopage/page_arithmetic.hpp"

namespace octopage::cuda {

inline constexpr int kMatrixRows = 128;   // of a tile: two warpgroups of 64
inline constexpr int kMostTileRows = 32;  // with 4 heads per group
inline constexpr int kBatchPages = 8;
inline constexpr int kUnionThreads = 256;
inline constexpr int kMostSplitShift = 4;
inline constexpr int kSharedBytesOfCta = 232448;  // 227 KiB

/// Copies that bring a page of an f8 cache: one of K and V, or, where shared memory is short, two.
/// The border between K and V of head dims 64 and 192 lies within a chunk of 128 bytes.
constexpr int f8_copies(int64_t dim) {
  return dim < 256 ? 1 : 2;
}

/// Rows of a tile whose groups have that many heads: heads are padded to a power of two from 4.
constexpr int head_shift(int64_t heads_per_group) {
  int shift = 2;
  while ((int64_t{1} << shift) < heads_per_group) ++shift;
  return shift;
}
constexpr int tile_rows(int64_t heads_per_group) {
  return kMatrixRows >> head_shift(heads_per_group);
}

/// A split of a tile as `unions` leaves it; the first twelve words are read by one warp at once.
struct TileHeader {
  int32_t row;            ///< first row of the call
  int32_t rows;           ///< of the tile
  int32_t last;           ///< 1: the last tile of its span
  int32_t first_batch;    ///< of the tile, in the span's lists
  int32_t begin;          ///< first batch of the split, in the tile
  int32_t end;            ///< behind its last one
  int32_t first_step[2];  ///< of each half, in the span's lists
  int32_t steps[2];       ///< of each half
  /// The page that holds the tile's newest position and its tokens up to there, as in `own`. Tokens
  /// behind them may never have been written. -1 where nobody selected it.
  int32_t tail;
  uint32_t live;  ///< bit r: row r of the tile sees a token, in whichever split
  /// By row of the tile: the place of its own page and the tokens it sees of it,
  /// (batch * 8 + slot) * 8 + tokens - 1; -1 where it is not selected.
  int32_t own[kMostTileRows];
};
inline constexpr int kHeaderWords = 12;
static_assert(offsetof(TileHeader, own) == kHeaderWords * sizeof(int32_t));

/// A step as one row of its half sees it: which batch of the tile, and bit j of the mask where the
/// row selects page j of it.
constexpr uint32_t step_word(uint32_t batch, uint32_t mask) {
  return batch | mask << 24;
}
constexpr int32_t batch_of_step(uint32_t word) {
  return static_cast<int32_t>(word & 0xffffff);
}
constexpr uint32_t mask_of_step(uint32_t word) {
  return word >> 24;
}

/// The first batch of a split; that of split number 2^split_shift is the end.
constexpr int32_t split_begin(int32_t batches, int32_t split, int32_t split_shift) {
  return batches * split >> split_shift;
}

/// What tells whether uniting a call's selections pays: work of the union path, and of a row by row
/// kernel.
struct SpanWork {
  uint32_t steps;    ///< of both halves
  uint32_t entries;  ///< of the span's rows that count
};

/// The lists of all spans in the workspace. Counting and laying out are one body.
struct UnionLists {
  TileHeader* headers;  ///< [selections, spans, splits, tile_rows]
  int32_t* pages;       ///< [selections, spans, capacity, 8] page ids, -1 pads
  uint32_t* steps;      ///< [selections, spans, 2, capacity, half_rows] see step_word
  SpanWork* work;       ///< [selections, spans]
  int32_t* row_by_row;  ///< [1] 1: the selections have too little in common, see SpanWork
  int64_t spans;
  int32_t tile_rows;
  int32_t half_rows;    ///< max(tile_rows / 2, 1)
  int32_t capacity;     ///< batches of a span
  int32_t split_shift;  ///< log2 of the splits of each tile

  /// `selections`: groups, or 1 where all groups share one. Returns the bytes used from `base`,
  /// which must be a multiple of 256 or null.
  size_t lay_out(std::byte* base, int64_t rows, int64_t selections, int64_t region_count,
                 int64_t heads_per_group, int32_t split_shift_of_tile) {
    split_shift = split_shift_of_tile;
    tile_rows = cuda::tile_rows(heads_per_group);
    half_rows = tile_rows > 1 ? tile_rows / 2 : 1;
    spans = (rows + tile_rows - 1) / tile_rows;
    // Each tile pads the pages of both halves, of the first and of the second to full batches.
    capacity = static_cast<int32_t>((tile_rows * region_count + 7) / 8 + 3 * tile_rows);
    size_t used = 0;
    const auto take = [&](int64_t count, size_t element_bytes) {
      const size_t at = used;
      used += (static_cast<size_t>(count) * element_bytes + 255) / 256 * 256;
      return base == nullptr ? nullptr : base + at;
    };
    const int64_t lists = selections * spans;
    headers =
        reinterpret_cast<TileHeader*>(take(lists * tile_rows << split_shift, sizeof(TileHeader)));
    pages = reinterpret_cast<int32_t*>(take(lists * capacity * kBatchPages, sizeof(int32_t)));
    steps = reinterpret_cast<uint32_t*>(take(lists * 2 * capacity * half_rows, sizeof(uint32_t)));
    work = reinterpret_cast<SpanWork*>(take(lists, sizeof(SpanWork)));
    row_by_row = reinterpret_cast<int32_t*>(take(1, sizeof(int32_t)));
    return used;
  }
};

/// What the splits leave for `merge`, in the workspace. Without splits there is none.
struct UnionPartials {
  float* sums;  ///< [splits, rows, heads, dim] not normalised
  float*
      stats;  ///< [splits, rows, heads, 2] maximum in units of log2, normaliser; -1: sees nothing

  /// As UnionLists::lay_out.
  size_t lay_out(std::byte* base, int64_t rows, int64_t heads, int64_t dim, int32_t split_shift) {
    if (split_shift == 0) return 0;
    const auto parts = static_cast<size_t>(rows * heads << split_shift);
    const size_t sum_bytes = (parts * static_cast<size_t>(dim) * sizeof(float) + 255) / 256 * 256;
    sums = reinterpret_cast<float*>(base);
    stats = reinterpret_cast<float*>(base == nullptr ? nullptr : base + sum_bytes);
    return sum_bytes + (parts * 2 * sizeof(float) + 255) / 256 * 256;
  }
};

/// Into how many splits to cut the tiles of so many units (a span of a group each), as log2. The
/// time of a unit is 1; writing and merging a part costs the share that was measured for 512
/// regions.
inline int32_t split_shift_of(int64_t units, int64_t multiprocessors, int64_t region_count) {
  constexpr double kPart = 0.04, kMergeLaunch = 0.04;
  const double part = kPart * 512.0 / static_cast<double>(std::max<int64_t>(region_count, 1));
  int32_t best = 0;
  double least = 0;
  for (int32_t shift = 0; shift <= kMostSplitShift; ++shift) {
    if (shift > 0 && region_count < int64_t{4 * kBatchPages} << shift) break;
    const int64_t waves = ((units << shift) + multiprocessors - 1) / multiprocessors;
    const double share = 1.0 / static_cast<double>(1 << shift);
    const double cost = static_cast<double>(waves) * (share + (shift > 0 ? 2 * part : 0)) +
                        (shift > 0 ? kMergeLaunch : 0);
    if (shift == 0 || cost < 0.95 * least) best = shift, least = cost;
  }
  return best;
}

struct UnionsParams {
  UnionLists lists;
  BlockTableView table;
  PageGeometry geometry;
  const int32_t* owners;  ///< [rows]
  int64_t stride_owners;
  const void* positions;  ///< [rows] i32, or i64 where wide_positions
  int64_t stride_positions;
  const int32_t* regions;  ///< [rows, selections, region_count]
  int64_t stride_regions_row;
  int64_t stride_regions_selection;
  int64_t stride_regions_entry;
  int64_t region_count;
  int64_t rows;
  int32_t* status;  ///< [1]; may be null
  int32_t wide_positions;
  uint32_t window;  ///< regions whose marks a CTA holds at a time; `launch_unions` chooses it
};

/// Strides in elements.
struct UnionAttentionParams {
  UnionLists lists;
  const void* query;  ///< [rows, groups * heads_per_group, dim]
  int64_t stride_query_row;
  int64_t stride_query_head;
  void* output;  ///< [rows, groups * heads_per_group, dim]
  int64_t stride_output_row;
  int64_t stride_output_head;
  float* lse;  ///< [rows, groups * heads_per_group]; may be null
  int64_t stride_lse_row;
  int64_t stride_lse_head;
  int64_t rows;  ///< of the call
  UnionPartials partials;
  const float* k_scale;  ///< [1]; null: folded into `scale_log2`
  const float* v_scale;  ///< [1]; null: folded into `output_scale`
  float scale_log2;      ///< multiplies q . k, in units of log2
  float output_scale;    ///< multiplies the normalised sum
  int32_t heads_per_group;
  int32_t head_shift;  ///< log2 of the padded heads
  int32_t groups;
  int32_t shared_selection;  ///< all groups share one
  int32_t query_is_f16;      ///< else bf16
  int32_t output_is_f32;     ///< else the query's type
  int32_t aligned_query;     ///< 16-byte loads are possible
  int32_t aligned_output;    ///< 16-byte stores are possible
  /// Beyond so many steps per batch of entries, in 256ths, a row by row kernel is faster: this one
  /// does nothing but say so in lists.row_by_row. 0: there is no such kernel to follow.
  int32_t most_steps;
  int64_t selections;
};
static_assert(std::is_trivially_copyable_v<UnionsParams>);
static_assert(std::is_trivially_copyable_v<UnionAttentionParams>);

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_PARAMS_HPP_
