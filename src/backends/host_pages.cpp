// The page functions and a plan's memory on the CPU.

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "backends/backend.hpp"
#include "backends/page_device.hpp"
#include "core/check.hpp"
#include "core/read_once.hpp"
#include "plan/compact_metadata.hpp"

namespace octopage {
namespace {

/// Host memory that keeps its address while the capacity reached so far suffices. Growing is split
/// in two, so that a plan whose memory cannot be had leaves the former one as it was.
template <typename T>
class GrowingBuffer {
 public:
  void prepare(int64_t size) {
    if (size <= capacity_) return;
    try {
      next_ = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(size));
    } catch (const std::bad_alloc&) {
      fail(ErrorCode::out_of_memory, "plan: could not allocate {} bytes",
           size * static_cast<int64_t>(sizeof(T)));
    }
    next_capacity_ = size;
  }
  /// Takes over what `prepare` allocated, if it did.
  void commit() noexcept {
    if (!next_) return;
    data_ = std::move(next_);
    capacity_ = next_capacity_;
  }
  T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_, next_;
  int64_t capacity_ = 0, next_capacity_ = 0;
};

class HostPlanStorage final : public PlanStorage {
 public:
  void plan(std::span<const int64_t> positions, int64_t region_count, int64_t entries,
            size_t query_bytes, const PageContext&) override {
    const auto rows = static_cast<int64_t>(positions.size());
    positions_.prepare(rows);
    planned_indptr_.prepare(rows + 1);
    indptr_.prepare(rows + 1);
    last_page_len_.prepare(rows);
    pages_.prepare(entries);
    query_.prepare(static_cast<int64_t>(query_bytes));
    // From here on nothing fails.
    positions_.commit();
    planned_indptr_.commit();
    indptr_.commit();
    last_page_len_.commit();
    query_.commit();
    pages_.commit();
    std::fill_n(pages_.data(), entries, -1);  // rows not filled since the plan select nothing
    std::copy(positions.begin(), positions.end(), positions_.data());
    write_compact_metadata(positions, region_count, planned_indptr_.data(), last_page_len_.data());
    std::copy_n(planned_indptr_.data(), rows + 1, indptr_.data());
    rows_ = rows;
    owns_query_ = query_bytes > 0;
  }

  void fixup(const TensorView& positions, int64_t region_count,
             const PageContext& context) override {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t at = row * positions.strides[0];
      positions_.data()[row] = positions.dtype == DType::i64
                                   ? read_once(static_cast<const int64_t*>(positions.data) + at)
                                   : read_once(static_cast<const int32_t*>(positions.data) + at);
    }
    raise_status(
        context.status,
        fixup_compact_metadata({positions_.data(), static_cast<size_t>(rows_)}, region_count,
                               planned_indptr_.data(), indptr_.data(), last_page_len_.data()));
  }

  Views views() const override {
    return {.pages = pages_.data(),
            .indptr = indptr_.data(),
            .last_page_len = last_page_len_.data(),
            .positions = positions_.data(),
            .query = owns_query_ ? query_.data() : nullptr};
  }

 private:
  int64_t rows_ = 0;
  bool owns_query_ = false;
  GrowingBuffer<int64_t> positions_;       // [rows] current: bounds, or exact after a fixup
  GrowingBuffer<int32_t> planned_indptr_;  // [rows+1] of the bounds
  GrowingBuffer<int32_t> indptr_;          // [rows+1] current
  GrowingBuffer<int32_t> last_page_len_;   // [rows] current
  GrowingBuffer<int32_t> pages_;           // [entries]
  GrowingBuffer<std::byte> query_;
};

class HostPageDevice final : public PageDevice {
 public:
  void fill(const FillParams& params, const PageContext& context) const override {
    raise_status(context.status, fill_pages(params, *context.threads));
  }
  void stage(const StageParams& params, const PageContext& context) const override {
    raise_status(context.status, stage_pages(params, *context.threads));
  }
  void write_staging_plan(const BlockTableView& table, std::span<const int64_t> lengths,
                          int64_t block_size, int32_t* staged_blocks, int32_t* staged_table,
                          int64_t staged_stride_request, int64_t staged_stride_block,
                          const PageContext&) const override {
    octopage::write_staging_plan(table, lengths, block_size, staged_blocks, staged_table,
                                 staged_stride_request, staged_stride_block);
  }
  std::unique_ptr<PlanStorage> make_plan_storage(Device) const override {
    return std::make_unique<HostPlanStorage>();
  }
  void download(const void* from, size_t bytes, void* to, const PageContext&) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

const PageDevice& host_page_device() {
  static const HostPageDevice device;
  return device;
}

}  // namespace octopage
