#ifndef OCTOPAGE_KV_HOST_LOOKUP_HPP_
#define OCTOPAGE_KV_HOST_LOOKUP_HPP_

#include <cstdint>

#include "core/read_once.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage {

/// `page_of_region` on the host, where another thread may write to the table: its one entry is read
/// once. The rules and their order are those of `page_of_region`, and tests/kv holds them together.
inline PageLookup host_page_of_region(const BlockTableView& table, const PageGeometry& geometry,
                                      int64_t owner, int64_t region, int64_t own_region) {
  if (owner < 0 || owner >= table.requests) return {-1, status_owner};
  if (region < 0 || region > own_region) return {-1, status_region};
  const RequestLookup lookup = request_lookup(table, geometry, owner);
  const uint32_t column = static_cast<uint32_t>(region) / lookup.regions_per_block;
  if (column >= lookup.columns) return {-1, status_table};
  const int32_t block = read_once(lookup.blocks + column * lookup.stride_block);
  if (static_cast<uint32_t>(block) >= lookup.block_count) return {-1, status_table};
  return {page_of_block(lookup, block, static_cast<uint32_t>(region), column), 0};
}

}  // namespace octopage

#endif  // OCTOPAGE_KV_HOST_LOOKUP_HPP_
