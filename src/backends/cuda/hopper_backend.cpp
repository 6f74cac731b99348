// cuda-sm90a: the direct path over unions of neighbouring rows' selections. The planned path is the
// portable kernel's.

#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cuda/cuda_backend.hpp"
#include "backends/cuda/runtime/runtime.hpp"
#include "backends/cuda/union/launch.hpp"
#include "core/check.hpp"

namespace octopage {
namespace {

constexpr const char* kName = "cuda-sm90a";
constexpr size_t kAlignment = 256;
constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();  // of a copy's coordinate
constexpr int64_t kMostStrideBytes = int64_t{1} << 40;                // of a tensor map
constexpr int64_t kMostTableRegions = int64_t{1} << 24;  // a marked region is packed with its rows

/// The workspace of a call. Counting and laying out are one body.
struct Workspace {
  cuda::UnionLists lists = {};
  cuda::UnionPartials partials = {};
  size_t bytes = 0;

  Workspace(std::byte* base, const Problem& problem) {
    const int64_t selections = problem.layout.selections;
    const int64_t spans = (problem.rows + cuda::tile_rows(problem.heads_per_group) - 1) /
                          cuda::tile_rows(problem.heads_per_group);
    const int32_t split_shift = cuda::split_shift_of(
        spans * problem.groups, cuda::device_limits(problem.device.index).multiprocessors,
        problem.region_count);
    bytes = lists.lay_out(base, problem.rows, selections, problem.region_count,
                          problem.heads_per_group, split_shift);
    bytes += partials.lay_out(base == nullptr ? nullptr : base + bytes, problem.rows,
                              problem.groups * problem.heads_per_group, problem.dim, split_shift);
  }
};

/// Steps of the union path per batch of entries, in 256ths, beyond which cuda-sm80 is the faster
/// kernel: measured on an H200 with groups of up to 16 heads, and in proportion for each 16 more,
/// which cost cuda-sm80 another pass. 0: it never is.
int32_t most_steps(const Problem& problem) {
  const bool f8 = problem.cache_dtype == DType::f8_e4m3fn;
  const double up_to_16 = problem.dim == 64    ? (f8 ? 0.60 : 0.54)
                          : problem.dim == 128 ? (f8 ? 0.75 : 0.88)
                          : problem.dim == 192 ? (f8 ? 0.75 : 1.0)
                                               : (f8 ? 0.58 : 1.0);
  const auto passes = static_cast<double>((problem.heads_per_group + 15) / 16);
  const double most = passes == 1 ? up_to_16 : 0.87 * passes * up_to_16;
  return most >= 1.0 ? 0 : static_cast<int32_t>(most * 256);
}

class CudaSm90aBackend final : public Backend {
 public:
  BackendInfo info() const override {
    const cuda::DeviceSummary device = cuda::summarize_device(0);
    BackendInfo info = {
        .name = kName,
        .description = "unions of neighbouring rows, TMA and WGMMA, compute capability 9.0",
        .device = DeviceType::cuda,
        .priority = 300,
        .available = device.usable,
        .reason = device.reason};
    if (!device.usable) return info;
    if (device.compute_major != 9 || device.compute_minor != 0) {
      info.available = false;
      info.reason = fmt::format("{} has compute capability {}.{}, 9.0 is required", device.name,
                                device.compute_major, device.compute_minor);
    } else {
      info.description = "unions of neighbouring rows, TMA and WGMMA, on " + device.name;
    }
    return info;
  }

  Support supports(const Problem& problem) const override {
    const auto no = [](std::string why) { return Support{false, kName + (": " + why)}; };
    if (problem.device.type != DeviceType::cuda) {
      return no(fmt::format("runs on cuda tensors; these are on {}", name(problem.device)));
    }
    const cuda::DeviceLimits limits = cuda::device_limits(problem.device.index);
    if (limits.compute_major != 9 || limits.compute_minor != 0) {
      return no(fmt::format("compute capability 9.0 is required, {} has {}.{}",
                            name(problem.device), limits.compute_major, limits.compute_minor));
    }
    if (problem.path == Problem::Path::paged) return cuda_sm80_backend().supports(problem);
    const Support shape = supports_shape(kName, problem);
    if (!shape) return shape;
    if (problem.batch_invariant) return no("batch-invariant calls need tiles of one row");
    if (!cuda::has_union_instance(problem.query_dtype, problem.cache_dtype)) {
      return no(
          fmt::format("kv_cache must have the query's dtype, or f8_e4m3fn; these are {} and {}",
                      name(problem.query_dtype), name(problem.cache_dtype)));
    }
    const Problem::Layout& layout = problem.layout;
    if (!layout.positive_scale)
      return no("scale must be positive, neither subnormal nor above 2^127");
    if (!layout.even_query) return no("query must lie in pairs: even strides, 4-byte alignment");
    if (!layout.even_output) {
      return no("output must lie in pairs: even strides, aligned to two elements");
    }
    const int64_t element_bytes = itemsize(problem.cache_dtype);
    if (layout.tokens > kMostTokens) {
      return no(fmt::format("{} tokens from the first to the last of a group, {} at most",
                            layout.tokens, kMostTokens));
    }
    if (layout.stride_token * element_bytes >= kMostStrideBytes ||
        layout.stride_group * element_bytes >= kMostStrideBytes) {
      return no("strides of kv_cache must be below 2^40 bytes");
    }
    if (problem.groups > 1 && layout.stride_group <= 0)
      return no("groups of kv_cache must lie apart, their stride is 0");
    if (layout.table_regions > kMostTableRegions) {
      return no(fmt::format("block_table has columns for {} regions, {} at most",
                            layout.table_regions, kMostTableRegions));
    }
    if (!cuda::unions_fit(problem.heads_per_group, problem.region_count)) {
      return no(fmt::format("{} regions of {} rows are too many to unite at once",
                            problem.region_count, cuda::tile_rows(problem.heads_per_group)));
    }
    const cuda::UnionLists lists = Workspace(nullptr, problem).lists;
    const int64_t steps = layout.selections * lists.spans * 2 * lists.capacity * lists.half_rows;
    const int64_t pages = layout.selections * lists.spans * lists.capacity * cuda::kBatchPages;
    const int64_t units = lists.spans * problem.groups << lists.split_shift;
    if (std::max({steps, pages, units}) > std::numeric_limits<int32_t>::max()) {
      return no(fmt::format("{} rows x {} groups x {} regions are too many for one call",
                            problem.rows, layout.selections, problem.region_count));
    }
    return {true, ""};
  }

  size_t workspace_bytes(const Problem& problem, int32_t workers) const override {
    if (problem.path == Problem::Path::paged)
      return cuda_sm80_backend().workspace_bytes(problem, workers);
    return problem.rows == 0 ? 0 : Workspace(nullptr, problem).bytes + kAlignment - 1;
  }

  void attend_direct(const DirectParams& d, const RunContext& context) const override {
    const Problem& problem = d.problem;
    const AttentionTensors& t = d.tensors;
    const cuda::DeviceGuard guard(problem.device.index);
    auto* base = reinterpret_cast<std::byte*>(
        (reinterpret_cast<uintptr_t>(context.workspace.data()) + kAlignment - 1) / kAlignment *
        kAlignment);
    const Workspace workspace(base, problem);
    const cuda::UnionsParams unions = {.lists = workspace.lists,
                                       .table = d.table,
                                       .geometry = t.cache.geometry(),
                                       .owners = d.rows.owners,
                                       .stride_owners = d.rows.stride_owners,
                                       .positions = d.rows.positions,
                                       .stride_positions = d.rows.stride_positions,
                                       .regions = d.regions,
                                       .stride_regions_row = d.stride_regions_row,
                                       .stride_regions_selection = d.stride_regions_group,
                                       .stride_regions_entry = d.stride_regions_entry,
                                       .region_count = problem.region_count,
                                       .rows = problem.rows,
                                       .status = context.status,
                                       .wide_positions = d.rows.wide_positions ? 1 : 0,
                                       .window = 0};  // `launch_unions` chooses it
    const auto aligned = [](const void* data, int64_t row, int64_t head, DType dtype) {
      const int64_t bytes = itemsize(dtype);
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row * bytes % 16 == 0 &&
             head * bytes % 16 == 0;
    };
    constexpr double kLog2e = 1.44269504088896340736;
    const cuda::UnionAttentionParams attention = {
        .lists = workspace.lists,
        .query = t.query,
        .stride_query_row = t.stride_query_row,
        .stride_query_head = t.stride_query_head,
        .output = t.output,
        .stride_output_row = t.stride_output_row,
        .stride_output_head = t.stride_output_head,
        .lse = t.lse,
        .stride_lse_row = t.stride_lse_row,
        .stride_lse_head = t.stride_lse_head,
        .rows = problem.rows,
        .partials = workspace.partials,
        .k_scale = t.k_scale_pointer,
        .v_scale = t.v_scale_pointer,
        .scale_log2 = static_cast<float>(t.scale * kLog2e),
        .output_scale = static_cast<float>(t.v_scale),
        .heads_per_group = static_cast<int32_t>(problem.heads_per_group),
        .head_shift = cuda::head_shift(problem.heads_per_group),
        .groups = static_cast<int32_t>(problem.groups),
        .shared_selection = problem.layout.selections == 1 ? 1 : 0,
        .query_is_f16 = problem.query_dtype == DType::f16 ? 1 : 0,
        .output_is_f32 = problem.output_dtype == DType::f32 ? 1 : 0,
        .aligned_query =
            aligned(t.query, t.stride_query_row, t.stride_query_head, problem.query_dtype) ? 1 : 0,
        .aligned_output =
            aligned(t.output, t.stride_output_row, t.stride_output_head, problem.output_dtype) ? 1
                                                                                               : 0,
        .most_steps = cuda_sm80_backend().supports(problem) ? most_steps(problem) : 0,
        .selections = problem.layout.selections};
    const bool empty = problem.layout.tokens == 0;
    cuda::launch_union_path(unions, problem.layout.selections, attention,
                            {.cache = empty ? base : t.cache.data,
                             .dtype = problem.cache_dtype,
                             .dim = problem.dim,
                             .tokens = problem.layout.tokens,
                             .groups = problem.groups,
                             .stride_token = t.cache.stride_token,
                             .stride_group = t.cache.stride_group},
                            cuda::device_limits(problem.device.index).multiprocessors,
                            context.stream);
    if (attention.most_steps > 0) attend_row_by_row_if(workspace.lists.row_by_row, d, context);
  }

  void attend_paged(const PagedParams& params, const RunContext& context) const override {
    cuda_sm80_backend().attend_paged(params, context);
  }
};

}  // namespace

const Backend& cuda_sm90a_backend() {
  static const CudaSm90aBackend backend;
  return backend;
}

}  // namespace octopage
