// Random steps against the oracle, and what must not change a bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

/// A step with interleaved owners, padding rows, permuted blocks, garbage behind selections and in
/// the table's tail, regions in any order.
Step random_step(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const int64_t dims[] = {64, 128, 192, 256};
  const DType caches[] = {DType::bf16, DType::f16, DType::f8_e4m3fn};
  SyntheticSpec spec;
  spec.requests = 1 + below(3);
  spec.rows = spec.requests * (1 + below(kSanitized ? 4 : 9));
  spec.groups = 1 + below(3);
  spec.heads = spec.groups * (1 + below(kSanitized ? 9 : 40));
  spec.dim = dims[below(4)];
  spec.block_size = 8 * (1 + below(8));
  spec.context = spec.rows + 30 + below(400);
  spec.region_count = 3 + below(30);
  spec.local_regions = 1;
  spec.query_dtype = below(2) == 0 ? DType::bf16 : DType::f16;
  spec.kv_dtype = caches[below(3)];
  spec.keep = 0.1 * static_cast<double>(below(11));
  spec.seed = seed;
  Step step = clone(make_synthetic_step(spec));
  // Shuffle rows, so that requests interleave; make some padding; shuffle selections.
  for (int64_t row = step.rows(); row-- > 1;) {
    const int64_t other = below(row + 1);
    std::swap(owner_of(step, row), owner_of(step, other));
    std::swap(position_of(step, row), position_of(step, other));
    for (int64_t g = 0; g < step.groups(); ++g) {
      for (int64_t i = 0; i < step.region_count(); ++i)
        std::swap(region_of(step, row, g, i), region_of(step, other, g, i));
    }
  }
  for (int64_t row = 0; row < step.rows(); ++row) {
    if (below(7) == 0) position_of(step, row) = static_cast<int32_t>(-1 - below(20));
    const int64_t count = entries_of(step, row);
    for (int64_t g = 0; g < step.groups(); ++g) {
      for (int64_t i = count; i-- > 1;)
        std::swap(region_of(step, row, g, i), region_of(step, row, g, below(i + 1)));
      for (int64_t i = count; i < step.region_count(); ++i)
        region_of(step, row, g, i) = static_cast<int32_t>(random());
    }
  }
  return step;
}

constexpr uint64_t kSteps = kSanitized ? 6 : 40;

TEST(Property, RandomStepsAgreeWithTheOracleOnBothPaths) {
  for (uint64_t seed = 1; seed <= kSteps; ++seed) {
    const Step step = random_step(seed);
    const auto args = args_of(step);
    for (const char* backend : kBackends) {
      const std::string what = "seed " + std::to_string(seed) + ", " + backend;
      const Outcome direct = run(step, backend);
      ASSERT_NO_FATAL_FAILURE(expect_call(direct, args, Bounds::exact(), what));
      EXPECT_EQ(direct.status, 0) << what;
      ASSERT_NO_FATAL_FAILURE(
          expect_call(run_planned(step, backend), args, Bounds::exact(), what + ", planned"));
      ASSERT_NO_FATAL_FAILURE(expect_call(run(step, backend, step.query.dtype), args,
                                          Bounds::of(args, step.query.dtype),
                                          what + ", query's type"));
    }
  }
}

TEST(Property, ThreadsAndExecutorsDoNotChangeABit) {
  class Backwards final : public Executor {
   public:
    int32_t concurrency() const override { return 3; }
    void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t),
                      void* context) override {
      for (int64_t i = count; i-- > 0;) body(context, i, static_cast<int32_t>(i % 3));
    }
  } backwards;
  class PlainThreads final : public Executor {
   public:
    int32_t concurrency() const override { return 2; }
    void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t),
                      void* context) override {
      std::atomic<int64_t> next{0};
      const auto work = [&](int32_t worker) {
        for (int64_t i = next++; i < count; i = next++) body(context, i, worker);
      };
      std::thread other(work, 1);
      work(0);
      other.join();
    }
  } plain;
  for (uint64_t seed = 100; seed < 100 + kSteps / 4; ++seed) {
    const Step step = random_step(seed);
    for (const char* backend : kBackends) {
      Options options = on(backend);
      options.threads = 1;
      const Outcome expected = run(args_of(step), options);
      expect_same_bits(run(args_of(step), options), expected, "again");
      options.executor = &plain;
      expect_same_bits(run(args_of(step), options), expected, "plain threads");
      options.executor = &backwards;
      expect_same_bits(run(args_of(step), options), expected, "backwards");
      options.executor = nullptr;
      for (const int32_t threads : {2, 5}) {
        options.threads = threads;
        expect_same_bits(run(args_of(step), options), expected,
                         std::to_string(threads) + " threads");
      }
    }
  }
}

TEST(Property, BatchInvariantRowsDoNotDependOnTheirNeighbours) {
  for (uint64_t seed = 200; seed < 200 + kSteps / 2; ++seed) {
    const Step step = random_step(seed);
    Options options = on("cpu");
    options.batch_invariant = true;
    const Outcome together = run(args_of(step), options);
    for (int64_t row = 0; row < step.rows(); ++row) {
      SparsePrefillArgs args = args_of(step);
      args.query = args.query.slice(0, row, row + 1);
      args.owners = args.owners.slice(0, row, row + 1);
      args.positions = args.positions.slice(0, row, row + 1);
      args.regions = args.regions.slice(0, row, row + 1);
      const Outcome alone = run(args, options);
      const auto bytes = alone.output.size();
      ASSERT_EQ(std::memcmp(alone.output.data(),
                            together.output.data() + static_cast<size_t>(row) * bytes, bytes),
                0)
          << "seed " << seed << ", row " << row;
      ASSERT_EQ(std::memcmp(alone.lse.data(), together.lse.data() + row * step.heads(),
                            alone.lse.size() * 4),
                0);
    }
  }
}

TEST(Property, OutputOfTheQuerysTypeIsTheF32OneRoundedOnce) {
  for (uint64_t seed = 300; seed < 300 + kSteps / 4; ++seed) {
    const Step step = random_step(seed);
    for (const char* backend : kBackends) {
      const Outcome wide = run(step, backend), narrow = run(step, backend, step.query.dtype);
      for (size_t i = 0; i < narrow.output.size() / 2; ++i) {
        const float value = load_f32(wide.output.data(), DType::f32, static_cast<int64_t>(i));
        uint16_t bits = 0;
        store_f32(&bits, step.query.dtype, 0, value);
        uint16_t actual = 0;
        std::memcpy(&actual, narrow.output.data() + 2 * i, 2);
        ASSERT_EQ(actual, bits) << backend << ", seed " << seed << ", element " << i;
      }
    }
  }
}

TEST(Property, SharedSelectionsEqualTheirCopiesPerGroup) {
  for (uint64_t seed = 400; seed < 400 + kSteps / 4; ++seed) {
    Step step = random_step(seed);
    for (int64_t row = 0; row < step.rows(); ++row) {
      for (int64_t g = 1; g < step.groups(); ++g) {
        for (int64_t i = 0; i < step.region_count(); ++i)
          region_of(step, row, g, i) = region_of(step, row, 0, i);
      }
    }
    SparsePrefillArgs shared = args_of(step);
    shared.regions.rank = 2;
    shared.regions.shape = {step.rows(), step.region_count()};
    shared.regions.strides = {step.regions.strides[0], step.regions.strides[2]};
    for (const char* backend : kBackends)
      expect_same_bits(run(shared, on(backend)), run(step, backend), backend);
  }
}

}  // namespace
}  // namespace octopage::test
