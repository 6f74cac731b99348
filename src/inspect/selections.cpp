#include "inspect/selections.hpp"

#include <algorithm>

namespace octopage {

bool Selection::has_own() const {
  for (int64_t entry = 0; entry < count; ++entry) {
    if ((*this)[entry] == own) return true;
  }
  return false;
}

Selection selection_of(const TensorView& group_regions, int64_t row, int64_t position) {
  return {static_cast<const int32_t*>(group_regions.data) + row * group_regions.strides[0],
          group_regions.strides[1], selection_count(position, group_regions.shape[1]),
          region_of_position(position)};
}

TensorView regions_of_group(const Step& step, int64_t group) {
  if (step.regions.rank == 2) return step.regions;
  TensorView regions = step.regions.slice(1, group, group + 1);
  regions.rank = 2;
  regions.shape[1] = regions.shape[2];
  regions.strides[1] = regions.strides[2];
  return regions;
}

HeadRange heads_of_group(const Step& step, int64_t group) {
  const int64_t heads_per_group = step.heads() / step.groups();
  return {group * heads_per_group, (group + 1) * heads_per_group};
}

BlockTableView table_of(const Step& step) {
  const TensorView& table = step.block_table;
  return {static_cast<const int32_t*>(table.data), table.shape[0], table.shape[1], table.strides[0],
          table.strides[1]};
}

std::vector<int64_t> positions_of(const Step& step) {
  const auto copy = [&](const auto* data) {
    return std::vector<int64_t>(data, data + step.rows());
  };
  return step.positions.dtype == DType::i64
             ? copy(static_cast<const int64_t*>(step.positions.data))
             : copy(static_cast<const int32_t*>(step.positions.data));
}

std::vector<int64_t> lengths_of(const Step& step) {
  if (step.lengths.present()) {
    const auto* lengths = static_cast<const int32_t*>(step.lengths.data);
    return std::vector<int64_t>(lengths, lengths + step.requests());
  }
  std::vector<int64_t> lengths(static_cast<size_t>(step.requests()), 0);
  const int64_t capacity = step.block_table.shape[1] * step.block_size();
  const std::vector<int64_t> positions = positions_of(step);
  const auto* owners = static_cast<const int32_t*>(step.owners.data);
  for (int64_t row = 0; row < step.rows(); ++row) {
    if (owners[row] < 0 || owners[row] >= step.requests()) continue;
    int64_t& length = lengths[static_cast<size_t>(owners[row])];
    length = std::max(length, std::min(positions[static_cast<size_t>(row)], capacity - 1) + 1);
  }
  return lengths;
}

SelectionCount count_selections(const Step& step, bool own_required) {
  SelectionCount result;
  const BlockTableView table = table_of(step);
  const PageGeometry geometry = kv_cache_view(step.kv_cache).geometry();
  const std::vector<int64_t> positions = positions_of(step);
  const auto* owners = static_cast<const int32_t*>(step.owners.data);
  for (int64_t group = 0; group < step.groups(); ++group) {
    const TensorView regions = regions_of_group(step, group);
    for (int64_t row = 0; row < step.rows(); ++row) {
      const int64_t position = positions[static_cast<size_t>(row)];
      const Selection selection = selection_of(regions, row, position);
      result.entries += selection.count;
      const int64_t owner = owners[row];
      if (own_required && owner >= 0 && owner < table.requests && !selection.has_own()) {
        result.invalid_region += selection.count;
        continue;
      }
      for (int64_t entry = 0; entry < selection.count; ++entry) {
        const int64_t region = selection[entry];
        const PageLookup page = page_of_region(table, geometry, owner, region, selection.own);
        result.invalid_region += page.fault == status_region;
        result.invalid_owner += page.fault == status_owner;
        result.invalid_table += page.fault == status_table;
        if (page.fault == 0) {
          result.visible_tokens += std::min(kPageTokens - 1, position - region * kPageTokens) + 1;
        }
      }
    }
  }
  return result;
}

}  // namespace octopage
