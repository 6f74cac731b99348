#ifndef OCTOPAGE_BACKENDS_PAGE_DEVICE_HPP_
#define OCTOPAGE_BACKENDS_PAGE_DEVICE_HPP_

// The page functions and a plan's memory on one kind of device. Arguments have been checked
// (src/api); entries are checked where the work runs.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/executor.hpp"
#include "octopage/tensor.hpp"
#include "plan/page_functions.hpp"

namespace octopage {

/// How a page function runs.
struct PageContext {
  Device device;
  Threads* threads;  ///< CPU
  void* stream;      ///< CUDA
  int32_t* status;   ///< [1] on the device; may be null
};

/// What a plan keeps on its device. Addresses hold while the capacity reached so far suffices.
class PlanStorage {
 public:
  struct Views {
    int32_t* pages;          ///< [entries]
    int32_t* indptr;         ///< [rows+1]
    int32_t* last_page_len;  ///< [rows]
    int64_t* positions;      ///< [rows]
    void* query;             ///< [query_bytes]; null where the plan owns no copy
  };
  virtual ~PlanStorage() = default;
  /// Takes over a plan. Fails without losing the former one. `entries` pages in all.
  virtual void plan(std::span<const int64_t> positions, int64_t region_count, int64_t entries,
                    size_t query_bytes, const PageContext& context) = 0;
  /// Exact positions, [rows] i32 or i64 on the device, replace the bounds.
  virtual void fixup(const TensorView& positions, int64_t region_count,
                     const PageContext& context) = 0;
  virtual Views views() const = 0;
};

class PageDevice {
 public:
  virtual ~PageDevice() = default;
  virtual void fill(const FillParams& params, const PageContext& context) const = 0;
  virtual void stage(const StageParams& params, const PageContext& context) const = 0;
  virtual void write_staging_plan(const BlockTableView& table, std::span<const int64_t> lengths,
                                  int64_t block_size, int32_t* staged_blocks, int32_t* staged_table,
                                  int64_t staged_stride_request, int64_t staged_stride_block,
                                  const PageContext& context) const = 0;
  virtual std::unique_ptr<PlanStorage> make_plan_storage(Device device) const = 0;
  /// Copies device memory to the host and waits: strict checks. Refused under capture.
  virtual void download(const void* from, size_t bytes, void* to,
                        const PageContext& context) const = 0;
};

const PageDevice& host_page_device();

/// The page device of tensors on `device`. Throws Error(unsupported) where this build has none.
const PageDevice& page_device(Device device);

}  // namespace octopage

#endif  // OCTOPAGE_BACKENDS_PAGE_DEVICE_HPP_
