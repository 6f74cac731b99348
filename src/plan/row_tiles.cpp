#include "plan/row_tiles.hpp"

#include <algorithm>
#include <numeric>

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

int64_t cut_row_tiles(const RowView& view, int64_t rows, int64_t height, int32_t* order,
                      int32_t* starts) {
  std::iota(order, order + rows, 0);
  const auto before = [&](int32_t a, int32_t b) {
    const int64_t owner_a = view.owner(a);
    const int64_t owner_b = view.owner(b);
    if (owner_a != owner_b) return owner_a < owner_b;
    const int64_t position_a = view.position(a);
    const int64_t position_b = view.position(b);
    if (position_a != position_b) return position_a < position_b;
    return a < b;
  };
  // Engines mostly hand over rows in this order already.
  if (!std::is_sorted(order, order + rows, before)) std::sort(order, order + rows, before);
  int64_t tiles = 0;
  starts[0] = 0;
  for (int64_t place = 1; place <= rows; ++place) {
    const bool full = place - starts[tiles] == height;
    if (place == rows || full || view.owner(order[place]) != view.owner(order[place - 1])) {
      starts[++tiles] = static_cast<int32_t>(place);
    }
  }
  return tiles;
}

RowTiles make_row_tiles(const TensorView& owners, const TensorView& positions, int64_t height) {
  if (height < 1) fail_argument("height = {}: a tile has at least one row", height);
  const int64_t rows = owners.shape[0];
  RowTiles tiles;
  tiles.order.resize(static_cast<size_t>(rows));
  tiles.starts.resize(static_cast<size_t>(rows) + 1);
  const int64_t count = cut_row_tiles(row_view(owners, positions), rows, height, tiles.order.data(),
                                      tiles.starts.data());
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
