#ifndef OCTOPAGE_INSPECT_SELECTIONS_HPP_
#define OCTOPAGE_INSPECT_SELECTIONS_HPP_

// What is read out of a step's selections, entry by entry.

#include <cstdint>
#include <vector>

#include "octopage/kv_cache.hpp"
#include "octopage/page_arithmetic.hpp"
#include "step/step_file.hpp"

namespace octopage {

/// Entries that count and are skipped, by kind; and the work of the others.
struct SelectionCount {
  int64_t entries = 0;  ///< all that count, over rows and groups
  int64_t invalid_region =
      0;  ///< negative, past the row, or (planned path) in a row without its own
  int64_t invalid_owner = 0;   ///< of a row whose owner is no request
  int64_t invalid_table = 0;   ///< whose table column or block does not exist
  int64_t visible_tokens = 0;  ///< tokens that rows attend to, over rows and groups
  int64_t invalid() const { return invalid_region + invalid_owner + invalid_table; }
};

/// Walks the selections. `own_required`: as the planned path sees them, where a selection without
/// the row's own region is invalid as a whole.
SelectionCount count_selections(const Step& step, bool own_required);

/// Position of each row.
std::vector<int64_t> positions_of(const Step& step);

/// Tokens of each request: `lengths` of the file, or else as many as the rows stand in, at most
/// what the block table holds.
std::vector<int64_t> lengths_of(const Step& step);

BlockTableView table_of(const Step& step);

/// Selections of one group as [rows, region_count].
TensorView regions_of_group(const Step& step, int64_t group);

/// Heads `[begin, end)` of a group, for slices of query, output and lse.
struct HeadRange {
  int64_t begin;
  int64_t end;
};
HeadRange heads_of_group(const Step& step, int64_t group);

/// One row's entries.
struct Selection {
  const int32_t* data;
  int64_t stride;
  int64_t count;  ///< entries that count
  int64_t own;    ///< the row's own region
  int32_t operator[](int64_t entry) const { return data[entry * stride]; }
  bool has_own() const;
};
Selection selection_of(const TensorView& group_regions, int64_t row, int64_t position);

}  // namespace octopage

#endif  // OCTOPAGE_INSPECT_SELECTIONS_HPP_
