// Purpose: the CPU targets. How fast is octopage beside a BLAS on the same cores, beside the
// straightforward gather-then-matmul on that BLAS, in threads, in context length and in overlap?
// Rules: everything side by side in one run (use --benchmark_enable_random_interleaving=true and
// repetitions); the result is verified against the reference before anything is timed; only tokens
// that a row sees count as work; times include every call that a step needs.

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/executor.hpp"
#include "gather_matmul.hpp"
#include "octopage/octopage.hpp"
#include "step/synthetic.hpp"

namespace {

using octopage::DType;
using octopage::Step;
using octopage::TensorView;

constexpr int64_t kRows = 128;
constexpr int64_t kSide = 2048;

/// A step with its output and useful work, made once.
struct Case {
  Step step;
  std::vector<float> output;
  double flops = 0;

  octopage::SparsePrefillArgs args() {
    octopage::SparsePrefillArgs a;
    a.query = step.query;
    a.kv_cache = step.kv_cache;
    a.block_table = step.block_table;
    a.owners = step.owners;
    a.positions = step.positions;
    a.regions = step.regions;
    a.output =
        TensorView::contiguous(output.data(), DType::f32, {step.rows(), step.heads(), step.dim()});
    a.scale = step.scale;
    if (step.kv_cache.dtype == DType::f8_e4m3fn) {
      a.k_scale = octopage::Scale::of(step.k_scale);
      a.v_scale = octopage::Scale::of(step.v_scale);
    }
    return a;
  }
};

int64_t position_of(const Step& step, int64_t row) {
  return step.positions.dtype == DType::i64 ? static_cast<const int64_t*>(step.positions.data)[row]
                                            : static_cast<const int32_t*>(step.positions.data)[row];
}

/// Useful work: 4 * dim operations for each head and token that the row sees.
double useful_flops(const Step& step) {
  double tokens = 0;
  for (int64_t row = 0; row < step.rows(); ++row) {
    const int64_t position = position_of(step, row);
    const int64_t count = octopage::selection_count(position, step.region_count());
    if (count > 0)
      tokens += static_cast<double>((count - 1) * 8 + octopage::last_page_len(position));
  }
  return 4.0 * static_cast<double>(step.dim() * step.heads()) * tokens;
}

double worst_error(const std::vector<float>& actual, const std::vector<float>& expected,
                   int64_t dim) {
  double worst = 0;
  for (size_t at = 0; at < actual.size(); at += static_cast<size_t>(dim)) {
    double difference = 0, norm = 0;
    for (size_t d = at; d < at + static_cast<size_t>(dim); ++d) {
      difference += std::pow(double{actual[d]} - expected[d], 2);
      norm += std::pow(double{expected[d]}, 2);
    }
    worst = std::max(worst, norm > 0 ? std::sqrt(difference / norm) : difference);
  }
  return worst;
}

/// The step, verified: the cpu backend agrees with the reference.
Case& make_case(octopage::SyntheticSpec spec, bool verify) {
  static std::map<std::string, std::unique_ptr<Case>> cases;
  const std::string key = std::to_string(spec.context) + "/" + std::to_string(spec.keep) + "/" +
                          std::to_string(spec.rows) + "/" +
                          std::to_string(static_cast<int>(spec.kv_dtype));
  auto& slot = cases[key];
  if (slot) return *slot;
  slot = std::make_unique<Case>();
  slot->step = octopage::make_synthetic_step(spec);
  slot->output.assign(static_cast<size_t>(slot->step.query.size()), 0.0f);
  slot->flops = useful_flops(slot->step);
  if (verify) {
    octopage::sparse_prefill(slot->args(), {.backend = "cpu"});
    std::vector<float> actual = slot->output;
    octopage::sparse_prefill(slot->args(), {.backend = "reference"});
    const double error = worst_error(actual, slot->output, spec.dim);
    if (!(error <= 1e-5)) {
      std::fprintf(stderr, "verification failed: relative error %g\n", error);
      std::exit(1);
    }
  }
  return *slot;
}

octopage::SyntheticSpec target_spec() {
  return {
      .rows = kRows, .context = 32768, .heads = 16, .dim = 192, .region_count = 512, .keep = 0.95};
}

void report(benchmark::State& state, double flops) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(flops / 1e9, benchmark::Counter::kIsIterationInvariantRate);
}

void run_octopage(benchmark::State& state, Case& c, int threads) {
  std::vector<std::byte> workspace(
      octopage::sparse_prefill_workspace_size(c.args(), {.backend = "cpu", .threads = threads}));
  const octopage::Options options = {.backend = "cpu",
                                     .threads = threads,
                                     .workspace = workspace.data(),
                                     .workspace_bytes = workspace.size()};
  const auto args = c.args();
  for (auto _ : state) octopage::sparse_prefill(args, options);
  report(state, c.flops);
}

void sgemm(benchmark::State& state) {
  static std::vector<float> a(kSide * kSide, 0.5f), b(kSide * kSide, 0.25f), c(kSide * kSide);
  octopage::bench::set_blas_threads(static_cast<int>(state.range(0)));
  for (auto _ : state) octopage::bench::square_sgemm(kSide, a.data(), b.data(), c.data());
  report(state, 2.0 * kSide * kSide * kSide);
}

void octopage_cpu(benchmark::State& state) {
  run_octopage(state, make_case(target_spec(), true), static_cast<int>(state.range(0)));
}

octopage::bench::GatherMatmulStep peer_step(const Step& step, std::vector<int64_t>& positions) {
  positions.clear();
  for (int64_t row = 0; row < step.rows(); ++row) positions.push_back(position_of(step, row));
  return {.query = static_cast<const uint16_t*>(step.query.data),
          .kv_cache = static_cast<const uint16_t*>(step.kv_cache.data),
          .table = static_cast<const int32_t*>(step.block_table.data),
          .regions = static_cast<const int32_t*>(step.regions.data),
          .positions = positions.data(),
          .heads = step.heads(),
          .dim = step.dim(),
          .region_count = step.region_count(),
          .block_size = step.block_size(),
          .scale = step.scale};
}

void gather_matmul(benchmark::State& state) {
  Case& c = make_case(target_spec(), true);
  std::vector<int64_t> positions;
  const auto peer = peer_step(c.step, positions);
  octopage::bench::set_blas_threads(
      1);  // rows run in parallel, which suits the small products best
  octopage::Threads threads(nullptr, static_cast<int>(state.range(0)));
  const auto scratch_size = static_cast<size_t>(octopage::bench::gather_matmul_scratch(peer));
  std::vector<float> scratch(scratch_size * static_cast<size_t>(threads.concurrency()));
  std::vector<float> output(static_cast<size_t>(c.step.query.size()));
  const auto run = [&] {
    threads.parallel_for(c.step.rows(), [&](int64_t row, int32_t worker) {
      octopage::bench::gather_matmul_row(
          peer, row, scratch.data() + scratch_size * static_cast<size_t>(worker),
          output.data() + row * c.step.heads() * c.step.dim());
    });
  };
  run();
  octopage::sparse_prefill(c.args(), {.backend = "cpu"});
  if (!(worst_error(output, c.output, c.step.dim()) <= 1e-4)) {
    state.SkipWithError("the peer's result is wrong");
    return;
  }
  for (auto _ : state) run();
  report(state, c.flops);
}

void by_context(benchmark::State& state) {
  auto spec = target_spec();
  spec.context = state.range(0);
  run_octopage(state, make_case(spec, false), 1);
}

void by_keep(benchmark::State& state) {
  auto spec = target_spec();
  spec.keep = static_cast<double>(state.range(0)) / 100.0;
  run_octopage(state, make_case(spec, false), 1);
}

void by_cache_type(benchmark::State& state) {
  auto spec = target_spec();
  spec.kv_dtype = static_cast<DType>(state.range(0));
  state.SetLabel(octopage::name(spec.kv_dtype));
  run_octopage(state, make_case(spec, true), 1);
}

}  // namespace

BENCHMARK(sgemm)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(octopage_cpu)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(gather_matmul)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(by_context)
    ->Arg(8192)
    ->Arg(32768)
    ->Arg(131072)
    ->Arg(524288)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(by_keep)->Arg(100)->Arg(95)->Arg(80)->Arg(50)->Arg(0)->UseRealTime()->Unit(
    benchmark::kMillisecond);
BENCHMARK(by_cache_type)
    ->Arg(static_cast<int>(DType::bf16))
    ->Arg(static_cast<int>(DType::f16))
    ->Arg(static_cast<int>(DType::f8_e4m3fn))
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

int main(int argc, char** argv) {
  // 16,384 rows of the Step-5 shape: what the direct path needs beyond inputs and output.
  octopage::SparsePrefillArgs large;
  const int64_t rows = 16384;
  large.query = TensorView::contiguous(nullptr, DType::bf16, {rows, 16, 192});
  large.kv_cache = TensorView::contiguous(nullptr, DType::bf16, {2048, 1, 64, 384});
  large.block_table = TensorView::contiguous(nullptr, DType::i32, {1, 2048});
  large.owners = TensorView::contiguous(nullptr, DType::i32, {rows});
  large.positions = TensorView::contiguous(nullptr, DType::i32, {rows});
  large.regions = TensorView::contiguous(nullptr, DType::i32, {rows, 512});
  large.output = large.query;
  for (const int threads : {1, 2, 16, 64}) {
    benchmark::AddCustomContext(
        "workspace_bytes_16384_rows_" + std::to_string(threads) + "_threads",
        std::to_string(octopage::sparse_prefill_workspace_size(
            large, {.backend = "cpu", .threads = threads})));
  }
  benchmark::AddCustomContext("blas", octopage::bench::blas_kernel());
  for (const auto& backend : octopage::backends()) {
    if (backend.name == "cpu") benchmark::AddCustomContext("octopage_cpu", backend.description);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
