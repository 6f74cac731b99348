// What only the union path can get wrong: shapes of its tiles, orders that could lock its ring,
// what neighbours in a tile see of each other. Runs where it is the backend under test.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <tuple>
#include <utility>

#include "backends/cuda/runtime/runtime.hpp"
#include "backends/cuda/union/params.hpp"
#include "cuda/device_step.hpp"

namespace octopage::test {
namespace {

class Union : public testing::Test {
 protected:
  void SetUp() override {
    if (test_backend != "cuda-sm90a") GTEST_SKIP() << "cuda-sm90a is not under test";
  }
  /// A direct call that the union path must take.
  static Result run(DeviceStep& device) {
    const Support support = backend_supports("cuda-sm90a", device.args);
    EXPECT_TRUE(support.ok) << support.reason;
    return device.direct();
  }
  static void expect_right(const Step& step, const std::string& what) {
    DeviceStep device(step);
    expect_close(run(device), reference(step), step, what);
  }
};

/// Copies of the selections and rows that a test may change.
struct Editable {
  std::vector<int32_t> owners, positions, regions;
  Step step;
  explicit Editable(const Step& base)
      : owners(copy(base.owners)),
        positions(copy(base.positions)),
        regions(copy(base.regions)),
        step(base) {
    step.owners.data = owners.data();
    step.positions.data = positions.data();
    step.regions.data = regions.data();
  }
  int64_t entries() const { return step.regions.size() / step.rows(); }  // of a row, all groups

 private:
  static std::vector<int32_t> copy(const TensorView& t) {
    const auto* data = static_cast<const int32_t*>(t.data);
    return {data, data + t.size()};
  }
};

/// A copy of a step's 16-bit cache that a test may change.
struct EditableCache {
  std::vector<uint16_t> memory;
  uint16_t* data;
  explicit EditableCache(const Step& step) : memory(static_cast<size_t>(step.kv_cache.size()) + 8) {
    void* aligned = memory.data();
    size_t space = memory.size() * 2;
    const auto bytes = static_cast<size_t>(step.kv_cache.size()) * 2;
    data = static_cast<uint16_t*>(std::align(16, bytes, aligned, space));
    std::memcpy(data, step.kv_cache.data, bytes);
  }
};

TEST_F(Union, EveryHeadCountDimAndType) {
  uint64_t seed = 1000;
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128, 192, 256}) {
      for (const int64_t heads : {1, 3, 4, 6, 8, 12, 16, 24, 32, 64, 100, 128}) {
        const int64_t groups = heads <= 16 ? 2 : 1;
        const Step step = make_synthetic_step({.rows = 41,
                                               .requests = 2,
                                               .context = 900,
                                               .groups = groups,
                                               .heads = heads * groups,
                                               .dim = dim,
                                               .region_count = 37,
                                               .block_size = 40,
                                               .query_dtype = type,
                                               .kv_dtype = type,
                                               // Alike enough for the union path.
                                               .keep = 0.95,
                                               .local_regions = 2,
                                               .seed = seed++});
        ASSERT_NO_FATAL_FAILURE(expect_right(step, std::string(name(type)) + " dim " +
                                                       std::to_string(dim) + " heads " +
                                                       std::to_string(heads)));
      }
    }
  }
}

TEST_F(Union, InterleavedOwnersPaddingAndShuffledEntries) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    const int64_t heads = std::vector<int64_t>{4, 8, 16, 64}[seed % 4];
    Editable e(make_synthetic_step({.rows = 90,
                                    .requests = 5,
                                    .context = 1300,
                                    .groups = 2,
                                    .heads = heads * 2,
                                    .dim = 192,
                                    .region_count = 29,
                                    .block_size = 16,
                                    .keep = 0.6,
                                    .local_regions = 1,
                                    .seed = seed}));
    const int64_t entries = e.entries(), rows = e.step.rows();
    const auto swap_rows = [&](int64_t a, int64_t b) {
      std::swap(e.owners[static_cast<size_t>(a)], e.owners[static_cast<size_t>(b)]);
      std::swap(e.positions[static_cast<size_t>(a)], e.positions[static_cast<size_t>(b)]);
      std::swap_ranges(e.regions.begin() + a * entries, e.regions.begin() + (a + 1) * entries,
                       e.regions.begin() + b * entries);
    };
    if (seed % 3 != 0) {
      for (int64_t row = rows - 1; row > 0; --row)
        if (random() % 4 == 0) swap_rows(row, static_cast<int64_t>(random() % row));
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t g = 0; g < 2; ++g) {
        const auto begin = e.regions.begin() + row * entries + g * 29;
        const int64_t count = std::min<int64_t>(e.positions[static_cast<size_t>(row)] / 8 + 1, 29);
        std::shuffle(begin, begin + count, random);
      }
      if (random() % 9 == 0) e.positions[static_cast<size_t>(row)] = -3;
    }
    ASSERT_NO_FATAL_FAILURE(expect_right(e.step, "seed " + std::to_string(seed)));
  }
}

TEST_F(Union, AdversarialOrdersDoNotLockTheRing) {
  // 16 heads: tiles of eight rows, halves of four. Regions by row of the tile and entry.
  constexpr int64_t kCount = 48;
  struct Pattern {
    const char* name;
    std::function<int32_t(int64_t row, int64_t entry)> region;
  };
  const Pattern patterns[] = {
      {"all the same", [](int64_t, int64_t i) { return static_cast<int32_t>(i); }},
      {"halves share nothing",
       [](int64_t row, int64_t i) { return static_cast<int32_t>(2 * i + (row % 8 < 4 ? 0 : 1)); }},
      {"first half low, second half high",
       [](int64_t row, int64_t i) { return static_cast<int32_t>(i + (row % 8 < 4 ? 0 : 300)); }},
      {"second half low, first half high",
       [](int64_t row, int64_t i) { return static_cast<int32_t>(i + (row % 8 < 4 ? 300 : 0)); }},
      {"every row its own",
       [](int64_t row, int64_t i) { return static_cast<int32_t>(8 * i + row % 8); }},
      {"second half selects nothing",
       [](int64_t row, int64_t i) { return row % 8 < 4 ? static_cast<int32_t>(3 * i) : -1; }},
      {"first half selects nothing",
       [](int64_t row, int64_t i) { return row % 8 >= 4 ? static_cast<int32_t>(3 * i) : -1; }},
      {"one region", [](int64_t, int64_t) { return 7; }},
      {"one region of one row",
       [](int64_t row, int64_t i) { return row % 8 == 6 && i == 0 ? 7 : -1; }},
      {"nothing", [](int64_t, int64_t) { return -1; }},
      {"every other tile nothing",
       [](int64_t row, int64_t i) { return row / 8 % 2 == 0 ? static_cast<int32_t>(i) : -1; }},
      {"a long surplus of the first half",
       [](int64_t row, int64_t i) {
         return row % 8 < 4 ? static_cast<int32_t>(i * 8 + row % 8) : static_cast<int32_t>(i % 2);
       }},
      {"a long surplus of the second half",
       [](int64_t row, int64_t i) {
         return row % 8 >= 4 ? static_cast<int32_t>(i * 8 + row % 8) : static_cast<int32_t>(i % 2);
       }},
  };
  // bf16 of this head dim goes through the union whatever rows share; f8 at 256, most of the
  // patterns of which do, has the shortest ring.
  for (const auto& [dim, kv] : {std::pair{192, DType::bf16}, {256, DType::f8_e4m3fn}}) {
    Editable e(make_synthetic_step({.rows = 1200,  // more tiles than multiprocessors
                                    .requests = 1,
                                    .context = 8000,
                                    .groups = 1,
                                    .heads = 16,
                                    .dim = dim,
                                    .region_count = kCount,
                                    .block_size = 64,
                                    .kv_dtype = kv,
                                    .local_regions = 1,
                                    .seed = 4}));
    for (const Pattern& pattern : patterns) {
      for (int64_t row = 0; row < e.step.rows(); ++row) {
        for (int64_t i = 0; i < kCount; ++i) {
          // Duplicates are a caller's mistake that a row alone must not pay for: make them invalid.
          int32_t region = pattern.region(row, i);
          for (int64_t before = 0; before < i && region >= 0; ++before)
            if (e.regions[static_cast<size_t>(row * kCount + before)] == region) region = -1;
          e.regions[static_cast<size_t>(row * kCount + i)] = region;
        }
      }
      ASSERT_NO_FATAL_FAILURE(expect_right(e.step, std::string(name(kv)) + ", " + pattern.name));
    }
  }
}

TEST_F(Union, LaunchedBackToBack) {
  const Step step = make_synthetic_step({.rows = 300,
                                         .requests = 3,
                                         .context = 3000,
                                         .groups = 2,
                                         .heads = 32,
                                         .dim = 192,
                                         .region_count = 64,
                                         .block_size = 64,
                                         .keep = 0.8,
                                         .seed = 12});
  DeviceStep device(step, DType::bf16);
  const Result first = run(device);
  const Options options = device.options();
  for (int i = 0; i < 1500; ++i) sparse_prefill(device.args, options);
  const Result last = device.fetch();
  EXPECT_EQ(first.bits, last.bits);
  EXPECT_EQ(first.lse, last.lse);
  expect_close(last, reference(step), step, "after 1500 launches", DType::bf16);
}

TEST_F(Union, OneSelectionForAllGroups) {
  Step step = make_synthetic_step({.rows = 50,
                                   .requests = 2,
                                   .context = 1000,
                                   .groups = 4,
                                   .heads = 32,
                                   .dim = 192,
                                   .region_count = 31,
                                   .block_size = 64,
                                   .keep = 0.8,
                                   .local_regions = 1,
                                   .seed = 5});
  const Editable e(step);
  std::vector<int32_t> shared;
  for (int64_t row = 0; row < step.rows(); ++row) {
    const auto begin = e.regions.begin() + row * e.entries();
    shared.insert(shared.end(), begin, begin + 31);
  }
  step.regions = TensorView::contiguous(shared.data(), DType::i32, {50, 31});
  expect_right(step, "shared selection");
}

TEST_F(Union, ANonFiniteKeyShowsOnlyWhereItIsSelected) {
  // Keys are exact in every row of a tile; values of a written token may reach its neighbours.
  Step step = make_synthetic_step({.rows = 16,
                                   .requests = 1,
                                   .context = 2000,
                                   .groups = 1,
                                   .heads = 16,
                                   .dim = 128,
                                   .region_count = 24,
                                   .block_size = 8,
                                   .keep = 0.5,
                                   .local_regions = 1,
                                   .poison = false,
                                   .seed = 3});
  for (const uint16_t bits : {0x7fc0, 0x7f80, 0xff80}) {  // NaN, Inf, -Inf
    const EditableCache copy(step);
    uint16_t* const cache = copy.data;
    const auto* regions = static_cast<const int32_t*>(step.regions.data);
    const int32_t region = regions[5 * 24 + 9];  // of row 5
    const int64_t block = static_cast<const int32_t*>(step.block_table.data)[region];
    for (int64_t d = 0; d < 128; ++d) cache[(block * 8 + 3) * 256 + d] = bits;
    Step dirty = step;
    dirty.kv_cache.data = cache;
    DeviceStep clean_device(step), dirty_device(dirty);
    const Result before = run(clean_device), after = run(dirty_device);
    int64_t untouched = 0;
    for (int64_t row = 0; row < step.rows(); ++row) {
      const bool selects = std::count(regions + row * 24, regions + (row + 1) * 24, region) > 0;
      const auto begin = static_cast<size_t>(row * 16 * 128);
      for (size_t i = begin; i < begin + 16 * 128 && !selects; ++i)
        ASSERT_NEAR(after.output[i], before.output[i], 2e-2) << "row " << row << ", bits " << bits;
      untouched += selects ? 0 : 1;
    }
    EXPECT_GT(untouched, 0);
  }
}

TEST_F(Union, RequestsAreIsolated) {
  // NaN in everything one request has written: the other requests keep their bits.
  Step step = make_synthetic_step({.rows = 40,
                                   .requests = 4,
                                   .context = 700,
                                   .groups = 1,
                                   .heads = 8,
                                   .dim = 192,
                                   .region_count = 20,
                                   .block_size = 16,
                                   .local_regions = 1,
                                   .poison = false,
                                   .seed = 8});
  const EditableCache copy(step);
  uint16_t* const cache = copy.data;
  const int64_t columns = step.block_table.shape[1];
  const auto* table = static_cast<const int32_t*>(step.block_table.data);
  const auto* owners = static_cast<const int32_t*>(step.owners.data);
  int64_t newest = -1;
  for (int64_t row = 0; row < step.rows(); ++row)
    if (owners[row] == 1) newest = std::max(newest, position_of(step.positions, row));
  for (int64_t c = 0; c <= newest / 16; ++c) {  // what lies behind belongs to others
    const int32_t block = table[columns + c];
    std::fill_n(cache + int64_t{block} * 16 * 384, 16 * 384, uint16_t{0x7fc0});
  }
  Step dirty = step;
  dirty.kv_cache.data = cache;
  DeviceStep clean_device(step), dirty_device(dirty);
  const Result before = run(clean_device), after = run(dirty_device);
  for (int64_t row = 0; row < step.rows(); ++row) {
    const auto begin = static_cast<size_t>(row * 8 * 192);
    const bool same =
        std::memcmp(after.output.data() + begin, before.output.data() + begin, 8 * 192 * 4) == 0;
    EXPECT_EQ(same, owners[row] != 1) << row;
  }
}

TEST_F(Union, PairedStridesAndForeignLayouts) {
  // Rows and heads with gaps that keep pairs whole but no 16-byte words; groups interleaved by
  // token and a gap between blocks. Gaps stay as they are.
  const Step step = make_synthetic_step({.rows = 30,
                                         .requests = 2,
                                         .context = 500,
                                         .groups = 2,
                                         .heads = 32,
                                         .dim = 64,
                                         .region_count = 20,
                                         .block_size = 24,
                                         .keep = 0.8,
                                         .local_regions = 1,
                                         .seed = 21});
  const Result expected = reference(step);
  const int64_t rows = step.rows(), heads = step.heads(), dim = step.dim();
  const int64_t stride_head = dim + 2, stride_row = heads * stride_head + 6;
  const auto& shape = step.kv_cache.shape;
  const int64_t token = shape[1] * shape[3], block = (shape[2] + 8) * token;
  std::vector<uint16_t> query(static_cast<size_t>(rows * stride_row), 0x7fc0);
  for (int64_t line = 0; line < rows * heads; ++line) {
    std::memcpy(query.data() + line / heads * stride_row + line % heads * stride_head,
                static_cast<const uint16_t*>(step.query.data) + line * dim,
                static_cast<size_t>(dim) * 2);
  }
  std::vector<uint16_t> cache(static_cast<size_t>(shape[0] * block), 0x7fc0);
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t g = 0; g < shape[1]; ++g) {
      for (int64_t t = 0; t < shape[2]; ++t) {
        std::memcpy(cache.data() + b * block + t * token + g * shape[3],
                    static_cast<const uint16_t*>(step.kv_cache.data) +
                        ((b * shape[1] + g) * shape[2] + t) * shape[3],
                    static_cast<size_t>(shape[3]) * 2);
      }
    }
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    DeviceStep device(step);
    SparsePrefillArgs args = device.args;
    args.query.data = device.arena
                          .upload(TensorView::contiguous(query.data(), DType::bf16,
                                                         {static_cast<int64_t>(query.size())}))
                          .data;
    args.query.strides = {stride_row, stride_head, 1};
    args.kv_cache.data = device.arena
                             .upload(TensorView::contiguous(cache.data(), DType::bf16,
                                                            {static_cast<int64_t>(cache.size())}))
                             .data;
    args.kv_cache.strides = {block, shape[3], token, 1};
    const TensorView memory = device.arena.allocate(dtype, {rows * stride_row}, 0x7f);
    args.output = memory;
    args.output.rank = 3;
    args.output.shape = {rows, heads, dim};
    args.output.strides = {stride_row, stride_head, 1};
    ASSERT_TRUE(backend_supports("cuda-sm90a", args).ok)
        << backend_supports("cuda-sm90a", args).reason;
    sparse_prefill(args, device.options_for(args));
    std::vector<uint8_t> raw(static_cast<size_t>(memory.size() * itemsize(dtype)));
    device.arena.download(memory, raw.data());
    Result actual = device.fetch();
    uint8_t poison[4] = {0x7f, 0x7f, 0x7f, 0x7f};
    for (int64_t at = 0; at < memory.size(); ++at) {
      const int64_t row = at / stride_row, in_row = at % stride_row;
      const int64_t head = in_row / stride_head, d = in_row % stride_head;
      if (head < heads && d < dim) {
        actual.output[static_cast<size_t>((row * heads + head) * dim + d)] =
            load_f32(raw.data(), dtype, at);
      } else {
        ASSERT_EQ(std::memcmp(raw.data() + at * itemsize(dtype), poison,
                              static_cast<size_t>(itemsize(dtype))),
                  0)
            << "a gap was written at " << at;
      }
    }
    expect_close(actual, expected, step, name(dtype), dtype);
  }
}

/// Into how many splits a call's tiles are cut, as log2.
int32_t split_shift_of(const Step& step) {
  const int64_t spans = (step.rows() + cuda::tile_rows(step.heads() / step.groups()) - 1) /
                        cuda::tile_rows(step.heads() / step.groups());
  return cuda::split_shift_of(spans * step.groups(), cuda::device_limits(0).multiprocessors,
                              step.region_count());
}

TEST_F(Union, FewRowsAreSplit) {
  uint64_t seed = 2000;
  int64_t split = 0;
  for (const DType type : {DType::bf16, DType::f16, DType::f8_e4m3fn}) {
    for (const int64_t dim : {64, 192, 256}) {
      for (const int64_t heads : {1, 4, 16, 24, 128}) {
        for (const int64_t rows : {1, 7, 33, 150}) {
          if (rows * heads > 150 * 24)
            continue;  // the reference would take half of the test's time
          const Step step = make_synthetic_step({.rows = rows,
                                                 .requests = std::min<int64_t>(rows, 3),
                                                 .context = 2500,
                                                 .groups = heads <= 16 ? 2 : 1,
                                                 .heads = heads * (heads <= 16 ? 2 : 1),
                                                 .dim = dim,
                                                 .region_count = 200,
                                                 .block_size = 40,
                                                 .query_dtype = rows % 2 == 0         ? DType::bf16
                                                                : type == DType::bf16 ? DType::bf16
                                                                                      : DType::f16,
                                                 .kv_dtype = type,
                                                 .keep = 0.9,
                                                 .local_regions = 2,
                                                 .seed = seed++});
          if (type == DType::f16 && step.query.dtype != DType::f16) continue;
          split += split_shift_of(step) > 0 ? 1 : 0;
          ASSERT_NO_FATAL_FAILURE(expect_right(
              step, std::string(name(type)) + " dim " + std::to_string(dim) + " heads " +
                        std::to_string(heads) + " rows " + std::to_string(rows)));
        }
      }
    }
  }
  EXPECT_GT(split, 60) << "the calls were meant to be split";
}

TEST_F(Union, SplitsKeepStrangersOut) {
  // Rows that see tokens in some splits alone, beside NaN values of their neighbours in others.
  for (const DType output : {DType::f32, DType::bf16}) {
    Editable e(make_synthetic_step({.rows = 24,
                                    .requests = 1,
                                    .context = 4096,
                                    .groups = 1,
                                    .heads = 16,
                                    .dim = 192,
                                    .region_count = 128,
                                    .block_size = 8,
                                    .local_regions = 1,
                                    .poison = false,
                                    .seed = 31}));
    ASSERT_GT(split_shift_of(e.step), 0);
    const EditableCache copy(e.step);
    e.step.kv_cache.data = copy.data;
    const auto* table = static_cast<const int32_t*>(e.step.block_table.data);
    for (int64_t row = 0; row < 24; ++row) {
      for (int64_t i = 0; i < 128; ++i) {
        auto& region = e.regions[static_cast<size_t>(row * 128 + i)];
        // Even rows: the first regions alone; rows 3, 11, 19: nothing; the others: all over.
        if (row % 2 == 0) region = i < 9 ? static_cast<int32_t>(i) : -1;
        if (row % 8 == 3) region = -1;
        if (row % 2 == 1 && row % 8 != 3) region = static_cast<int32_t>(3 * i + 20);
      }
    }
    // V of regions that stand in other splits than the even rows' own.
    for (int64_t region = 250; region < 400; ++region) {
      const int64_t block = table[region];
      for (int64_t t = 0; t < 8; ++t)
        copy.data[(block * 8 + t) * 384 + 192 + region % 192] = 0x7fc0;
    }
    DeviceStep device(e.step, output);
    const Result result = run(device);
    EXPECT_EQ(result.status, status_region);
    const Result expected = reference(e.step);
    for (int64_t row = 0; row < 24; ++row) {
      for (int64_t head = 0; head < 16; ++head) {
        const auto line = static_cast<size_t>(row * 16 + head);
        const float lse = result.lse[line];
        if (row % 8 == 3) {
          ASSERT_EQ(lse, -INFINITY) << row;
        } else {
          ASSERT_NEAR(lse, expected.lse[line], 2e-3) << row;
        }
        for (size_t d = 0; d < 192; ++d) {
          const float value = result.output[line * 192 + d];
          if (row % 8 == 3) {
            ASSERT_EQ(value, 0.0f) << row;
          } else if (row % 2 == 0) {
            ASSERT_NEAR(value, expected.output[line * 192 + d], 2e-2) << row;
          }
        }
      }
    }
  }
}

TEST_F(Union, TheNormaliserSumsWhatIsMultiplied) {
  // One region has score 0, all others exp(-x) that 16 bits round by nearly half a unit, all the
  // same way. V is constant, so the result is V, however they were rounded.
  for (const float other : {0.0038f, 0.0059f, 0.0115f, 1.3f}) {
    Step step = make_synthetic_step({.rows = 300,
                                     .requests = 1,
                                     .context = 4000,
                                     .groups = 1,
                                     .heads = 16,
                                     .dim = 64,
                                     .region_count = 256,
                                     .block_size = 8,
                                     .keep = 0.9,
                                     .local_regions = 1,
                                     .poison = false,
                                     .seed = 77});
    const EditableCache copy(step);
    for (int64_t token = 0; token < step.kv_cache.size() / 128; ++token) {
      for (int64_t d = 0; d < 64; ++d) {
        store_f32(copy.data, DType::bf16, token * 128 + d, d == 0 && token % 64 != 0 ? -other : 0);
        store_f32(copy.data, DType::bf16, token * 128 + 64 + d, 1.25f);
      }
    }
    std::vector<uint16_t> query(static_cast<size_t>(step.query.size()));
    for (int64_t i = 0; i < step.query.size(); ++i)
      store_f32(query.data(), DType::bf16, i, i % 64 == 0 ? 1.0f : 0.0f);
    step.kv_cache.data = copy.data;
    step.query.data = query.data();
    step.scale = 1.0f;
    DeviceStep device(step);
    const Result result = run(device);
    for (const float value : result.output) ASSERT_NEAR(value, 1.25f, 1e-5f) << other;
    expect_close(result, reference(step), step, std::to_string(other));
  }
}

TEST_F(Union, AnEmptyCacheIsLegal) {
  Step step = make_synthetic_step({.rows = 20,
                                   .requests = 1,
                                   .context = 500,
                                   .groups = 1,
                                   .heads = 16,
                                   .dim = 192,
                                   .region_count = 16,
                                   .seed = 1});
  step.kv_cache.shape[0] = 0;
  DeviceStep device(step);
  const Result result = run(device);
  EXPECT_EQ(result.status, status_table);
  for (const float value : result.output) ASSERT_EQ(value, 0.0f);
  for (const float value : result.lse) ASSERT_EQ(value, -INFINITY);
}

TEST_F(Union, ARowWithoutTokensBesideNonFiniteValues) {
  Editable e(make_synthetic_step({.rows = 1100,  // enough not to be split
                                  .requests = 1,
                                  .context = 2000,
                                  .groups = 1,
                                  .heads = 16,
                                  .dim = 64,
                                  .region_count = 20,
                                  .block_size = 8,
                                  .keep = 0.9,
                                  .local_regions = 1,
                                  .poison = false,
                                  .seed = 9}));
  ASSERT_EQ(split_shift_of(e.step), 0);
  const EditableCache copy(e.step);
  for (int64_t token = 0; token < e.step.kv_cache.size() / 128; ++token)
    for (int64_t d = 0; d < 64; ++d) copy.data[token * 128 + 64 + d] = 0x7fc0;
  e.step.kv_cache.data = copy.data;
  for (int64_t row = 2; row < 1100; row += 5)
    for (int64_t i = 0; i < 20; ++i) e.regions[static_cast<size_t>(row * 20 + i)] = INT32_MAX;
  DeviceStep device(e.step);
  const Result result = run(device);
  for (int64_t row = 0; row < 1100; ++row) {
    const float first = result.output[static_cast<size_t>(row * 16 * 64)];
    if (row % 5 == 2) {
      ASSERT_EQ(first, 0.0f) << row;
      ASSERT_EQ(result.lse[static_cast<size_t>(row * 16)], -INFINITY) << row;
    } else {
      ASSERT_TRUE(std::isnan(first)) << row;
    }
  }
}

TEST_F(Union, ManyRegionsOfARow) {
  // Eight rows that share little of 4,600 regions each. Their lists leave no room for more than the
  // smallest window, and the context has two of them.
  const Step step = make_synthetic_step({.rows = 24,
                                         .requests = 1,
                                         .context = 300000,
                                         .groups = 1,
                                         .heads = 16,
                                         .dim = 192,
                                         .region_count = 4600,
                                         .block_size = 64,
                                         .keep = 0.1,
                                         .seed = 15});
  expect_right(step, "4600 regions");
}

TEST_F(Union, LongContexts) {
  // 37,500 regions: with 16 heads one window larger than the smallest, with fewer two of them. Two
  // requests, so that a tile finds the marks of the one before it.
  for (const int64_t heads : {4, 8, 16}) {
    const Step step = make_synthetic_step({.rows = 37,
                                           .requests = 2,
                                           .context = 300000,
                                           .groups = 1,
                                           .heads = heads,
                                           .dim = 64,
                                           .region_count = 96,
                                           .block_size = 64,
                                           .keep = 0.5,
                                           .seed = 23});
    ASSERT_NO_FATAL_FAILURE(expect_right(step, "long context"));
  }
}

TEST_F(Union, UnrelatedSelectionsGoRowByRow) {
  // The bits tell which kernel made a result.
  for (const DType kv : {DType::bf16, DType::f8_e4m3fn}) {
    for (const int64_t rows : {100, 1100}) {
      for (const double keep : {1.0, 0.0}) {
        const Step step = make_synthetic_step({.rows = rows,
                                               .requests = 1,
                                               .context = 40000,
                                               .groups = 1,
                                               .heads = 16,
                                               .dim = 64,
                                               .region_count = 64,
                                               .block_size = 64,
                                               .kv_dtype = kv,
                                               .keep = keep,
                                               .seed = 19});
        DeviceStep device(step), row_by_row(step);
        const Result result = run(device);
        Options options;
        options.backend = "cuda-sm80";
        sparse_prefill(row_by_row.args, options);
        const Result other = row_by_row.fetch();
        EXPECT_EQ(result.bits == other.bits, keep == 0.0)
            << name(kv) << ", " << rows << " rows, keep " << keep;
        ASSERT_NO_FATAL_FAILURE(expect_close(result, reference(step), step, "unrelated"));
      }
    }
  }
}

/// A step over an f8 cache with the scales of a test.
Step f8_step(DType query, int64_t dim, int64_t heads, int64_t rows, uint64_t seed) {
  const int64_t groups = heads <= 16 ? 2 : 1;
  return make_synthetic_step({.rows = rows,
                              .requests = 2,
                              .context = 900,
                              .groups = groups,
                              .heads = heads * groups,
                              .dim = dim,
                              .region_count = 37,
                              .block_size = 40,
                              .query_dtype = query,
                              .kv_dtype = DType::f8_e4m3fn,
                              .keep = 0.95,
                              .local_regions = 2,
                              .seed = seed});
}

TEST_F(Union, F8OfEveryHeadCountDimAndQueryType) {
  uint64_t seed = 3000;
  for (const DType query : {DType::bf16, DType::f16}) {
    for (const int64_t dim : {64, 128, 192, 256}) {
      for (const int64_t heads : {1, 3, 4, 6, 8, 12, 16, 24, 32, 64, 100, 128}) {
        const Step step = f8_step(query, dim, heads, 41, seed++);
        const std::string what = std::string(name(query)) + " dim " + std::to_string(dim) +
                                 " heads " + std::to_string(heads);
        for (const bool by_value : {false, true}) {
          DeviceStep device(step, by_value ? query : DType::f32);
          if (by_value) {
            device.args.k_scale = Scale::of(step.k_scale);
            device.args.v_scale = Scale::of(step.v_scale);
          }
          ASSERT_NO_FATAL_FAILURE(expect_close(run(device), reference(step), step, what,
                                               by_value ? query : DType::f32));
        }
      }
    }
  }
}

TEST_F(Union, F8ScalesOfAnySignAndSize) {
  for (const auto& [dim, heads, rows] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {192, 4, 41}, {192, 4, 1200}, {192, 16, 41}, {192, 16, 1200}, {256, 16, 41}}) {
    Step step = f8_step(DType::bf16, dim, heads, rows, static_cast<uint64_t>(heads + rows));
    for (const auto& [k, v] : std::vector<std::pair<float, float>>{
             {-0.37f, 2.0f}, {0.0f, -1.5f}, {-0.0f, 1.0f}, {3.5f, 0.0f}, {1e-40f, 1e3f}}) {
      step.k_scale = k;
      step.v_scale = v;
      ASSERT_NO_FATAL_FAILURE(
          expect_right(step, "k_scale " + std::to_string(k) + ", v_scale " + std::to_string(v)));
    }
  }
}

TEST_F(Union, F8ScoresUpToTheContractsBound) {
  // Scores about 64 times as large as usual, where one key decides and neighbours differ by little.
  for (const auto& [dim, heads] :
       std::vector<std::pair<int64_t, int64_t>>{{192, 4}, {192, 16}, {256, 16}}) {
    Step step = f8_step(DType::bf16, dim, heads, 200, 91);
    step.k_scale *= 8.0f;
    expect_right(step, "large scores");
  }
}

TEST_F(Union, TheWorkspaceDecides) {
  const Step step = make_synthetic_step({.rows = 20,
                                         .requests = 1,
                                         .context = 500,
                                         .groups = 1,
                                         .heads = 16,
                                         .dim = 192,
                                         .region_count = 16,
                                         .seed = 1});
  DeviceStep device(step);
  const size_t bytes = sparse_prefill_workspace_size(device.args);
  ASSERT_GT(bytes, 0u);
  Options options;
  EXPECT_EQ(choose_backend(device.args, options), "cuda-sm80") << "none given";
  options.batch_invariant = true;
  EXPECT_EQ(sparse_prefill_workspace_size(device.args, options), 0u) << "row by row";
  options.batch_invariant = false;
  const TensorView workspace = device.arena.allocate(DType::u8, {static_cast<int64_t>(bytes)});
  options.workspace = workspace.data;
  options.workspace_bytes = bytes;
  EXPECT_EQ(choose_backend(device.args, options), "cuda-sm90a");
  sparse_prefill(device.args, options);
  expect_close(device.fetch(), reference(step), step, "exact workspace");
  options.workspace_bytes = bytes - 1;
  EXPECT_THROW(sparse_prefill(device.args, options), Error);
  options.backend = "cuda-sm90a";
  options.workspace = nullptr;
  EXPECT_THROW(sparse_prefill(device.args, options), Error);
  // An odd address of the workspace is as good as any.
  const TensorView odd = device.arena.allocate(DType::u8, {static_cast<int64_t>(bytes) + 3});
  options.workspace = static_cast<uint8_t*>(odd.data) + 3;
  options.workspace_bytes = bytes;
  sparse_prefill(device.args, options);
  expect_close(device.fetch(), reference(step), step, "odd workspace");
}

TEST_F(Union, RefusalsNameTheirReason) {
  const Step step = make_synthetic_step({.rows = 20,
                                         .requests = 1,
                                         .context = 500,
                                         .groups = 1,
                                         .heads = 16,
                                         .dim = 192,
                                         .region_count = 16,
                                         .seed = 1});
  DeviceStep device(step);
  const auto reason = [&](SparsePrefillArgs args, Options options = {}) {
    const Support support = backend_supports("cuda-sm90a", args, options);
    EXPECT_FALSE(support.ok);
    return support.reason;
  };
  const auto has = [](const std::string& text, const char* word) {
    return text.find(word) != std::string::npos;
  };
  SparsePrefillArgs args = device.args;
  args.scale = -1.0f;
  EXPECT_TRUE(has(reason(args), "scale"));
  args = device.args;
  args.query.strides[1] += 1;
  EXPECT_TRUE(has(reason(args), "query"));
  args = device.args;
  args.output.strides[0] += 1;
  EXPECT_TRUE(has(reason(args), "output"));
  EXPECT_TRUE(has(reason(device.args, {.batch_invariant = true}), "batch-invariant"));
  args = device.args;
  args.kv_cache.dtype = DType::f16;
  EXPECT_TRUE(has(reason(args), "kv_cache")) << "another type of 16 bits";
  // Regions that no 64 bits count: one column, over and over.
  const Step large_blocks = make_synthetic_step({.rows = 20,
                                                 .requests = 1,
                                                 .context = 500,
                                                 .groups = 1,
                                                 .heads = 16,
                                                 .dim = 192,
                                                 .region_count = 16,
                                                 .block_size = 8192,
                                                 .seed = 1});
  DeviceStep wide(large_blocks);
  wide.args.block_table.shape[1] = int64_t{1} << 54;
  wide.args.block_table.strides[1] = 0;
  EXPECT_TRUE(has(reason(wide.args), "block_table"));
  expect_close(wide.direct(), reference(large_blocks), large_blocks, "served row by row");
}

}  // namespace
}  // namespace octopage::test
