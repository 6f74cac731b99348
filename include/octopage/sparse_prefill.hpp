#ifndef OCTOPAGE_SPARSE_PREFILL_HPP_
#define OCTOPAGE_SPARSE_PREFILL_HPP_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "octopage/export.h"
#include "octopage/options.hpp"
#include "octopage/tensor.hpp"

namespace octopage {

/// The tensors of one prefill call, all on one device.
struct SparsePrefillArgs {
  TensorView query;     ///< [rows, heads, dim] bf16 or f16; any row and head stride, dim contiguous
  TensorView kv_cache;  ///< [blocks, groups, block_size, 2*dim]; rules at kv_cache_view()
  TensorView block_table;  ///< [requests, max_blocks] i32
  TensorView owners;       ///< [rows] i32, the request of each row, in any order
  TensorView positions;    ///< [rows] i32 or i64, position in the request; negative: a padding row
  TensorView regions;  ///< [rows, groups, region_count] i32, or [rows, region_count] for all groups
  TensorView output;   ///< [rows, heads, dim], the query's type or f32; written in full
  TensorView lse = {};  ///< [rows, heads] f32, natural logarithm; may be absent
  float scale = 1.0f;   ///< multiplies q . k before the softmax
  Scale k_scale = {};   ///< f8 caches: required
  Scale v_scale = {};   ///< f8 caches: required
};

/// Attention of every row to the tokens `t <= position` of its selected regions, straight from the
/// paged cache: no plan, no page list, no staging, all groups in one call.
///
/// Query head h reads group `h / (heads / groups)`. Of a row at position p the first
/// `min(p / 8 + 1, region_count)` entries of its selection count. A row that sees no token gives
/// output 0 and lse -inf. Outputs share no memory with inputs or with each other. Invalid entries
/// are skipped (or fail the call, see Options::strict). Throws Error: invalid_argument,
/// unsupported, invalid_entry (strict), out_of_memory.
OCTOPAGE_API void sparse_prefill(const SparsePrefillArgs& args, const Options& options = {});

/// Bytes of workspace that `sparse_prefill` uses for the same arguments and options; the data
/// pointers are not read. Throws as `sparse_prefill` would for the shapes.
OCTOPAGE_API size_t sparse_prefill_workspace_size(const SparsePrefillArgs& args,
                                                  const Options& options = {});

/// Owners and positions of a batch as engines describe it.
struct Rows {
  std::vector<int32_t> owners;     ///< [rows]
  std::vector<int64_t> positions;  ///< [rows]
};

/// Expands a batch: request `i` owns rows `query_start_loc[i] .. query_start_loc[i+1]`, which are
/// the last tokens of its `seq_lens[i]`.
///
/// `query_start_loc` is [requests+1], starts with 0 and does not fall; `seq_lens` is [requests] and
/// no smaller than the request's rows. Throws Error(invalid_argument) otherwise.
OCTOPAGE_API Rows rows_from_query_start_loc(std::span<const int32_t> query_start_loc,
                                            std::span<const int32_t> seq_lens);

}  // namespace octopage

#endif  // OCTOPAGE_SPARSE_PREFILL_HPP_
