#ifndef OCTOPAGE_TOOLS_PATHS_HPP_
#define OCTOPAGE_TOOLS_PATHS_HPP_

// The three ways to the same result that `octopage attend` runs a step by.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "octopage/options.hpp"
#include "octopage/page_plan.hpp"
#include "octopage/sparse_prefill.hpp"
#include "step/step_file.hpp"
#include "step/tensor_storage.hpp"

namespace octopage::cli {

enum class Path { direct, planned, staged };

/// Seconds of each part; the total is their sum.
struct Timing {
  double plan = 0;
  double stage = 0;
  double fill = 0;
  double attention = 0;
  double total() const { return plan + stage + fill + attention; }
};

struct PathResult {
  TensorView output;  ///< [rows, heads, dim]
  TensorView lse;     ///< [rows, heads] f32
  std::string backend;
  Timing timing;
  int32_t status = 0;                           ///< StatusBits that the library raised
  std::optional<CompactPageMetadata> metadata;  ///< planned and staged paths with rows
  std::vector<std::vector<int32_t>> pages;      ///< [groups][indptr[rows]] planned path with rows
  std::optional<StagedPrefillPages> staging;    ///< staged path with rows
  std::shared_ptr<TensorStorage> storage;       ///< of output and lse
};

/// The step's tensors as one call's arguments.
SparsePrefillArgs args_of(const Step& step, const TensorView& output, const TensorView& lse);

/// Runs a step. `options.status` is set by the call; output_dtype is the query's or f32.
PathResult run_path(const Step& step, Path path, DType output_dtype, const Options& options);

/// The arguments that fill one group's page list from a plan's record of it.
FillPrefillPagesArgs fill_args(const Step& step, int64_t group, const TensorView& kv_cache,
                               const PagedPrefillMetadata& metadata);

/// The first group's part of a call: the planned path sees one group at a time.
SparsePrefillArgs first_group(const SparsePrefillArgs& args);

/// k_scale and v_scale of an f8 cache, absent for others.
Scale k_scale_of(const Step& step);
Scale v_scale_of(const Step& step);

/// Page lists of the planned path on the cache as it lies in the file: [groups][indptr[rows]].
std::vector<std::vector<int32_t>> fill_page_lists(const Step& step,
                                                  const CompactPageMetadata& metadata);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_PATHS_HPP_
