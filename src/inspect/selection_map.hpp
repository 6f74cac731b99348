#ifndef OCTOPAGE_INSPECT_SELECTION_MAP_HPP_
#define OCTOPAGE_INSPECT_SELECTION_MAP_HPP_

// The selections of a step as a picture: rows in the order of tiles downwards, regions to the
// right, both in bins of equal size (the last may be smaller) so that any step is a picture of
// bounded size.

#include <cstdint>
#include <vector>

#include "inspect/sharing.hpp"
#include "step/step_file.hpp"

namespace octopage {

/// The rows of one line of the map.
struct RowBin {
  int64_t begin = 0;  ///< places in the order of tiles
  int64_t end = 0;    ///< half-open
  int64_t first_owner = 0;
  int64_t last_owner = 0;
  int64_t least_position = 0;
  int64_t greatest_position = 0;
  Overlap overlap;  ///< of its rows with the rows before them
};

struct SelectionMap {
  int64_t rows = 0;
  int64_t regions = 0;  ///< columns before binning: of the longest request
  int64_t rows_per_bin = 1;
  int64_t regions_per_bin = 1;
  int64_t row_bins = 0;
  int64_t region_bins = 0;
  std::vector<int64_t> counts;  ///< [row_bins, region_bins] valid entries, over groups
  std::vector<RowBin> bins;     ///< [row_bins]

  /// Rows times regions of a bin: how many entries each group can have there.
  int64_t cells(int64_t row_bin, int64_t region_bin) const;
};

/// `sharing` is that of the same step and groups. Both limits are at least 1.
SelectionMap make_selection_map(const Step& step, GroupRange groups, const Sharing& sharing,
                                int64_t most_row_bins, int64_t most_region_bins);

}  // namespace octopage

#endif  // OCTOPAGE_INSPECT_SELECTION_MAP_HPP_
