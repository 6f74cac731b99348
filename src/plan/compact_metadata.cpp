#include "plan/compact_metadata.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/check.hpp"
#include "core/read_once.hpp"
#include "octopage/page_arithmetic.hpp"
#include "octopage/page_plan.hpp"

namespace octopage {

int64_t compact_entry_count(std::span<const int64_t> positions, int64_t region_count) {
  if (region_count < 0) fail_argument("region_count = {} is negative", region_count);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kPositionLimit = int64_t{1} << 34;
  int64_t total = 0;
  for (size_t row = 0; row < positions.size(); ++row) {
    if (positions[row] >= kPositionLimit) {
      fail_argument("positions[{}] = {}: must be below 2^34, so that its region fits i32", row,
                    positions[row]);
    }
    const int64_t count = selection_count(positions[row], region_count);
    if (count > kMost - total) {
      fail_argument(
          "positions: the first {} of {} rows need {} page entries in all, more than 2^31 - 1",
          row + 1, positions.size(), total + count);
    }
    total += count;
  }
  return total;
}

void write_compact_metadata(std::span<const int64_t> positions, int64_t region_count,
                            int32_t* indptr, int32_t* last_page_len_out) {
  int64_t total = 0;
  indptr[0] = 0;
  for (size_t row = 0; row < positions.size(); ++row) {
    total += selection_count(positions[row], region_count);
    indptr[row + 1] = static_cast<int32_t>(total);
    last_page_len_out[row] = last_page_len(positions[row]);
  }
}

int32_t fixup_compact_metadata(std::span<const int64_t> positions, int64_t region_count,
                               const int32_t* planned_indptr, int32_t* indptr,
                               int32_t* last_page_len_out) {
  int32_t status = 0;
  int32_t total = 0;
  indptr[0] = 0;
  for (size_t row = 0; row < positions.size(); ++row) {
    const int64_t planned = planned_indptr[row + 1] - planned_indptr[row];
    const int64_t exact = selection_count(positions[row], region_count);
    if (exact > planned) status = status_range_cut;
    total += static_cast<int32_t>(std::min(exact, planned));
    indptr[row + 1] = total;
    last_page_len_out[row] = last_page_len(positions[row]);
  }
  return status;
}

CompactPageMetadata compact_page_metadata(std::span<const int64_t> positions_given,
                                          int64_t region_count) {
  const std::vector<int64_t> positions = copy_once(positions_given);
  compact_entry_count(positions, region_count);
  CompactPageMetadata metadata;
  metadata.indptr.resize(positions.size() + 1);
  metadata.last_page_len.resize(positions.size());
  write_compact_metadata(positions, region_count, metadata.indptr.data(),
                         metadata.last_page_len.data());
  return metadata;
}

}  // namespace octopage
