#ifndef OCTOPAGE_PLAN_ROW_TILES_HPP_
#define OCTOPAGE_PLAN_ROW_TILES_HPP_

// Tiles: neighbouring rows of one request, which share most of their selections.

#include <cstdint>
#include <span>
#include <vector>

#include "core/read_once.hpp"
#include "octopage/tensor.hpp"

namespace octopage {

/// Which request and position each row has. Strides in elements. Each call reads the memory once.
struct RowView {
  const int32_t* owners;  ///< [rows]
  int64_t stride_owners;
  const void* positions;  ///< [rows] i32 or i64
  bool wide_positions;    ///< i64
  int64_t stride_positions;

  int64_t owner(int64_t row) const { return read_once(owners + row * stride_owners); }
  int64_t position(int64_t row) const {
    const int64_t offset = row * stride_positions;
    return wide_positions ? read_once(static_cast<const int64_t*>(positions) + offset)
                          : read_once(static_cast<const int32_t*>(positions) + offset);
  }
};

/// Views `owners` [rows] i32 and `positions` [rows] i32 or i64 of the CPU.
RowView row_view(const TensorView& owners, const TensorView& positions);

/// A row as its tile sees it: a copy, so that what it was sorted by is what it is computed with.
struct TileRow {
  int64_t position;
  int32_t owner;
  int32_t row;
};

/// Orders rows by (owner, position, row) into `ordered` [rows] and cuts them into tiles of at most
/// `height` rows of one owner: tile i is ordered[starts[i] .. starts[i+1]), `starts` [rows+1].
/// Returns the number of tiles. Reads the view once, allocates nothing.
int64_t cut_row_tiles(const RowView& view, int64_t rows, int64_t height, TileRow* ordered,
                      int32_t* starts);

/// The same in memory of its own.
struct RowTiles {
  std::vector<int32_t> order;   ///< [rows] row of each place
  std::vector<int32_t> starts;  ///< [tiles+1] places
  int64_t count() const { return static_cast<int64_t>(starts.size()) - 1; }
};

/// Tiles of rows described by `owners` [rows] i32 and `positions` [rows] i32 or i64 on the CPU.
RowTiles make_row_tiles(const TensorView& owners, const TensorView& positions, int64_t height);

/// Union factor of a step for a tile height: distinct valid regions of the tile over the mean
/// selection of its rows, averaged over tiles and groups weighted by rows. 1: the rows of a tile
/// select the same regions; `height`: they share nothing. Tiles shorter than `height` are left out
/// unless there is no full one.
struct UnionFactor {
  int64_t height = 0;
  double factor = 0;
  int64_t tiles = 0;
};
UnionFactor measure_union_factor(const TensorView& owners, const TensorView& positions,
                                 const TensorView& regions, int64_t height);

/// Mean share of a row's valid regions that the row before it (of the same owner and group) has
/// too.
double measure_neighbour_overlap(const TensorView& owners, const TensorView& positions,
                                 const TensorView& regions);

}  // namespace octopage

#endif  // OCTOPAGE_PLAN_ROW_TILES_HPP_
