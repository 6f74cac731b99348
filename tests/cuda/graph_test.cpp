// What may be captured in a CUDA graph replays rightly after inputs changed in place; what may not
// says so.

#include <cuda_runtime_api.h>

#include "backends/cuda/runtime/runtime.hpp"
#include "cuda/device_step.hpp"

namespace octopage::test {
namespace {

class Graph {
 public:
  Graph() { cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~Graph() {
    if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  template <typename Body>
  void capture(Body&& body) {
    cuda::check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin capture");
    body();
    cuda::check(cudaStreamEndCapture(stream_, &graph_), "end capture");
    cuda::check(cudaGraphInstantiate(&executable_, graph_, 0), "instantiate");
  }
  void replay() {
    cuda::check(cudaGraphLaunch(executable_, stream_), "launch");
    cuda::check(cudaStreamSynchronize(stream_), "synchronize");
  }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

Step step_of(uint64_t seed) {
  SyntheticSpec spec = {.rows = 40,
                        .requests = 2,
                        .context = 600,
                        .groups = 1,
                        .heads = 16,
                        .dim = 192,
                        .region_count = 24,
                        .block_size = 32,
                        .keep = 0.5,
                        .local_regions = 2,
                        .seed = seed};
  return make_synthetic_step(spec);
}

TEST(Graph, DirectReplaysAfterChangesInPlace) {
  const Step first = step_of(1), second = step_of(2);
  DeviceStep device(first);
  Graph graph;
  Options options = device.options();
  options.stream = graph.stream();
  graph.capture([&] { sparse_prefill(device.args, options); });
  graph.replay();
  expect_close(device.fetch(), reference(first), first, "first");
  device.arena.assign(device.args.query, second.query.data);
  device.arena.assign(device.args.kv_cache, second.kv_cache.data);
  device.arena.assign(device.args.block_table, second.block_table.data);
  device.arena.assign(device.args.regions, second.regions.data);
  device.arena.assign(device.args.positions, second.positions.data);
  graph.replay();
  expect_close(device.fetch(), reference(second), second, "second");
}

TEST(Graph, FixupFillAndFinishReplayAfterANewPlan) {
  const Step first = step_of(3), second = step_of(4);
  DeviceStep device(first);
  CompactPagedPrefill plan;
  const auto bounds = [&](const Step& step) {
    std::vector<int64_t> positions;
    for (int64_t row = 0; row < step.rows(); ++row)
      positions.push_back(position_of(step.positions, row) + 9);
    return positions;
  };
  const auto first_bounds = bounds(first), second_bounds = bounds(second);
  PrefillPlanArgs args = {.query_shape = {40, 16, 192},
                          .dtype = DType::bf16,
                          .device = device.arena.device(),
                          .positions = first_bounds,
                          .region_count = 24,
                          .scale = first.scale,
                          .block_size = 32,
                          .contiguous_query = false};
  Graph graph;
  Options options = device.options();
  options.stream = graph.stream();
  TensorView regions = device.args.regions;
  regions.rank = 2;
  regions.shape = {40, 24};
  regions.strides = {24, 1};
  plan.plan(args, options);
  graph.capture([&] {
    plan.fixup_positions(device.args.positions, options);
    plan.prepare_chunk(0, device.args.query, device.args.kv_cache, regions, device.args.block_table,
                       device.args.owners, options);
    plan.finish({}, device.args.kv_cache, device.args.output, device.args.lse, {}, {}, options);
  });
  graph.replay();
  expect_close(device.fetch(), reference(first), first, "first");
  args.positions = second_bounds;
  plan.plan(args, options);  // same addresses: the graph stays valid
  device.arena.assign(device.args.query, second.query.data);
  device.arena.assign(device.args.kv_cache, second.kv_cache.data);
  device.arena.assign(device.args.block_table, second.block_table.data);
  device.arena.assign(device.args.regions, second.regions.data);
  device.arena.assign(device.args.positions, second.positions.data);
  graph.replay();
  const Result result = device.fetch();
  expect_close(result, reference(second), second, "second");
  EXPECT_EQ(result.status, 0);
}

TEST(Graph, PlanAndStrictCallsRefuseCapture) {
  const Step step = step_of(5);
  DeviceStep device(step);
  const auto positions = device.host_positions();
  CompactPagedPrefill plan;
  Graph graph;
  Options options = device.options();
  options.stream = graph.stream();
  const auto expect_refusal = [&](auto&& call, const char* what) {
    try {
      call();
      ADD_FAILURE() << what << " was not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::wrong_state) << error.what();
      EXPECT_NE(std::string(error.what()).find("captured"), std::string::npos) << error.what();
    }
  };
  graph.capture([&] {
    expect_refusal(
        [&] {
          plan.plan({.query_shape = {40, 16, 192},
                     .dtype = DType::bf16,
                     .device = device.arena.device(),
                     .positions = positions,
                     .region_count = 24,
                     .scale = 1,
                     .block_size = 32},
                    options);
        },
        "plan");
    expect_refusal(
        [&] {
          Options strict = options;
          strict.strict = true;
          sparse_prefill(device.args, strict);
        },
        "strict");
    sparse_prefill(device.args, options);  // the capture goes on
  });
  graph.replay();
  expect_close(device.fetch(), reference(step), step, "after the refusals");
}

}  // namespace
}  // namespace octopage::test
