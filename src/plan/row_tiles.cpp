#include "plan/row_tiles.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage {
namespace {

/// Valid distinct regions of one row and group, ascending.
std::vector<int32_t> valid_regions(const RowView& view, const TensorView& regions, int64_t row,
                                   int64_t group) {
  const bool shared = regions.rank == 2;
  const int64_t region_count = regions.shape[shared ? 1 : 2];
  const int64_t stride_entry = regions.strides[shared ? 1 : 2];
  const int64_t position = view.position(row);
  const auto* data = static_cast<const int32_t*>(regions.data) + row * regions.strides[0] +
                     (shared ? 0 : group * regions.strides[1]);
  std::vector<int32_t> valid;
  for (int64_t entry = 0; entry < selection_count(position, region_count); ++entry) {
    const int32_t region = data[entry * stride_entry];
    if (region >= 0 && region <= region_of_position(position)) valid.push_back(region);
  }
  std::sort(valid.begin(), valid.end());
  valid.erase(std::unique(valid.begin(), valid.end()), valid.end());
  return valid;
}

int64_t group_count(const TensorView& regions) {
  return regions.rank == 2 ? 1 : regions.shape[1];
}

}  // namespace

RowView row_view(const TensorView& owners, const TensorView& positions) {
  return {.owners = static_cast<const int32_t*>(owners.data),
          .stride_owners = owners.strides[0],
          .positions = positions.data,
          .wide_positions = positions.dtype == DType::i64,
          .stride_positions = positions.strides[0]};
}

int64_t cut_row_tiles(const RowView& view, int64_t rows, int64_t height, TileRow* ordered,
                      int32_t* starts) {
  for (int64_t row = 0; row < rows; ++row) {
    ordered[row] = {.position = view.position(row),
                    .owner = static_cast<int32_t>(view.owner(row)),
                    .row = static_cast<int32_t>(row)};
  }
  const auto before = [](const TileRow& a, const TileRow& b) {
    if (a.owner != b.owner) return a.owner < b.owner;
    if (a.position != b.position) return a.position < b.position;
    return a.row < b.row;
  };
  // Engines mostly hand over rows in this order already.
  if (!std::is_sorted(ordered, ordered + rows, before)) std::sort(ordered, ordered + rows, before);
  int64_t tiles = 0;
  starts[0] = 0;
  for (int64_t place = 1; place <= rows; ++place) {
    const bool full = place - starts[tiles] == height;
    if (place == rows || full || ordered[place].owner != ordered[place - 1].owner) {
      starts[++tiles] = static_cast<int32_t>(place);
    }
  }
  return tiles;
}

RowTiles make_row_tiles(const TensorView& owners, const TensorView& positions, int64_t height) {
  if (height < 1) fail_argument("height = {}: a tile has at least one row", height);
  const int64_t rows = owners.shape[0];
  RowTiles tiles;
  std::vector<TileRow> ordered(static_cast<size_t>(rows));
  tiles.starts.resize(static_cast<size_t>(rows) + 1);
  const int64_t count =
      cut_row_tiles(row_view(owners, positions), rows, height, ordered.data(), tiles.starts.data());
  tiles.order.reserve(ordered.size());
  for (const TileRow& row : ordered) tiles.order.push_back(row.row);
  tiles.starts.resize(static_cast<size_t>(count) + 1);
  return tiles;
}

UnionFactor measure_union_factor(const TensorView& owners, const TensorView& positions,
                                 const TensorView& regions, int64_t height) {
  const RowTiles tiles = make_row_tiles(owners, positions, height);
  const RowView view = row_view(owners, positions);
  bool any_full = false;
  for (size_t i = 0; i + 1 < tiles.starts.size(); ++i) {
    any_full |= tiles.starts[i + 1] - tiles.starts[i] == height;
  }
  UnionFactor result{.height = height};
  double weighted = 0;
  double weight = 0;
  for (size_t tile = 0; tile + 1 < tiles.starts.size(); ++tile) {
    const int64_t tile_rows = tiles.starts[tile + 1] - tiles.starts[tile];
    if (any_full && tile_rows != height) continue;
    for (int64_t group = 0; group < group_count(regions); ++group) {
      std::vector<int32_t> all;
      for (int32_t place = tiles.starts[tile]; place < tiles.starts[tile + 1]; ++place) {
        const auto valid =
            valid_regions(view, regions, tiles.order[static_cast<size_t>(place)], group);
        all.insert(all.end(), valid.begin(), valid.end());
      }
      if (all.empty()) continue;
      const double mean = static_cast<double>(all.size()) / static_cast<double>(tile_rows);
      std::sort(all.begin(), all.end());
      const auto distinct = std::unique(all.begin(), all.end()) - all.begin();
      weighted += static_cast<double>(distinct) / mean * static_cast<double>(tile_rows);
      weight += static_cast<double>(tile_rows);
    }
    ++result.tiles;
  }
  result.factor = weight > 0 ? weighted / weight : 0;
  return result;
}

double measure_neighbour_overlap(const TensorView& owners, const TensorView& positions,
                                 const TensorView& regions) {
  const RowTiles tiles = make_row_tiles(owners, positions, std::max<int64_t>(owners.shape[0], 1));
  const RowView view = row_view(owners, positions);
  double shared = 0;
  double selected = 0;
  for (size_t tile = 0; tile + 1 < tiles.starts.size(); ++tile) {
    for (int64_t group = 0; group < group_count(regions); ++group) {
      std::vector<int32_t> before;
      for (int32_t place = tiles.starts[tile]; place < tiles.starts[tile + 1]; ++place) {
        auto current = valid_regions(view, regions, tiles.order[static_cast<size_t>(place)], group);
        if (place > tiles.starts[tile]) {
          std::vector<int32_t> both;
          std::set_intersection(before.begin(), before.end(), current.begin(), current.end(),
                                std::back_inserter(both));
          shared += static_cast<double>(both.size());
          selected += static_cast<double>(current.size());
        }
        before = std::move(current);
      }
    }
  }
  return selected > 0 ? shared / selected : 0;
}

}  // namespace octopage
