#include "step/synthetic.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "octopage/error.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage {
namespace {

uint64_t fnv1a(uint64_t hash, const TensorView& tensor) {
  const auto* bytes = static_cast<const uint8_t*>(tensor.data);
  for (int64_t i = 0; i < tensor.size() * itemsize(tensor.dtype); ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3u;
  }
  return hash;
}

/// Of all that a step holds.
uint64_t checksum(const Step& step) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const TensorView* tensor : {&step.query, &step.kv_cache, &step.block_table, &step.owners,
                                   &step.positions, &step.regions, &step.lengths}) {
    hash = fnv1a(hash, *tensor);
  }
  return hash;
}

int32_t i32(const TensorView& tensor, int64_t index) {
  return static_cast<const int32_t*>(tensor.data)[index];
}

/// The entries of a row that count.
std::vector<int32_t> selection(const Step& step, int64_t row, int64_t group) {
  const int64_t count = selection_count(i32(step.positions, row), step.region_count());
  const auto* entries = static_cast<const int32_t*>(step.regions.data) +
                        (row * step.groups() + group) * step.region_count();
  return {entries, entries + count};
}

TEST(Synthetic, RowsAreTheLastTokensOfTheirRequests) {
  const Step step =
      make_synthetic_step({.rows = 11, .requests = 3, .context = 100, .dim = 8, .region_count = 4});
  const std::vector<int32_t> owners = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2};
  const std::vector<int32_t> positions = {96, 97, 98, 99, 96, 97, 98, 99, 97, 98, 99};
  for (int64_t row = 0; row < 11; ++row) {
    EXPECT_EQ(i32(step.owners, row), owners[static_cast<size_t>(row)]);
    EXPECT_EQ(i32(step.positions, row), positions[static_cast<size_t>(row)]);
  }
  for (int64_t request = 0; request < 3; ++request) EXPECT_EQ(i32(step.lengths, request), 100);
}

TEST(Synthetic, SelectionsAreDistinctInRangeAndHoldTheForcedRegions) {
  for (const double keep : {0.0, 0.5, 0.95, 1.0}) {
    const SyntheticSpec spec = {.rows = 96,
                                .requests = 2,
                                .context = 700,
                                .groups = 2,
                                .heads = 2,
                                .dim = 8,
                                .region_count = 40,
                                .block_size = 16,
                                .keep = keep};
    const Step step = make_synthetic_step(spec);
    for (int64_t row = 0; row < step.rows(); ++row) {
      const int64_t own = region_of_position(i32(step.positions, row));
      for (int64_t group = 0; group < 2; ++group) {
        const std::vector<int32_t> regions = selection(step, row, group);
        ASSERT_EQ(regions.size(), 40u);
        EXPECT_TRUE(std::is_sorted(regions.begin(), regions.end()));
        EXPECT_EQ(std::set<int32_t>(regions.begin(), regions.end()).size(), regions.size());
        EXPECT_EQ(regions.front(), 0);  // the sink
        EXPECT_LE(regions.back(), own);
        for (int64_t region = own - 8; region <= own; ++region) {
          EXPECT_TRUE(std::binary_search(regions.begin(), regions.end(), region)) << region;
        }
      }
    }
  }
}

TEST(Synthetic, ShortRowsSelectEverything) {
  const Step step = make_synthetic_step(
      {.rows = 100, .context = 100, .dim = 8, .region_count = 10, .block_size = 8, .keep = 0.5});
  for (int64_t row = 0; row < 100; ++row) {
    const std::vector<int32_t> regions = selection(step, row, 0);
    EXPECT_EQ(regions.size(), static_cast<size_t>(std::min<int64_t>(row / 8 + 1, 10)));
    for (size_t i = 0; row < 80 && i < regions.size(); ++i)
      EXPECT_EQ(regions[i], static_cast<int32_t>(i));
  }
}

/// Mean share of a row's regions outside sink, window and own that the row before it has too.
double measured_keep(const Step& step, int64_t sink, int64_t local) {
  int64_t carried = 0;
  int64_t others = 0;
  for (int64_t row = 1; row < step.rows(); ++row) {
    if (i32(step.owners, row) != i32(step.owners, row - 1)) continue;
    const int64_t own = region_of_position(i32(step.positions, row));
    for (int64_t group = 0; group < step.groups(); ++group) {
      const std::vector<int32_t> before = selection(step, row - 1, group);
      for (const int32_t region : selection(step, row, group)) {
        if (region < sink || region >= own - local) continue;
        ++others;
        carried += std::binary_search(before.begin(), before.end(), region);
      }
    }
  }
  return static_cast<double>(carried) / static_cast<double>(others);
}

TEST(Synthetic, CarriesOverWhatWasAskedFor) {
  for (const double keep : {0.0, 0.3, 0.87, 0.95, 1.0}) {
    const Step step = make_synthetic_step({.rows = 128,
                                           .requests = 2,
                                           .context = 16384,
                                           .groups = 2,
                                           .heads = 2,
                                           .dim = 8,
                                           .region_count = 128,
                                           .keep = keep,
                                           .sink_regions = 2,
                                           .local_regions = 4});
    EXPECT_NEAR(measured_keep(step, 2, 4), keep, 0.005);
  }
}

TEST(Synthetic, UnreachableKeepTakesFromTheRowBefore) {
  // 63 of 64 regions: no row can avoid those of the row before.
  const Step step =
      make_synthetic_step({.rows = 8, .context = 512, .dim = 8, .region_count = 63, .keep = 0.0});
  for (int64_t row = 0; row < 8; ++row) {
    const std::vector<int32_t> regions = selection(step, row, 0);
    EXPECT_EQ(std::set<int32_t>(regions.begin(), regions.end()).size(), 63u);
  }
}

TEST(Synthetic, FewRegionsStillHoldTheOwn) {
  for (const int64_t count : {0, 1, 2, 5}) {
    const Step step =
        make_synthetic_step({.rows = 8, .context = 512, .dim = 8, .region_count = count});
    for (int64_t row = 0; row < 8; ++row) {
      const std::vector<int32_t> regions = selection(step, row, 0);
      ASSERT_EQ(regions.size(), static_cast<size_t>(count));
      if (count > 0) {
        EXPECT_EQ(regions.back(), 63);
      }
    }
  }
}

TEST(Synthetic, WrittenSlotsAreFiniteAndAllOthersPoisoned) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f8_e4m3fn}) {
    const SyntheticSpec spec = {.rows = 4,
                                .requests = 2,
                                .context = 77,
                                .groups = 2,
                                .heads = 2,
                                .dim = 8,
                                .region_count = 4,
                                .block_size = 16,
                                .kv_dtype = dtype};
    const Step step = make_synthetic_step(spec);
    const int64_t blocks = step.kv_cache.shape[0];
    const int64_t columns = step.block_table.shape[1];
    std::vector<int64_t> written(static_cast<size_t>(blocks), 0);
    for (int64_t request = 0; request < 2; ++request) {
      for (int64_t column = 0; column < 5; ++column) {
        const int32_t block = i32(step.block_table, request * columns + column);
        ASSERT_GE(block, 0);
        ASSERT_LT(block, blocks);
        EXPECT_EQ(written[static_cast<size_t>(block)], 0) << "used twice";
        written[static_cast<size_t>(block)] = std::min<int64_t>(16, 77 - 16 * column);
      }
      EXPECT_EQ(i32(step.block_table, request * columns + 5), -1);
    }
    EXPECT_EQ(std::count(written.begin(), written.end(), 0), 2);  // blocks of nobody
    double sum = 0;
    double squares = 0;
    int64_t values = 0;
    for (int64_t i = 0; i < step.kv_cache.size(); ++i) {
      const int64_t block = i / (2 * 16 * 16);
      const int64_t token = i / 16 % 16;
      const double value = load_f32(step.kv_cache.data, dtype, i);
      ASSERT_EQ(std::isfinite(value), token < written[static_cast<size_t>(block)])
          << "element " << i;
      if (!std::isfinite(value)) continue;
      sum += value;
      squares += value * value;
      ++values;
    }
    EXPECT_EQ(values, 2 * 77 * 2 * 16);
    EXPECT_NEAR(sum / static_cast<double>(values), 0.0, 0.05);
    EXPECT_NEAR(squares / static_cast<double>(values), 1.0, 0.06);
    EXPECT_EQ(step.k_scale, dtype == DType::f8_e4m3fn ? 0.37f : 1.0f);
    EXPECT_EQ(step.v_scale, dtype == DType::f8_e4m3fn ? 2.25f : 1.0f);
  }
}

TEST(Synthetic, WithoutPoisonEverythingIsFinite) {
  const Step step =
      make_synthetic_step({.rows = 4, .context = 77, .dim = 8, .block_size = 16, .poison = false});
  for (int64_t i = 0; i < step.kv_cache.size(); ++i) {
    ASSERT_TRUE(std::isfinite(load_f32(step.kv_cache.data, DType::bf16, i)));
  }
}

TEST(Synthetic, TheSameEverywhere) {
  const SyntheticSpec spec = {.rows = 24,
                              .requests = 2,
                              .context = 300,
                              .groups = 2,
                              .heads = 4,
                              .dim = 16,
                              .region_count = 16,
                              .block_size = 24,
                              .keep = 0.9,
                              .seed = 7};
  SyntheticSpec f8 = spec;
  f8.kv_dtype = DType::f8_e4m3fn;
  f8.query_dtype = DType::f16;
  EXPECT_EQ(checksum(make_synthetic_step(spec)), 3795433760395397225u);
  EXPECT_EQ(checksum(make_synthetic_step(f8)), 5335724976460239217u);
  SyntheticSpec other = spec;
  other.seed = 8;
  EXPECT_NE(checksum(make_synthetic_step(other)), checksum(make_synthetic_step(spec)));
}

TEST(Synthetic, RefusesSpecsThatCannotBeMet) {
  const auto refusal = [](const SyntheticSpec& spec) -> std::string {
    try {
      make_synthetic_step(spec);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    ADD_FAILURE() << "the spec was taken";
    return "";
  };
  EXPECT_EQ(refusal({.rows = -1}), "rows: must be at least 0, is -1");
  EXPECT_EQ(refusal({.requests = 0}), "requests: must be at least 1, is 0");
  EXPECT_EQ(refusal({.rows = 65, .context = 64}),
            "context: must hold the 65 rows of a request, is 64");
  EXPECT_EQ(refusal({.groups = 3}), "heads: must be a multiple of groups = 3, is 16");
  EXPECT_EQ(refusal({.block_size = 12}), "block_size: must be a multiple of 8, is 12");
  EXPECT_EQ(refusal({.query_dtype = DType::f32}), "query_dtype: must be bf16 or f16, is f32");
  EXPECT_EQ(refusal({.kv_dtype = DType::i32}), "kv_dtype: must be bf16, f16 or f8_e4m3fn, is i32");
  EXPECT_EQ(refusal({.keep = 1.5}), "keep: must be 0 .. 1, is 1.5");
  EXPECT_EQ(refusal({.keep = std::nan("")}), "keep: must be 0 .. 1, is nan");
}

}  // namespace
}  // namespace octopage
