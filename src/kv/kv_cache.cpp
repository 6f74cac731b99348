#include "octopage/kv_cache.hpp"

#include "core/check.hpp"

namespace octopage {
namespace {

/// A stride that holds: the caller's, or `natural` where the dimension has one element at most.
int64_t effective_stride(const TensorView& tensor, size_t d, int64_t natural) {
  return tensor.shape[d] <= 1 ? natural : tensor.strides[d];
}

void check_aligned_stride(const char* which, int64_t stride, int64_t element_bytes) {
  if (stride * element_bytes % 16 != 0) {
    fail_argument("kv_cache.{} = {} elements of {} bytes: cache rows must be 16-byte aligned",
                  which, stride, element_bytes);
  }
}

}  // namespace

KvCacheView KvCacheView::slice_groups(int64_t begin, int64_t end) const {
  if (begin < 0 || end < begin || end > groups) {
    fail_argument("slice_groups: [{}, {}) is not inside the cache's {} groups", begin, end, groups);
  }
  KvCacheView view = *this;
  view.groups = end - begin;
  if (data != nullptr && begin > 0) {
    view.data = static_cast<const char*>(data) + begin * stride_group * itemsize(dtype);
  }
  return view;
}

KvCacheView kv_cache_view(const TensorView& kv_cache) {
  if (kv_cache.rank != 4) {
    fail_argument("kv_cache: must have 4 dimensions [blocks, groups, block_size, 2*dim], has {}",
                  kv_cache.rank);
  }
  KvCacheView view;
  switch (kv_cache.dtype) {
    case DType::bf16:
    case DType::f16:
    case DType::f8_e4m3fn:
      view.dtype = kv_cache.dtype;
      break;
    case DType::u8:
      view.dtype = DType::f8_e4m3fn;
      break;
    default:
      fail_argument("kv_cache: dtype must be bf16, f16, f8_e4m3fn or u8, is {}",
                    name(kv_cache.dtype));
  }
  for (size_t d = 0; d < 4; ++d) {
    if (kv_cache.shape[d] < 0)
      fail_argument("kv_cache.shape[{}] = {} is negative", d, kv_cache.shape[d]);
  }
  const int64_t row = kv_cache.shape[3];
  if (row <= 0 || row % 2 != 0) {
    fail_argument("kv_cache.shape[3] = {}: must be 2*dim, even and positive", row);
  }
  view.data = kv_cache.data;
  view.device = kv_cache.device;
  view.blocks = kv_cache.shape[0];
  view.groups = kv_cache.shape[1];
  view.block_size = kv_cache.shape[2];
  view.dim = row / 2;
  if (view.groups <= 0)
    fail_argument("kv_cache.shape[1] = {}: must have at least one group", view.groups);
  if (view.block_size <= 0 || view.block_size % kPageTokens != 0) {
    fail_argument("kv_cache.shape[2] (block_size) = {}: must be a positive multiple of 8",
                  view.block_size);
  }
  if (view.block_size > INT32_MAX) {
    fail_argument("kv_cache.shape[2] (block_size) = {}: must be below 2^31", view.block_size);
  }
  if (kv_cache.strides[3] != 1) {
    fail_argument("kv_cache.strides[3] = {}: the last dimension must be contiguous",
                  kv_cache.strides[3]);
  }
  const int64_t element_bytes = itemsize(view.dtype);
  view.stride_token = effective_stride(kv_cache, 2, row);
  if (view.stride_token < row) {
    fail_argument("kv_cache.stride_token = {}: must be at least 2*dim = {}", view.stride_token,
                  row);
  }
  const int64_t block_span =
      checked_mul(view.block_size, view.stride_token, "kv_cache: block_size * stride_token");
  view.stride_group = effective_stride(kv_cache, 1, block_span);
  // One block: the page stride is block_size / 8 whatever the caller's stride says.
  view.stride_block = effective_stride(kv_cache, 0, block_span);
  if (view.stride_group < 0)
    fail_argument("kv_cache.stride_group = {} is negative", view.stride_group);
  if (view.stride_block <= 0)
    fail_argument("kv_cache.stride_block = {} is not positive", view.stride_block);
  const int64_t page = checked_mul(kPageTokens, view.stride_token, "kv_cache: 8 * stride_token");
  if (view.stride_block % page != 0) {
    fail_argument(
        "kv_cache.stride_block = {} elements is not a whole number of eight-token pages (8 * {} = "
        "{})",
        view.stride_block, view.stride_token, page);
  }
  if (view.page_stride() > INT32_MAX) {
    fail_argument("kv_cache.stride_block = {}: a page stride of {} must be below 2^31",
                  view.stride_block, view.page_stride());
  }
  // The last element must be addressable in bytes.
  int64_t last = checked_add(block_span, row, "kv_cache extent");
  if (view.blocks > 1) {
    last = checked_add(last, checked_mul(view.blocks - 1, view.stride_block, "kv_cache extent"),
                       "kv_cache extent");
  }
  last = checked_add(last, checked_mul(view.groups - 1, view.stride_group, "kv_cache extent"),
                     "kv_cache extent");
  checked_mul(last, element_bytes, "kv_cache extent in bytes");
  check_aligned_stride("stride_token", view.stride_token, element_bytes);
  check_aligned_stride("stride_group", view.stride_group, element_bytes);
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) {
    fail_argument("kv_cache.data = {}: cache rows must be 16-byte aligned", fmt::ptr(view.data));
  }
  if (view.data == nullptr && view.blocks > 0) {
    fail_argument("kv_cache.data is null, but the cache has {} blocks", view.blocks);
  }
  return view;
}

int64_t kv_page_stride(const TensorView& kv_cache) {
  return kv_cache_view(kv_cache).page_stride();
}

int64_t kv_page_count(const KvCacheView& cache) {
  if (cache.blocks == 0) return 0;
  return ((cache.blocks - 1) * cache.stride_block + cache.block_size * cache.stride_token) /
         (kPageTokens * cache.stride_token);
}

SparseKvPages view_sparse_kv_pages(const TensorView& kv_cache) {
  const KvCacheView cache = kv_cache_view(kv_cache);
  if (cache.groups != 1) {
    fail_argument("kv_cache.shape[1] = {}: a page view covers one group; slice the cache first",
                  cache.groups);
  }
  SparseKvPages pages;
  pages.k.data = const_cast<void*>(cache.data);
  pages.k.dtype = kv_cache.dtype;
  pages.k.device = cache.device;
  pages.k.rank = 4;
  pages.k.shape = {kv_page_count(cache), kPageTokens, 1, cache.dim};
  pages.k.strides = {kPageTokens * cache.stride_token, cache.stride_token, 2 * cache.dim, 1};
  pages.v = pages.k;
  if (cache.data != nullptr) {
    pages.v.data = static_cast<char*>(pages.k.data) + cache.dim * itemsize(cache.dtype);
  }
  return pages;
}

RegionAddress region_address(const KvCacheView& cache, const BlockTableView& table, int64_t group,
                             int64_t owner, int64_t region, int64_t position) {
  if (group < 0 || group >= cache.groups) {
    fail_argument("group = {}: must be in 0 .. {}", group, cache.groups - 1);
  }
  const PageLookup page = region > INT32_MAX ? PageLookup{-1, status_region}
                                             : page_of_region(table, cache.geometry(), owner,
                                                              region, region_of_position(position));
  if (page.fault != 0) return {nullptr, page};
  const int64_t offset = page_offset(cache, group, page.page) * itemsize(cache.dtype);
  return {static_cast<const char*>(cache.data) + offset, page};
}

}  // namespace octopage
