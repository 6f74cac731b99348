#ifndef OCTOPAGE_KV_HOST_LOOKUP_HPP_
#define OCTOPAGE_KV_HOST_LOOKUP_HPP_

#include <cstdint>

#include "core/read_once.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage {

/// `page_of_region` on the host, where another thread may write to the table: the one entry that
/// the look-up needs is read once, and the look-up sees the copy. Same preconditions, same result.
inline PageLookup host_page_of_region(const BlockTableView& table, const PageGeometry& geometry,
                                      int64_t owner, int64_t region, int64_t own_region) {
  int32_t entry = -1;
  if (owner >= 0 && owner < table.requests && region >= 0 && region <= own_region) {
    const uint32_t column =
        static_cast<uint32_t>(region) / static_cast<uint32_t>(geometry.regions_per_block);
    if (column < table.max_blocks)
      entry = read_once(table.data + owner * table.stride_request + column * table.stride_block);
  }
  const BlockTableView copy = {.data = &entry,
                               .requests = table.requests,
                               .max_blocks = table.max_blocks,
                               .stride_request = 0,
                               .stride_block = 0};
  return page_of_region(copy, geometry, owner, region, own_region);
}

}  // namespace octopage

#endif  // OCTOPAGE_KV_HOST_LOOKUP_HPP_
