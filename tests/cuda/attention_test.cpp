// Random shapes and hostile inputs on the device against the float64 reference.

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "backends/cuda/runtime/runtime.hpp"
#include "cuda/device_step.hpp"

namespace octopage::test {
namespace {

SyntheticSpec small(int64_t heads, int64_t groups, int64_t dim, uint64_t seed) {
  return {.rows = 23,
          .requests = 3,
          .context = 700,
          .groups = groups,
          .heads = heads * groups,
          .dim = dim,
          .region_count = 21,
          .block_size = 24,
          .keep = 0.8,
          .sink_regions = 1,
          .local_regions = 2,
          .seed = seed};
}

TEST(Attention, EveryTypeAndDim) {
  uint64_t seed = 1;
  for (const DType query : {DType::bf16, DType::f16}) {
    for (const DType cache : {DType::bf16, DType::f16, DType::f8_e4m3fn}) {
      for (const int64_t dim : {64, 128, 192, 256}) {
        SyntheticSpec spec = small(16, 2, dim, seed++);
        spec.query_dtype = query;
        spec.kv_dtype = cache;
        const Step step = make_synthetic_step(spec);
        const Result expected = reference(step);
        const std::string what =
            std::string(name(query)) + " " + name(cache) + " " + std::to_string(dim);
        DeviceStep device(step);
        expect_close(device.direct(), expected, step, what + " direct");
        EXPECT_EQ(device.fetch().status, 0) << what;
        DeviceStep planned(step, query);
        expect_close(planned.planned(planned.args.kv_cache, planned.args.block_table), expected,
                     step, what + " planned", query);
      }
    }
  }
}

TEST(Attention, EveryHeadCount) {
  for (const int64_t heads :
       {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 64, 128}) {
    const Step step = make_synthetic_step(small(heads, 1, 64, static_cast<uint64_t>(heads)));
    DeviceStep device(step);
    expect_close(device.direct(), reference(step), step, std::to_string(heads) + " heads");
  }
}

TEST(Attention, EveryPositionModuloEight) {
  // Unwritten slots hold NaN and Inf (make_synthetic_step poisons them): they never show.
  for (int64_t context = 96; context < 112; ++context) {
    SyntheticSpec spec = small(16, 1, 192, static_cast<uint64_t>(context));
    spec.rows = 17;
    spec.requests = 1;
    spec.context = context;
    const Step step = make_synthetic_step(spec);
    DeviceStep device(step);
    expect_close(device.direct(), reference(step), step, "context " + std::to_string(context));
  }
}

TEST(Attention, ShortRowsAndManyRegions) {
  for (const int64_t regions : {0, 1, 2, 31, 32, 33, 63, 65, 127, 129, 200, 600}) {
    SyntheticSpec spec = small(16, 1, 128, static_cast<uint64_t>(regions) + 7);
    spec.requests = 1;
    spec.context = 1500;
    spec.rows = 9;
    spec.region_count = regions;
    spec.sink_regions = std::min<int64_t>(regions, 1);
    spec.local_regions = 0;
    Step step = make_synthetic_step(spec);
    DeviceStep device(step);
    expect_close(device.direct(), reference(step), step, std::to_string(regions) + " regions");
  }
}

TEST(Attention, InvalidEntriesAreSkippedWithTheirBits) {
  SyntheticSpec spec = small(16, 2, 192, 99);
  Step step = make_synthetic_step(spec);
  std::vector<int32_t> regions(
      static_cast<const int32_t*>(step.regions.data),
      static_cast<const int32_t*>(step.regions.data) + step.regions.size());
  std::vector<int32_t> owners(static_cast<const int32_t*>(step.owners.data),
                              static_cast<const int32_t*>(step.owners.data) + step.rows());
  std::vector<int32_t> table(
      static_cast<const int32_t*>(step.block_table.data),
      static_cast<const int32_t*>(step.block_table.data) + step.block_table.size());
  const int32_t hostile[] = {0x7fc00000, -1, INT32_MIN, INT32_MAX, 1 << 20};
  std::mt19937 random(5);
  for (size_t i = 0; i < regions.size(); i += 1 + random() % 5) regions[i] = hostile[random() % 5];
  const int64_t row_entries = step.regions.size() / step.rows();
  for (int64_t i = 0; i < row_entries; ++i)
    regions[static_cast<size_t>(4 * row_entries + i)] = -5;  // nothing left
  struct Variant {
    const char* name;
    bool owner, entry;
    int32_t bits;
  };
  for (const Variant v : {Variant{"regions", false, false, status_region},
                          Variant{"owners", true, false, status_region | status_owner},
                          Variant{"table", false, true, status_region | status_table}}) {
    auto bad_owners = owners;
    auto bad_table = table;
    if (v.owner) bad_owners[2] = 77, bad_owners[9] = -1, bad_owners[11] = INT32_MAX;
    if (v.entry)
      bad_table[0] = -1, bad_table[1] = INT32_MAX,
      bad_table[2] = static_cast<int32_t>(step.kv_cache.shape[0]);
    Step hostile_step = step;
    hostile_step.regions.data = regions.data();
    hostile_step.owners.data = bad_owners.data();
    hostile_step.block_table.data = bad_table.data();
    const Result expected = reference(hostile_step);
    ASSERT_EQ(expected.status, v.bits);
    DeviceStep device(hostile_step);
    const Result actual = device.direct();
    expect_close(actual, expected, hostile_step, v.name);
    EXPECT_EQ(actual.status, v.bits) << v.name;
    // Strict: refused before anything is written, with the message of the CPU.
    DeviceStep strict(hostile_step);
    Options options = strict.options();
    options.strict = true;
    std::string message, host_message;
    try {
      sparse_prefill(strict.args, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_entry);
      message = error.what();
    }
    std::vector<float> sink(static_cast<size_t>(step.query.size()));
    try {
      Options host_options;
      host_options.strict = true;
      sparse_prefill(host_args(hostile_step,
                               TensorView::contiguous(sink.data(), DType::f32,
                                                      {step.rows(), step.heads(), step.dim()}),
                               {}),
                     host_options);
    } catch (const Error& error) {
      host_message = error.what();
    }
    EXPECT_FALSE(message.empty());
    EXPECT_EQ(message, host_message);
    for (const uint8_t byte : strict.fetch().bits) ASSERT_EQ(byte, 0xff) << "output was written";
  }
}

TEST(Attention, LargeLogitsStayFinite) {
  SyntheticSpec spec = small(16, 1, 128, 3);
  Step step = make_synthetic_step(spec);
  step.scale = 3000.0f;  // scores of 1e5
  const Result expected = reference(step);
  DeviceStep device(step);
  const Result actual = device.direct();
  for (size_t i = 0; i < actual.output.size(); ++i)
    ASSERT_TRUE(std::isfinite(actual.output[i])) << i;
  for (size_t i = 0; i < actual.lse.size(); ++i) {
    // The spacing of f32 at 1e5 is 8e-3; a dot product of 128 terms loses a few of them.
    ASSERT_NEAR(actual.lse[i], expected.lse[i],
                std::max(0.2, 1e-5 * std::fabs(double{expected.lse[i]})))
        << i;
  }
}

/// Each (row, head) has a magnitude of its own; the scale brings scores back to where they differ.
/// In f16's products, queries of bf16 are brought into its range.
void queries_of_any_magnitude(DType cache) {
  for (const auto& [dim, heads] :
       std::vector<std::pair<int64_t, int64_t>>{{192, 4}, {192, 16}, {256, 16}}) {
    for (const auto& [from, back] : std::vector<std::pair<int, float>>{{-120, 1e34f},
                                                                       {-100, 1e28f},
                                                                       {-30, 1e8f},
                                                                       {0, 0.3f},
                                                                       {30, 1e-9f},
                                                                       {100, 1e-30f},
                                                                       {120, 1e-36f}}) {
      SyntheticSpec spec = small(heads, 2, dim, static_cast<uint64_t>(heads + from + 200));
      spec.kv_dtype = cache;
      Step step = make_synthetic_step(spec);
      std::vector<uint16_t> query(static_cast<size_t>(step.query.size()));
      for (int64_t i = 0; i < step.query.size(); ++i) {
        const float value = load_f32(step.query.data, DType::bf16, i);
        const int exponent = from + static_cast<int>(i / dim % 7) - 3;
        store_f32(query.data(), DType::bf16, i, std::ldexp(value, exponent));
      }
      step.query.data = query.data();
      if (cache == DType::f8_e4m3fn) {
        step.k_scale = back;
      } else {
        step.scale *= back;
      }
      DeviceStep device(step);
      expect_close(device.direct(), reference(step), step,
                   "dim " + std::to_string(dim) + ", 2^" + std::to_string(from));
    }
  }
}

TEST(Attention, QueriesOfAnyMagnitudeOnF8) {
  queries_of_any_magnitude(DType::f8_e4m3fn);
}

TEST(Attention, QueriesOfAnyMagnitudeOnF16) {
  queries_of_any_magnitude(DType::f16);
}

TEST(Attention, FaintTokensCountByTheirNumber) {
  // One token has a score of 17.5, 98,303 others 0: each is worth 2^-25.2 of it, all
  // together 2.5e-3.
  constexpr int64_t kRegions = 12288, kDim = 64;
  for (const auto& [query, cache] :
       std::vector<std::pair<DType, DType>>{{DType::bf16, DType::bf16},
                                            {DType::bf16, DType::f8_e4m3fn},
                                            {DType::f16, DType::f8_e4m3fn},
                                            {DType::f16, DType::f16}}) {
    Step step = make_synthetic_step({.rows = 1,
                                     .requests = 1,
                                     .context = kRegions * kPageTokens,
                                     .groups = 1,
                                     .heads = 64,
                                     .dim = kDim,
                                     .region_count = kRegions,
                                     .block_size = 64,
                                     .query_dtype = query,
                                     .kv_dtype = cache,
                                     .seed = 17});
    std::vector<uint16_t> ones(static_cast<size_t>(step.query.size()));
    for (int64_t i = 0; i < step.query.size(); ++i) store_f32(ones.data(), query, i, 1.0f);
    step.query.data = ones.data();
    std::vector<std::byte> kv(static_cast<size_t>(step.kv_cache.size() * itemsize(cache)));
    for (int64_t i = 0; i < step.kv_cache.size(); ++i)
      store_f32(kv.data(), cache, i, i / kDim % 2 == 0 ? 0.0f : 1.0f);
    const int64_t token = static_cast<const int32_t*>(step.block_table.data)[0] * int64_t{64};
    for (int64_t i = 0; i < kDim; ++i) {
      store_f32(kv.data(), cache, token * 2 * kDim + i, i < 56 ? 0.3125f : 0.0f);
      store_f32(kv.data(), cache, token * 2 * kDim + kDim + i, i % 2 == 0 ? 1.0f : -1.0f);
    }
    ASSERT_EQ(step.kv_cache.size(), step.kv_cache.shape[0] * 64 * 2 * kDim);
    step.kv_cache.data = kv.data();
    step.scale = step.k_scale = step.v_scale = 1.0f;
    DeviceStep device(step);
    expect_close(device.direct(), reference(step), step,
                 std::string(name(query)) + " on " + name(cache));
  }
}

TEST(Attention, NonFiniteInputsStayInTheirRow) {
  SyntheticSpec spec = small(16, 1, 192, 12);
  spec.poison = false;
  const Step step = make_synthetic_step(spec);
  std::vector<uint16_t> query(static_cast<const uint16_t*>(step.query.data),
                              static_cast<const uint16_t*>(step.query.data) + step.query.size());
  DeviceStep clean(step);
  const Result before = clean.direct();
  const int64_t row_elements = step.heads() * step.dim();
  query[static_cast<size_t>(5 * row_elements + 3)] = 0x7fc0;
  query[static_cast<size_t>(7 * row_elements + 100)] = 0x7f80;
  Step dirty = step;
  dirty.query.data = query.data();
  DeviceStep device(dirty);
  const Result after = device.direct();
  for (int64_t row = 0; row < step.rows(); ++row) {
    const auto begin = static_cast<size_t>(row * row_elements),
               bytes = static_cast<size_t>(row_elements) * 4;
    const bool same =
        std::memcmp(after.output.data() + begin, before.output.data() + begin, bytes) == 0;
    EXPECT_EQ(same, row != 5 && row != 7) << row;
  }
  EXPECT_TRUE(std::isnan(after.output[static_cast<size_t>(5 * row_elements)]));
}

TEST(Attention, ANonFiniteWrittenTokenShowsOnlyWhereItIsSelected) {
  SyntheticSpec spec = small(4, 1, 64, 31);
  spec.poison = false;
  spec.requests = 1;
  const Step step = make_synthetic_step(spec);
  // NaN and Inf in V of a whole block: rows that select none of its regions keep their bits.
  std::vector<uint16_t> memory(static_cast<size_t>(step.kv_cache.size()) + 8);
  void* aligned = memory.data();
  size_t space = memory.size() * 2;
  std::align(16, static_cast<size_t>(step.kv_cache.size()) * 2, aligned, space);
  auto* cache = static_cast<uint16_t*>(aligned);
  std::memcpy(cache, step.kv_cache.data, static_cast<size_t>(step.kv_cache.size()) * 2);
  const int64_t column = 9, regions_per_block = 3;
  const int64_t block = static_cast<const int32_t*>(step.block_table.data)[column];
  for (int64_t t = 0; t < 24; ++t) {
    for (int64_t d = 0; d < 64; ++d)
      cache[(block * 24 + t) * 128 + 64 + d] = t % 2 == 0 ? 0x7fc0 : 0x7f80;
  }
  Step dirty = step;
  dirty.kv_cache.data = cache;
  DeviceStep clean_device(step), dirty_device(dirty);
  const Result before = clean_device.direct(), after = dirty_device.direct();
  int64_t touched = 0;
  for (int64_t row = 0; row < step.rows(); ++row) {
    bool selects = false;
    for (int64_t i = 0; i < 21; ++i) {
      selects |= static_cast<const int32_t*>(step.regions.data)[row * 21 + i] / regions_per_block ==
                 column;
    }
    const auto begin = static_cast<size_t>(row * 4 * 64);
    const bool same =
        std::memcmp(after.output.data() + begin, before.output.data() + begin, 4 * 64 * 4) == 0;
    // Rows of one tile share its pages, and V of a written token with it.
    if (test_backend == "cuda-sm80" || selects) {
      EXPECT_EQ(same, !selects) << row;
    }
    touched += selects ? 1 : 0;
  }
  EXPECT_GT(touched, 0);
  EXPECT_LT(touched, step.rows());
}

TEST(Attention, TableWidthAndStaleTails) {
  SyntheticSpec spec = small(16, 1, 128, 77);
  spec.requests = 1;
  const Step step = make_synthetic_step(spec);
  // A table cut short: regions past its width are invalid; one with a garbage tail: nothing
  // changes.
  const int64_t columns = step.block_table.shape[1];
  std::vector<int32_t> table(static_cast<const int32_t*>(step.block_table.data),
                             static_cast<const int32_t*>(step.block_table.data) + columns);
  Step cut = step;
  cut.block_table = TensorView::contiguous(table.data(), DType::i32, {1, columns / 2});
  const Result expected = reference(cut);
  ASSERT_EQ(expected.status, status_table);
  DeviceStep cut_device(cut);
  const Result actual = cut_device.direct();
  expect_close(actual, expected, cut, "cut table");
  EXPECT_EQ(actual.status, status_table);
  table.insert(table.end(), {-1, INT32_MAX, 123456, INT32_MIN});
  Step stale = step;
  stale.block_table = TensorView::contiguous(table.data(), DType::i32, {1, columns + 4});
  DeviceStep stale_device(stale), plain_device(step);
  const Result with_tail = stale_device.direct(), without = plain_device.direct();
  EXPECT_EQ(with_tail.bits, without.bits);
  EXPECT_EQ(with_tail.status, 0);
}

TEST(Attention, EveryF8Code) {
  SyntheticSpec spec = small(16, 1, 64, 5);
  spec.kv_dtype = DType::f8_e4m3fn;
  spec.requests = 1;
  spec.poison = false;
  const Step step = make_synthetic_step(spec);
  // All finite codes in V, small ones in K; then a NaN code in one token's V.
  std::vector<uint8_t> memory(static_cast<size_t>(step.kv_cache.size()) + 16);
  void* aligned = memory.data();
  size_t space = memory.size();
  std::align(16, static_cast<size_t>(step.kv_cache.size()), aligned, space);
  auto* cache = static_cast<uint8_t*>(aligned);
  uint32_t code = 0;
  for (int64_t i = 0; i < step.kv_cache.size(); ++i) {
    if (i % 128 < 64) {
      cache[i] = static_cast<uint8_t>(code % 48 + (code % 2 == 0 ? 0 : 128));
    } else {
      cache[i] = (code & 0x7f) == 0x7f ? 0 : static_cast<uint8_t>(code);
    }
    code = code * 1664525u + 1013904223u;
    code ^= code >> 11;
  }
  Step codes = step;
  codes.kv_cache.data = cache;
  for (const DType query : {DType::bf16, DType::f16}) {
    Step typed = codes;
    typed.query.dtype = query;  // the bits read as f16 are another query, as finite
    std::vector<uint16_t> bits(static_cast<size_t>(step.query.size()));
    for (size_t i = 0; i < bits.size(); ++i) {
      const float value = load_f32(step.query.data, DType::bf16, static_cast<int64_t>(i));
      store_f32(bits.data(), query, static_cast<int64_t>(i), value);
    }
    typed.query.data = bits.data();
    DeviceStep device(typed);
    expect_close(device.direct(), reference(typed), typed, name(query));
  }
  const int64_t own = position_of(step.positions, step.rows() - 1);
  const int64_t block = static_cast<const int32_t*>(step.block_table.data)[own / 24];
  for (int64_t d = 0; d < 64; ++d)
    cache[(block * 24 + own % 24) * 128 + 64 + d] = d % 2 == 0 ? 0x7f : 0xff;
  DeviceStep device(codes);
  const Result result = device.direct();
  // On cuda-sm90a such a V may reach the rows of its tile.
  const int64_t last = step.rows() - 1, tile = test_backend == "cuda-sm90a" ? 8 : 1;
  for (int64_t row = 0; row < step.rows(); ++row) {
    const bool nan = std::isnan(result.output[static_cast<size_t>(row * 16 * 64)]);
    EXPECT_TRUE(nan || row != last);
    EXPECT_TRUE(!nan || row / tile == last / tile) << row;
  }
}

TEST(Attention, StridedTensorsAndForeignLayouts) {
  const Step step = make_synthetic_step(small(5, 2, 64, 44));
  const Result expected = reference(step);
  DeviceStep device(step);
  const int64_t rows = step.rows(), heads = step.heads(), dim = step.dim();
  // Query: odd strides, so that no 16-byte load is possible. Output likewise, gaps stay poisoned.
  const int64_t stride_head = dim + 3, stride_row = heads * stride_head + 7;
  std::vector<uint16_t> query(static_cast<size_t>(rows * stride_row + 1), 0x7fc0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(query.data() + 1 + r * stride_row + h * stride_head,
                  static_cast<const uint16_t*>(step.query.data) + (r * heads + h) * dim,
                  static_cast<size_t>(dim) * 2);
    }
  }
  const TensorView query_memory = device.arena.upload(
      TensorView::contiguous(query.data(), DType::bf16, {rows * stride_row + 1}));
  SparsePrefillArgs args = device.args;
  args.query.data = static_cast<uint16_t*>(query_memory.data) + 1;
  args.query.strides = {stride_row, stride_head, 1};
  const TensorView output_memory = device.arena.allocate(DType::f32, {rows * stride_row + 1}, 0x7f);
  args.output.data = static_cast<float*>(output_memory.data) + 1;
  args.output.strides = {stride_row, stride_head, 1};
  // Cache: groups interleaved per token, [blocks, block_size, groups, 2*dim], and a gap between
  // blocks.
  const auto& shape = step.kv_cache.shape;
  const int64_t token = shape[1] * shape[3], block = (shape[2] + 8) * token;
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
  const TensorView cache_memory =
      device.arena.upload(TensorView::contiguous(cache.data(), DType::bf16, {shape[0] * block}));
  args.kv_cache.data = cache_memory.data;
  args.kv_cache.strides = {block, shape[3], token, 1};
  sparse_prefill(args, device.options_for(args));
  std::vector<float> raw(static_cast<size_t>(output_memory.size()));
  device.arena.download(output_memory, raw.data());
  Result actual = device.fetch();
  float poison;
  std::memset(&poison, 0x7f, sizeof(poison));
  std::vector<bool> written(raw.size(), false);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t d = 0; d < dim; ++d) {
        const auto at = static_cast<size_t>(1 + r * stride_row + h * stride_head + d);
        actual.output[static_cast<size_t>((r * heads + h) * dim + d)] = raw[at];
        written[at] = true;
      }
    }
  }
  expect_close(actual, expected, step, "strided");
  for (size_t i = 0; i < raw.size(); ++i) {
    if (!written[i]) {
      ASSERT_EQ(raw[i], poison) << "a gap was written at " << i;
    }
  }
}

TEST(Attention, TwentyRepeatsAreBitwiseEqual) {
  SyntheticSpec spec = small(16, 1, 192, 8);
  spec.rows = 200;
  spec.requests = 1;
  spec.context = 4000;
  spec.region_count = 100;
  const Step step = make_synthetic_step(spec);
  DeviceStep device(step, DType::bf16);
  const Result first = device.direct();
  for (int i = 0; i < 19; ++i) {
    const Result again = device.direct();
    ASSERT_EQ(again.bits, first.bits) << i;
    ASSERT_EQ(again.lse, first.lse) << i;
  }
}

TEST(Attention, RowsDoNotDependOnOtherRows) {
  const Step step = make_synthetic_step(small(16, 1, 192, 18));
  DeviceStep device(step);
  const Result all = device.direct();
  const int64_t row_elements = step.heads() * step.dim();
  for (const int64_t row : {0, 11, 22}) {
    SparsePrefillArgs args = device.args;
    args.query = args.query.slice(0, row, row + 1);
    args.owners = args.owners.slice(0, row, row + 1);
    args.positions = args.positions.slice(0, row, row + 1);
    args.regions = args.regions.slice(0, row, row + 1);
    args.output = device.arena.allocate(DType::f32, {1, step.heads(), step.dim()});
    args.lse = device.arena.allocate(DType::f32, {1, step.heads()});
    sparse_prefill(args, device.options_for(args));
    std::vector<float> alone(static_cast<size_t>(row_elements));
    device.arena.download(args.output, alone.data());
    if (test_backend != "cuda-sm80") {  // within the accuracy, not to the bit
      for (size_t i = 0; i < alone.size(); ++i)
        ASSERT_NEAR(alone[i], all.output[static_cast<size_t>(row * row_elements) + i], 2e-2) << i;
      continue;
    }
    EXPECT_EQ(std::memcmp(alone.data(), all.output.data() + row * row_elements, alone.size() * 4),
              0)
        << row;
  }
}

// A caller can write to the plan's record: what it says is cut to the list, the region count and a
// page. The sanitizer's memcheck sees what was read.
TEST(Attention, AlteredRangesReadNothingElse) {
  const Step step = make_synthetic_step(small(16, 1, 192, 1));
  DeviceStep device(step);
  CompactPagedPrefill plan;
  device.make_plan(plan, step.heads(), step.block_size());
  plan.prepare_chunk(0, device.args.query, device.args.kv_cache, device.regions_of_group(0),
                     device.args.block_table, device.args.owners, device.options());
  const auto write = [&](const TensorView& to, std::initializer_list<int32_t> values) {
    std::vector<int32_t> written(static_cast<size_t>(to.size()));
    for (size_t i = 0; i < written.size(); ++i) written[i] = values.begin()[i % values.size()];
    cuda::check(
        cudaMemcpy(to.data, written.data(), written.size() * sizeof(int32_t), cudaMemcpyDefault),
        "copy");
  };
  const auto finish = [&] {
    plan.finish({}, device.args.kv_cache, device.args.output, device.args.lse, device.args.k_scale,
                device.args.v_scale, device.options());
    return device.fetch().bits;
  };
  const auto with_last = [&](int32_t tokens) {
    write(plan.last_page_len(), {tokens});
    return finish();
  };
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  const auto one = with_last(1), all = with_last(8);
  EXPECT_NE(one, all);
  for (const int32_t tokens : {kMin, -1, 0}) EXPECT_EQ(with_last(tokens), one) << tokens;
  for (const int32_t tokens : {9, 4096, kMax}) EXPECT_EQ(with_last(tokens), all) << tokens;
  write(plan.indptr(), {kMin, kMax, 0, kMax, -5, 3, kMax - 1, 40, 1});
  finish();
  for (const float value : device.fetch().output) ASSERT_TRUE(std::isfinite(value));
}

TEST(Attention, ZeroRowsIsLegal) {
  SyntheticSpec spec = small(16, 1, 192, 1);
  const Step step = make_synthetic_step(spec);
  DeviceStep device(step);
  SparsePrefillArgs args = device.args;
  args.query = args.query.slice(0, 0, 0);
  args.owners = args.owners.slice(0, 0, 0);
  args.positions = args.positions.slice(0, 0, 0);
  args.regions = args.regions.slice(0, 0, 0);
  args.output = args.output.slice(0, 0, 0);
  args.lse = args.lse.slice(0, 0, 0);
  sparse_prefill(args, device.options_for(args));
  for (const uint8_t byte : device.fetch().bits) ASSERT_EQ(byte, 0xff);
}

TEST(Attention, BackendsAreChosenAndForced) {
  const Step step = make_synthetic_step(small(16, 1, 192, 1));
  DeviceStep device(step);
  EXPECT_EQ(choose_backend(device.args), "cuda-sm80") << "nothing else runs without a workspace";
  EXPECT_FALSE(backend_supports("cpu", device.args).ok);
  try {
    sparse_prefill(device.args, {.backend = "cpu"});
    FAIL() << "the cpu backend took cuda tensors";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
  // A tensor on another device is refused by name.
  SparsePrefillArgs mixed = device.args;
  mixed.owners = step.owners;
  try {
    sparse_prefill(mixed);
    FAIL() << "a cpu tensor was taken among cuda ones";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("owners"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace octopage::test
