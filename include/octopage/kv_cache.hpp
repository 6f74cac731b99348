#ifndef OCTOPAGE_KV_CACHE_HPP_
#define OCTOPAGE_KV_CACHE_HPP_

#include <cstdint>

#include "octopage/export.h"
#include "octopage/page_arithmetic.hpp"
#include "octopage/tensor.hpp"

namespace octopage {

/// A paged KV cache `[blocks, groups, block_size, 2*dim]`. K of a token lies in `[0, dim)` of its
/// cache row and V in `[dim, 2*dim)`. Strides are in elements; those of dimensions of size 1 have
/// been replaced by ones that hold (see `kv_cache_view`).
struct OCTOPAGE_API KvCacheView {
  const void* data =
      nullptr;  ///< [blocks, groups, block_size, 2*dim], 16-byte aligned; may be null if blocks = 0
  DType dtype = DType::bf16;  ///< bf16, f16 or f8_e4m3fn
  Device device = {};
  int64_t blocks = 0;
  int64_t groups = 0;
  int64_t block_size = 0;  ///< tokens, a multiple of 8
  int64_t dim = 0;         ///< elements of K (and of V) of one token and group
  int64_t stride_block = 0;
  int64_t stride_group = 0;
  int64_t stride_token = 0;  ///< >= 2*dim

  /// Pages between neighbouring blocks of one group: stride_block / (8 * stride_token).
  int64_t page_stride() const { return stride_block / (kPageTokens * stride_token); }
  PageGeometry geometry() const { return {blocks, block_size / kPageTokens, page_stride()}; }
  /// Groups `[begin, end)` of the same cache. Throws Error when out of range.
  KvCacheView slice_groups(int64_t begin, int64_t end) const;
};

/// Checks a tensor against the rules of a cache and describes it.
///
/// Rules: rank 4; bf16, f16, f8_e4m3fn or u8; block_size a positive multiple of 8; an even last
/// dimension that is contiguous; stride_token >= 2*dim; rows 16-byte aligned; a block stride of a
/// whole number of eight-token pages. A stride of a dimension of size 1 means nothing and is
/// replaced. Throws Error(invalid_argument) with argument, rule and value.
OCTOPAGE_API KvCacheView kv_cache_view(const TensorView& kv_cache);

/// The page stride of a cache: whole pages of eight tokens between neighbouring blocks of a group,
/// block_size / 8 where there is one block. Throws as `kv_cache_view`.
OCTOPAGE_API int64_t kv_page_stride(const TensorView& kv_cache);

/// K and V of a cache with one group as pages.
struct SparseKvPages {
  TensorView k;  ///< [pages, 8, 1, dim], strides (8*stride_token, stride_token, 2*dim, 1)
  TensorView v;  ///< the same, dim elements further
};

/// Views a cache of one group as `pages = ((blocks-1)*stride_block + block_size*stride_token) /
/// (8*stride_token)` pages of eight tokens, gaps between blocks retained, without a copy. With no
/// block there is no page. Throws as `kv_cache_view`, or if groups != 1.
OCTOPAGE_API SparseKvPages view_sparse_kv_pages(const TensorView& kv_cache);

/// Pages in the view of one group (see `view_sparse_kv_pages`).
OCTOPAGE_API int64_t kv_page_count(const KvCacheView& cache);

/// Elements from `cache.data` to token 0 of `page` in `group`.
constexpr int64_t page_offset(const KvCacheView& cache, int64_t group, int64_t page) {
  return group * cache.stride_group + page * (kPageTokens * cache.stride_token);
}

/// Where K of the first token of a region lies, checked: the first element's address, or null with
/// the reason. CPU caches and tables; `position` is that of the row which asks.
struct RegionAddress {
  const void* data;  ///< [8, 2*dim] with stride_token; null where fault != 0
  PageLookup page;
};
OCTOPAGE_API RegionAddress region_address(const KvCacheView& cache, const BlockTableView& table,
                                          int64_t group, int64_t owner, int64_t region,
                                          int64_t position);

}  // namespace octopage

#endif  // OCTOPAGE_KV_CACHE_HPP_
