#ifndef OCTOPAGE_PAGE_ARITHMETIC_HPP_
#define OCTOPAGE_PAGE_ARITHMETIC_HPP_

// The one place where a region becomes a page: region -> block -> page, with every check. Host
// code and device kernels share it, so an index that one of them refuses is refused by all.
//
//   request's tokens   | 0 .. 7 | 8 .. 15 | 16 .. 23 | ...        region g = tokens 8g .. 8g+7
//   logical block      g / regions_per_block                      regions_per_block = block_size / 8
//   physical block     block_table[owner][logical block]
//   page               physical block * page_stride + g % regions_per_block

#include <cstdint>

#include "octopage/export.h"

namespace octopage {

inline constexpr int64_t kPageTokens = 8;  ///< tokens of a region and of a page

/// Bits that calls OR into the caller's `status`; only the caller clears them.
enum StatusBit : int32_t {
  status_region = 1,     ///< a region id that is negative, past the row's position, or the own region missing
  status_owner = 2,      ///< an owner outside 0 .. requests-1
  status_table = 4,      ///< a table column past the table's width, or a block id outside 0 .. blocks-1
  status_range_cut = 8,  ///< an exact range longer than the planned one
};

/// Physical block of each logical block.
struct BlockTableView {
  const int32_t* data;     ///< [requests, max_blocks]; may be null where a dimension is 0
  int64_t requests;        ///< rows of the table
  int64_t max_blocks;      ///< columns of the table
  int64_t stride_request;  ///< in elements
  int64_t stride_block;    ///< in elements
};

/// How the blocks of one group lie in memory, in units of eight-token pages.
struct PageGeometry {
  int64_t blocks;             ///< block ids are 0 .. blocks-1
  int64_t regions_per_block;  ///< block_size / 8
  int64_t page_stride;        ///< pages between neighbouring blocks
};

/// A page, or the reason why there is none. Both numbers are set, never only one.
struct PageLookup {
  int64_t page;   ///< -1 where fault != 0
  int32_t fault;  ///< 0 or one StatusBit
};

/// The region that holds a position: floor(position / 8), so -1 for -8 .. -1.
OCTOPAGE_HOST_DEVICE constexpr int64_t region_of_position(int64_t position) {
  return position >= 0 ? position / kPageTokens : -((kPageTokens - 1 - position) / kPageTokens);
}

/// How many entries of a row's selection count: min(position / 8 + 1, region_count), 0 for padding.
OCTOPAGE_HOST_DEVICE constexpr int64_t selection_count(int64_t position, int64_t region_count) {
  const int64_t regions = position < 0 ? 0 : region_of_position(position) + 1;
  return regions < region_count ? regions : region_count;
}

/// Tokens of the row's own page that it sees: position mod 8 (floored) + 1, in 1 .. 8.
OCTOPAGE_HOST_DEVICE constexpr int32_t last_page_len(int64_t position) {
  return static_cast<int32_t>(position - region_of_position(position) * kPageTokens) + 1;
}

/// Physical block of a logical block, or -1 with the fault. `owner` must be a valid request.
OCTOPAGE_HOST_DEVICE constexpr PageLookup block_of_column(const BlockTableView& table,
                                                          int64_t blocks, int64_t owner,
                                                          int64_t column) {
  if (column >= table.max_blocks) return {-1, status_table};
  const int64_t block = table.data[owner * table.stride_request + column * table.stride_block];
  if (block < 0 || block >= blocks) return {-1, status_table};
  return {block, 0};
}

/// The page that holds `region` of request `owner`. `own_region` is the row's own region, the
/// largest that it may select; both are below 2^31, and so is geometry.regions_per_block. Dereferences the table only after owner, region and column are
/// known to be inside. The first broken rule is reported, in the order owner, region, table.
OCTOPAGE_HOST_DEVICE constexpr PageLookup page_of_region(const BlockTableView& table,
                                                         const PageGeometry& geometry,
                                                         int64_t owner, int64_t region,
                                                         int64_t own_region) {
  if (owner < 0 || owner >= table.requests) return {-1, status_owner};
  if (region < 0 || region > own_region) return {-1, status_region};
  // Region ids are i32, so 32-bit division suffices; on a GPU it costs a fifth of a 64-bit one.
  const auto id = static_cast<uint32_t>(region);
  const auto per_block = static_cast<uint32_t>(geometry.regions_per_block);
  const uint32_t column = id / per_block;
  const PageLookup block = block_of_column(table, geometry.blocks, owner, column);
  if (block.fault != 0) return block;
  return {block.page * geometry.page_stride + (id - column * per_block), 0};
}

}  // namespace octopage

#endif  // OCTOPAGE_PAGE_ARITHMETIC_HPP_
