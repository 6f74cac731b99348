#ifndef OCTOPAGE_BACKENDS_CUDA_PAGES_LAUNCH_HPP_
#define OCTOPAGE_BACKENDS_CUDA_PAGES_LAUNCH_HPP_

// Launchers of the page kernels. Every pointer in the parameters is on the device; each launcher
// checks its launch and throws Error(device_error).

#include <cstdint>
#include <span>

#include "plan/page_functions.hpp"

namespace octopage::cuda {

/// Stream handles without a CUDA header: a cudaStream_t.
using StreamHandle = void*;

/// One launch for pages and query copy. Bits go to `status` [1], which may be null.
void launch_fill(const FillParams& params, int32_t* status, StreamHandle stream);

void launch_stage(const StageParams& params, int32_t* status, StreamHandle stream);

/// Exact positions replace the bounds: positions [rows] i32 or i64 on the device ->
/// `exact_positions` [rows] i64, `indptr` [rows+1], `last_page_len` [rows].
struct FixupParams {
  const void* positions;
  bool wide_positions;
  int64_t stride_positions;
  int64_t rows;
  int64_t region_count;
  const int32_t* planned_indptr;  ///< [rows+1]
  int64_t* exact_positions;
  int32_t* indptr;
  int32_t* last_page_len;
};
void launch_fixup(const FixupParams& params, int32_t* status, StreamHandle stream);

/// The staging plan of a device table and host lengths. Lengths travel as kernel parameters, so
/// nothing is copied and nothing waits.
void launch_staging_plan(const BlockTableView& table, std::span<const int64_t> lengths,
                         int64_t block_size, int32_t* staged_blocks, int32_t* staged_table,
                         int64_t staged_stride_request, int64_t staged_stride_block,
                         StreamHandle stream);

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_PAGES_LAUNCH_HPP_
