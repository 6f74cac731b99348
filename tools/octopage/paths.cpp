#include "tools/octopage/paths.hpp"

#include <chrono>

#include "inspect/selections.hpp"
#include "octopage/backends.hpp"
#include "octopage/kv_cache.hpp"
#include "tools/octopage/step_device.hpp"

namespace octopage::cli {
namespace {

/// Adds the seconds of its scope to a sum, device work included.
class Stopwatch {
 public:
  Stopwatch(double& seconds, const StepDevice& device)
      : seconds_(seconds), device_(device), start_(std::chrono::steady_clock::now()) {}
  /// Ends the scope: waits for the device, which may throw.
  void stop() {
    device_.synchronize();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  const StepDevice& device_;
  std::chrono::steady_clock::time_point start_;
};

std::vector<int32_t> download_i32(const StepDevice& device, const TensorView& tensor) {
  std::vector<int32_t> values(static_cast<size_t>(tensor.size()));
  device.download(tensor, values.data());
  return values;
}

/// One plan for the step, then group by group: [stage,] fill, finish. `step` is on `device`, `host`
/// is the same step in host memory.
void run_planned(const Step& host, const Step& step, bool staged, const TensorView& step_output,
                 const TensorView& step_lse, StepDevice& device, const Options& options,
                 PathResult& result) {
  Timing& timing = result.timing;
  const int64_t groups = step.groups();
  const std::vector<int64_t> positions = positions_of(host);
  CompactPagedPrefill prefill;
  {
    Stopwatch watch(timing.plan, device);
    PrefillPlanArgs plan;
    plan.query_shape = {step.rows(), step.heads() / groups, step.dim()};
    plan.dtype = step.query.dtype;
    plan.positions = positions;
    plan.region_count = step.region_count();
    plan.scale = step.scale;
    plan.block_size = step.block_size();
    plan.contiguous_query = groups == 1;  // heads of one group among others are strided
    plan.device = device.device();
    prefill.plan(plan, options);
    watch.stop();
  }

  TensorView table = step.block_table;
  TensorView staged_blocks;
  TensorView staged_cache;
  if (staged) {
    const std::vector<int64_t> lengths = lengths_of(host);
    const int64_t count = staged_block_count(lengths, step.block_size());
    StagedPrefillPages staging;
    staging.requests = step.block_table.shape[0];
    staging.max_blocks = step.block_table.shape[1];
    staging.blocks.resize(static_cast<size_t>(count));
    staging.table.resize(static_cast<size_t>(staging.requests * staging.max_blocks));
    table = device.allocate(DType::i32, {staging.requests, staging.max_blocks});
    staged_blocks = device.allocate(DType::i32, {count});
    staged_cache = device.allocate(step.query.dtype, {count, 1, step.block_size(), 2 * step.dim()});
    Stopwatch watch(timing.stage, device);
    plan_staged_prefill_pages(step.block_table, lengths, step.block_size(), staged_blocks, table,
                              options);
    watch.stop();
    device.download(staged_blocks, staging.blocks.data());
    device.download(table, staging.table.data());
    result.staging = std::move(staging);
  }

  for (int64_t group = 0; group < groups; ++group) {
    const HeadRange heads = heads_of_group(step, group);
    const TensorView query = step.query.slice(1, heads.begin, heads.end);
    const TensorView output = step_output.slice(1, heads.begin, heads.end);
    const TensorView lse = step_lse.slice(1, heads.begin, heads.end);
    TensorView kv_cache = step.kv_cache.slice(1, group, group + 1);
    Scale k_scale = k_scale_of(step);
    Scale v_scale = v_scale_of(step);
    if (staged) {
      Stopwatch watch(timing.stage, device);
      stage_prefill_pages(kv_cache, staged_blocks, staged_cache, k_scale, v_scale, options);
      watch.stop();
      kv_cache = staged_cache;  // of the query's type: its scales are applied
      k_scale = v_scale = Scale{};
    }
    {
      Stopwatch watch(timing.fill, device);
      const auto metadata = prefill.page_metadata(table, step.owners, kv_page_stride(kv_cache));
      if (metadata) {
        fill_prefill_pages(fill_args(step, group, kv_cache, *metadata), options);
      } else {
        prefill.prepare_chunk(0, query, kv_cache, regions_of_group(step, group), table, step.owners,
                              options);
      }
      watch.stop();
    }
    {
      Stopwatch watch(timing.attention, device);
      prefill.finish(query, kv_cache, output, lse, k_scale, v_scale, options);
      watch.stop();
    }
    if (!staged) result.pages.push_back(download_i32(device, prefill.pages()));
  }
  result.metadata = CompactPageMetadata{download_i32(device, prefill.indptr()),
                                        download_i32(device, prefill.last_page_len())};
}

}  // namespace

Scale k_scale_of(const Step& step) {
  return step.kv_cache.dtype == DType::f8_e4m3fn ? Scale::of(step.k_scale) : Scale{};
}

Scale v_scale_of(const Step& step) {
  return step.kv_cache.dtype == DType::f8_e4m3fn ? Scale::of(step.v_scale) : Scale{};
}

FillPrefillPagesArgs fill_args(const Step& step, int64_t group, const TensorView& kv_cache,
                               const PagedPrefillMetadata& metadata) {
  FillPrefillPagesArgs args;
  args.regions = regions_of_group(step, group);
  args.block_table = metadata.block_table;
  args.owners = metadata.owners;
  args.indptr = metadata.indptr;
  args.pages = metadata.pages;
  args.block_size = metadata.block_size;
  args.page_stride = metadata.page_stride;
  args.blocks = kv_cache.shape[0];
  args.positions = metadata.positions;
  return args;
}

SparsePrefillArgs first_group(const SparsePrefillArgs& args) {
  SparsePrefillArgs group = args;
  const int64_t groups = args.kv_cache.shape[1];
  const int64_t heads = args.query.shape[1] / groups;
  group.query = args.query.slice(1, 0, heads);
  group.output = args.output.slice(1, 0, heads);
  if (args.lse.present()) group.lse = args.lse.slice(1, 0, heads);
  group.kv_cache = args.kv_cache.slice(1, 0, 1);
  if (args.regions.rank == 3) group.regions = args.regions.slice(1, 0, 1);
  return group;
}

SparsePrefillArgs args_of(const Step& step, const TensorView& output, const TensorView& lse) {
  SparsePrefillArgs args;
  args.query = step.query;
  args.kv_cache = step.kv_cache;
  args.block_table = step.block_table;
  args.owners = step.owners;
  args.positions = step.positions;
  args.regions = step.regions;
  args.output = output;
  args.lse = lse;
  args.scale = step.scale;
  args.k_scale = k_scale_of(step);
  args.v_scale = v_scale_of(step);
  return args;
}

PathResult run_path(const Step& step, Path path, DType output_dtype, const Options& options) {
  PathResult result;
  result.storage = std::make_shared<TensorStorage>();
  result.output =
      result.storage->allocate_tensor(output_dtype, {step.rows(), step.heads(), step.dim()});
  result.lse = result.storage->allocate_tensor(DType::f32, {step.rows(), step.heads()});
  const std::unique_ptr<StepDevice> device = make_step_device(options.backend);
  const bool on_host = device->device().type == DeviceType::cpu;
  const Step on_device = step_on(step, *device);
  const TensorView output =
      on_host ? result.output
              : device->allocate(output_dtype, {step.rows(), step.heads(), step.dim()});
  const TensorView lse =
      on_host ? result.lse : device->allocate(DType::f32, {step.rows(), step.heads()});
  const int32_t no_bits = 0;
  const TensorView status = device->upload(TensorView::contiguous(&no_bits, DType::i32, {1}));
  const SparsePrefillArgs args = args_of(on_device, output, lse);
  Options with_status = options;
  with_status.status = on_host ? &result.status : static_cast<int32_t*>(status.data);
  if (path == Path::direct && !on_host) {
    // Scratch memory is the caller's on a device: without it the slower kernels serve the call.
    const size_t bytes = sparse_prefill_workspace_size(args, options);
    with_status.workspace = device->allocate(DType::u8, {static_cast<int64_t>(bytes)}).data;
    with_status.workspace_bytes = bytes;
  }
  // A forced backend may serve the planned path of a step whose direct path it refuses.
  result.backend =
      path != Path::direct && !options.backend.empty()
          ? std::string(options.backend)
          : choose_backend(path == Path::direct ? args : first_group(args), with_status);
  if (path == Path::direct) {
    Stopwatch watch(result.timing.attention, *device);
    sparse_prefill(args, with_status);
    watch.stop();
  } else if (step.rows() > 0) {
    run_planned(step, on_device, path == Path::staged, output, lse, *device, with_status, result);
  }
  if (!on_host) {
    device->download(output, result.output.data);
    device->download(lse, result.lse.data);
    device->download(status, &result.status);
  }
  return result;
}

std::vector<std::vector<int32_t>> fill_page_lists(const Step& step,
                                                  const CompactPageMetadata& metadata) {
  const std::vector<int64_t> positions = positions_of(step);
  std::vector<std::vector<int32_t>> lists;
  for (int64_t group = 0; group < step.groups(); ++group) {
    const TensorView kv_cache = step.kv_cache.slice(1, group, group + 1);
    std::vector<int32_t> pages(static_cast<size_t>(metadata.indptr.back()), -1);
    const PagedPrefillMetadata record = {
        .owners = step.owners,
        .block_table = step.block_table,
        .pages = TensorView::contiguous(pages.data(), DType::i32, {metadata.indptr.back()}),
        .indptr = TensorView::contiguous(metadata.indptr.data(), DType::i32, {step.rows() + 1}),
        .positions = TensorView::contiguous(positions.data(), DType::i64, {step.rows()}),
        .block_size = step.block_size(),
        .page_stride = kv_page_stride(kv_cache)};
    fill_prefill_pages(fill_args(step, group, kv_cache, record));
    lists.push_back(std::move(pages));
  }
  return lists;
}

}  // namespace octopage::cli
