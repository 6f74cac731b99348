// What sparse_prefill refuses, and the workspace that it asks for.

#include <climits>
#include <functional>

#include "api/overlap.hpp"
#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

/// A good call of 2 groups, 4 heads, dim 64, to be broken in one place.
struct Call {
  Step step;
  std::vector<float> output, lse;
  SparsePrefillArgs args;
  Options options;

  explicit Call(DType kv = DType::bf16)
      : step(make_synthetic_step({.rows = 5,
                                  .requests = 1,
                                  .context = 90,
                                  .groups = 2,
                                  .heads = 4,
                                  .dim = 64,
                                  .region_count = 6,
                                  .block_size = 16,
                                  .kv_dtype = kv,
                                  .local_regions = 1,
                                  .seed = 4})),
        output(static_cast<size_t>(step.query.size())),
        lse(20),
        args(args_of(step)) {
    args.output = TensorView::contiguous(output.data(), DType::f32, {5, 4, 64});
    args.lse = TensorView::contiguous(lse.data(), DType::f32, {5, 4});
  }
};

class BadExecutor final : public Executor {
 public:
  explicit BadExecutor(int32_t concurrency) : concurrency_(concurrency) {}
  int32_t concurrency() const override { return concurrency_; }
  void parallel_for(int64_t, void (*)(void*, int64_t, int32_t), void*) override {
    ADD_FAILURE() << "was used";
  }

 private:
  int32_t concurrency_;
};

void* shifted(const TensorView& tensor, int64_t bytes) {
  return static_cast<char*>(tensor.data) + bytes;
}

struct Case {
  const char* name;
  std::function<void(Call&)> spoil;
  std::vector<std::string> pieces;  // argument, rule, value
};

/// Every case is refused as an invalid argument, by every backend, with nothing written.
void expect_refused(const std::vector<Case>& cases, DType kv = DType::bf16) {
  for (const Case& c : cases) {
    for (const char* backend : kBackends) {
      Call call(kv);
      call.options = on(backend);
      ASSERT_NO_THROW(sparse_prefill(call.args, call.options))
          << "the call is good before " << c.name;
      std::fill(call.output.begin(), call.output.end(), 7.0f);
      std::fill(call.lse.begin(), call.lse.end(), 7.0f);
      c.spoil(call);
      expect_error([&] { sparse_prefill(call.args, call.options); }, ErrorCode::invalid_argument,
                   c.pieces, c.name);
      for (const float value : call.output)
        ASSERT_EQ(value, 7.0f) << c.name << ": the output was written";
      for (const float value : call.lse) ASSERT_EQ(value, 7.0f) << c.name << ": lse was written";
    }
  }
}

TEST(SparsePrefill, RefusesWrongTypes) {
  expect_refused({
      {"query f32",
       [](Call& c) { c.args.query.dtype = DType::f32; },
       {"query", "bf16", "f16", "f32"}},
      {"query f8", [](Call& c) { c.args.query.dtype = DType::f8_e4m3fn; }, {"query", "f8_e4m3fn"}},
      {"cache f32",
       [](Call& c) { c.args.kv_cache.dtype = DType::f32; },
       {"kv_cache", "bf16", "f8_e4m3fn", "f32"}},
      {"cache i32", [](Call& c) { c.args.kv_cache.dtype = DType::i32; }, {"kv_cache", "i32"}},
      {"table i64",
       [](Call& c) { c.args.block_table.dtype = DType::i64; },
       {"block_table", "i32", "i64"}},
      {"owners i64", [](Call& c) { c.args.owners.dtype = DType::i64; }, {"owners", "i32", "i64"}},
      {"owners f32", [](Call& c) { c.args.owners.dtype = DType::f32; }, {"owners", "i32", "f32"}},
      {"positions f32",
       [](Call& c) { c.args.positions.dtype = DType::f32; },
       {"positions", "i32", "i64", "f32"}},
      {"regions i64",
       [](Call& c) { c.args.regions.dtype = DType::i64; },
       {"regions", "i32", "i64"}},
      {"regions f32",
       [](Call& c) { c.args.regions.dtype = DType::f32; },
       {"regions", "i32", "f32"}},
      {"output f16",
       [](Call& c) { c.args.output.dtype = DType::f16; },
       {"output", "bf16", "f32", "f16"}},
      {"output i32", [](Call& c) { c.args.output.dtype = DType::i32; }, {"output", "i32"}},
      {"lse bf16", [](Call& c) { c.args.lse.dtype = DType::bf16; }, {"lse", "f32", "bf16"}},
  });
}

TEST(SparsePrefill, RefusesWrongRanksAndShapes) {
  expect_refused({
      {"query missing", [](Call& c) { c.args.query = {}; }, {"query"}},
      {"query rank 2", [](Call& c) { c.args.query.rank = 2; }, {"query", "3", "[5, 4]"}},
      {"cache missing", [](Call& c) { c.args.kv_cache = {}; }, {"kv_cache", "4", "0"}},
      {"cache rank 3", [](Call& c) { c.args.kv_cache.rank = 3; }, {"kv_cache", "4", "3"}},
      {"table rank 1", [](Call& c) { c.args.block_table.rank = 1; }, {"block_table", "2"}},
      {"table missing", [](Call& c) { c.args.block_table = {}; }, {"block_table", "required"}},
      {"owners missing", [](Call& c) { c.args.owners = {}; }, {"owners", "required"}},
      {"owners rank 2",
       [](Call& c) {
         c.args.owners = TensorView::contiguous(c.args.owners.data, DType::i32, {5, 1});
       },
       {"owners", "[5, 1]"}},
      {"owners short", [](Call& c) { c.args.owners.shape[0] = 4; }, {"owners", "[5]", "[4]"}},
      {"positions missing", [](Call& c) { c.args.positions = {}; }, {"positions", "required"}},
      {"positions long",
       [](Call& c) { c.args.positions.shape[0] = 6; },
       {"positions", "[5]", "[6]"}},
      {"regions missing", [](Call& c) { c.args.regions = {}; }, {"regions", "required"}},
      {"regions rank 1", [](Call& c) { c.args.regions.rank = 1; }, {"regions", "[5]"}},
      {"regions of 3 groups",
       [](Call& c) { c.args.regions.shape[1] = 3; },
       {"regions", "[5, 2, *]", "[5, 3, 6]"}},
      {"regions of 4 rows", [](Call& c) { c.args.regions.shape[0] = 4; }, {"regions", "[4, 2, 6]"}},
      {"shared regions of 4 rows",
       [](Call& c) {
         c.args.regions = TensorView::contiguous(c.args.regions.data, DType::i32, {4, 6});
       },
       {"regions", "[4, 6]"}},
      {"output missing", [](Call& c) { c.args.output = {}; }, {"output", "required"}},
      {"output of 3 heads",
       [](Call& c) { c.args.output.shape[1] = 3; },
       {"output", "[5, 4, 64]", "[5, 3, 64]"}},
      {"output of 6 rows",
       [](Call& c) { c.args.output.shape[0] = 6; },
       {"output", "[5, 4, 64]", "[6, 4, 64]"}},
      {"lse transposed",
       [](Call& c) {
         c.args.lse = TensorView::contiguous(c.lse.data(), DType::f32, {4, 5});
       },
       {"lse", "[5, 4]", "[4, 5]"}},
      {"lse rank 1", [](Call& c) { c.args.lse.rank = 1; }, {"lse", "2"}},
      {"heads no multiple of groups",
       [](Call& c) { c.args.query.shape[1] = c.args.output.shape[1] = c.args.lse.shape[1] = 3; },
       {"heads", "= 3", "multiple", "2 groups"}},
      {"no heads",
       [](Call& c) { c.args.query.shape[1] = c.args.output.shape[1] = c.args.lse.shape[1] = 0; },
       {"heads", "= 0", "positive"}},
      {"dim of the cache",
       [](Call& c) { c.args.query.shape[2] = c.args.output.shape[2] = 128; },
       {"dim", "128", "64"}},
      {"negative rows",
       [](Call& c) { c.args.query.shape[0] = -5; },
       {"query.shape[0]", "-5", "negative"}},
      {"negative requests",
       [](Call& c) { c.args.block_table.shape[0] = -1; },
       {"block_table.shape[0]", "-1", "negative"}},
      {"negative columns",
       [](Call& c) { c.args.block_table.shape[1] = -2; },
       {"block_table.shape[1]", "-2"}},
      {"negative blocks",
       [](Call& c) { c.args.kv_cache.shape[0] = -3; },
       {"kv_cache.shape[0]", "-3", "negative"}},
      {"negative region count",
       [](Call& c) { c.args.regions.shape[2] = -1; },
       {"regions.shape[2]", "-1", "negative"}},
      {"too many rows",
       [](Call& c) { c.args.query.shape[0] = int64_t{1} << 31; },
       {"rows", "2147483648", "2^31 - 1"}},
      {"negative block size",
       [](Call& c) { c.args.kv_cache.shape[2] = -8; },
       {"kv_cache.shape[2]", "-8", "negative"}},
      {"no group",
       [](Call& c) { c.args.kv_cache.shape[1] = 0; },
       {"kv_cache.shape[1]", "0", "group"}},
      {"odd last dimension",
       [](Call& c) { c.args.kv_cache.shape[3] = 127; },
       {"kv_cache.shape[3]", "127", "even"}},
  });
}

TEST(SparsePrefill, RefusesBlockSizesThatCutRegions) {
  for (const int64_t size : {0, 1, 4, 12, 20}) {
    expect_refused({{"block size",
                     [&](Call& c) { c.args.kv_cache.shape[2] = size; },
                     {"block_size", std::to_string(size)}}});
  }
}

TEST(SparsePrefill, RefusesWrongDevices) {
  const Device cuda{DeviceType::cuda, 1};
  expect_refused({
      {"cache", [&](Call& c) { c.args.kv_cache.device = cuda; }, {"kv_cache", "cpu", "cuda:1"}},
      {"table",
       [&](Call& c) { c.args.block_table.device = cuda; },
       {"block_table", "cpu", "cuda:1"}},
      {"owners", [&](Call& c) { c.args.owners.device = cuda; }, {"owners", "cpu", "cuda:1"}},
      {"positions",
       [&](Call& c) { c.args.positions.device = cuda; },
       {"positions", "cpu", "cuda:1"}},
      {"regions", [&](Call& c) { c.args.regions.device = cuda; }, {"regions", "cpu", "cuda:1"}},
      {"output", [&](Call& c) { c.args.output.device = cuda; }, {"output", "cpu", "cuda:1"}},
      {"lse", [&](Call& c) { c.args.lse.device = cuda; }, {"lse", "cpu", "cuda:1"}},
  });
}

TEST(SparsePrefill, RefusesNullAndMisalignedData) {
  expect_refused({
      {"query null",
       [](Call& c) { c.args.query.data = nullptr; },
       {"query.data", "null", "[5, 4, 64]"}},
      {"cache null", [](Call& c) { c.args.kv_cache.data = nullptr; }, {"kv_cache.data", "null"}},
      {"table null",
       [](Call& c) { c.args.block_table.data = nullptr; },
       {"block_table.data", "null"}},
      {"owners null",
       [](Call& c) { c.args.owners.data = nullptr; },
       {"owners.data", "null", "[5]"}},
      {"positions null",
       [](Call& c) { c.args.positions.data = nullptr; },
       {"positions.data", "null"}},
      {"regions null", [](Call& c) { c.args.regions.data = nullptr; }, {"regions.data", "null"}},
      {"output null", [](Call& c) { c.args.output.data = nullptr; }, {"output.data", "null"}},
      {"lse null", [](Call& c) { c.args.lse.data = nullptr; }, {"lse.data", "null"}},
      {"query odd",
       [](Call& c) { c.args.query.data = shifted(c.args.query, 1); },
       {"query.data", "aligned", "2-byte"}},
      {"cache off by 8",
       [](Call& c) { c.args.kv_cache.data = shifted(c.args.kv_cache, 8); },
       {"kv_cache.data", "16-byte aligned"}},
      {"table odd",
       [](Call& c) { c.args.block_table.data = shifted(c.args.block_table, 2); },
       {"block_table.data", "aligned", "4-byte"}},
      {"owners odd",
       [](Call& c) { c.args.owners.data = shifted(c.args.owners, 1); },
       {"owners.data", "aligned"}},
      {"positions off by 4 as i64",
       [](Call& c) {
         c.args.positions.dtype = DType::i64;
         c.args.positions.data = shifted(c.args.positions, 4);
       },
       {"positions.data", "aligned", "8-byte"}},
      {"regions odd",
       [](Call& c) { c.args.regions.data = shifted(c.args.regions, 3); },
       {"regions.data", "aligned"}},
      {"output odd",
       [](Call& c) { c.args.output.data = shifted(c.args.output, 2); },
       {"output.data", "aligned"}},
      {"lse odd",
       [](Call& c) { c.args.lse.data = shifted(c.args.lse, 1); },
       {"lse.data", "aligned"}},
  });
}

TEST(SparsePrefill, RefusesStridesThatCannotBe) {
  expect_refused({
      {"query not contiguous",
       [](Call& c) { c.args.query.strides[2] = 2; },
       {"query.strides[2]", "2", "contiguous"}},
      {"cache not contiguous",
       [](Call& c) { c.args.kv_cache.strides[3] = 2; },
       {"kv_cache.strides[3]", "2", "contiguous"}},
      {"output not contiguous",
       [](Call& c) { c.args.output.strides[2] = -1; },
       {"output.strides[2]", "-1", "contiguous"}},
      {"output row stride 0",
       [](Call& c) { c.args.output.strides[0] = 0; },
       {"output.strides[0]", "0", "share"}},
      {"output head stride 0",
       [](Call& c) { c.args.output.strides[1] = 0; },
       {"output.strides[1]", "0"}},
      {"lse row stride 0", [](Call& c) { c.args.lse.strides[0] = 0; }, {"lse.strides[0]", "0"}},
      {"lse head stride 0", [](Call& c) { c.args.lse.strides[1] = 0; }, {"lse.strides[1]", "0"}},
      {"page stride not whole",
       [](Call& c) { c.args.kv_cache.strides[0] = 24 * 1024 + 8; },
       {"kv_cache.stride_block", "24584", "8 * 128 = 1024", "whole"}},
      {"tokens overlap",
       [](Call& c) { c.args.kv_cache.strides[2] = 120; },
       {"stride_token", "120", "128"}},
      {"token stride breaks alignment",
       [](Call& c) { c.args.kv_cache.strides[2] = 129; },
       {"kv_cache", "129"}},
      {"group stride breaks alignment",
       [](Call& c) { c.args.kv_cache.strides[1] = 2049; },
       {"stride_group", "2049", "16-byte"}},
      {"negative block stride",
       [](Call& c) { c.args.kv_cache.strides[0] = -4096; },
       {"stride_block", "-4096"}},
      {"block stride 0", [](Call& c) { c.args.kv_cache.strides[0] = 0; }, {"stride_block", "0"}},
      {"negative group stride",
       [](Call& c) { c.args.kv_cache.strides[1] = -2048; },
       {"stride_group", "-2048"}},
      {"extent beyond 64 bits",
       [](Call& c) { c.args.kv_cache.shape[0] = INT64_MAX / 1024; },
       {"kv_cache", "overflows"}},
  });
  // 136 elements are whole 16-byte units in bf16, but not in f8.
  expect_refused({{"f8 token stride breaks alignment",
                   [](Call& c) {
                     c.args.kv_cache.strides[2] = 136;
                     c.args.kv_cache.strides[0] = 136 * 32;
                   },
                   {"stride_token", "136", "16-byte"}}},
                 DType::f8_e4m3fn);
}

TEST(SparsePrefill, RefusesWrongScalarsAndOptions) {
  static BadExecutor none(0), negative(-4);
  const float inf = std::numeric_limits<float>::infinity();
  expect_refused({
      {"scale NaN",
       [](Call& c) { c.args.scale = std::numeric_limits<float>::quiet_NaN(); },
       {"scale", "nan", "finite"}},
      {"scale inf", [&](Call& c) { c.args.scale = inf; }, {"scale", "inf", "finite"}},
      {"scale -inf", [&](Call& c) { c.args.scale = -inf; }, {"scale", "-inf", "finite"}},
      {"negative threads",
       [](Call& c) { c.options.threads = -1; },
       {"options.threads", "-1", "negative"}},
      {"idle executor",
       [](Call& c) { c.options.executor = &none; },
       {"options.executor", "concurrency", "0", "at least 1"}},
      {"negative executor",
       [](Call& c) { c.options.executor = &negative; },
       {"options.executor", "-4"}},
  });
}

TEST(SparsePrefill, RefusesScalesThatAreNotFinite) {
  static const float pointed = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  expect_refused(
      {{"k_scale", [&](Call& c) { c.args.k_scale = Scale::of(inf); }, {"k_scale", "inf", "finite"}},
       {"v_scale", [](Call& c) { c.args.v_scale = Scale::at(&pointed); }, {"v_scale", "nan"}}},
      DType::f8_e4m3fn);
}

TEST(SparsePrefill, RefusesOutputsThatShareMemory) {
  expect_refused({
      {"rows overlap",
       [](Call& c) {
         c.args.output.strides = {100, 64, 1};
       },
       {"output", "share", "[5, 4, 64]", "[100, 64, 1]"}},
      {"heads meet the next row's",
       [](Call& c) {
         c.args.output.strides = {66, 64, 1};
       },
       {"output", "share"}},
      {"lse meets itself",
       [](Call& c) {
         c.args.lse.strides = {2, 3};
       },
       {"lse", "share"}},
      {"output in the query",
       [](Call& c) { c.args.output.data = c.args.query.data; },
       {"output", "query", "share"}},
      {"output at the cache's end",
       [](Call& c) {
         const auto& cache = c.args.kv_cache;
         c.args.output.data = shifted(cache, cache.size() * 2 - 4);
       },
       {"output", "kv_cache"}},
      {"lse in the output",
       [](Call& c) { c.args.lse.data = shifted(c.args.output, 5 * 4 * 64 * 4 - 4); },
       {"output", "lse"}},
      {"lse in the regions",
       [](Call& c) { c.args.lse.data = c.args.regions.data; },
       {"lse", "regions"}},
      {"workspace in the output",
       [](Call& c) {
         c.options.workspace = c.output.data();
         c.options.workspace_bytes = 1;
       },
       {"output", "options.workspace"}},
  });
}

TEST(SparsePrefill, OutputsMayLieBetweenOtherTensors) {
  // Query and output are columns of one buffer; the output's heads alternate with unused ones, and
  // its rows lie between each other's heads.
  Call call;
  std::vector<uint16_t> columns(5 * 1024);
  for (int64_t row = 0; row < 5; ++row) {
    std::memcpy(&columns[static_cast<size_t>(row) * 1024],
                static_cast<const uint16_t*>(call.step.query.data) + row * 256, 512);
  }
  SparsePrefillArgs args = call.args;
  args.query.data = columns.data();
  args.query.strides = {1024, 64, 1};
  args.output.data = columns.data() + 256;
  args.output.dtype = DType::bf16;
  args.output.strides = {1024, 128, 1};
  std::vector<float> woven(5 * 4 * 64);
  SparsePrefillArgs rows_between_heads = call.args;
  rows_between_heads.output.data = woven.data();
  rows_between_heads.output.strides = {64, 5 * 64, 1};
  for (const char* backend : kBackends) {
    const Outcome narrow = run(call.step, backend, DType::bf16), wide = run(call.step, backend);
    sparse_prefill(args, on(backend));
    sparse_prefill(rows_between_heads, on(backend));
    for (int64_t row = 0; row < 5; ++row) {
      for (int64_t i = 0; i < 256; ++i) {
        const auto at = static_cast<size_t>(row * 1024 + 256 + i / 64 * 128 + i % 64);
        ASSERT_EQ(bf16_to_f32(columns[at]), narrow.at(row, i / 64, i % 64)) << backend;
        const auto woven_at = static_cast<size_t>(row * 64 + i / 64 * 320 + i % 64);
        ASSERT_EQ(woven[woven_at], wide.at(row, i / 64, i % 64)) << backend;
      }
    }
  }
}

TEST(SparsePrefill, EveryScaleIsAllowed) {
  for (const float scale : {0.0f, -0.125f, 1e-30f}) {
    Call call;
    call.args.scale = scale;
    for (const char* backend : kBackends) {
      expect_call(run(call.args, on(backend)), call.args, Bounds::exact(),
                  std::string(backend) + " " + std::to_string(scale));
    }
  }
}

TEST(SparsePrefill, LseIsOptional) {
  Call call;
  for (const char* backend : kBackends) {
    const Outcome expected = run(call.step, backend);
    SparsePrefillArgs args = call.args;
    args.lse = {};
    Fenced output(call.output.size() * 4);
    args.output.data = output.data();
    sparse_prefill(args, on(backend));
    EXPECT_EQ(std::memcmp(output.data(), expected.output.data(), output.size()), 0) << backend;
    EXPECT_TRUE(output.fences_intact());
  }
}

TEST(SparsePrefill, OutputsOfEitherType) {
  // The query's type is the f32 result rounded once.
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Step step = make_synthetic_step({.rows = 5,
                                           .requests = 1,
                                           .context = 90,
                                           .groups = 2,
                                           .heads = 4,
                                           .dim = 64,
                                           .region_count = 6,
                                           .block_size = 16,
                                           .query_dtype = dtype,
                                           .local_regions = 1,
                                           .seed = 4});
    for (const char* backend : kBackends) {
      const Outcome wide = run(step, backend, DType::f32), narrow = run(step, backend, dtype);
      for (int64_t i = 0; i < step.query.size(); ++i) {
        const float value = wide.at(0, 0, i);
        const float rounded =
            dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(value)) : f16_to_f32(f32_to_f16(value));
        ASSERT_EQ(narrow.at(0, 0, i), rounded) << backend << ", element " << i;
      }
    }
  }
}

// --- workspace ------------------------------------------------------------------------------

TEST(Workspace, TooSmallNamesTheNeededSize) {
  Call call;
  call.options = on("cpu");
  const size_t needed = sparse_prefill_workspace_size(call.args, call.options);
  ASSERT_GT(needed, 0u);
  for (const size_t bytes : {size_t{0}, size_t{1}, needed - 1}) {
    Fenced workspace(needed);
    std::fill(call.output.begin(), call.output.end(), 7.0f);
    call.options.workspace = workspace.data();
    call.options.workspace_bytes = bytes;
    expect_error([&] { sparse_prefill(call.args, call.options); }, ErrorCode::invalid_argument,
                 {"options.workspace", std::to_string(bytes) + " bytes", std::to_string(needed)},
                 "workspace");
    EXPECT_TRUE(workspace.untouched());
    for (const float value : call.output) ASSERT_EQ(value, 7.0f);
  }
}

TEST(Workspace, ExactSizeAtAnyAddressAndAnyContentGivesTheSameBits) {
  Call call;
  for (const char* backend : kBackends) {
    const Options plain = on(backend);
    SparsePrefillArgs args = call.args;
    sparse_prefill(args, plain);  // allocates for itself
    const std::vector<float> expected = call.output, expected_lse = call.lse;
    const size_t needed = sparse_prefill_workspace_size(args, plain);
    for (size_t skew = 0; skew < 64; skew += 1 + skew % 7) {
      for (const int fill : {0x00, 0xff, 0x7f}) {
        Fenced workspace(needed, skew);
        std::memset(workspace.data(), fill, needed);
        Options options = plain;
        options.workspace = workspace.data();
        options.workspace_bytes = needed;
        std::fill(call.output.begin(), call.output.end(), -1.0f);
        sparse_prefill(args, options);
        ASSERT_EQ(call.output, expected)
            << backend << ", skew " << skew << ", filled with " << fill;
        ASSERT_EQ(call.lse, expected_lse) << backend;
        ASSERT_TRUE(workspace.fences_intact()) << backend << ", skew " << skew;
      }
    }
  }
}

TEST(Workspace, EveryShapeStaysInside) {
  // Fences of run() stand around exactly what the library asked for.
  for (const int64_t heads : {1, 3, 16, 33, 128}) {
    for (const int64_t regions : {0, 1, 40}) {
      for (const bool invariant : {false, true}) {
        for (const int32_t threads : {1, 3}) {
          const Step step = make_synthetic_step({.rows = 21,
                                                 .requests = 2,
                                                 .context = 400,
                                                 .groups = 1,
                                                 .heads = heads,
                                                 .dim = 128,
                                                 .region_count = regions,
                                                 .block_size = 16,
                                                 .sink_regions = 0,
                                                 .local_regions = 0,
                                                 .seed = 6});
          Options options = on("cpu");
          options.threads = threads;
          options.batch_invariant = invariant;
          const Outcome outcome = run(args_of(step), options);
          expect_line(outcome, 20, args_of(step), 20, heads - 1, Bounds::exact(),
                      std::to_string(heads) + " heads");
        }
      }
    }
  }
}

TEST(Workspace, LargeStepsStayUnder64MiB) {
  // 16,384 rows of 16 heads, dim 192, 512 regions: shapes are all that the question needs.
  SparsePrefillArgs args;
  args.query = TensorView::contiguous(nullptr, DType::bf16, {16384, 16, 192});
  args.kv_cache = TensorView::contiguous(nullptr, DType::bf16, {8192, 1, 64, 384});
  args.block_table = TensorView::contiguous(nullptr, DType::i32, {1, 8192});
  args.owners = TensorView::contiguous(nullptr, DType::i32, {16384});
  args.positions = TensorView::contiguous(nullptr, DType::i32, {16384});
  args.regions = TensorView::contiguous(nullptr, DType::i32, {16384, 1, 512});
  args.output = TensorView::contiguous(nullptr, DType::bf16, {16384, 16, 192});
  for (int32_t threads = 1; threads <= 64; ++threads) {
    const Options options{.backend = "cpu", .threads = threads};
    EXPECT_LT(sparse_prefill_workspace_size(args, options), size_t{64} << 20)
        << threads << " threads";
  }
  EXPECT_EQ(sparse_prefill_workspace_size(args, {.backend = "reference"}), 0u);
}

/// Runs everything on the calling thread, but claims more workers and hands them out backwards.
class SlowExecutor final : public Executor {
 public:
  int32_t concurrency() const override { return 5; }
  void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t), void* context) override {
    for (int64_t i = count - 1; i >= 0; --i) body(context, i, static_cast<int32_t>(i * 3 % 5));
    ++calls;
  }
  int64_t calls = 0;
};

TEST(Workspace, ThreadsAndExecutorsGiveTheSameBits) {
  const Step step = make_synthetic_step({.rows = 60,
                                         .requests = 3,
                                         .context = 400,
                                         .groups = 2,
                                         .heads = 8,
                                         .dim = 64,
                                         .region_count = 20,
                                         .block_size = 16,
                                         .local_regions = 2,
                                         .seed = 6});
  for (const char* backend : kBackends) {
    const Outcome expected = run(step, backend);
    for (const int32_t threads : {0, 1, 2, 7}) {
      Options options = on(backend);
      options.threads = threads;
      expect_same_bits(run(args_of(step), options), expected,
                       std::string(backend) + ", threads " + std::to_string(threads));
    }
    SlowExecutor executor;
    Options options = on(backend);
    options.executor = &executor;
    options.threads = 0;
    expect_same_bits(run(args_of(step), options), expected, std::string(backend) + ", executor");
    EXPECT_GT(executor.calls, 0);
    for (int i = 0; i < 10; ++i)
      expect_same_bits(run(step, backend), expected, std::string(backend) + ", again");
  }
}

TEST(SparsePrefill, BatchInvariantRowsKnowNoOthers) {
  const Step step = make_synthetic_step({.rows = 24,
                                         .requests = 2,
                                         .context = 400,
                                         .groups = 2,
                                         .heads = 6,
                                         .dim = 64,
                                         .region_count = 20,
                                         .block_size = 16,
                                         .local_regions = 2,
                                         .seed = 7});
  for (const char* backend : kBackends) {
    Options options = on(backend);
    options.batch_invariant = true;
    const Outcome all = run(args_of(step), options);
    expect_call(all, args_of(step), Bounds::exact(), backend);
    for (const int64_t row : {0, 7, 11, 12, 23}) {
      SparsePrefillArgs args = args_of(step);
      for (TensorView* tensor : {&args.query, &args.owners, &args.positions, &args.regions}) {
        *tensor = tensor->slice(0, row, row + 1);
      }
      const Outcome alone = run(args, options);
      EXPECT_EQ(std::memcmp(alone.output.data(),
                            all.output.data() + static_cast<size_t>(row) * alone.output.size(),
                            alone.output.size()),
                0)
          << backend << ", row " << row;
      EXPECT_EQ(std::memcmp(alone.lse.data(), &all.lse[static_cast<size_t>(row * 6)], 24), 0)
          << backend << ", row " << row;
    }
  }
}

TEST(Overlap, ColumnsByAnyStrideAreApart) {
  std::vector<float> memory(4096);
  const auto view = [&](int64_t offset, std::array<int64_t, 3> shape,
                        std::array<int64_t, 3> strides) {
    TensorView t = TensorView::contiguous(memory.data() + offset, DType::f32, {1, 1, 1});
    for (size_t d = 0; d < 3; ++d) t.shape[d] = shape[d];
    for (size_t d = 0; d < 3; ++d) t.strides[d] = strides[d];
    return t;
  };
  const auto apart = [](const TensorView& a, const TensorView& b) {
    return !may_share_memory(a, b) && !may_share_memory(b, a);
  };
  // Halves of a per-head buffer [4 rows, 3 heads, 2 * 8], with one row as well.
  EXPECT_TRUE(apart(view(0, {4, 3, 8}, {48, 16, 1}), view(8, {4, 3, 8}, {48, 16, 1})));
  EXPECT_TRUE(apart(view(0, {1, 3, 8}, {48, 16, 1}), view(8, {1, 3, 8}, {48, 16, 1})));
  EXPECT_FALSE(apart(view(0, {4, 3, 9}, {48, 16, 1}), view(8, {4, 3, 8}, {48, 16, 1})));
  // [heads 3, 2, rows 4, 8]: the two of each head.
  EXPECT_TRUE(apart(view(0, {4, 3, 8}, {8, 64, 1}), view(32, {4, 3, 8}, {8, 64, 1})));
  EXPECT_FALSE(apart(view(0, {5, 3, 8}, {8, 64, 1}), view(32, {4, 3, 8}, {8, 64, 1})));
  // Every other row beside every row.
  EXPECT_TRUE(apart(view(0, {3, 1, 8}, {64, 8, 1}), view(16, {6, 1, 8}, {32, 8, 1})));
  EXPECT_FALSE(apart(view(0, {3, 1, 8}, {48, 8, 1}), view(16, {6, 1, 8}, {32, 8, 1})));
  // Backwards.
  EXPECT_TRUE(apart(view(96, {3, 1, 8}, {-48, 8, 1}), view(8, {3, 1, 8}, {48, 8, 1})));
  // Shapes whose product does not fit are not empty.
  EXPECT_FALSE(apart(view(0, {8, 1, int64_t{1} << 61}, {0, 0, 0}), view(0, {4, 1, 8}, {8, 8, 1})));
}

TEST(SparsePrefill, StatusScalesAndEntriesHaveRules) {
  Step step = make_synthetic_step({.rows = 4,
                                   .requests = 1,
                                   .context = 100,
                                   .groups = 1,
                                   .heads = 2,
                                   .dim = 64,
                                   .region_count = 4,
                                   .block_size = 16,
                                   .kv_dtype = DType::f8_e4m3fn,
                                   .local_regions = 1,
                                   .seed = 3});
  for (const char* backend : kBackends) {
    std::vector<float> output(4 * 2 * 64, 7.0f);
    SparsePrefillArgs args = args_of(step);
    args.output = TensorView::contiguous(output.data(), DType::f32, {4, 2, 64});
    const auto message = [&](const SparsePrefillArgs& call, const Options& options) {
      try {
        sparse_prefill(call, options);
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    Options options = on(backend);
    options.status = reinterpret_cast<int32_t*>(output.data() + 5);
    EXPECT_NE(message(args, options).find("options.status"), std::string::npos);
    options = on(backend);
    SparsePrefillArgs wide = args;
    wide.regions.shape[static_cast<size_t>(wide.regions.rank - 1)] = int64_t{1} << 58;
    wide.regions.strides[static_cast<size_t>(wide.regions.rank - 1)] = 0;
    EXPECT_NE(message(wide, options).find("regions"), std::string::npos);
    alignas(4) char bytes[8] = {};
    SparsePrefillArgs odd = args;
    odd.k_scale = Scale::at(reinterpret_cast<const float*>(bytes + 1));
    EXPECT_NE(message(odd, options).find("k_scale"), std::string::npos);
    SparsePrefillArgs inside = args;
    inside.v_scale = Scale::at(output.data() + 9);
    EXPECT_NE(message(inside, options).find("v_scale"), std::string::npos);
    EXPECT_TRUE(std::all_of(output.begin(), output.end(), [](float x) { return x == 7.0f; }));
    EXPECT_EQ(message(args, options), "");
  }
}

}  // namespace
}  // namespace octopage::test
