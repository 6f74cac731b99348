// The page functions on the device give what the CPU gives, bit by bit.

#include <cstring>
#include <numeric>
#include <random>

#include "cuda/device_step.hpp"

namespace octopage::test {
namespace {

template <typename T>
TensorView view(const std::vector<T>& data, DType dtype, std::initializer_list<int64_t> shape) {
  return TensorView::contiguous(data.data(), dtype, shape);
}

std::vector<int32_t> fetch_i32(const DeviceArena& arena, const TensorView& t) {
  std::vector<int32_t> values(static_cast<size_t>(t.size()));
  arena.download(t, values.data());
  return values;
}

struct FillCase {
  std::vector<int32_t> regions, table, owners, indptr;
  std::vector<int64_t> positions;
  std::vector<uint16_t> query;
  int64_t rows, region_count, requests, columns, heads = 3, dim = 64, block_size = 24, blocks = 50;
};

FillCase random_fill(uint64_t seed, int64_t rows, int64_t region_count, bool hostile) {
  std::mt19937_64 random(seed);
  FillCase c;
  c.rows = rows;
  c.region_count = region_count;
  c.requests = 3;
  c.columns = 12;
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  for (int64_t i = 0; i < c.requests * c.columns; ++i) {
    c.table.push_back(
        static_cast<int32_t>(hostile && below(20) == 0 ? below(200) - 100 : below(c.blocks)));
  }
  for (int64_t r = 0; r < rows; ++r) {
    c.owners.push_back(
        static_cast<int32_t>(hostile && below(15) == 0 ? below(9) - 3 : below(c.requests)));
    c.positions.push_back(below(10) == 0 ? -1 - below(9) : below(c.columns * c.block_size));
    std::vector<int32_t> all(static_cast<size_t>(std::max<int64_t>(c.positions.back() / 8 + 1, 1)));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    const int64_t own = c.positions.back() / 8;
    const int64_t count = selection_count(c.positions.back(), region_count);
    // The own region stands among the first `count`, anywhere, unless this is a hostile row.
    const auto at = std::find(all.begin(), all.end(), static_cast<int32_t>(own)) - all.begin();
    if (count > 0 && at >= count && !(hostile && below(6) == 0)) {
      std::swap(all[static_cast<size_t>(at)], all[static_cast<size_t>(below(count))]);
    }
    all.resize(static_cast<size_t>(region_count), -7);
    for (auto& region : all) {
      if (hostile && below(12) == 0) region = static_cast<int32_t>(random());
    }
    c.regions.insert(c.regions.end(), all.begin(), all.end());
  }
  c.indptr = compact_page_metadata(c.positions, region_count).indptr;
  for (int64_t i = 0; i < rows * c.heads * c.dim * 2; ++i)
    c.query.push_back(static_cast<uint16_t>(random()));
  return c;
}

void run_fill(uint64_t seed, int64_t rows, int64_t region_count, bool hostile, bool exact) {
  const FillCase c = random_fill(seed, rows, region_count, hostile);
  const int64_t capacity = std::max<int64_t>(c.indptr.back(), 1);
  std::vector<int32_t> host_pages(static_cast<size_t>(capacity), 123456);
  std::vector<uint16_t> host_query(static_cast<size_t>(rows * c.heads * c.dim), 0xabab);
  int32_t host_status = 0;
  FillPrefillPagesArgs args;
  args.regions = view(c.regions, DType::i32, {rows, region_count});
  args.block_table = view(c.table, DType::i32, {c.requests, c.columns});
  args.owners = view(c.owners, DType::i32, {rows});
  args.indptr = view(c.indptr, DType::i32, {rows + 1});
  args.pages = view(host_pages, DType::i32, {capacity});
  args.block_size = c.block_size;
  args.page_stride = 5;
  args.blocks = c.blocks;
  if (exact) args.positions = view(c.positions, DType::i64, {rows});
  args.query = view(c.query, DType::bf16, {rows, 2 * c.heads, c.dim}).slice(1, 0, c.heads);
  args.contiguous_query = view(host_query, DType::bf16, {rows, c.heads, c.dim});
  Options host_options;
  host_options.status = &host_status;
  fill_prefill_pages(args, host_options);

  DeviceArena arena;
  FillPrefillPagesArgs on_device = args;
  on_device.regions = arena.upload(args.regions);
  on_device.block_table = arena.upload(args.block_table);
  on_device.owners = arena.upload(args.owners);
  on_device.pages = arena.upload(TensorView::contiguous(
      std::vector<int32_t>(static_cast<size_t>(capacity), 123456).data(), DType::i32, {capacity}));
  on_device.query =
      arena.upload(view(c.query, DType::bf16, {rows, 2 * c.heads, c.dim})).slice(1, 0, c.heads);
  on_device.contiguous_query = arena.allocate(DType::bf16, {rows, c.heads, c.dim}, 0xab);
  const TensorView indptr = arena.upload(args.indptr);
  const TensorView positions = arena.upload(args.positions);
  const TensorView status = arena.allocate(DType::i32, {1}, 0);
  Options options;
  options.status = static_cast<int32_t*>(status.data);
  // Chunks, last first.
  const int64_t cut = rows / 3;
  for (const auto& [begin, end] : {std::pair{cut, rows}, std::pair{int64_t{0}, cut}}) {
    FillPrefillPagesArgs chunk = on_device;
    chunk.regions = on_device.regions.slice(0, begin, end);
    chunk.owners = on_device.owners.slice(0, begin, end);
    chunk.indptr = indptr.slice(0, begin, end + 1);
    if (exact) chunk.positions = positions.slice(0, begin, end);
    chunk.query = on_device.query.slice(0, begin, end);
    chunk.contiguous_query = on_device.contiguous_query.slice(0, begin, end);
    fill_prefill_pages(chunk, options);
  }
  EXPECT_EQ(fetch_i32(arena, on_device.pages), host_pages)
      << seed << " " << rows << " " << region_count;
  std::vector<uint16_t> query(host_query.size());
  arena.download(on_device.contiguous_query, query.data());
  EXPECT_EQ(query, host_query);
  EXPECT_EQ(fetch_i32(arena, status)[0], host_status) << seed;
}

TEST(Fill, EqualsTheCpu) {
  uint64_t seed = 1;
  for (const int64_t regions : {1, 7, 31, 32, 33, 127, 128, 129, 300}) {
    for (const bool hostile : {false, true}) {
      for (const bool exact : {false, true}) run_fill(seed++, 61, regions, hostile, exact);
    }
  }
}

TEST(Fill, SeventyThousandRows) {
  run_fill(4, 70000, 5, true, true);
}

TEST(Stage, EqualsTheCpu) {
  for (const DType from : {DType::f8_e4m3fn, DType::bf16, DType::f16}) {
    for (const DType to : {DType::bf16, DType::f16}) {
      for (const int64_t block_size : {8, 24, 528}) {
        // Every code of the type, in a cache of three groups: the group in the middle is staged.
        const int64_t blocks = 7, groups = 3, dim = 64;
        std::vector<uint8_t> bytes(
            static_cast<size_t>(blocks * groups * block_size * 2 * dim * itemsize(from)));
        std::mt19937 random(static_cast<uint32_t>(block_size));
        for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
        std::vector<uint8_t> aligned_storage(bytes.size() + 64);
        void* aligned = aligned_storage.data();
        size_t space = aligned_storage.size();
        std::align(64, bytes.size(), aligned, space);
        std::memcpy(aligned, bytes.data(), bytes.size());
        const auto cache =
            TensorView::contiguous(aligned, from, {blocks, groups, block_size, 2 * dim});
        const std::vector<int32_t> list = {6, 0,        0, 3, -1, static_cast<int32_t>(blocks),
                                           5, INT32_MAX};
        const auto staged = static_cast<int64_t>(list.size());
        std::vector<uint16_t> expected(static_cast<size_t>(staged * block_size * 2 * dim), 0xabab);
        int32_t host_status = 0;
        Options host_options;
        host_options.status = &host_status;
        stage_prefill_pages(cache.slice(1, 1, 2), view(list, DType::i32, {staged}),
                            view(expected, to, {staged, 1, block_size, 2 * dim}), Scale::of(0.37f),
                            Scale::of(2.25f), host_options);
        DeviceArena arena;
        const TensorView device_cache = arena.upload(cache);
        const TensorView output = arena.allocate(to, {staged, 1, block_size, 2 * dim}, 0xab);
        const TensorView status = arena.allocate(DType::i32, {1}, 0);
        const float values[2] = {0.37f, 2.25f};
        const TensorView scales = arena.upload(TensorView::contiguous(values, DType::f32, {2}));
        Options options;
        options.status = static_cast<int32_t*>(status.data);
        stage_prefill_pages(device_cache.slice(1, 1, 2),
                            arena.upload(view(list, DType::i32, {staged})), output,
                            Scale::at(static_cast<const float*>(scales.data)),
                            Scale::at(static_cast<const float*>(scales.data) + 1), options);
        std::vector<uint16_t> actual(expected.size());
        arena.download(output, actual.data());
        for (size_t i = 0; i < actual.size(); ++i) {
          const bool nan =
              std::isnan(load_f32(&expected[i], to, 0)) && std::isnan(load_f32(&actual[i], to, 0));
          ASSERT_TRUE(nan || actual[i] == expected[i])
              << name(from) << " -> " << name(to) << " at " << i << ": " << actual[i]
              << ", expected " << expected[i];
        }
        EXPECT_EQ(fetch_i32(arena, status)[0], host_status);
        EXPECT_EQ(host_status, status_table);
      }
    }
  }
}

TEST(Plan, FixupEqualsAnExactPlan) {
  std::mt19937_64 random(3);
  for (const int64_t rows : {1, 5, 4095, 4096, 4097, 20000, 70001}) {
    std::vector<int64_t> bounds, exact;
    for (int64_t r = 0; r < rows; ++r) {
      exact.push_back(static_cast<int64_t>(random() % 9000) - 20);
      bounds.push_back(exact.back() + static_cast<int64_t>(random() % 300));
    }
    const auto expected = compact_page_metadata(exact, 64);
    DeviceArena arena;
    CompactPagedPrefill plan;
    PrefillPlanArgs args = {.query_shape = {rows, 4, 64},
                            .dtype = DType::bf16,
                            .device = arena.device(),
                            .positions = bounds,
                            .region_count = 64,
                            .scale = 1,
                            .block_size = 64};
    const TensorView status = arena.allocate(DType::i32, {1}, 0);
    Options options;
    options.status = static_cast<int32_t*>(status.data);
    plan.plan(args, options);
    EXPECT_EQ(fetch_i32(arena, plan.indptr()), compact_page_metadata(bounds, 64).indptr);
    const TensorView device_exact = arena.upload(view(exact, DType::i64, {rows}));
    plan.fixup_positions(device_exact, options);
    plan.fixup_positions(device_exact, options);  // a second time changes nothing
    EXPECT_EQ(fetch_i32(arena, plan.indptr()), expected.indptr) << rows;
    EXPECT_EQ(fetch_i32(arena, plan.last_page_len()), expected.last_page_len) << rows;
    EXPECT_EQ(fetch_i32(arena, status)[0], 0);
    // Longer than planned: cut, and reported if one of the rows had room for more.
    std::vector<int32_t> longer;
    bool cut = false;
    for (const int64_t bound : bounds) {
      longer.push_back(static_cast<int32_t>(std::max<int64_t>(bound, 0)) + 16);
      cut |= selection_count(longer.back(), 64) > selection_count(bound, 64);
    }
    plan.fixup_positions(arena.upload(view(longer, DType::i32, {rows})), options);
    EXPECT_EQ(fetch_i32(arena, plan.indptr()), compact_page_metadata(bounds, 64).indptr);
    EXPECT_EQ(fetch_i32(arena, status)[0], cut ? status_range_cut : 0);
    // A smaller plan keeps every address.
    const void* before[] = {plan.pages().data, plan.indptr().data, plan.last_page_len().data,
                            plan.positions().data};
    bounds.resize(static_cast<size_t>((rows + 1) / 2));
    args.positions = bounds;
    args.query_shape[0] = static_cast<int64_t>(bounds.size());
    plan.plan(args, options);
    const void* after[] = {plan.pages().data, plan.indptr().data, plan.last_page_len().data,
                           plan.positions().data};
    EXPECT_TRUE(std::equal(std::begin(before), std::end(before), std::begin(after)));
    EXPECT_EQ(fetch_i32(arena, plan.indptr()), compact_page_metadata(bounds, 64).indptr);
    EXPECT_EQ(fetch_i32(arena, plan.last_page_len()),
              compact_page_metadata(bounds, 64).last_page_len);
  }
}

TEST(Plan, PageIdsOutsideTheViewAreSkipped) {
  SyntheticSpec spec = {
      .rows = 9, .context = 300, .heads = 16, .dim = 64, .region_count = 8, .block_size = 16};
  const Step step = make_synthetic_step(spec);
  DeviceStep device(step);
  CompactPagedPrefill plan;
  const auto positions = device.host_positions();
  plan.plan({.query_shape = {9, 16, 64},
             .dtype = DType::bf16,
             .device = device.arena.device(),
             .positions = positions,
             .region_count = 8,
             .scale = step.scale,
             .block_size = 16,
             .contiguous_query = true});
  std::vector<int32_t> wild(static_cast<size_t>(plan.pages().size()));
  for (size_t i = 0; i < wild.size(); ++i)
    wild[i] = i % 2 == 0 ? -static_cast<int32_t>(i) - 1 : INT32_MAX - static_cast<int32_t>(i);
  device.arena.assign(plan.pages(), wild.data());
  plan.finish(device.args.query, device.args.kv_cache, device.args.output, device.args.lse, {}, {},
              device.options());
  const Result result = device.fetch();
  for (const float value : result.output) ASSERT_EQ(value, 0.0f);
  for (const float value : result.lse) ASSERT_EQ(value, -INFINITY);
}

TEST(Plan, MissingOwnRegionEmptiesTheRow) {
  SyntheticSpec spec = {
      .rows = 9, .context = 300, .heads = 16, .dim = 64, .region_count = 8, .block_size = 16};
  Step step = make_synthetic_step(spec);
  std::vector<int32_t> regions(
      static_cast<const int32_t*>(step.regions.data),
      static_cast<const int32_t*>(step.regions.data) + step.regions.size());
  const auto own = static_cast<int32_t>(position_of(step.positions, 4) / 8);
  for (int64_t i = 0; i < 8; ++i) {
    auto& region = regions[static_cast<size_t>(4 * 8 + i)];
    if (region == own) region = -1;
  }
  step.regions.data = regions.data();
  DeviceStep device(step);
  const Result result = device.planned(device.args.kv_cache, device.args.block_table);
  for (int64_t h = 0; h < 16; ++h)
    EXPECT_EQ(result.lse[static_cast<size_t>(4 * 16 + h)], -INFINITY);
  EXPECT_NE(result.lse[3 * 16], -INFINITY);
  EXPECT_EQ(result.status, status_region);
}

}  // namespace
}  // namespace octopage::test
