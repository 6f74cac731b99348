#include "tools/octopage/bench_run.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <set>

#include "inspect/selections.hpp"
#include "octopage/backends.hpp"
#include "octopage/kv_cache.hpp"
#include "step/synthetic.hpp"

namespace octopage::cli {
namespace {

/// The planned path of one step on a device: plan once, then `layer` as often as there are layers.
class PlannedRun {
 public:
  PlannedRun(const Step& host, const Step& step, const SparsePrefillArgs& args,
             const Options& options)
      : step_(step), args_(args), options_(options), positions_(positions_of(host)) {}

  void plan(const Device& device) {
    PrefillPlanArgs plan;
    plan.query_shape = {step_.rows(), step_.heads() / step_.groups(), step_.dim()};
    plan.dtype = step_.query.dtype;
    plan.positions = positions_;
    plan.region_count = step_.region_count();
    plan.scale = step_.scale;
    plan.block_size = step_.block_size();
    plan.contiguous_query = step_.groups() == 1;  // heads of one group among others are strided
    plan.device = device;
    prefill_.plan(plan, options_);
  }

  void layer() {
    for (int64_t group = 0; group < step_.groups(); ++group) {
      const HeadRange heads = heads_of_group(step_, group);
      const TensorView query = step_.query.slice(1, heads.begin, heads.end);
      const TensorView kv_cache = step_.kv_cache.slice(1, group, group + 1);
      const auto metadata =
          prefill_.page_metadata(step_.block_table, step_.owners, kv_page_stride(kv_cache));
      if (metadata) {
        fill_prefill_pages(fill_args(step_, group, kv_cache, *metadata), options_);
      } else {
        prefill_.prepare_chunk(0, query, kv_cache, regions_of_group(step_, group),
                               step_.block_table, step_.owners, options_);
      }
      prefill_.finish(query, kv_cache, args_.output.slice(1, heads.begin, heads.end), {},
                      args_.k_scale, args_.v_scale, options_);
    }
  }

 private:
  const Step& step_;
  const SparsePrefillArgs& args_;
  const Options& options_;
  std::vector<int64_t> positions_;  // [rows]
  CompactPagedPrefill prefill_;
};

std::vector<int64_t> sampled_rows(int64_t rows) {
  const std::set<int64_t> sampled = {0, rows / 3, rows / 2, rows - 1};
  return {sampled.begin(), sampled.end()};
}

/// Sampled rows of `output` [rows, heads, dim] on the host against the reference backend.
OutputError verify(const Step& step, const TensorView& output) {
  const double bound = default_tolerance(step.query.dtype, step.kv_cache.dtype, output.dtype);
  OutputError worst;
  std::vector<float> expected(static_cast<size_t>(step.heads() * step.dim()));
  for (const int64_t row : sampled_rows(step.rows())) {
    Step one = step;
    for (TensorView* tensor : {&one.query, &one.owners, &one.positions, &one.regions})
      *tensor = tensor->slice(0, row, row + 1);
    const TensorView wanted =
        TensorView::contiguous(expected.data(), DType::f32, {1, step.heads(), step.dim()});
    sparse_prefill(args_of(one, wanted, {}), {.backend = "reference"});
    OutputError error = compare_output(output.slice(0, row, row + 1), wanted, bound);
    error.worst[0] = row;
    const int64_t over = worst.over + error.over;
    if (!(error.largest <= worst.largest) || row == 0) worst = error;
    worst.over = over;
  }
  return worst;
}

Spread time_calls(StepDevice& device, const std::function<void()>& call, bool cold, int64_t calls) {
  std::vector<double> seconds;
  for (int64_t i = 0; i < calls; ++i) seconds.push_back(device.time(call, cold));
  return spread_of(std::move(seconds));
}

/// Host time of a plan, from an idle device.
Spread time_plan(StepDevice& device, const std::function<void()>& plan, int64_t calls) {
  std::vector<double> seconds;
  for (int64_t i = 0; i < calls; ++i) {
    device.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    plan();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return spread_of(std::move(seconds));
}

}  // namespace

BenchResult run_scenario(const SyntheticSpec& spec, Path path, const Options& options,
                         int64_t calls, StepDevice& device) {
  const Step host = make_synthetic_step(spec);
  const Step step = step_on(host, device);
  const TensorView output =
      device.allocate(step.query.dtype, {step.rows(), step.heads(), step.dim()});
  const SparsePrefillArgs args = args_of(step, output, {});
  BenchResult result;
  Options with_workspace = options;
  PlannedRun planned(host, step, args, with_workspace);
  std::function<void()> call = [&] { planned.layer(); };
  const std::function<void()> plan = [&] { planned.plan(device.device()); };
  if (path == Path::direct) {
    result.workspace_bytes = sparse_prefill_workspace_size(args, options);
    with_workspace.workspace =
        device.allocate(DType::u8, {static_cast<int64_t>(result.workspace_bytes)}).data;
    with_workspace.workspace_bytes = result.workspace_bytes;
    call = [&] { sparse_prefill(args, with_workspace); };
  } else {
    plan();
  }
  result.backend = choose_backend(path == Path::direct ? args : first_group(args), with_workspace);

  call();
  TensorStorage storage;
  const TensorView on_host =
      storage.allocate_tensor(output.dtype, {step.rows(), step.heads(), step.dim()});
  device.download(output, on_host.data);
  result.verified = verify(host, on_host);
  result.verified_rows = static_cast<int64_t>(sampled_rows(step.rows()).size());
  if (result.verified.over > 0) return result;

  const SelectionCount count = count_selections(host, path != Path::direct);
  const int64_t heads_per_group = step.heads() / step.groups();
  result.flops = 4.0 * static_cast<double>(step.dim() * heads_per_group) *
                 static_cast<double>(count.visible_tokens);
  result.gathered_bytes =
      static_cast<double>(count.entries - count.invalid()) *
      static_cast<double>(kPageTokens * 2 * step.dim() * itemsize(step.kv_cache.dtype));
  result.warm = time_calls(device, call, false, calls);
  result.cold = time_calls(device, call, true, calls);
  if (path != Path::direct) result.plan = time_plan(device, plan, calls);
  return result;
}

}  // namespace octopage::cli
