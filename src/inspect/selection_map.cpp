#include "inspect/selection_map.hpp"

#include <algorithm>

#include "inspect/selections.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage {
namespace {

int64_t divide_up(int64_t a, int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Regions of the longest request.
int64_t region_extent(const Step& step) {
  int64_t longest = 0;
  for (const int64_t length : lengths_of(step)) longest = std::max(longest, length);
  return divide_up(longest, kPageTokens);
}

void extend(RowBin& bin, const SelectedRow& row, const Overlap& overlap) {
  if (bin.begin == bin.end) {
    bin = {row.place, row.place, row.owner, row.owner, row.position, row.position, {}};
  }
  bin.end = row.place + 1;
  bin.last_owner = row.owner;
  bin.least_position = std::min(bin.least_position, row.position);
  bin.greatest_position = std::max(bin.greatest_position, row.position);
  bin.overlap.shared += overlap.shared;
  bin.overlap.compared += overlap.compared;
}

}  // namespace

int64_t SelectionMap::cells(int64_t row_bin, int64_t region_bin) const {
  return std::min(rows_per_bin, rows - row_bin * rows_per_bin) *
         std::min(regions_per_bin, regions - region_bin * regions_per_bin);
}

SelectionMap make_selection_map(const Step& step, GroupRange groups, const Sharing& sharing,
                                int64_t most_row_bins, int64_t most_region_bins) {
  SelectionMap map;
  map.rows = step.rows();
  map.regions = region_extent(step);
  map.rows_per_bin = std::max<int64_t>(divide_up(map.rows, most_row_bins), 1);
  map.regions_per_bin = std::max<int64_t>(divide_up(map.regions, most_region_bins), 1);
  map.row_bins = divide_up(map.rows, map.rows_per_bin);
  map.region_bins = divide_up(map.regions, map.regions_per_bin);
  map.counts.resize(static_cast<size_t>(map.row_bins * map.region_bins));
  map.bins.resize(static_cast<size_t>(map.row_bins));
  walk_selections(step, groups, [&](const SelectedRow& row) {
    const int64_t row_bin = row.place / map.rows_per_bin;
    if (row.group == groups.begin) {
      extend(map.bins[static_cast<size_t>(row_bin)], row,
             sharing.overlap_at[static_cast<size_t>(row.place)]);
    }
    // A valid region lies below its row's position, so inside its request.
    int64_t* line = map.counts.data() + row_bin * map.region_bins;
    for (const int32_t region : row.regions) ++line[region / map.regions_per_bin];
  });
  return map;
}

}  // namespace octopage
