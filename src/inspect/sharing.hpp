#ifndef OCTOPAGE_INSPECT_SHARING_HPP_
#define OCTOPAGE_INSPECT_SHARING_HPP_

// How much neighbouring rows of a step share, and how old the regions are that they select.
//
// A valid entry is one that a call would attend to: its owner, region, table column and block
// exist, and the row did not name the same region before. Rows stand in the order in which kernels
// take them into tiles: by owner, position, row.

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "step/step_file.hpp"

namespace octopage {

/// Heights of tiles that are looked at. Each divides the next: a tile of 16 rows is made of whole
/// tiles of 8, and so on.
inline constexpr std::array<int64_t, 5> kTileHeights = {1, 2, 4, 8, 16};

/// Groups `[begin, end)` of a step.
struct GroupRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// One row and group, as `walk_selections` hands it on.
struct SelectedRow {
  int64_t group;
  int64_t place;                     ///< in the order of tiles
  int64_t row;                       ///< in the step
  int64_t owner;                     ///< may be no request
  int64_t position;                  ///< may be negative
  bool continues;                    ///< the row at the place before has the same owner
  std::span<const int32_t> regions;  ///< valid ones, ascending, distinct; empty for padding
};

/// What counts and what is skipped, by kind. The kinds exclude each other.
struct EntryCount {
  int64_t counted = 0;  ///< entries that count, over rows and groups
  int64_t valid = 0;
  int64_t duplicate = 0;       ///< of a valid entry before it
  int64_t invalid_region = 0;  ///< negative or past the row
  int64_t invalid_owner = 0;   ///< of a row whose owner is no request
  int64_t invalid_table = 0;   ///< whose table column or block does not exist
  int64_t visible_tokens = 0;  ///< that the valid entries let rows see
  int64_t skipped() const { return counted - valid; }
};

/// Calls `visit` for each group and, in it, each row in the order of tiles.
EntryCount walk_selections(const Step& step, GroupRange groups,
                           const std::function<void(const SelectedRow&)>& visit);

/// Regions that rows share with the row before them of the same owner and group.
struct Overlap {
  int64_t shared = 0;
  int64_t compared = 0;  ///< regions of the rows that have a row before them
  double share() const {
    return compared > 0 ? static_cast<double>(shared) / static_cast<double>(compared) : 0.0;
  }
};

/// Tiles of one height.
struct TileSharing {
  int64_t height = 0;
  /// Distinct regions of a tile over the mean selection of its rows, weighted by rows, as
  /// `measure_union_factor` defines it. 1: the rows select the same; `height`: they share nothing.
  double factor = 0;
  int64_t tiles = 0;       ///< that the factor is the mean of
  int64_t loaded = 0;      ///< regions that all tiles load, each once for its tile, over groups
  int64_t multiplied = 0;  ///< row times region pairs that tiles compute: loaded times their rows
};

/// Ages of selected regions: how many regions the row's own lies behind them.
struct AgeBin {
  int64_t begin = 0;  ///< regions
  int64_t end = 0;    ///< half-open
  int64_t entries = 0;
};

struct Sharing {
  EntryCount entries;
  Overlap overlap;
  std::array<TileSharing, kTileHeights.size()> tiles;
  std::vector<AgeBin> ages;              ///< [0,1) [1,2) [2,4) [4,8) ..., up to the oldest
  std::vector<Overlap> overlap_at;       ///< [rows] of each place with the place before it
  std::vector<Overlap> request_overlap;  ///< [requests]
  std::vector<int64_t> request_entries;  ///< [requests] valid entries
  std::vector<int64_t> request_skipped;  ///< [requests] entries that count and are not valid
  int64_t distinct_pages = 0;            ///< of the cache that anybody selects, over groups
  int64_t padding_rows = 0;              ///< with a negative position
  int64_t empty_rows = 0;                ///< others without a valid entry in any of the groups
};

Sharing measure_sharing(const Step& step, GroupRange groups);

}  // namespace octopage

#endif  // OCTOPAGE_INSPECT_SHARING_HPP_
