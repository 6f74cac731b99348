// Which backend serves a call: the list, the priorities, and what was forced.

#include <cstdlib>
#include <set>

#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

/// OCTOPAGE_BACKEND for one scope; null: not set.
class Environment {
 public:
  explicit Environment(const char* value) {
    const char* before = std::getenv(kName);
    had_ = before != nullptr;
    if (had_) before_ = before;
    set(value);
  }
  ~Environment() { set(had_ ? before_.c_str() : nullptr); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static constexpr const char* kName = "OCTOPAGE_BACKEND";
  static void set(const char* value) {
    if (value == nullptr) {
      unsetenv(kName);
    } else {
      setenv(kName, value, 1);
    }
  }
  bool had_ = false;
  std::string before_;
};

/// A small call on the CPU with its outputs.
struct Call {
  Step step;
  std::vector<float> output;
  SparsePrefillArgs args;
  explicit Call(int64_t heads = 2)
      : step(make_synthetic_step({.rows = 4,
                                  .requests = 1,
                                  .context = 60,
                                  .groups = 1,
                                  .heads = heads,
                                  .dim = 64,
                                  .region_count = 4,
                                  .block_size = 8,
                                  .local_regions = 1,
                                  .seed = 2})),
        output(static_cast<size_t>(step.query.size())),
        args(args_of(step)) {
    args.output = TensorView::contiguous(output.data(), DType::f32, {4, heads, 64});
  }
};

TEST(Backends, TheListNamesEachOnceAndByPriority) {
  const std::vector<BackendInfo> all = backends();
  std::set<std::string> names;
  int32_t before = INT32_MAX;
  for (const BackendInfo& info : all) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name << " is listed twice";
    EXPECT_LE(info.priority, before) << info.name;
    before = info.priority;
    EXPECT_FALSE(info.description.empty()) << info.name;
    EXPECT_EQ(info.available, info.reason.empty())
        << info.name << ": a reason, and only where it is missing";
  }
  for (const char* name : {"reference", "cpu", "cuda-sm80", "cuda-sm90a"})
    EXPECT_TRUE(names.contains(name)) << name;
  for (const BackendInfo& info : all) {
    if (info.name == "cpu" || info.name == "reference") {
      EXPECT_TRUE(info.available) << info.reason;
      EXPECT_EQ(info.device, DeviceType::cpu);
    } else {
      EXPECT_EQ(info.device, DeviceType::cuda) << info.name;
    }
  }
  EXPECT_EQ(all.back().name, "reference") << "the definition serves only where it is asked";
}

TEST(Backends, TheFastestThatCanIsChosen) {
  const Environment none(nullptr);
  const Call call;
  EXPECT_EQ(choose_backend(call.args), "cpu");
  EXPECT_EQ(choose_backend(call.args, {.backend = "reference"}), "reference");
  EXPECT_EQ(choose_backend(call.args, {.backend = "cpu"}), "cpu");
}

TEST(Backends, TheChosenOneRuns) {
  // float64 and f32 differ in some bit of a softmax: which backend ran shows in the result.
  const Environment none(nullptr);
  const Call call(8);
  const Outcome reference = run(call.step, "reference"), cpu = run(call.step, "cpu");
  ASSERT_NE(reference.output, cpu.output);
  Options options;
  EXPECT_EQ(run(call.args, options).output, cpu.output);
  {
    const Environment forced("reference");
    EXPECT_EQ(run(call.args, options).output, reference.output);
    options.backend = "cpu";
    EXPECT_EQ(run(call.args, options).output, cpu.output);
  }
  options.backend = "reference";
  EXPECT_EQ(run(call.args, options).output, reference.output);
}

TEST(Backends, TheEnvironmentForces) {
  const Call call;
  {
    const Environment forced("reference");
    EXPECT_EQ(choose_backend(call.args), "reference");
    EXPECT_EQ(choose_backend(call.args, {.backend = "cpu"}), "cpu") << "the option wins";
  }
  {
    const Environment empty("");
    EXPECT_EQ(choose_backend(call.args), "cpu") << "an empty variable forces nothing";
  }
  const Environment wrong("fastest");
  expect_error([&] { choose_backend(call.args); }, ErrorCode::invalid_argument,
               {"OCTOPAGE_BACKEND", "fastest", "cpu", "reference"},
               "unknown name in the environment");
  expect_error([&] { sparse_prefill(call.args); }, ErrorCode::invalid_argument,
               {"OCTOPAGE_BACKEND", "fastest"}, "the call itself");
  EXPECT_NO_THROW(sparse_prefill(call.args, {.backend = "cpu"}));
}

TEST(Backends, UnknownNamesAreRefusedWithTheKnownOnes) {
  const Call call;
  for (const char* name : {"CPU", "cpu ", "gpu", "ref"}) {
    const Options options{.backend = name};
    expect_error([&] { sparse_prefill(call.args, options); }, ErrorCode::invalid_argument,
                 {"options.backend", std::string("'") + name + "'", "reference", "cuda-sm80"},
                 name);
    expect_error([&] { choose_backend(call.args, options); }, ErrorCode::invalid_argument, {name},
                 name);
    expect_error([&] { sparse_prefill_workspace_size(call.args, options); },
                 ErrorCode::invalid_argument, {name}, name);
    expect_error([&] { backend_supports(name, call.args); }, ErrorCode::invalid_argument,
                 {"backend", name, "cpu"}, name);
  }
}

TEST(Backends, AForcedBackendIsNeverReplaced) {
  const Environment none(nullptr);
  const Call call;
  // Tensors on the CPU: no CUDA backend takes them, whether this build has it or not.
  for (const BackendInfo& info : backends()) {
    if (info.device == DeviceType::cpu) continue;
    Fenced output(call.output.size() * 4);
    SparsePrefillArgs args = call.args;
    args.output.data = output.data();
    const Options options{.backend = info.name};
    expect_error([&] { sparse_prefill(args, options); }, ErrorCode::unsupported, {info.name},
                 info.name);
    EXPECT_TRUE(output.untouched()) << info.name;
    const Support support = backend_supports(info.name, args);
    EXPECT_FALSE(support.ok);
    EXPECT_FALSE(support.reason.empty());
    if (!info.available) {
      EXPECT_NE(support.reason.find(info.reason), std::string::npos) << support.reason;
    }
  }
  const Environment forced("cuda-sm80");
  expect_error([&] { sparse_prefill(call.args); }, ErrorCode::unsupported,
               {"OCTOPAGE_BACKEND", "cuda-sm80"}, "forced by the environment");
}

TEST(Backends, SupportsTellsWhy) {
  const Call call;
  for (const char* backend : kBackends) {
    const Support yes = backend_supports(backend, call.args);
    EXPECT_TRUE(yes.ok);
    EXPECT_TRUE(static_cast<bool>(yes));
    EXPECT_EQ(yes.reason, "");
    const Call wide(129);
    const Support no = backend_supports(backend, wide.args);
    EXPECT_FALSE(no.ok);
    for (const char* piece : {backend, "heads per group", "1 .. 128", "129"}) {
      EXPECT_NE(no.reason.find(piece), std::string::npos) << no.reason;
    }
    // Shapes alone decide: no memory is needed to ask.
    SparsePrefillArgs shapes = call.args;
    for (TensorView* tensor : {&shapes.query, &shapes.kv_cache, &shapes.block_table, &shapes.owners,
                               &shapes.positions, &shapes.regions, &shapes.output}) {
      tensor->data = nullptr;
    }
    EXPECT_TRUE(backend_supports(backend, shapes).ok);
    EXPECT_EQ(choose_backend(shapes, {.backend = backend}), backend);
    EXPECT_NO_THROW(sparse_prefill_workspace_size(shapes, {.backend = backend}));
    // Arguments that break a rule of their own are an error, not a "no".
    SparsePrefillArgs broken = call.args;
    broken.owners.dtype = DType::i64;
    expect_error([&] { backend_supports(backend, broken); }, ErrorCode::invalid_argument,
                 {"owners", "i32", "i64"}, backend);
  }
}

TEST(Backends, NothingServesTensorsOfAnAbsentDevice) {
  const Environment none(nullptr);
  const Call call;
  SparsePrefillArgs args = call.args;
  for (TensorView* tensor : {&args.query, &args.kv_cache, &args.block_table, &args.owners,
                             &args.positions, &args.regions, &args.output}) {
    tensor->device = {DeviceType::cuda, 0};
  }
  for (const char* backend : kBackends) {
    expect_error([&] { choose_backend(args, {.backend = backend}); }, ErrorCode::unsupported,
                 {backend, "cpu tensors", "cuda:0"}, backend);
  }
#if !OCTOPAGE_HAS_CUDA
  expect_error([&] { choose_backend(args); }, ErrorCode::unsupported,
               {"cpu", "reference", "cuda:0"}, "by priority");
#endif
}

}  // namespace
}  // namespace octopage::test
