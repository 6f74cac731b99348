#ifndef OCTOPAGE_BACKENDS_CUDA_PAGED_PARAMS_HPP_
#define OCTOPAGE_BACKENDS_CUDA_PAGED_PARAMS_HPP_

// What the attention kernel reads: one record, the same on host and device. No CUDA in this file.

#include <cstdint>
#include <type_traits>

#include "octopage/page_arithmetic.hpp"

namespace octopage::cuda {

/// Where a row's pages come from.
struct PageSource {
  // Planned path: a flat list. `pages` is null on the direct path.
  const int32_t* pages;   ///< [capacity] page ids; those outside 0 .. page_count-1 are skipped
  const int32_t* indptr;  ///< [rows+1]
  const int32_t* last_page_len;  ///< [rows]
  int64_t page_count;
  int64_t page_capacity;  ///< entries of `pages`
  // Direct path: selections and block table.
  BlockTableView table;
  PageGeometry geometry;
  const int32_t* owners;  ///< [rows]
  int64_t stride_owners;
  const void* positions;  ///< [rows] i32, or i64 where wide_positions
  int64_t stride_positions;
  const int32_t* regions;  ///< [rows, groups, region_count]
  int64_t stride_regions_row;
  int64_t stride_regions_group;
  int64_t stride_regions_entry;
  int32_t wide_positions;
  int64_t region_count;  ///< entries of a row at most, on both paths
};

/// Strides in elements unless they end in _bytes.
struct PagedAttentionParams {
  const void* query;  ///< [rows, groups * heads_per_group, dim]
  int64_t stride_query_row;
  int64_t stride_query_head;
  void* output;  ///< [rows, groups * heads_per_group, dim]
  int64_t stride_output_row;
  int64_t stride_output_head;
  float* lse;  ///< [rows, groups * heads_per_group]; may be null
  int64_t stride_lse_row;
  int64_t stride_lse_head;
  const char* cache;  ///< page p of group g begins at g * stride_group_bytes + p * page_bytes
  int64_t stride_group_bytes;
  int64_t page_bytes;
  int64_t stride_token_bytes;
  PageSource source;
  int32_t* status;         ///< [1]; may be null
  const int32_t* only_if;  ///< [1]; where it is 0 the kernel does nothing; may be null
  const float* k_scale;    ///< [1]; null: folded into `scale`
  const float* v_scale;    ///< [1]; null: folded into `output_scale`
  float scale;             ///< multiplies q . k
  float output_scale;      ///< multiplies the normalised sum
  int32_t heads_per_group;
  int32_t groups;
  int32_t head_tiles;     ///< ceil(heads_per_group / 16)
  int32_t output_is_f32;  ///< else the query's type
  int32_t aligned_query;  ///< 16-byte loads are possible
  int32_t aligned_output;
};
static_assert(std::is_trivially_copyable_v<PagedAttentionParams>);
static_assert(sizeof(PagedAttentionParams) < 4096, "kernel parameters");

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_PAGED_PARAMS_HPP_
