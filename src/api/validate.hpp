#ifndef OCTOPAGE_API_VALIDATE_HPP_
#define OCTOPAGE_API_VALIDATE_HPP_

// All checks of what a caller passed, once, before anything runs.

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "backends/backend.hpp"
#include "octopage/page_plan.hpp"
#include "octopage/sparse_prefill.hpp"

namespace octopage {

/// Whether data pointers matter: a size query takes shapes only.
enum class Pointers { checked, ignored };

/// Rank, dtype, shape and device of a tensor argument. An extent of -1 in `shape` is any.
void check_tensor(const char* argument, const TensorView& tensor,
                  std::initializer_list<DType> dtypes, std::initializer_list<int64_t> shape,
                  Device device, Pointers pointers = Pointers::checked);

/// The tensor's last dimension is contiguous (strides of extents 0 and 1 mean nothing).
void check_last_contiguous(const char* argument, const TensorView& tensor);

/// `output`, `lse`, ... must not overlap themselves: no two elements lie at one address.
void check_writable(const char* argument, const TensorView& tensor);

/// The caller's workspace as a tensor; absent where there is none.
TensorView workspace_view(const Options& options, Device device);
/// Absent where there is none.
TensorView status_view(const Options& options, Device device);
TensorView scale_view(const Scale& scale, Device device);

/// The cache, described; with Pointers::ignored its data pointer is not looked at.
KvCacheView check_cache(const TensorView& kv_cache, Pointers pointers);

/// Table, owners and positions as views that kernels read.
BlockTableView check_block_table(const TensorView& block_table, Device device,
                                 Pointers pointers = Pointers::checked);

/// The scales of an f8 cache; 1 for other types. On the CPU by value, on a device the pointers stay
/// pointers (null: the value holds). With Pointers::ignored only their presence is checked.
struct ScaleValues {
  float k = 1.0f;
  float v = 1.0f;
  const float* k_pointer = nullptr;
  const float* v_pointer = nullptr;
};
ScaleValues check_scales(const KvCacheView& cache, const Scale& k_scale, const Scale& v_scale,
                         Pointers pointers = Pointers::checked);

/// Folds k into the score's scale and v into the output's.
void apply_scales(const ScaleValues& scales, AttentionTensors* tensors);

/// Query, output and lse of a call, and the problem they make. Fills everything but the selection.
void check_attention(const TensorView& query, const KvCacheView& cache, const TensorView& output,
                     const TensorView& lse, float scale, Pointers pointers, Problem* problem,
                     AttentionTensors* tensors);

/// The arguments of `sparse_prefill` as parameters.
DirectParams check_sparse_prefill(const SparsePrefillArgs& args, const Options& options,
                                  Pointers pointers = Pointers::checked);

/// Strict: throws Error(invalid_entry) for the first bad entry of the step, by row, group, entry.
/// On a device it copies the selections to the host and waits.
void check_entries(const SparsePrefillArgs& args, const Options& options);
void check_entries(const DirectParams& params);

/// A tensor's memory on the host: itself on the CPU, a copy in `storage` otherwise (strict checks).
TensorView host_view(const char* argument, const TensorView& tensor, const Options& options,
                     std::vector<std::byte>* storage);

/// Throws the message of a bad entry. `groups` 1 leaves the group out.
[[noreturn]] void fail_entry(const struct BadEntry& bad, int64_t row, int64_t group, int64_t groups,
                             const BlockTableView& table, const PageGeometry& geometry,
                             int64_t own_region, int64_t owner);

/// `fill_prefill_pages` whose messages call the copy of the query so: a plan's has another name.
void fill_prefill_pages(const FillPrefillPagesArgs& args, const Options& options,
                        const char* copy_name);

}  // namespace octopage

#endif  // OCTOPAGE_API_VALIDATE_HPP_
