#ifndef OCTOPAGE_BACKENDS_CPU_TILE_KERNEL_HPP_
#define OCTOPAGE_BACKENDS_CPU_TILE_KERNEL_HPP_

// Attention of one tile: a few rows of one group over the union of their pages.
//
// (row, head) pairs lie in vector lanes and everything else is a scalar that is broadcast, so both
// products have the same form and the softmax needs no horizontal step:
//
//     S[token][lane] += K[token][d] * Q[d][lane]        for d      [tokens, D] x [D, lanes]
//     O[d][lane]     += V[token][d] * P[token][lane]    for token  [D, tokens] x [tokens, lanes]
//
// A pack is what one pass handles: one row with all its heads in as many vectors as they need, or,
// where a row's heads fill at most half a vector, several rows side by side in one vector.
// K and V of a chunk of pages are converted to f32 once for all rows of the tile.

#include <cstddef>
#include <cstdint>

#include "octopage/page_arithmetic.hpp"
#include "octopage/tensor.hpp"

namespace octopage {

inline constexpr int64_t kChunkPages = 8;    ///< pages converted at a time
inline constexpr int64_t kMaxTileRows = 32;  ///< must fit the 8 bits of a key
/// f32 elements between converted tokens: a constant, so that kernels address tokens by immediate
/// offsets, of an odd number of cache lines, so that tokens fall into different cache sets.
inline constexpr int64_t kTokenStride = 256 + 16;

/// One row's claim on a page: id in the high bits, so that sorted keys group by page.
struct PageKey {
  static constexpr uint64_t make(uint64_t id, int64_t row_in_tile, int64_t visible_tokens) {
    return id << 16 | static_cast<uint64_t>(row_in_tile) << 8 |
           static_cast<uint64_t>(visible_tokens);
  }
  static constexpr uint64_t id(uint64_t key) { return key >> 16; }
  static constexpr int64_t row(uint64_t key) { return static_cast<int64_t>(key >> 8 & 0xff); }
  static constexpr int64_t visible(uint64_t key) { return static_cast<int64_t>(key & 0xff); }
};

/// A page that at least one row of the tile selected.
struct TilePage {
  int64_t offset;     ///< elements from the cache's data to token 0
  int64_t first_key;  ///< its keys are keys[first_key .. end_key)
  int64_t end_key;
};

/// Lanes of a pack for a number of heads on a machine with `lanes` f32 lanes per vector.
struct PackShape {
  int64_t rows;     ///< rows side by side in a pack
  int64_t vectors;  ///< vectors of a pack
  static constexpr PackShape of(int64_t heads, int64_t tile_rows, int64_t lanes) {
    if (heads * 2 > lanes || tile_rows == 1) return {1, (heads + lanes - 1) / lanes};
    const int64_t fit = lanes / heads;
    return {fit < tile_rows ? fit : tile_rows, 1};
  }
};

/// Scratch memory of one worker, 64-byte aligned. `width` = vectors of a pack * lanes.
struct TileScratch {
  float* k;           ///< [kChunkPages * 8, kTokenStride]
  float* v;           ///< [kChunkPages * 8, kTokenStride]
  float* query;       ///< [packs, dim, width], scale folded in
  float* sums;        ///< [packs, dim, width], O
  float* largest;     ///< [packs, width], running maximum of the scores
  float* normaliser;  ///< [packs, width], running sum of exponentials
  float* scores;      ///< [kChunkPages * 8, width], S and then P
  float* correction;  ///< [width], what the older sums are multiplied by
  uint8_t* visible;   ///< [kChunkPages, kMaxTileRows], visible tokens, 0: not selected
};

/// One tile. Strides in elements.
struct TileJob {
  const void* cache;  ///< page offsets start here
  DType cache_dtype;
  int64_t stride_token;
  int64_t dim;
  const TilePage* pages;  ///< [page_count] in the order of the visit
  int64_t page_count;
  const uint64_t* keys;
  int64_t rows;            ///< 1 .. kMaxTileRows
  const int32_t* row_ids;  ///< [rows] rows of the tensors
  int64_t heads;           ///< of the group
  const void* query;       ///< head 0 of the group
  DType query_dtype;
  int64_t stride_query_row;
  int64_t stride_query_head;
  void* output;  ///< head 0 of the group
  DType output_dtype;
  int64_t stride_output_row;
  int64_t stride_output_head;
  float* lse;  ///< head 0 of the group; may be null
  int64_t stride_lse_row;
  int64_t stride_lse_head;
  double scale;
  double v_scale;
  TileScratch scratch;
};

/// f32 lanes of a vector of the instruction set in use.
int64_t tile_lanes();
/// The instruction set in use, as Highway names it.
const char* tile_target();
/// Computes the tile and writes its rows of output and lse.
void attend_tile(const TileJob& job);

}  // namespace octopage

#endif  // OCTOPAGE_BACKENDS_CPU_TILE_KERNEL_HPP_
