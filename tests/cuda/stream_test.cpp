// Streams, threads and alternating plans.

#include <cuda_runtime_api.h>

#include <thread>

#include "backends/cuda/runtime/runtime.hpp"
#include "cuda/device_step.hpp"

namespace octopage::test {
namespace {

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { cuda::check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "stream"); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(handle)); }
};

Step step_of(uint64_t seed, int64_t rows) {
  SyntheticSpec spec = {.rows = rows,
                        .requests = 1,
                        .context = 3000,
                        .groups = 1,
                        .heads = 16,
                        .dim = 192,
                        .region_count = 64,
                        .block_size = 64,
                        .keep = 0.9,
                        .seed = seed};
  return make_synthetic_step(spec);
}

void run_planned(DeviceStep& device, CompactPagedPrefill& plan, std::span<const int64_t> positions,
                 const Options& options) {
  const Step& step = device.host;
  plan.plan({.query_shape = {step.rows(), 16, 192},
             .dtype = DType::bf16,
             .device = device.arena.device(),
             .positions = positions,
             .region_count = 64,
             .scale = step.scale,
             .block_size = 64,
             .contiguous_query = false},
            options);
  TensorView regions = device.args.regions;
  regions.rank = 2;
  regions.shape = {step.rows(), 64};
  regions.strides = {64, 1};
  plan.prepare_chunk(0, device.args.query, device.args.kv_cache, regions, device.args.block_table,
                     device.args.owners, options);
  plan.finish({}, device.args.kv_cache, device.args.output, device.args.lse, {}, {}, options);
}

TEST(Stream, TwoPlansAlternateUnderALongRunningKernel) {
  // A heavy call keeps the stream busy, so that every plan is made while older work still runs.
  const Step heavy_step = step_of(1, 2000), a_step = step_of(2, 40), b_step = step_of(3, 55);
  DeviceStep heavy(heavy_step), a(a_step), b(b_step);
  const auto a_positions = a.host_positions(), b_positions = b.host_positions();
  Stream stream;
  const auto with_stream = [&](DeviceStep& device) {
    Options options = device.options();
    options.stream = stream.handle;
    return options;
  };
  CompactPagedPrefill plans[2];
  run_planned(a, plans[0], a_positions, with_stream(a));
  run_planned(b, plans[1], b_positions, with_stream(b));
  for (int round = 0; round < 8; ++round) {
    for (int i = 0; i < 20; ++i) sparse_prefill(heavy.args, with_stream(heavy));
    // The two objects swap their steps, so stale metadata would show.
    run_planned(a, plans[round % 2], a_positions, with_stream(a));
    run_planned(b, plans[1 - round % 2], b_positions, with_stream(b));
  }
  expect_close(a.fetch(), reference(a_step), a_step, "a");
  expect_close(b.fetch(), reference(b_step), b_step, "b");
}

TEST(Stream, TwoThreadsOnTwoStreams) {
  const Step steps[2] = {step_of(7, 64), step_of(8, 96)};
  Result results[2];
  std::thread threads[2];
  for (int t = 0; t < 2; ++t) {
    threads[t] = std::thread([&, t] {
      DeviceStep device(steps[t]);
      const auto positions = device.host_positions();
      Stream stream;
      CompactPagedPrefill plan;
      Options options = device.options();
      options.stream = stream.handle;
      for (int i = 0; i < 30; ++i) {
        run_planned(device, plan, positions, options);
        sparse_prefill(device.args, options);
      }
      run_planned(device, plan, positions, options);
      results[t] = device.fetch();
    });
  }
  for (auto& thread : threads) thread.join();
  for (int t = 0; t < 2; ++t)
    expect_close(results[t], reference(steps[t]), steps[t], std::to_string(t));
}

TEST(Stream, AFailedLaunchIsAnError) {
  // A stream of another life: the launch fails and says so; the next call works.
  const Step step = step_of(9, 8);
  DeviceStep device(step);
  Options options = device.options();
  cudaStream_t destroyed = nullptr;
  cuda::check(cudaStreamCreate(&destroyed), "stream");
  cuda::check(cudaStreamBeginCapture(destroyed, cudaStreamCaptureModeThreadLocal), "capture");
  options.stream = destroyed;
  options.strict = true;
  EXPECT_THROW(sparse_prefill(device.args, options), Error);
  cudaGraph_t graph = nullptr;
  static_cast<void>(cudaStreamEndCapture(destroyed, &graph));
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  static_cast<void>(cudaStreamDestroy(destroyed));
  expect_close(device.direct(), reference(step), step, "after a refused call");
}

}  // namespace
}  // namespace octopage::test
