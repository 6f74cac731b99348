#include "inspect/sharing.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>

#include "inspect/selections.hpp"
#include "octopage/page_arithmetic.hpp"
#include "plan/row_tiles.hpp"

namespace octopage {
namespace {

int64_t size_of(const std::vector<int32_t>& regions) {
  return static_cast<int64_t>(regions.size());
}

/// Of one group alone, without the gaps that other groups leave between its blocks.
PageGeometry group_geometry(const Step& step) {
  const int64_t regions_per_block = step.block_size() / kPageTokens;
  return {step.kv_cache.shape[0], regions_per_block, regions_per_block};
}

/// Unites the rows of one tile of the greatest height, pair by pair: a tile of height h is the
/// union of two tiles of height h / 2 before it.
class TileUnions {
 public:
  /// Adds the next row of the tile.
  void add(std::span<const int32_t> regions) { rows_.emplace_back(regions.begin(), regions.end()); }
  int64_t rows() const { return static_cast<int64_t>(rows_.size()); }

  /// Calls `visit(height index, rows, selected, distinct)` for every tile of every height, and
  /// forgets the rows.
  template <typename Visit>
  void finish(Visit visit) {
    std::vector<int64_t> selected;
    for (const auto& row : rows_) selected.push_back(size_of(row));
    std::vector<int64_t> heights(rows_.size(), 1);
    for (size_t level = 0; level < kTileHeights.size(); ++level) {
      if (level > 0) unite_pairs(heights, selected);
      for (size_t i = 0; i < rows_.size(); ++i) {
        visit(level, heights[i], selected[i], size_of(rows_[i]));
      }
    }
    rows_.clear();
  }

 private:
  void unite_pairs(std::vector<int64_t>& heights, std::vector<int64_t>& selected) {
    const size_t count = (rows_.size() + 1) / 2;
    for (size_t i = 0; i < count; ++i) {
      if (2 * i + 1 == rows_.size()) {  // the last one has no partner
        rows_[i] = std::vector<int32_t>(rows_[2 * i]);
        heights[i] = heights[2 * i];
        selected[i] = selected[2 * i];
        continue;
      }
      std::vector<int32_t> both;
      std::set_union(rows_[2 * i].begin(), rows_[2 * i].end(), rows_[2 * i + 1].begin(),
                     rows_[2 * i + 1].end(), std::back_inserter(both));
      rows_[i] = std::move(both);
      heights[i] = heights[2 * i] + heights[2 * i + 1];
      selected[i] = selected[2 * i] + selected[2 * i + 1];
    }
    rows_.resize(count);
    heights.resize(count);
    selected.resize(count);
  }

  std::vector<std::vector<int32_t>> rows_;
};

/// The weighted mean of tiles, full ones and others apart.
struct FactorSum {
  double full = 0, full_weight = 0;
  double rest = 0, rest_weight = 0;
};

/// Collects everything that `measure_sharing` returns.
class SharingCounter {
 public:
  SharingCounter(const Step& step, GroupRange groups)
      : step_(step), groups_(groups), table_(table_of(step)) {
    const auto rows = static_cast<size_t>(step.rows());
    const auto requests = static_cast<size_t>(step.requests());
    geometry_ = group_geometry(step);
    result_.overlap_at.resize(rows);
    result_.request_overlap.resize(requests);
    result_.request_entries.resize(requests);
    result_.request_skipped.resize(requests);
    selects_.resize(rows);
    used_.resize(static_cast<size_t>(geometry_.blocks * geometry_.regions_per_block));
    for (size_t i = 0; i < kTileHeights.size(); ++i) result_.tiles[i].height = kTileHeights[i];
  }

  void add(const SelectedRow& row) {
    if (row.group != group_ || !row.continues || unions_.rows() == kTileHeights.back()) {
      finish_tile();
    }
    if (row.group != group_) start_group(row.group);
    unions_.add(row.regions);
    if (row.continues) compare_with_before(row);
    for (const int32_t region : row.regions) count_entry(row, region);
    count_request(row);
    before_.assign(row.regions.begin(), row.regions.end());
  }

  Sharing finish(const EntryCount& entries) {
    finish_tile();
    for (size_t i = 0; i < kTileHeights.size(); ++i) {
      const FactorSum& sum = sums_[i];
      const bool full = tiles_full_[i] > 0;
      result_.tiles[i].tiles = full ? tiles_full_[i] : tiles_rest_[i];
      const double weight = full ? sum.full_weight : sum.rest_weight;
      result_.tiles[i].factor = weight > 0 ? (full ? sum.full : sum.rest) / weight : 0;
    }
    for (size_t row = 0; row < selects_.size(); ++row) {
      const bool padding = positions_[row] < 0;
      result_.padding_rows += padding ? 1 : 0;
      result_.empty_rows += !padding && !selects_[row] ? 1 : 0;
    }
    result_.entries = entries;
    return std::move(result_);
  }

 private:
  void start_group(int64_t group) {
    group_ = group;
    std::fill(used_.begin(), used_.end(), false);
  }

  void finish_tile() {
    const bool first_group = group_ == groups_.begin;
    unions_.finish([&](size_t level, int64_t rows, int64_t selected, int64_t distinct) {
      TileSharing& tile = result_.tiles[level];
      tile.loaded += distinct;
      tile.multiplied += distinct * rows;
      const bool full = rows == kTileHeights[level];
      if (first_group) ++(full ? tiles_full_ : tiles_rest_)[level];
      if (selected == 0) return;
      FactorSum& sum = sums_[level];
      const auto height = static_cast<double>(rows);
      const double weighted =
          static_cast<double>(distinct) * height / static_cast<double>(selected) * height;
      (full ? sum.full : sum.rest) += weighted;
      (full ? sum.full_weight : sum.rest_weight) += height;
    });
  }

  void compare_with_before(const SelectedRow& row) {
    both_.clear();
    std::set_intersection(before_.begin(), before_.end(), row.regions.begin(), row.regions.end(),
                          std::back_inserter(both_));
    const auto add = [&](Overlap& overlap) {
      overlap.shared += size_of(both_);
      overlap.compared += static_cast<int64_t>(row.regions.size());
    };
    add(result_.overlap);
    add(result_.overlap_at[static_cast<size_t>(row.place)]);
    if (is_request(row.owner)) add(result_.request_overlap[static_cast<size_t>(row.owner)]);
  }

  void count_entry(const SelectedRow& row, int32_t region) {
    const int64_t own = region_of_position(row.position);
    const auto bin = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(own - region)));
    while (result_.ages.size() <= bin) {
      const size_t next = result_.ages.size();
      result_.ages.push_back({next == 0 ? 0 : int64_t{1} << (next - 1), int64_t{1} << next, 0});
    }
    ++result_.ages[bin].entries;
    const int64_t page = page_of_region(table_, geometry_, row.owner, region, own).page;
    if (!used_[static_cast<size_t>(page)]) {
      used_[static_cast<size_t>(page)] = true;
      ++result_.distinct_pages;
    }
  }

  void count_request(const SelectedRow& row) {
    if (!row.regions.empty()) selects_[static_cast<size_t>(row.row)] = true;
    if (!is_request(row.owner)) return;
    const auto request = static_cast<size_t>(row.owner);
    const auto valid = static_cast<int64_t>(row.regions.size());
    result_.request_entries[request] += valid;
    result_.request_skipped[request] += selection_count(row.position, step_.region_count()) - valid;
  }

  bool is_request(int64_t owner) const { return owner >= 0 && owner < step_.requests(); }

  const Step& step_;
  GroupRange groups_;
  BlockTableView table_;
  PageGeometry geometry_ = {};
  Sharing result_;
  TileUnions unions_;
  std::array<FactorSum, kTileHeights.size()> sums_ = {};
  std::array<int64_t, kTileHeights.size()> tiles_full_ = {};
  std::array<int64_t, kTileHeights.size()> tiles_rest_ = {};
  std::vector<int64_t> positions_ = positions_of(step_);
  std::vector<bool> selects_;  // [rows] in any group
  std::vector<bool> used_;     // [blocks * regions_per_block] of the group at hand
  std::vector<int32_t> before_, both_;
  int64_t group_ = -1;
};

}  // namespace

EntryCount walk_selections(const Step& step, GroupRange groups,
                           const std::function<void(const SelectedRow&)>& visit) {
  EntryCount count;
  const BlockTableView table = table_of(step);
  const PageGeometry geometry = group_geometry(step);
  const RowView view = row_view(step.owners, step.positions);
  const RowTiles order =
      make_row_tiles(step.owners, step.positions, std::max<int64_t>(step.rows(), 1));
  std::vector<int32_t> valid;
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const TensorView regions = regions_of_group(step, group);
    int64_t owner_before = std::numeric_limits<int64_t>::min();
    for (int64_t place = 0; place < step.rows(); ++place) {
      const int64_t row = order.order[static_cast<size_t>(place)];
      const int64_t owner = view.owner(row);
      const int64_t position = view.position(row);
      const Selection selection = selection_of(regions, row, position);
      valid.clear();
      for (int64_t entry = 0; entry < selection.count; ++entry) {
        const int32_t fault =
            page_of_region(table, geometry, owner, selection[entry], selection.own).fault;
        count.invalid_region += fault == status_region;
        count.invalid_owner += fault == status_owner;
        count.invalid_table += fault == status_table;
        if (fault == 0) valid.push_back(selection[entry]);
      }
      if (!std::is_sorted(valid.begin(), valid.end())) std::sort(valid.begin(), valid.end());
      const auto distinct = std::unique(valid.begin(), valid.end());
      count.duplicate += valid.end() - distinct;
      valid.erase(distinct, valid.end());
      count.counted += selection.count;
      count.valid += size_of(valid);
      for (const int32_t region : valid) {
        count.visible_tokens += std::min(kPageTokens - 1, position - region * kPageTokens) + 1;
      }
      visit({group, place, row, owner, position, owner == owner_before, valid});
      owner_before = owner;
    }
  }
  return count;
}

Sharing measure_sharing(const Step& step, GroupRange groups) {
  SharingCounter counter(step, groups);
  const EntryCount entries =
      walk_selections(step, groups, [&](const SelectedRow& row) { counter.add(row); });
  return counter.finish(entries);
}

}  // namespace octopage
