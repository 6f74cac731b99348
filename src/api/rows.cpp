#include "core/check.hpp"
#include "octopage/sparse_prefill.hpp"

namespace octopage {

Rows rows_from_query_start_loc(std::span<const int32_t> query_start_loc,
                               std::span<const int32_t> seq_lens) {
  if (query_start_loc.size() != seq_lens.size() + 1) {
    fail_argument("query_start_loc: must have requests + 1 = {} entries, has {}",
                  seq_lens.size() + 1, query_start_loc.size());
  }
  if (query_start_loc[0] != 0) {
    fail_argument("query_start_loc[0] = {}: must be 0", query_start_loc[0]);
  }
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    const int64_t rows = int64_t{query_start_loc[i + 1]} - query_start_loc[i];
    if (rows < 0) {
      fail_argument("query_start_loc[{}] = {}: must not be below query_start_loc[{}] = {}", i + 1,
                    query_start_loc[i + 1], i, query_start_loc[i]);
    }
    if (seq_lens[i] < rows) {
      fail_argument("seq_lens[{}] = {}: must be at least the request's {} rows", i, seq_lens[i],
                    rows);
    }
  }
  Rows rows;
  rows.owners.reserve(static_cast<size_t>(query_start_loc.back()));
  rows.positions.reserve(static_cast<size_t>(query_start_loc.back()));
  for (size_t i = 0; i < seq_lens.size(); ++i) {
    const int64_t count = int64_t{query_start_loc[i + 1]} - query_start_loc[i];
    for (int64_t j = 0; j < count; ++j) {
      rows.owners.push_back(static_cast<int32_t>(i));
      rows.positions.push_back(seq_lens[i] - count + j);
    }
  }
  return rows;
}

}  // namespace octopage
