// Beyond 2^31 elements and beyond 65,535 rows.

#include <cstring>
#include <random>

#include "cuda/device_step.hpp"

namespace octopage::test {
namespace {

/// A few rows of a large call against the reference of those rows alone.
void expect_rows(const SparsePrefillArgs& args, const Step& step, DeviceArena& arena,
                 std::vector<int64_t> rows, int64_t first_block, int64_t blocks) {
  for (const int64_t row : rows) {
    Step one = step;
    const int64_t heads = args.query.shape[1], dim = args.query.shape[2];
    std::vector<uint16_t> query(static_cast<size_t>(heads * dim));
    TensorView source = args.query.slice(0, row, row + 1);
    arena.download(TensorView::contiguous(source.data, DType::bf16, {1, heads, dim}, source.device),
                   query.data());
    one.query = TensorView::contiguous(query.data(), DType::bf16, {1, heads, dim});
    one.owners = step.owners.slice(0, row, row + 1);
    one.positions = step.positions.slice(0, row, row + 1);
    one.regions = step.regions.slice(0, row, row + 1);
    std::vector<int32_t> table(
        static_cast<const int32_t*>(step.block_table.data),
        static_cast<const int32_t*>(step.block_table.data) + step.block_table.size());
    for (auto& block : table) block -= static_cast<int32_t>(first_block);
    one.block_table.data = table.data();
    ASSERT_EQ(one.kv_cache.shape[0], blocks);
    const Result expected = reference(one);
    Result actual;
    actual.output.resize(static_cast<size_t>(heads * dim));
    actual.lse.resize(static_cast<size_t>(heads));
    source = args.output.slice(0, row, row + 1);
    arena.download(TensorView::contiguous(source.data, DType::f32, {heads * dim}, source.device),
                   actual.output.data());
    source = args.lse.slice(0, row, row + 1);
    arena.download(TensorView::contiguous(source.data, DType::f32, {heads}, source.device),
                   actual.lse.data());
    expect_close(actual, expected, one, "row " + std::to_string(row));
  }
}

void prefill(const SparsePrefillArgs& args, DeviceArena& arena) {
  Options options;
  options.backend = test_backend;
  ASSERT_TRUE(backend_supports(test_backend, args).ok)
      << backend_supports(test_backend, args).reason;
  const auto bytes = static_cast<int64_t>(sparse_prefill_workspace_size(args, options));
  if (bytes > 0) {
    options.workspace = arena.allocate(DType::u8, {bytes}).data;
    options.workspace_bytes = static_cast<size_t>(bytes);
  }
  ++calls_under_test;
  sparse_prefill(args, options);
}

Step rows_of(int64_t rows, int64_t heads, int64_t dim) {
  SyntheticSpec spec = {.rows = std::min<int64_t>(rows, 2000),
                        .requests = 1,
                        .context = 4096,
                        .groups = 1,
                        .heads = heads,
                        .dim = dim,
                        .region_count = 6,
                        .block_size = 64,
                        .keep = 0.9,
                        .local_regions = 2,
                        .seed = 6};
  return make_synthetic_step(spec);
}

/// The step's rows repeated to `rows`.
struct Repeated {
  std::vector<int32_t> owners, positions, regions;
  Step step;
  Repeated(const Step& base, int64_t rows) : step(base) {
    const int64_t entries = base.regions.size() / base.rows();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = r % base.rows();
      owners.push_back(static_cast<const int32_t*>(base.owners.data)[from]);
      positions.push_back(static_cast<int32_t>(position_of(base.positions, from)));
      const auto* line = static_cast<const int32_t*>(base.regions.data) + from * entries;
      regions.insert(regions.end(), line, line + entries);
    }
    step.owners = TensorView::contiguous(owners.data(), DType::i32, {rows});
    step.positions = TensorView::contiguous(positions.data(), DType::i32, {rows});
    step.regions = TensorView::contiguous(regions.data(), DType::i32, {rows, 1, entries});
  }
};

TEST(Large, SeventyThousandRows) {
  const Step base = rows_of(70000, 1, 64);
  const Repeated repeated(base, 70000);
  DeviceArena arena;
  std::vector<uint16_t> query(70000 * 64);
  std::mt19937 random(1);
  for (auto& q : query) q = f32_to_bf16(static_cast<float>(random() % 2000) / 1000.0f - 1.0f);
  SparsePrefillArgs args;
  args.query = arena.upload(TensorView::contiguous(query.data(), DType::bf16, {70000, 1, 64}));
  args.kv_cache = arena.upload(base.kv_cache);
  args.block_table = arena.upload(base.block_table);
  args.owners = arena.upload(repeated.step.owners);
  args.positions = arena.upload(repeated.step.positions);
  args.regions = arena.upload(repeated.step.regions);
  args.output = arena.allocate(DType::f32, {70000, 1, 64});
  args.lse = arena.allocate(DType::f32, {70000, 1});
  args.scale = base.scale;
  prefill(args, arena);
  expect_rows(args, repeated.step, arena, {0, 1, 65535, 65536, 69999}, 0, base.kv_cache.shape[0]);
}

TEST(Large, QueryBeyondTwoToThe31Elements) {
  const int64_t rows = 720000, heads = 16, dim = 192;  // 2.2e9 elements
  const Step base = rows_of(rows, heads, dim);
  const Repeated repeated(base, rows);
  DeviceArena arena;
  SparsePrefillArgs args;
  args.query = arena.allocate(DType::bf16, {rows, heads, dim}, 0x3c);  // 0x3c3c: 0.0115
  args.kv_cache = arena.upload(base.kv_cache);
  args.block_table = arena.upload(base.block_table);
  args.owners = arena.upload(repeated.step.owners);
  args.positions = arena.upload(repeated.step.positions);
  args.regions = arena.upload(repeated.step.regions);
  args.output = arena.allocate(DType::f32, {rows, heads, dim});
  args.lse = arena.allocate(DType::f32, {rows, heads});
  args.scale = base.scale;
  // Rows on both sides of the boundary get queries of their own.
  const std::vector<int64_t> checked = {0, 350000, 699050, 699051, rows - 1};
  std::mt19937 random(1);
  for (const int64_t row : checked) {
    std::vector<uint16_t> query(static_cast<size_t>(heads * dim));
    for (auto& q : query) q = f32_to_bf16(static_cast<float>(random() % 2000) / 1000.0f - 1.0f);
    arena.assign(args.query.slice(0, row, row + 1), query.data());
  }
  prefill(args, arena);
  expect_rows(args, repeated.step, arena, checked, 0, base.kv_cache.shape[0]);
}

TEST(Large, CacheBeyondTwoToThe31Elements) {
  const Step base = rows_of(100, 16, 192);
  const int64_t block_elements = base.kv_cache.size() / base.kv_cache.shape[0];
  const int64_t used = base.kv_cache.shape[0];
  const int64_t blocks = (int64_t{1} << 31) / block_elements + used + 10;
  const int64_t first = blocks - used;  // beyond 2^31 elements
  DeviceArena arena;
  const TensorView cache =
      arena.allocate(DType::bf16, {blocks, 1, 64, 384}, 0xff);  // NaN everywhere else
  arena.assign(cache.slice(0, first, blocks), base.kv_cache.data);
  Step moved = base;
  std::vector<int32_t> table(
      static_cast<const int32_t*>(base.block_table.data),
      static_cast<const int32_t*>(base.block_table.data) + base.block_table.size());
  for (auto& block : table) block += static_cast<int32_t>(first);
  moved.block_table.data = table.data();
  SparsePrefillArgs args;
  args.query = arena.upload(base.query);
  args.kv_cache = cache;
  args.block_table = arena.upload(moved.block_table);
  args.owners = arena.upload(base.owners);
  args.positions = arena.upload(base.positions);
  args.regions = arena.upload(base.regions);
  args.output = arena.allocate(DType::f32, {base.rows(), 16, 192});
  args.lse = arena.allocate(DType::f32, {base.rows(), 16});
  args.scale = base.scale;
  prefill(args, arena);
  expect_rows(args, moved, arena, {0, base.rows() / 2, base.rows() - 1}, first, used);
}

}  // namespace
}  // namespace octopage::test
