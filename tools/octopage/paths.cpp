#include "tools/octopage/paths.hpp"

#include <chrono>

#include "octopage/backends.hpp"
#include "octopage/kv_cache.hpp"
#include "tools/octopage/selections.hpp"

namespace octopage::cli {
namespace {

/// Adds the seconds of its scope to a sum.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds)
      : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

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

/// One plan for the step, then group by group: [stage,] fill, finish.
void run_planned(const Step& step, bool staged, const Options& options, PathResult& result) {
  Timing& timing = result.timing;
  const int64_t groups = step.groups();
  const std::vector<int64_t> positions = positions_of(step);
  CompactPagedPrefill prefill;
  {
    const Stopwatch watch(timing.plan);
    PrefillPlanArgs plan;
    plan.query_shape = {step.rows(), step.heads() / groups, step.dim()};
    plan.dtype = step.query.dtype;
    plan.positions = positions;
    plan.region_count = step.region_count();
    plan.scale = step.scale;
    plan.block_size = step.block_size();
    plan.contiguous_query = groups == 1;  // heads of one group among others are strided
    prefill.plan(plan, options);
  }

  TensorView table = step.block_table;
  TensorView staged_blocks;
  TensorView staged_cache;
  TensorStorage storage;
  if (staged) {
    const Stopwatch watch(timing.stage);
    result.staging =
        plan_staged_prefill_pages(step.block_table, lengths_of(step), step.block_size());
    const auto count = static_cast<int64_t>(result.staging->blocks.size());
    table = TensorView::contiguous(result.staging->table.data(), DType::i32,
                                   {result.staging->requests, result.staging->max_blocks});
    staged_blocks = TensorView::contiguous(result.staging->blocks.data(), DType::i32, {count});
    staged_cache =
        storage.allocate_tensor(step.query.dtype, {count, 1, step.block_size(), 2 * step.dim()});
  }

  for (int64_t group = 0; group < groups; ++group) {
    const HeadRange heads = heads_of_group(step, group);
    const TensorView query = step.query.slice(1, heads.begin, heads.end);
    const TensorView output = result.output.slice(1, heads.begin, heads.end);
    const TensorView lse = result.lse.slice(1, heads.begin, heads.end);
    TensorView kv_cache = step.kv_cache.slice(1, group, group + 1);
    Scale k_scale = k_scale_of(step);
    Scale v_scale = v_scale_of(step);
    if (staged) {
      const Stopwatch watch(timing.stage);
      stage_prefill_pages(kv_cache, staged_blocks, staged_cache, k_scale, v_scale, options);
      kv_cache = staged_cache;  // of the query's type: its scales are applied
      k_scale = v_scale = Scale{};
    }
    {
      const Stopwatch watch(timing.fill);
      const auto metadata = prefill.page_metadata(table, step.owners, kv_page_stride(kv_cache));
      if (metadata) {
        fill_prefill_pages(fill_args(step, group, kv_cache, *metadata), options);
      } else {
        prefill.prepare_chunk(0, query, kv_cache, regions_of_group(step, group), table, step.owners,
                              options);
      }
    }
    {
      const Stopwatch watch(timing.attention);
      prefill.finish(query, kv_cache, output, lse, k_scale, v_scale, options);
    }
    if (!staged) {
      const TensorView pages = prefill.pages();
      const auto* data = static_cast<const int32_t*>(pages.data);
      result.pages.emplace_back(data, data + pages.shape[0]);
    }
  }
  const auto* indptr = static_cast<const int32_t*>(prefill.indptr().data);
  const auto* last = static_cast<const int32_t*>(prefill.last_page_len().data);
  result.metadata =
      CompactPageMetadata{{indptr, indptr + step.rows() + 1}, {last, last + step.rows()}};
}

/// The backend of the planned path: it sees one group at a time.
SparsePrefillArgs first_group(const SparsePrefillArgs& args) {
  SparsePrefillArgs group = args;
  const int64_t groups = args.kv_cache.shape[1];
  const int64_t heads = args.query.shape[1] / groups;
  group.query = args.query.slice(1, 0, heads);
  group.output = args.output.slice(1, 0, heads);
  group.lse = args.lse.slice(1, 0, heads);
  group.kv_cache = args.kv_cache.slice(1, 0, 1);
  if (args.regions.rank == 3) group.regions = args.regions.slice(1, 0, 1);
  return group;
}

}  // namespace

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
  const SparsePrefillArgs args = args_of(step, result.output, result.lse);
  Options with_status = options;
  with_status.status = &result.status;
  result.backend = choose_backend(path == Path::direct ? args : first_group(args), with_status);
  if (path == Path::direct) {
    const Stopwatch watch(result.timing.attention);
    sparse_prefill(args, with_status);
  } else if (step.rows() > 0) {
    run_planned(step, path == Path::staged, with_status, result);
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
