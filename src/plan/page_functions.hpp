#ifndef OCTOPAGE_PLAN_PAGE_FUNCTIONS_HPP_
#define OCTOPAGE_PLAN_PAGE_FUNCTIONS_HPP_

// The page functions on host memory: staging plan, staging copy and fill. Everything has been
// validated before; only entries that a device could not check beforehand are checked here.

#include <cstdint>
#include <span>

#include "core/executor.hpp"
#include "octopage/kv_cache.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage {

/// Throws Error unless block_size is a positive multiple of 8.
void check_block_size(int64_t block_size);

/// Lists the live blocks of each request and numbers them. `lengths` [table.requests] fit the
/// table.
void write_staging_plan(const BlockTableView& table, std::span<const int64_t> lengths,
                        int64_t block_size, int32_t* staged_blocks, int32_t* staged_table,
                        int64_t staged_stride_request, int64_t staged_stride_block);

/// A staging copy. Strides in elements.
struct StageParams {
  KvCacheView cache;             ///< one group
  const int32_t* staged_blocks;  ///< [staged] block ids
  int64_t staged;
  int64_t stride_staged;
  void* output;  ///< [staged, 1, block_size, 2*dim] contiguous
  DType output_dtype;
  float k_scale;  ///< f8 caches; where the pointers below are null
  float v_scale;
  const float* k_scale_pointer;  ///< [1] on the device; null on the CPU
  const float* v_scale_pointer;
};
/// Returns the status bits of block ids outside the cache, which are staged as zeros.
int32_t stage_pages(const StageParams& params, Threads& threads);

/// A fill of rows `0 .. rows` of a chunk. Strides in elements.
struct FillParams {
  int64_t rows;
  int64_t region_count;
  const int32_t* regions;  ///< [rows, region_count]
  int64_t stride_regions_row;
  int64_t stride_regions_entry;
  BlockTableView table;
  PageGeometry geometry;  ///< blocks may be 2^31 where the cache's size is not known
  const int32_t* owners;  ///< [rows]
  int64_t stride_owners;
  const int32_t* indptr;     ///< [rows+1] contiguous
  const int64_t* positions;  ///< [rows] contiguous; may be null: own region = largest valid id
  int32_t* pages;            ///< the whole page list, contiguous
  int64_t pages_capacity;    ///< ranges beyond it are cut, never overrun
  const void* query;         ///< [rows, heads, dim]; may be null: no copy
  int64_t stride_query_row;
  int64_t stride_query_head;
  void* contiguous_query;  ///< [rows, heads, dim] contiguous; null where query is
  int64_t heads;
  int64_t dim;
  int64_t element_bytes;  ///< of the query
};
/// Returns the status bits that the entries raise.
int32_t fill_pages(const FillParams& params, Threads& threads);

/// The first entry of a fill that a strict call refuses.
struct BadEntry {
  int32_t fault = 0;  ///< 0: none. One StatusBit, or kDuplicate
  int64_t row = 0;
  int64_t group = 0;
  int64_t entry = -1;         ///< index in the row's selection; -1: the owner
  int64_t value = 0;          ///< the region id or owner
  int64_t table_column = -1;  ///< status_table: the column,
  int64_t table_value = 0;    ///< and the entry there, where the column exists
};
inline constexpr int32_t kDuplicate = 1 << 16;  ///< BadEntry::fault: the region was listed before
inline constexpr int32_t kOwnMissing =
    1 << 17;  ///< BadEntry::fault: the row's own region is not listed

/// Finds the first bad entry of one row's selection: the owner, then entries in order, repeated
/// ones included, then the own region if it is missing. `own_region` is that of the row's position;
/// `require_own` also asks for the own region.
BadEntry check_selection(const BlockTableView& table, const PageGeometry& geometry, int64_t owner,
                         const int32_t* regions, int64_t stride_entry, int64_t count,
                         int64_t own_region, bool require_own);

}  // namespace octopage

#endif  // OCTOPAGE_PLAN_PAGE_FUNCTIONS_HPP_
