// Purpose: the kernels on the GPU, at the Step-5 shape and around it: unions of neighbouring rows,
// the row by row kernel straight from selections and over page lists; fill, staging, planning,
// beside a plain copy of as many bytes in the same run. Rules: the result is verified on a sample
// of rows before anything is timed; device times are CUDA events around one call, after a warm-up;
// only tokens that a row sees count as work.

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/runtime/device_arena.hpp"
#include "backends/cuda/runtime/runtime.hpp"
#include "core/dtype.hpp"
#include "octopage/octopage.hpp"
#include "step/synthetic.hpp"

namespace {

using octopage::CompactPagedPrefill;
using octopage::DType;
using octopage::Step;
using octopage::TensorView;

/// What a step is made of; the Step-5 shape where nothing else is said.
struct Shape {
  int64_t rows = 4096, context = 131072;
  double keep = 0.95;
  DType kv = DType::bf16;
  int64_t heads = 16, dim = 192, region_count = 512, groups = 1;  // heads of a group
  int64_t requests = 1;

  std::string name() const {
    const auto text = [](const char* what, int64_t value) {
      return std::string("/") + what + ":" + std::to_string(value);
    };
    std::string out = text("rows", rows) + text("context", context) +
                      "/keep:" + std::to_string(keep).substr(0, 4) + "/" + octopage::name(kv);
    if (groups != 1) out += text("groups", groups);
    if (requests != 1) out += text("requests", requests);
    if (heads != 16 || dim != 192 || region_count != 512)
      out += text("heads", heads) + text("dim", dim) + text("regions", region_count);
    return out;
  }
};

/// A step on the device with its plan, verified once.
struct Case {
  Step step;
  octopage::DeviceArena arena;
  octopage::SparsePrefillArgs args;
  std::vector<int64_t> positions;
  CompactPagedPrefill plan;
  TensorView regions;  // [rows, region_count]
  double flops = 0;
};

void fail(const std::string& why) {
  std::fprintf(stderr, "verification failed: %s\n", why.c_str());
  std::exit(1);
}

/// Sample rows against the cpu backend.
void verify(Case& c, const char* what) {
  const int64_t heads = c.step.heads(), dim = c.step.dim();
  std::vector<uint16_t> actual(static_cast<size_t>(heads * dim));
  std::vector<float> expected(actual.size());
  for (const int64_t row : {int64_t{0}, c.step.rows() / 2 + 1, c.step.rows() - 1}) {
    octopage::SparsePrefillArgs host;
    host.query = c.step.query.slice(0, row, row + 1);
    host.kv_cache = c.step.kv_cache;
    host.block_table = c.step.block_table;
    host.owners = c.step.owners.slice(0, row, row + 1);
    host.positions = c.step.positions.slice(0, row, row + 1);
    host.regions = c.step.regions.slice(0, row, row + 1);
    host.output = TensorView::contiguous(expected.data(), DType::f32, {1, heads, dim});
    host.scale = c.step.scale;
    if (c.step.kv_cache.dtype == DType::f8_e4m3fn) {
      host.k_scale = octopage::Scale::of(c.step.k_scale);
      host.v_scale = octopage::Scale::of(c.step.v_scale);
    }
    octopage::sparse_prefill(host);
    c.arena.download(c.args.output.slice(0, row, row + 1), actual.data());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const double a = octopage::bf16_to_f32(actual[i]);
      difference += (a - expected[i]) * (a - expected[i]);
      norm += double{expected[i]} * expected[i];
    }
    const double error = std::sqrt(difference / norm);
    if (!(error <= 4e-3))
      fail(std::string(what) + ": row " + std::to_string(row) + ": error " + std::to_string(error));
  }
}

Case& make_case(const Shape& shape, bool contiguous) {
  static std::map<std::string, std::unique_ptr<Case>> cases;
  const std::string key = shape.name() + (contiguous ? "" : "/strided");
  auto& slot = cases[key];
  if (slot) return *slot;
  cases.clear();  // one at a time: the large ones fill gigabytes
  auto& fresh = cases[key];
  fresh = std::make_unique<Case>();
  Case& c = *fresh;
  const int64_t heads = shape.heads * shape.groups;
  c.step = octopage::make_synthetic_step({.rows = shape.rows,
                                          .requests = shape.requests,
                                          .context = shape.context,
                                          .groups = shape.groups,
                                          .heads = heads,
                                          .dim = shape.dim,
                                          .region_count = shape.region_count,
                                          .kv_dtype = shape.kv,
                                          .keep = shape.keep});
  c.args.query = c.arena.upload(c.step.query);
  c.args.kv_cache = c.arena.upload(c.step.kv_cache);
  c.args.block_table = c.arena.upload(c.step.block_table);
  c.args.owners = c.arena.upload(c.step.owners);
  c.args.positions = c.arena.upload(c.step.positions);
  c.args.regions = c.arena.upload(c.step.regions);
  c.args.output = c.arena.allocate(c.step.query.dtype, {shape.rows, heads, shape.dim});
  c.args.scale = c.step.scale;
  if (shape.kv == DType::f8_e4m3fn) {
    c.args.k_scale = octopage::Scale::of(c.step.k_scale);
    c.args.v_scale = octopage::Scale::of(c.step.v_scale);
  }
  double tokens = 0;
  for (int64_t row = 0; row < shape.rows; ++row) {
    const int64_t position = c.step.positions.dtype == DType::i64
                                 ? static_cast<const int64_t*>(c.step.positions.data)[row]
                                 : static_cast<const int32_t*>(c.step.positions.data)[row];
    c.positions.push_back(position);
    const int64_t count = octopage::selection_count(position, shape.region_count);
    if (count > 0)
      tokens += static_cast<double>((count - 1) * 8 + octopage::last_page_len(position));
  }
  c.flops = 4.0 * static_cast<double>(heads * shape.dim) * tokens;
  if (shape.groups != 1) return c;  // the plan is of one group
  c.regions = c.args.regions;
  c.regions.rank = 2;
  c.regions.shape = {shape.rows, shape.region_count};
  c.regions.strides = {shape.region_count, 1};
  c.plan.plan({.query_shape = {shape.rows, heads, shape.dim},
               .dtype = DType::bf16,
               .device = c.arena.device(),
               .positions = c.positions,
               .region_count = shape.region_count,
               .scale = c.step.scale,
               .block_size = 64,
               .contiguous_query = contiguous});
  return c;
}

/// Times one call per iteration with events.
template <typename Call>
void time_device(benchmark::State& state, Call&& call) {
  cudaEvent_t begin, end;
  octopage::cuda::check(cudaEventCreate(&begin), "event");
  octopage::cuda::check(cudaEventCreate(&end), "event");
  for (int i = 0; i < 3; ++i) call();
  for (auto _ : state) {
    octopage::cuda::check(cudaEventRecord(begin), "record");
    call();
    octopage::cuda::check(cudaEventRecord(end), "record");
    octopage::cuda::check(cudaEventSynchronize(end), "wait");
    float ms = 0;
    octopage::cuda::check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    state.SetIterationTime(ms / 1000.0);
  }
  static_cast<void>(cudaEventDestroy(begin));
  static_cast<void>(cudaEventDestroy(end));
}

void report_work(benchmark::State& state, double flops) {
  state.counters["TFLOP/s"] =
      benchmark::Counter(flops / 1e12, benchmark::Counter::kIsIterationInvariantRate);
}
void report_bytes(benchmark::State& state, double bytes) {
  state.counters["GB/s"] =
      benchmark::Counter(bytes / 1e9, benchmark::Counter::kIsIterationInvariantRate);
}

octopage::FillPrefillPagesArgs fill_args(Case& c, bool copy_query) {
  octopage::FillPrefillPagesArgs fill;
  fill.regions = c.regions;
  fill.block_table = c.args.block_table;
  fill.owners = c.args.owners;
  fill.indptr = c.plan.indptr();
  fill.pages = c.plan.pages();
  fill.block_size = 64;
  fill.page_stride = 8;
  fill.blocks = c.step.kv_cache.shape[0];
  fill.positions = c.plan.positions();
  if (copy_query) {
    fill.query = c.args.query;
    fill.contiguous_query = c.plan.query_buffer();
  }
  return fill;
}

/// A forced backend with the workspace it needs, which is the arena's.
octopage::Options options_of(const Case& c, const char* backend, octopage::DeviceArena& arena) {
  octopage::Options options;
  options.backend = backend;
  options.workspace_bytes = octopage::sparse_prefill_workspace_size(c.args, options);
  if (options.workspace_bytes > 0) {
    options.workspace =
        arena.allocate(DType::u8, {static_cast<int64_t>(options.workspace_bytes)}).data;
  }
  return options;
}

/// One call on `backend`, everything it launches included.
void attention_direct(benchmark::State& state, const char* backend, const Shape& shape) {
  Case& c = make_case(shape, true);
  octopage::DeviceArena arena;
  const octopage::Options options = options_of(c, backend, arena);
  octopage::sparse_prefill(c.args, options);
  verify(c, backend);
  time_device(state, [&] { octopage::sparse_prefill(c.args, options); });
  report_work(state, c.flops);
}

/// Back to back, so that the chip is as warm and as throttled as in an engine; mean per call.
void attention_sustained(benchmark::State& state, const char* backend, const Shape& shape) {
  constexpr int kCalls = 1500;
  Case& c = make_case(shape, true);
  octopage::DeviceArena arena;
  const octopage::Options options = options_of(c, backend, arena);
  cudaEvent_t begin, end;
  octopage::cuda::check(cudaEventCreate(&begin), "event");
  octopage::cuda::check(cudaEventCreate(&end), "event");
  for (auto _ : state) {
    octopage::cuda::check(cudaEventRecord(begin), "record");
    for (int i = 0; i < kCalls; ++i) octopage::sparse_prefill(c.args, options);
    octopage::cuda::check(cudaEventRecord(end), "record");
    octopage::cuda::check(cudaEventSynchronize(end), "wait");
    float ms = 0;
    octopage::cuda::check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    state.SetIterationTime(ms / 1000.0 / kCalls);
  }
  static_cast<void>(cudaEventDestroy(begin));
  static_cast<void>(cudaEventDestroy(end));
  report_work(state, c.flops);
}

void attention_planned(benchmark::State& state, const Shape& shape) {
  Case& c = make_case(shape, true);
  octopage::fill_prefill_pages(fill_args(c, false));
  const auto finish = [&] {
    c.plan.finish(c.args.query, c.args.kv_cache, c.args.output, {}, c.args.k_scale, c.args.v_scale,
                  {.backend = "cuda-sm80"});
  };
  finish();
  verify(c, "planned");
  time_device(state, finish);
  report_work(state, c.flops);
}

/// Pages and query of 16,384 rows, and a plain copy of as many bytes.
void fill(benchmark::State& state, bool copy_query, bool plain) {
  Case& c = make_case({.rows = 16384}, false);
  const double entries = static_cast<double>(c.plan.pages().size());
  const double bytes = entries * 8 + (copy_query ? 16384.0 * 16 * 192 * 2 * 2 : 0);
  if (plain) {
    octopage::DeviceArena arena;
    const auto half = static_cast<int64_t>(bytes / 2);
    const TensorView from = arena.allocate(DType::u8, {half}),
                     to = arena.allocate(DType::u8, {half});
    time_device(state, [&] {
      octopage::cuda::check(
          cudaMemcpyAsync(to.data, from.data, static_cast<size_t>(half), cudaMemcpyDeviceToDevice),
          "copy");
    });
  } else {
    const auto args = fill_args(c, copy_query);
    time_device(state, [&] { octopage::fill_prefill_pages(args); });
  }
  report_bytes(state, bytes);
}

/// 2048 blocks of one group out of four, and a plain copy of as many bytes.
void stage(benchmark::State& state, DType from_type, bool plain) {
  const int64_t blocks = 2048, groups = 4;
  octopage::DeviceArena arena;
  const TensorView cache = arena.allocate(from_type, {blocks, groups, 64, 384}, 0x3c);
  const TensorView output = arena.allocate(DType::bf16, {blocks, 1, 64, 384});
  std::vector<int32_t> list;
  for (int64_t i = 0; i < blocks; ++i) list.push_back(static_cast<int32_t>(i * 1021 % blocks));
  const TensorView staged = arena.upload(TensorView::contiguous(list.data(), DType::i32, {blocks}));
  const double bytes = static_cast<double>(blocks * 64 * 384) *
                       static_cast<double>(octopage::itemsize(from_type) + 2);
  if (plain) {
    const auto half = static_cast<size_t>(bytes / 2);
    time_device(state, [&] {
      octopage::cuda::check(cudaMemcpyAsync(output.data, cache.data,
                                            std::min(half, static_cast<size_t>(output.size() * 2)),
                                            cudaMemcpyDeviceToDevice),
                            "copy");
    });
  } else {
    time_device(state, [&] {
      octopage::stage_prefill_pages(cache.slice(1, 1, 2), staged, output, octopage::Scale::of(0.5f),
                                    octopage::Scale::of(2.0f));
    });
  }
  report_bytes(state, bytes);
}

/// Host time of a plan for 16,384 rows.
void plan_on_host(benchmark::State& state) {
  Case& c = make_case({.rows = 16384}, false);
  const octopage::PrefillPlanArgs args = {.query_shape = {16384, 16, 192},
                                          .dtype = DType::bf16,
                                          .device = c.arena.device(),
                                          .positions = c.positions,
                                          .region_count = 512,
                                          .scale = 1,
                                          .block_size = 64,
                                          .contiguous_query = false};
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    c.plan.plan(args);
    state.SetIterationTime(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    c.arena.synchronize();
  }
}

void fixup(benchmark::State& state) {
  Case& c = make_case({.rows = 16384}, false);
  time_device(state, [&] { c.plan.fixup_positions(c.args.positions); });
}

template <typename... Args>
void add(const std::string& name, Args&&... args) {
  benchmark::RegisterBenchmark(name.c_str(), std::forward<Args>(args)...)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(30);
}

}  // namespace

int main(int argc, char** argv) {
  for (const auto& backend : octopage::backends()) {
    if (backend.name != "cuda-sm80") continue;
    if (!backend.available) {
      std::fprintf(stderr, "%s\n", backend.reason.c_str());
      return 1;
    }
    benchmark::AddCustomContext("gpu", backend.description);
  }
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
  const auto add_direct = [](const char* backend, const Shape& shape) {
    const bool hopper = std::string(backend) == "cuda-sm90a";
    add((hopper ? "union" : "direct") + shape.name(), attention_direct, backend, shape);
  };
  const auto add_all = [&](const Shape& shape) {
    add_direct("cuda-sm90a", shape);
    add_direct("cuda-sm80", shape);
    add("planned" + shape.name(), attention_planned, shape);
  };
  // Neighbours in this list share a step, which is costly to make.
  for (const double keep : {1.0, 0.97, 0.95, 0.87, 0.8, 0.5, 0.0}) {
    for (const DType kv : {DType::bf16, DType::f8_e4m3fn}) {
      const Shape shape = {.keep = keep, .kv = kv};
      if (keep == 0.95 || keep == 0.5 || keep == 0.0) {
        add_all(shape);
      } else {
        add_direct("cuda-sm90a", shape);
      }
    }
  }
  for (const int64_t rows : {64, 256, 512, 1024, 2048}) add_all({.rows = rows});
  for (const int64_t rows : {256, 1024})
    add_direct("cuda-sm90a", {.rows = rows, .kv = DType::f8_e4m3fn});
  for (const int64_t rows : {1024, 4096, 16384})
    add_direct("cuda-sm90a", {.rows = rows, .context = 16384});
  for (const int64_t rows : {256, 4096}) {
    add_direct("cuda-sm90a", {.rows = rows, .context = 1 << 20});
    add_direct("cuda-sm90a", {.rows = rows, .context = 1 << 20, .heads = 8, .dim = 128});
    add_direct("cuda-sm90a", {.rows = rows, .heads = 4});
  }
  for (const DType kv : {DType::bf16, DType::f8_e4m3fn})
    add_direct("cuda-sm90a", {.rows = 16384, .kv = kv});
  for (const int64_t context : {1 << 17, 1 << 20}) {
    for (const double keep : {0.5, 0.0}) {
      const Shape shape = {.rows = 256, .context = context, .keep = keep};
      add_direct("cuda-sm90a", shape);
      add_direct("cuda-sm80", shape);
    }
  }
  // Selections that have nothing in common, where a row by row kernel has the better chances.
  struct Unrelated {
    int64_t heads, dim, region_count;
    DType kv;
  };
  const DType bf16 = DType::bf16, f8 = DType::f8_e4m3fn;
  for (const Unrelated& u : {Unrelated{4, 192, 512, bf16},
                             {8, 128, 256, bf16},
                             {16, 64, 512, bf16},
                             {16, 128, 512, bf16},
                             {16, 256, 512, bf16},
                             {32, 64, 512, bf16},
                             {64, 192, 512, bf16},
                             {16, 64, 512, f8},
                             {16, 128, 512, f8},
                             {16, 192, 512, f8},
                             {16, 256, 512, f8},
                             {4, 192, 512, f8},
                             {32, 128, 512, f8}}) {
    for (const double keep : {0.95, 0.5, 0.0}) {
      const Shape shape = {.rows = 2048,
                           .keep = keep,
                           .kv = u.kv,
                           .heads = u.heads,
                           .dim = u.dim,
                           .region_count = u.region_count};
      add_direct("cuda-sm90a", shape);
      add_direct("cuda-sm80", shape);
    }
  }
  for (const Shape& shape :
       {Shape{.rows = 2048, .groups = 4}, Shape{.context = 8192, .requests = 64}}) {
    add_direct("cuda-sm90a", shape);
    add_direct("cuda-sm80", shape);
  }
  for (const Shape& shape :
       {Shape{}, Shape{.keep = 0.8}, Shape{.kv = DType::f8_e4m3fn}, Shape{.rows = 256}}) {
    benchmark::RegisterBenchmark(("union_sustained" + shape.name()).c_str(), attention_sustained,
                                 "cuda-sm90a", shape)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(1);
  }
  add("fill/pages", fill, false, false);
  add("fill/pages_copy_of_as_many_bytes", fill, false, true);
  add("fill/pages_and_query", fill, true, false);
  add("fill/pages_and_query_copy_of_as_many_bytes", fill, true, true);
  add("plan/host_time", plan_on_host);
  add("plan/fixup", fixup);
  for (const DType from : {DType::bf16, DType::f8_e4m3fn}) {
    add(std::string("stage/") + octopage::name(from), stage, from, false);
    add(std::string("stage/") + octopage::name(from) + "_copy_of_as_many_bytes", stage, from, true);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
