#ifndef OCTOPAGE_PAGE_ARITHMETIC_HPP_
#define OCTOPAGE_PAGE_ARITHMETIC_HPP_

// The one place where a region becomes a page: region -> block -> page, with every check. Host
// code and device kernels share it, so an index that one of them refuses is refused by all.
//
// clang-format off
//   tokens of a request   | 0 .. 7 | 8 .. 15 | 16 .. 23 | ...     region g: tokens 8 g .. 8 g + 7
//   logical block         g / regions_per_block                   regions_per_block = block_size / 8
//   physical block        block_table[owner][logical block]
//   page                  physical block * page_stride + g % regions_per_block
// clang-format on

#include <cstdint>

#include "octopage/export.h"

namespace octopage {

inline constexpr int64_t kPageTokens = 8;  ///< tokens of a region and of a page

/// Bits that calls OR into the caller's `status`; only the caller clears them.
enum StatusBit : int32_t {
  /// A region id that is negative or past the row's position, or the own region is missing.
  status_region = 1,
  status_owner = 2,  ///< an owner outside 0 .. requests-1
  status_table = 4,  ///< a table column past the table's width, or a block id outside 0 .. blocks-1
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

/// Regions of a request that the table has columns for, 2^31 at most: no region id lies beyond.
/// `regions_per_block` is positive.
OCTOPAGE_HOST_DEVICE constexpr int64_t table_regions(const BlockTableView& table,
                                                     const PageGeometry& geometry) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (table.max_blocks > kMost / geometry.regions_per_block) return kMost;
  return table.max_blocks * geometry.regions_per_block;
}

/// The region that holds a position: floor(position / 8), so -1 for -8 .. -1.
OCTOPAGE_HOST_DEVICE constexpr int64_t region_of_position(int64_t position) {
  return position >= 0 ? position / kPageTokens : ~(~position / kPageTokens);
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

/// One request's row of the table, made ready for many look-ups in 32 bits.
struct RequestLookup {
  const int32_t* blocks;       ///< [columns]; may be null where columns = 0
  int64_t stride_block;        ///< in elements
  uint32_t columns;            ///< of the table
  uint32_t block_count;        ///< block ids are 0 .. block_count-1
  uint32_t regions_per_block;  ///< of the cache
  uint32_t page_stride;        ///< pages between neighbouring blocks
};

/// `owner` must be a valid request, page_stride and regions_per_block below 2^31.
OCTOPAGE_HOST_DEVICE constexpr RequestLookup request_lookup(const BlockTableView& table,
                                                            const PageGeometry& geometry,
                                                            int64_t owner) {
  constexpr int64_t kMost = int64_t{1} << 31;  // columns and blocks beyond it cannot be named
  return {table.data + owner * table.stride_request,
          table.stride_block,
          static_cast<uint32_t>(table.max_blocks < kMost ? table.max_blocks : kMost),
          static_cast<uint32_t>(geometry.blocks < kMost ? geometry.blocks : kMost),
          static_cast<uint32_t>(geometry.regions_per_block),
          static_cast<uint32_t>(geometry.page_stride)};
}

/// The page of a region whose block id `block` the table holds in its column; the block is inside.
OCTOPAGE_HOST_DEVICE constexpr int64_t page_of_block(const RequestLookup& lookup, int32_t block,
                                                     uint32_t region, uint32_t column) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(block)) *
                                  lookup.page_stride +
                              (region - column * lookup.regions_per_block));
}

/// The page that holds `region` of request `owner`. `own_region` is the row's own region, the
/// largest that it may select; `region` is below 2^31. Dereferences the table only after owner,
/// region and column are known to be inside. The first broken rule is reported, in the order owner,
/// region, table.
OCTOPAGE_HOST_DEVICE constexpr PageLookup page_of_region(const BlockTableView& table,
                                                         const PageGeometry& geometry,
                                                         int64_t owner, int64_t region,
                                                         int64_t own_region) {
  if (owner < 0 || owner >= table.requests) return {-1, status_owner};
  if (region < 0 || region > own_region) return {-1, status_region};
  const RequestLookup lookup = request_lookup(table, geometry, owner);
  const uint32_t column = static_cast<uint32_t>(region) / lookup.regions_per_block;
  if (column >= lookup.columns) return {-1, status_table};
  const int32_t block = lookup.blocks[column * lookup.stride_block];
  // One unsigned comparison refuses negative ids as well.
  if (static_cast<uint32_t>(block) >= lookup.block_count) return {-1, status_table};
  return {page_of_block(lookup, block, static_cast<uint32_t>(region), column), 0};
}

}  // namespace octopage

#endif  // OCTOPAGE_PAGE_ARITHMETIC_HPP_
