#include "backends/cuda/cuda_backend.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "backends/cuda/paged/launch.hpp"
#include "backends/cuda/pages/launch.hpp"
#include "backends/cuda/runtime/runtime.hpp"
#include "core/check.hpp"
#include "plan/compact_metadata.hpp"

namespace octopage {
namespace {

bool divides_16(const void* data, int64_t element_bytes, std::initializer_list<int64_t> strides) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  return std::all_of(strides.begin(), strides.end(),
                     [&](int64_t stride) { return stride * element_bytes % 16 == 0; });
}

cuda::PagedKernelKey key_of(const Problem& problem) {
  return {.query = problem.query_dtype, .cache = problem.cache_dtype, .dim = problem.dim};
}

/// The part of the parameters that both paths share.
cuda::PagedAttentionParams make_params(const Problem& problem, const AttentionTensors& t,
                                       int32_t* status) {
  constexpr int64_t kHeadsOfTile = 16;
  cuda::PagedAttentionParams p = {};
  p.query = t.query;
  p.stride_query_row = t.stride_query_row;
  p.stride_query_head = t.stride_query_head;
  p.output = t.output;
  p.stride_output_row = t.stride_output_row;
  p.stride_output_head = t.stride_output_head;
  p.lse = t.lse;
  p.stride_lse_row = t.stride_lse_row;
  p.stride_lse_head = t.stride_lse_head;
  const int64_t element_bytes = itemsize(t.cache.dtype);
  p.cache = static_cast<const char*>(t.cache.data);
  p.stride_group_bytes = t.cache.stride_group * element_bytes;
  p.stride_token_bytes = t.cache.stride_token * element_bytes;
  p.page_bytes = kPageTokens * p.stride_token_bytes;
  p.status = status;
  p.k_scale = t.k_scale_pointer;
  p.v_scale = t.v_scale_pointer;
  p.scale = static_cast<float>(t.scale);
  p.output_scale = static_cast<float>(t.v_scale);
  p.heads_per_group = static_cast<int32_t>(problem.heads_per_group);
  p.groups = static_cast<int32_t>(problem.groups);
  p.head_tiles = static_cast<int32_t>((problem.heads_per_group + kHeadsOfTile - 1) / kHeadsOfTile);
  p.output_is_f32 = problem.output_dtype == DType::f32 ? 1 : 0;
  p.aligned_query = divides_16(t.query, 2, {t.stride_query_row, t.stride_query_head}) ? 1 : 0;
  p.aligned_output = divides_16(t.output, itemsize(problem.output_dtype),
                                {t.stride_output_row, t.stride_output_head})
                         ? 1
                         : 0;
  return p;
}

class CudaSm80Backend final : public Backend {
 public:
  BackendInfo info() const override {
    const cuda::DeviceSummary device = cuda::summarize_device(0);
    return {.name = "cuda-sm80",
            .description = device.usable ? "mma.sync row by row, on " + device.name
                                         : "mma.sync row by row, compute capability 8.0 and newer",
            .device = DeviceType::cuda,
            .priority = 200,
            .available = device.usable,
            .reason = device.reason};
  }

  Support supports(const Problem& problem) const override {
    constexpr const char* kName = "cuda-sm80";
    if (problem.device.type != DeviceType::cuda) {
      return {false, fmt::format("{}: runs on cuda tensors; these are on {}", kName,
                                 name(problem.device))};
    }
    const Support shape = supports_shape(kName, problem);
    if (!shape) return shape;
    const cuda::DeviceLimits limits = cuda::device_limits(problem.device.index);
    if (limits.compute_major < 8) {
      return {false, fmt::format("{}: compute capability 8.0 is required, {} has {}.{}", kName,
                                 name(problem.device), limits.compute_major, limits.compute_minor)};
    }
    if (cuda::paged_warps(key_of(problem), limits.shared_bytes_optin) == 0) {
      return {false, fmt::format("{}: needs {} bytes of shared memory for this shape, {} offers {}",
                                 kName, cuda::paged_shared_bytes(key_of(problem), 1),
                                 name(problem.device), limits.shared_bytes_optin)};
    }
    return {true, ""};
  }

  size_t workspace_bytes(const Problem&, int32_t) const override { return 0; }

  void attend_direct(const DirectParams& d, const RunContext& context) const override {
    attend_direct_if(nullptr, d, context);
  }

  static void attend_direct_if(const int32_t* only_if, const DirectParams& d,
                               const RunContext& context) {
    cuda::PagedAttentionParams p = make_params(d.problem, d.tensors, context.status);
    p.source.table = d.table;
    p.source.geometry = d.tensors.cache.geometry();
    p.source.owners = d.rows.owners;
    p.source.stride_owners = d.rows.stride_owners;
    p.source.positions = d.rows.positions;
    p.source.wide_positions = d.rows.wide_positions ? 1 : 0;
    p.source.stride_positions = d.rows.stride_positions;
    p.source.regions = d.regions;
    p.source.stride_regions_row = d.stride_regions_row;
    p.source.stride_regions_group = d.stride_regions_group;
    p.source.stride_regions_entry = d.stride_regions_entry;
    p.source.region_count = d.problem.region_count;
    p.only_if = only_if;
    launch(d.problem, d.tensors.cache, p, context);
  }

  void attend_paged(const PagedParams& d, const RunContext& context) const override {
    cuda::PagedAttentionParams p = make_params(d.problem, d.tensors, context.status);
    p.source.pages = d.pages;
    p.source.indptr = d.indptr;
    p.source.last_page_len = d.last_page_len;
    p.source.page_count = d.page_count;
    p.source.page_capacity = d.page_capacity;
    p.source.region_count = d.problem.region_count;
    launch(d.problem, d.tensors.cache, p, context);
  }

 private:
  static void launch(const Problem& problem, const KvCacheView& cache,
                     const cuda::PagedAttentionParams& params, const RunContext& context) {
    if (kv_page_count(cache) > std::numeric_limits<int32_t>::max()) {
      fail(ErrorCode::unsupported, "kv_cache: {} pages are more than 2^31 - 1",
           kv_page_count(cache));
    }
    const cuda::DeviceGuard guard(problem.device.index);
    const cuda::PagedKernelKey key = key_of(problem);
    const int32_t warps =
        cuda::paged_warps(key, cuda::device_limits(problem.device.index).shared_bytes_optin);
    cuda::launch_paged_attention(key, params, problem.rows * problem.groups * params.head_tiles,
                                 warps, context.stream);
  }
};

class CudaPlanStorage final : public PlanStorage {
 public:
  void plan(std::span<const int64_t> positions, int64_t region_count, int64_t entries,
            size_t query_bytes, const PageContext& context) override {
    const cuda::DeviceGuard guard(context.device.index);
    const auto stream = static_cast<cudaStream_t>(context.stream);
    cuda::refuse_capture(stream, "plan");
    const auto rows = static_cast<int64_t>(positions.size());
    const Offsets at(rows);
    record_.prepare(at.bytes);
    pages_.prepare(static_cast<size_t>(entries) * sizeof(int32_t));
    query_.prepare(query_bytes);
    std::byte* host = pinned_.acquire(at.bytes);
    // From here on only the device itself can fail.
    std::copy(positions.begin(), positions.end(), reinterpret_cast<int64_t*>(host + at.positions));
    auto* indptr = reinterpret_cast<int32_t*>(host + at.indptr);
    write_compact_metadata(positions, region_count, indptr,
                           reinterpret_cast<int32_t*>(host + at.last_page_len));
    std::copy_n(indptr, rows + 1, reinterpret_cast<int32_t*>(host + at.planned_indptr));
    // A smaller plan keeps the offsets of the largest, so that addresses hold.
    if (record_.commit()) capacity_rows_ = rows;
    query_.commit();
    pages_.commit();
    if (entries > 0) {
      // Rows not filled since the plan select nothing.
      cuda::check(cudaMemsetAsync(pages_.data(), 0xff,
                                  static_cast<size_t>(entries) * sizeof(int32_t), stream),
                  "cudaMemsetAsync");
    }
    upload(at, host, stream);
    rows_ = rows;
    owns_query_ = query_bytes > 0;
  }

  void fixup(const TensorView& positions, int64_t region_count,
             const PageContext& context) override {
    const cuda::DeviceGuard guard(context.device.index);
    const Offsets at(capacity_rows_);
    cuda::launch_fixup({.positions = positions.data,
                        .wide_positions = positions.dtype == DType::i64,
                        .stride_positions = positions.strides[0],
                        .rows = rows_,
                        .region_count = region_count,
                        .planned_indptr = piece<int32_t>(at.planned_indptr),
                        .exact_positions = piece<int64_t>(at.positions),
                        .indptr = piece<int32_t>(at.indptr),
                        .last_page_len = piece<int32_t>(at.last_page_len)},
                       context.status, context.stream);
  }

  Views views() const override {
    const Offsets at(capacity_rows_);
    return {.pages = pages_.as<int32_t>(),
            .indptr = piece<int32_t>(at.indptr),
            .last_page_len = piece<int32_t>(at.last_page_len),
            .positions = piece<int64_t>(at.positions),
            .query = owns_query_ ? query_.data() : nullptr};
  }

 private:
  /// One record for everything that a plan uploads: one allocation, one copy.
  struct Offsets {
    size_t positions = 0, indptr, planned_indptr, last_page_len, bytes;
    explicit Offsets(int64_t rows) {
      const auto n = static_cast<size_t>(rows);
      indptr = n * sizeof(int64_t);
      planned_indptr = indptr + (n + 1) * sizeof(int32_t);
      last_page_len = planned_indptr + (n + 1) * sizeof(int32_t);
      bytes = last_page_len + n * sizeof(int32_t);
    }
  };

  template <typename T>
  T* piece(size_t offset) const {
    return record_.data() == nullptr ? nullptr
                                     : reinterpret_cast<T*>(record_.as<std::byte>() + offset);
  }

  // NOTE: the pieces lie at the offsets of the capacity on the device; a plan of fewer rows copies
  // each piece to its place, a plan that fills the capacity all at once.
  void upload(const Offsets& at, const std::byte* host, cudaStream_t stream) {
    const Offsets to(capacity_rows_);
    if (to.bytes == at.bytes) {
      pinned_.upload(record_.data(), at.bytes, stream);
      return;
    }
    const auto copy = [&](size_t target, size_t from, size_t end) {
      cuda::check(cudaMemcpyAsync(record_.as<std::byte>() + target, host + from, end - from,
                                  cudaMemcpyHostToDevice, stream),
                  "cudaMemcpyAsync");
    };
    copy(to.positions, at.positions, at.indptr);
    copy(to.indptr, at.indptr, at.planned_indptr);
    copy(to.planned_indptr, at.planned_indptr, at.last_page_len);
    copy(to.last_page_len, at.last_page_len, at.bytes);
    pinned_.mark(stream);
  }

  int64_t rows_ = 0;
  int64_t capacity_rows_ = 0;
  bool owns_query_ = false;
  cuda::DeviceBuffer record_;  // positions, indptr, planned indptr, last page lengths
  cuda::DeviceBuffer pages_;
  cuda::DeviceBuffer query_;
  cuda::PinnedBuffer pinned_;
};

class CudaPageDevice final : public PageDevice {
 public:
  void fill(const FillParams& params, const PageContext& context) const override {
    const cuda::DeviceGuard guard(context.device.index);
    cuda::launch_fill(params, context.status, context.stream);
  }
  void stage(const StageParams& params, const PageContext& context) const override {
    const cuda::DeviceGuard guard(context.device.index);
    if (params.cache.dim % 4 != 0) {
      fail(ErrorCode::unsupported, "kv_cache.shape[3] = {}: must be a multiple of 8 on a GPU",
           2 * params.cache.dim);
    }
    if (2 * params.cache.dim * params.cache.block_size > std::numeric_limits<int32_t>::max()) {
      fail(ErrorCode::unsupported,
           "kv_cache: a block of {} x {} elements is too large to stage on a GPU",
           params.cache.block_size, 2 * params.cache.dim);
    }
    cuda::launch_stage(params, context.status, context.stream);
  }
  void write_staging_plan(const BlockTableView& table, std::span<const int64_t> lengths,
                          int64_t block_size, int32_t* staged_blocks, int32_t* staged_table,
                          int64_t staged_stride_request, int64_t staged_stride_block,
                          const PageContext& context) const override {
    const cuda::DeviceGuard guard(context.device.index);
    cuda::launch_staging_plan(table, lengths, block_size, staged_blocks, staged_table,
                              staged_stride_request, staged_stride_block, context.stream);
  }
  std::unique_ptr<PlanStorage> make_plan_storage(Device) const override {
    return std::make_unique<CudaPlanStorage>();
  }
  void download(const void* from, size_t bytes, void* to,
                const PageContext& context) const override {
    const cuda::DeviceGuard guard(context.device.index);
    const auto stream = static_cast<cudaStream_t>(context.stream);
    cuda::refuse_capture(stream, "a strict call");
    cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream),
                "cudaMemcpyAsync");
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
};

}  // namespace

void attend_row_by_row_if(const int32_t* only_if, const DirectParams& d,
                          const RunContext& context) {
  CudaSm80Backend::attend_direct_if(only_if, d, context);
}

const Backend& cuda_sm80_backend() {
  static const CudaSm80Backend backend;
  return backend;
}

const PageDevice& cuda_page_device() {
  static const CudaPageDevice device;
  return device;
}

}  // namespace octopage
