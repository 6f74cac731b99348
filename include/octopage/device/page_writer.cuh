#ifndef OCTOPAGE_DEVICE_PAGE_WRITER_CUH_
#define OCTOPAGE_DEVICE_PAGE_WRITER_CUH_

// For kernels of an engine's own, such as a top-k indexer: they write pages straight into a plan's
// page list, through the same checked arithmetic as octopage, and `fill_prefill_pages` is not
// needed.
//
//     // host, once per group
//     const auto metadata = plan.page_metadata(block_table, owners,
//     octopage::kv_page_stride(kv_cache)); const auto writer =
//     octopage::device::make_page_writer(*metadata, kv_cache.shape[0], status); my_indexer<<<rows,
//     ...>>>(writer, ...); plan.finish(query, kv_cache, output);
//
//     // device, for each row
//     const octopage::device::RowPages row = writer.row(r);
//     for (slot in 0 .. row.count() - 2, shared out among threads) row.write(slot, region[slot]);
//     if (one thread) row.write_own();
//
// This header needs nvcc; it is the only public one that does.

#include <cstdint>

#include "octopage/page_arithmetic.hpp"
#include "octopage/page_plan.hpp"

namespace octopage::device {

/// The page list of one row. Slots 0 .. count()-2 take any valid regions but the own one, each
/// once; the last slot is the own region's, whose page is cut at the row's position.
class RowPages {
 public:
  /// Entries that the row must write; 0 for padding rows.
  __device__ int32_t count() const { return count_; }
  /// The region of the row's own position, the largest that it may select.
  __device__ int64_t own_region() const { return own_region_; }

  /// Writes the page of `region` to `slot`. An invalid region, owner or table entry becomes page -1
  /// and raises its StatusBit; a slot outside 0 .. count()-2 is ignored.
  __device__ void write(int32_t slot, int32_t region) const {
    if (slot >= 0 && slot < count_ - 1) store(slot, region);
  }

  /// Writes the last slot. Once per row with count() > 0.
  __device__ void write_own() const {
    if (count_ > 0) store(count_ - 1, own_region_);
  }

 private:
  friend class PageWriter;

  __device__ void store(int32_t slot, int64_t region) const {
    PageLookup page = {-1, status_region};
    if (region <= INT32_MAX)
      page = page_of_region(*table_, *geometry_, owner_, region, own_region_);
    if (page.page > INT32_MAX) page = {-1, status_table};
    if (page.fault != 0 && status_ != nullptr) atomicOr(status_, page.fault);
    pages_[slot] = static_cast<int32_t>(page.page);
  }

  const BlockTableView* table_;
  const PageGeometry* geometry_;
  int32_t* pages_;   // the row's first entry
  int32_t* status_;  // may be null
  int64_t owner_;
  int64_t own_region_;
  int32_t count_;
};

/// A plan's page list as a kernel argument. Made by `make_page_writer`.
class PageWriter {
 public:
  /// Rows that the writer covers.
  __host__ __device__ int64_t rows() const { return rows_; }

  /// Row `r` of the covered ones. The result refers to this writer, which must outlive it.
  __device__ RowPages row(int64_t r) const {
    RowPages row;
    row.table_ = &table_;
    row.geometry_ = &geometry_;
    const int32_t begin = indptr_[r];
    const int64_t end = indptr_[r + 1] < capacity_ ? indptr_[r + 1] : capacity_;
    row.pages_ = pages_ + begin;
    row.count_ = begin < 0 || end <= begin ? 0 : static_cast<int32_t>(end - begin);
    row.status_ = status_;
    row.owner_ = owners_[r * stride_owners_];
    row.own_region_ = region_of_position(positions_[r]);
    return row;
  }

 private:
  friend PageWriter make_page_writer(const PagedPrefillMetadata& metadata, int64_t blocks,
                                     int32_t* status);

  BlockTableView table_;
  PageGeometry geometry_;
  const int32_t* owners_;  // [rows]
  int64_t stride_owners_;
  const int32_t* indptr_;     // [rows+1]
  const int64_t* positions_;  // [rows]
  int32_t* pages_;            // [capacity]
  int64_t capacity_;
  int64_t rows_;
  int32_t* status_;  // [1] on the device; may be null
};

/// `blocks` of the cache; `status` [1] i32 on the device, may be null. The metadata's tensors must
/// stay alive while kernels use the writer.
inline PageWriter make_page_writer(const PagedPrefillMetadata& metadata, int64_t blocks,
                                   int32_t* status) {
  PageWriter writer;
  writer.table_ = {static_cast<const int32_t*>(metadata.block_table.data),
                   metadata.block_table.shape[0], metadata.block_table.shape[1],
                   metadata.block_table.strides[0], metadata.block_table.strides[1]};
  writer.geometry_ = {blocks, metadata.block_size / kPageTokens, metadata.page_stride};
  writer.owners_ = static_cast<const int32_t*>(metadata.owners.data);
  writer.stride_owners_ = metadata.owners.strides[0];
  writer.indptr_ = static_cast<const int32_t*>(metadata.indptr.data);
  writer.positions_ = static_cast<const int64_t*>(metadata.positions.data);
  writer.pages_ = static_cast<int32_t*>(metadata.pages.data);
  writer.capacity_ = metadata.pages.shape[0];
  writer.rows_ = metadata.owners.shape[0];
  writer.status_ = status;
  return writer;
}

}  // namespace octopage::device

#endif  // OCTOPAGE_DEVICE_PAGE_WRITER_CUH_
