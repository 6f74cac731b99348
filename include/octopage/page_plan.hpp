#ifndef OCTOPAGE_PAGE_PLAN_HPP_
#define OCTOPAGE_PAGE_PLAN_HPP_

// The planned path: positions become ranges of a flat page list, selections fill the list, and
// attention runs over it. It serves one group at a time; callers loop over slices of the cache and
// of the selections. `sparse_prefill` needs none of this.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "octopage/export.h"
#include "octopage/options.hpp"
#include "octopage/tensor.hpp"

namespace octopage {

/// Where each row's pages stand in the flat page list.
struct CompactPageMetadata {
  std::vector<int32_t> indptr;         ///< [rows+1], row r owns entries indptr[r] .. indptr[r+1]
  std::vector<int32_t> last_page_len;  ///< [rows], tokens of the row's last page, 1 .. 8
};

/// Ranges of rows at these positions: `min(p / 8 + 1, region_count)` pages each, none for negative
/// positions. Throws Error(invalid_argument) for a negative region_count, for a position of 2^34 or
/// more (no i32 names its region) and for more than 2^31 - 1 entries in all.
OCTOPAGE_API CompactPageMetadata compact_page_metadata(std::span<const int64_t> positions,
                                                       int64_t region_count);

/// The blocks that staging gathers, and the table that finds them in the staged cache.
struct StagedPrefillPages {
  std::vector<int32_t> blocks;  ///< [staged] physical block ids, request by request
  std::vector<int32_t> table;   ///< [requests, max_blocks], numbered 0, 1, 2, ...; 0 past a length
  int64_t requests = 0;
  int64_t max_blocks = 0;
};

/// Blocks that `plan_staged_prefill_pages` lists: the sum of ceil(length / block_size).
/// Throws Error(invalid_argument) for a negative length or a block_size that is not a multiple
/// of 8.
OCTOPAGE_API int64_t staged_block_count(std::span<const int64_t> lengths, int64_t block_size);

/// Plans the staging of every live block of a CPU block table `[requests, max_blocks]` i32 whose
/// requests hold `lengths` tokens ([requests]). A block shared by two requests is staged twice.
/// Throws Error(invalid_argument) where a length goes beyond the table's width.
OCTOPAGE_API StagedPrefillPages plan_staged_prefill_pages(const TensorView& block_table,
                                                          std::span<const int64_t> lengths,
                                                          int64_t block_size);

/// The same into the caller's tensors, on the table's device: `staged_blocks` [staged] i32 with
/// staged = staged_block_count(...), `staged_table` [requests, max_blocks] i32.
OCTOPAGE_API void plan_staged_prefill_pages(const TensorView& block_table,
                                            std::span<const int64_t> lengths, int64_t block_size,
                                            const TensorView& staged_blocks,
                                            const TensorView& staged_table,
                                            const Options& options = {});

/// Gathers blocks of one group into a contiguous cache of bf16 or f16.
///
/// `kv_cache` [blocks, 1, block_size, 2*dim], any legal strides; `staged_blocks` [staged] i32;
/// `output` [staged, 1, block_size, 2*dim] bf16 or f16, contiguous. From f8, K is multiplied by
/// `k_scale` and V by `v_scale` in f32 before rounding once; both are then required. A block id
/// outside the cache is staged as zeros and raises status_table (strict: fails first).
OCTOPAGE_API void stage_prefill_pages(const TensorView& kv_cache, const TensorView& staged_blocks,
                                      const TensorView& output, Scale k_scale = {},
                                      Scale v_scale = {}, const Options& options = {});

struct FillPrefillPagesArgs {
  TensorView regions;      ///< [rows, region_count] i32, any strides
  TensorView block_table;  ///< [requests, max_blocks] i32
  TensorView owners;       ///< [rows] i32
  TensorView indptr;       ///< [rows+1] i32, a slice of the plan's; need not start with 0
  TensorView pages;  ///< [capacity] i32, the plan's whole list: written at indptr[r] .. indptr[r+1]
  int64_t block_size = 0;   ///< tokens
  int64_t page_stride = 0;  ///< pages between neighbouring blocks
  /// Blocks of the cache: table entries outside 0 .. blocks-1 are invalid. Negative: not known, and
  /// only negative entries are.
  int64_t blocks = -1;
  /// [rows] i64 exact positions; may be absent. Without them the own region of a row is the largest
  /// region among its entries that is valid otherwise.
  TensorView positions = {};
  TensorView query = {};  ///< [rows, heads, dim] bf16 or f16; may be absent
  TensorView contiguous_query =
      {};  ///< [rows, heads, dim] contiguous, receives query; may be absent
};

/// Writes each row's pages in the order of its regions, the row's own region moved last. An
/// invalid entry becomes page -1 in its place; a selection without the row's own region is invalid,
/// and all its entries become -1. Copies the query where both query tensors are given.
/// Rows can be filled in chunks, in any order of chunks.
OCTOPAGE_API void fill_prefill_pages(const FillPrefillPagesArgs& args, const Options& options = {});

/// What an indexer needs to write pages itself.
struct PagedPrefillMetadata {
  TensorView owners;       ///< [rows] i32
  TensorView block_table;  ///< [requests, max_blocks] i32
  TensorView pages;        ///< [capacity] i32, the whole list
  TensorView indptr;       ///< [rows+1] i32
  TensorView positions;    ///< [rows] i64, the plan's current positions
  int64_t block_size = 0;
  int64_t page_stride = 0;
};

struct PrefillPlanArgs {
  std::array<int64_t, 3> query_shape = {};  ///< rows, heads (of one group), dim
  DType dtype = DType::bf16;                ///< of the query: bf16 or f16
  Device device = {};
  std::span<const int64_t> positions;  ///< [rows] on the host; upper bounds are allowed
  int64_t region_count = 0;
  float scale = 1.0f;
  int64_t block_size = 0;
  bool contiguous_query = true;  ///< false: the plan owns a contiguous copy of the query
};

/// One plan for a whole prefill step, shared by its layers.
///
///     plan -> [fixup_positions] -> per layer: fill (prepare_chunk, or page_metadata and the
///     indexer's own writes) -> finish
///
/// `pages`, `indptr` and the query buffer keep their addresses across plans while the capacity
/// reached so far suffices; their contents do not survive. Rows that nobody filled since the last
/// plan select nothing: `finish` gives them output 0 and lse -inf. An object is used by one thread
/// at a time; different objects are independent.
class OCTOPAGE_API CompactPagedPrefill {
 public:
  /// `workspace` is scratch for `finish`, any dtype, contiguous; may be absent (see
  /// Options::workspace, which wins over it). Nothing lives in it between calls.
  explicit CompactPagedPrefill(const TensorView& workspace = {});
  ~CompactPagedPrefill();
  CompactPagedPrefill(CompactPagedPrefill&&) noexcept;
  CompactPagedPrefill& operator=(CompactPagedPrefill&&) noexcept;

  /// Plans a step. rows = positions.size() > 0. Throws Error(invalid_argument) and keeps the former
  /// plan where a rule is broken.
  void plan(const PrefillPlanArgs& args, const Options& options = {});

  /// Exact positions ([rows] i32 or i64 on the plan's device) replace the bounds. A row whose exact
  /// range is longer than planned is cut at its planned count and raises status_range_cut.
  void fixup_positions(const TensorView& positions, const Options& options = {});

  /// What an indexer needs to write the pages of rows `[start, end)` itself; nothing if this object
  /// owns a query copy (then `prepare_chunk` must see every row). end = -1: the last row.
  std::optional<PagedPrefillMetadata> page_metadata(const TensorView& block_table,
                                                    const TensorView& owners, int64_t page_stride,
                                                    int64_t start = 0, int64_t end = -1) const;

  /// Fills the pages of rows `start .. start + rows(query)` and copies their query. Only with an
  /// owned query buffer. `query` [chunk, heads, dim], `kv_cache` one group, `regions` [chunk,
  /// region_count], `owners` [chunk], or [rows] for the whole plan.
  void prepare_chunk(int64_t start, const TensorView& query, const TensorView& kv_cache,
                     const TensorView& regions, const TensorView& block_table,
                     const TensorView& owners, const Options& options = {});

  /// Attention over the prepared pages. Reads the owned query buffer, or `query` [rows, heads, dim]
  /// where there is none. `kv_cache` one group; `output` [rows, heads, dim] of the query's type or
  /// f32; `lse` [rows, heads] f32, may be absent. f8 caches need both scales. Page ids outside the
  /// cache's view are skipped.
  void finish(const TensorView& query, const TensorView& kv_cache, const TensorView& output,
              const TensorView& lse = {}, Scale k_scale = {}, Scale v_scale = {},
              const Options& options = {});

  /// Bytes of workspace that `finish` uses for a cache of this type, after `plan`.
  size_t finish_workspace_size(DType cache_dtype, const Options& options = {}) const;

  bool planned() const;
  TensorView pages() const;          ///< [indptr[rows] of the bound] i32
  TensorView indptr() const;         ///< [rows+1] i32
  TensorView last_page_len() const;  ///< [rows] i32
  TensorView positions() const;      ///< [rows] i64
  TensorView query_buffer() const;   ///< [rows, heads, dim]; absent without an owned copy
  std::array<int64_t, 3> query_shape() const;
  int64_t region_count() const;
  int64_t block_size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace octopage

#endif  // OCTOPAGE_PAGE_PLAN_HPP_
