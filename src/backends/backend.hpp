#ifndef OCTOPAGE_BACKENDS_BACKEND_HPP_
#define OCTOPAGE_BACKENDS_BACKEND_HPP_

// What a backend is: it says whether it serves a problem, how much scratch memory it needs, and
// runs validated work on the caller's memory. All checks of arguments happened before (src/api).

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/executor.hpp"
#include "octopage/backends.hpp"
#include "octopage/kv_cache.hpp"
#include "octopage/page_arithmetic.hpp"
#include "octopage/tensor.hpp"
#include "plan/row_tiles.hpp"

namespace octopage {

inline constexpr int64_t kMaxHeadsPerGroup = 128;
inline constexpr int64_t kHeadDims[] = {64, 128, 192, 256};

/// The shape of a call, which decides who can serve it.
struct Problem {
  enum class Path : int32_t { direct, paged };
  Path path = Path::direct;
  Device device = {};
  DType query_dtype = DType::bf16;
  DType cache_dtype = DType::bf16;
  DType output_dtype = DType::bf16;
  int64_t rows = 0;
  int64_t heads_per_group = 0;
  int64_t groups = 0;  ///< 1 on the paged path
  int64_t dim = 0;
  int64_t region_count = 0;
  bool batch_invariant = false;

  /// What some kernels ask of the tensors; direct path only.
  struct Layout {
    bool even_query = false;      ///< two neighbouring elements can be read at once
    bool even_output = false;     ///< and written
    bool positive_scale = false;  ///< of the scores, and a normal f32 twice over
    int64_t selections = 0;       ///< groups, or 1 where all groups share a selection
    int64_t table_regions = 0;    ///< regions that the block table has columns for
    int64_t tokens = 0;           ///< of a group, from its first block to its last, gaps included
    int64_t stride_token = 0;     ///< of the cache, in elements
    int64_t stride_group = 0;     ///< 0 with one group
  };
  Layout layout = {};
};

/// Query, output and cache of one call: the part that both paths share. Strides in elements.
struct AttentionTensors {
  const void* query;  ///< [rows, groups * heads_per_group, dim]
  int64_t stride_query_row;
  int64_t stride_query_head;
  void* output;  ///< [rows, groups * heads_per_group, dim]
  int64_t stride_output_row;
  int64_t stride_output_head;
  float* lse;  ///< [rows, groups * heads_per_group]; may be null
  int64_t stride_lse_row;
  int64_t stride_lse_head;
  KvCacheView cache;
  double scale;                  ///< k_scale folded in, where its value is known on the host
  double v_scale;                ///< multiplies the normalised sum, likewise
  const float* k_scale_pointer;  ///< [1] on the device, multiplies scale; null on the CPU
  const float* v_scale_pointer;  ///< [1] on the device, multiplies v_scale; null on the CPU
};

/// The direct path: selections and block table, read by the backend.
struct DirectParams {
  Problem problem;
  AttentionTensors tensors;
  BlockTableView table;
  RowView rows;
  const int32_t* regions;  ///< [rows, groups, region_count]
  int64_t stride_regions_row;
  int64_t stride_regions_group;  ///< 0 where all groups share a selection
  int64_t stride_regions_entry;
};

/// The planned path: a flat page list, one group.
struct PagedParams {
  Problem problem;
  AttentionTensors tensors;
  const int32_t* pages;   ///< [page_capacity] page ids; those outside 0 .. page_count-1 are skipped
  const int32_t* indptr;  ///< [rows+1]
  const int32_t* last_page_len;  ///< [rows]
  int64_t page_count;            ///< pages in the cache's view
  int64_t page_capacity;         ///< entries of `pages`
};

/// One row's entries of the page list. A caller can write to `indptr` and `last_page_len`, so what
/// they say is cut to the list, to the plan's region_count and to the tokens of a page.
struct PageRange {
  int64_t begin;
  int64_t end;
  int32_t last_tokens;  ///< tokens of entry end-1: 1 .. 8
};
PageRange page_range(const PagedParams& params, int64_t row);

/// Where and how a backend runs.
struct RunContext {
  Threads* threads;                ///< CPU
  void* stream;                    ///< CUDA
  std::span<std::byte> workspace;  ///< at least workspace_bytes() of the problem
  int32_t* status;                 ///< [1] on the device; may be null
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo info() const = 0;
  /// Yes, or why not. Called only where `info().available`.
  virtual Support supports(const Problem& problem) const = 0;
  /// Exact scratch memory of a run with that many workers, any alignment.
  virtual size_t workspace_bytes(const Problem& problem, int32_t workers) const = 0;
  virtual void attend_direct(const DirectParams& params, const RunContext& context) const = 0;
  virtual void attend_paged(const PagedParams& params, const RunContext& context) const = 0;
};

/// The compiled-in backends, highest priority first.
std::span<const Backend* const> compiled_backends();

/// The shapes that all backends share: query dtype, head dim and heads per group.
Support supports_shape(const char* backend, const Problem& problem);

/// The same for tensors on the CPU.
Support supports_on_cpu(const char* backend, const Problem& problem);

/// ORs status bits into the caller's word on the CPU; null is ignored.
void raise_status(int32_t* status, int32_t bits);

const Backend& reference_backend();
const Backend& cpu_backend();

}  // namespace octopage

#endif  // OCTOPAGE_BACKENDS_BACKEND_HPP_
