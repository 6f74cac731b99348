#ifndef OCTOPAGE_PLAN_COMPACT_METADATA_HPP_
#define OCTOPAGE_PLAN_COMPACT_METADATA_HPP_

#include <cstdint>
#include <span>

namespace octopage {

/// Entries of the page list for rows at these positions. Throws Error where it exceeds 2^31 - 1,
/// a position is 2^34 or more, or region_count is negative.
int64_t compact_entry_count(std::span<const int64_t> positions, int64_t region_count);

/// Writes `indptr` [rows+1] and `last_page_len` [rows]. The total has been checked.
void write_compact_metadata(std::span<const int64_t> positions, int64_t region_count,
                            int32_t* indptr, int32_t* last_page_len);

/// Exact positions replace the bounds: every range keeps at most its count in `planned_indptr`
/// [rows+1]. Writes `indptr` [rows+1] and `last_page_len` [rows]; returns status_range_cut if a
/// range was cut, else 0.
int32_t fixup_compact_metadata(std::span<const int64_t> positions, int64_t region_count,
                               const int32_t* planned_indptr, int32_t* indptr,
                               int32_t* last_page_len);

}  // namespace octopage

#endif  // OCTOPAGE_PLAN_COMPACT_METADATA_HPP_
