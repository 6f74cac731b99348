// Steps beyond 65,536 rows and tensors beyond 2^31 elements. The large tensors are anonymous
// mappings of which only the pages in use ever exist.

#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <random>

#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

/// Address space without memory behind it; reads as zeros.
class Mapping {
 public:
  explicit Mapping(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) memory_ = nullptr;
  }
  ~Mapping() {
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_);
  }
  explicit operator bool() const { return memory_ != nullptr; }

  /// Memory that is there, to show that a call touched no more than it needed.
  int64_t resident_bytes() const {
    constexpr size_t kSystemPage = 4096, kChunk = size_t{1} << 30;
    std::vector<unsigned char> pages(kChunk / kSystemPage);
    int64_t resident = 0;
    for (size_t at = 0; at < bytes_; at += kChunk) {
      const size_t length = std::min(kChunk, bytes_ - at);
      if (mincore(static_cast<char*>(memory_) + at, length, pages.data()) != 0) return -1;
      const size_t count = (length + kSystemPage - 1) / kSystemPage;
      for (size_t i = 0; i < count; ++i)
        resident += (pages[i] & 1) * static_cast<int64_t>(kSystemPage);
    }
    return resident;
  }

 private:
  void* memory_;
  size_t bytes_;
};

#define REQUIRE_MAPPING(mapping) \
  if (!(mapping)) GTEST_SKIP() << "this machine does not give so much address space"

constexpr int64_t kDim = 64;
constexpr int64_t kElementLimit = int64_t{1} << 31;

/// One written block of eight tokens, near-normal bf16 values.
void write_tokens(uint16_t* rows, int64_t stride_token, int64_t tokens, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t d = 0; d < 2 * kDim; ++d)
      rows[token * stride_token + d] = f32_to_bf16(normal(random));
  }
}

/// Rows of one request at position 63 over four of its eight regions.
struct SmallRows {
  static constexpr int64_t kRows = 3, kHeads = 2, kEntries = 4;
  std::vector<uint16_t> query;
  std::vector<int32_t> owners, positions, regions;

  explicit SmallRows(std::mt19937& random, int64_t groups = 1)
      : query(static_cast<size_t>(kRows * kHeads * groups * kDim)),
        owners(kRows, 0),
        positions(kRows, 63) {
    std::normal_distribution<float> normal;
    for (uint16_t& value : query) value = f32_to_bf16(normal(random));
    for (int64_t i = 0; i < kRows * groups; ++i) {
      for (const int32_t region : {0, 3, 5, 7})
        regions.push_back((region + static_cast<int32_t>(i)) % 7);
      regions.back() = 7;
      std::sort(regions.end() - 4, regions.end());
      if (std::unique(regions.end() - 4, regions.end()) != regions.end()) {
        std::copy_n(std::initializer_list<int32_t>{0, 2, 4, 7}.begin(), 4, regions.end() - 4);
      }
    }
  }
  SparsePrefillArgs args(const TensorView& cache, const TensorView& table) {
    SparsePrefillArgs a;
    const int64_t groups = cache.shape[1];
    a.query = TensorView::contiguous(query.data(), DType::bf16, {kRows, kHeads * groups, kDim});
    a.kv_cache = cache;
    a.block_table = table;
    a.owners = TensorView::contiguous(owners.data(), DType::i32, {kRows});
    a.positions = TensorView::contiguous(positions.data(), DType::i32, {kRows});
    a.regions = TensorView::contiguous(regions.data(), DType::i32, {kRows, groups, kEntries});
    a.scale = 0.125f;
    return a;
  }
};

/// Both backends on the call: no status, within the bounds, and little memory in use.
void expect_served(const SparsePrefillArgs& args, const Mapping& mapping, const std::string& what) {
  for (const char* backend : kBackends) {
    const Outcome outcome = run(args, on(backend));
    EXPECT_EQ(outcome.status, 0) << what;
    ASSERT_NO_FATAL_FAILURE(
        expect_call(outcome, args, Bounds::exact(), std::string(backend) + ", " + what));
    Step step;
    step.query = args.query;
    step.kv_cache = args.kv_cache;
    step.block_table = args.block_table;
    step.owners = args.owners;
    step.positions = args.positions;
    step.regions = args.regions;
    step.scale = args.scale;
    const Outcome planned = run_planned(step, backend);
    EXPECT_EQ(planned.status, 0) << what << ", planned";
    ASSERT_NO_FATAL_FAILURE(
        expect_call(planned, args, Bounds::exact(), std::string(backend) + " planned, " + what));
    double norm = 0;
    for (int64_t d = 0; d < kDim; ++d) norm += std::fabs(outcome.at(0, 0, d));
    EXPECT_GT(norm, 1.0) << what
                         << ": zeros were read, which a mapping holds where nothing was written";
  }
  if (!kSanitized) {
    EXPECT_GT(mapping.resident_bytes(), 0) << what;
    EXPECT_LT(mapping.resident_bytes(), int64_t{16} << 20) << what;
  }
}

TEST(Large, ManyBlocksBeyondTwoToThe31Elements) {
  // 2,400,000 blocks of eight tokens: 2.46e9 elements. The request's blocks lie at both ends.
  constexpr int64_t kBlocks = 2'400'000, kBlock = 8 * 2 * kDim;
  static_assert(kBlocks * kBlock > kElementLimit);
  const Mapping mapping(kBlocks * kBlock * 2);
  REQUIRE_MAPPING(mapping);
  std::mt19937 random(1);
  int32_t table[] = {2'399'999, 0, 2'099'000, 2'097'151, 2'097'152, 2'399'998, 1, 2'300'000};
  for (const int32_t block : table)
    write_tokens(mapping.as<uint16_t>() + block * kBlock, 2 * kDim, 8, random);
  SmallRows rows(random);
  expect_served(
      rows.args(TensorView::contiguous(mapping.as<void>(), DType::bf16, {kBlocks, 1, 8, 2 * kDim}),
                TensorView::contiguous(table, DType::i32, {1, 8})),
      mapping, "many blocks");
}

TEST(Large, GapsBetweenBlocksBeyondTwoToThe31Elements) {
  // Four blocks of 16 tokens, each 2^31 + 1024 elements from the next.
  constexpr int64_t kStride = kElementLimit + 1024;
  const Mapping mapping((3 * kStride + 16 * 2 * kDim) * 2);
  REQUIRE_MAPPING(mapping);
  std::mt19937 random(2);
  int32_t table[] = {3, 0, 2, 1};
  for (const int32_t block : table)
    write_tokens(mapping.as<uint16_t>() + block * kStride, 2 * kDim, 16, random);
  TensorView cache = TensorView::contiguous(mapping.as<void>(), DType::bf16, {4, 1, 16, 2 * kDim});
  cache.strides[0] = kStride;
  SmallRows rows(random);
  expect_served(rows.args(cache, TensorView::contiguous(table, DType::i32, {1, 4})), mapping,
                "gaps");
}

TEST(Large, GroupsBeyondTwoToThe31Elements) {
  // Two groups, 2^32 elements apart.
  constexpr int64_t kGroupStride = int64_t{1} << 32, kBlock = 16 * 2 * kDim;
  const Mapping mapping((kGroupStride + 4 * kBlock) * 2);
  REQUIRE_MAPPING(mapping);
  std::mt19937 random(3);
  int32_t table[] = {1, 3, 0, 2};
  for (int64_t group = 0; group < 2; ++group) {
    write_tokens(mapping.as<uint16_t>() + group * kGroupStride, 2 * kDim, 64, random);
  }
  TensorView cache = TensorView::contiguous(mapping.as<void>(), DType::bf16, {4, 2, 16, 2 * kDim});
  cache.strides = {kBlock, kGroupStride, 2 * kDim, 1};
  SmallRows rows(random, 2);
  expect_served(rows.args(cache, TensorView::contiguous(table, DType::i32, {1, 4})), mapping,
                "groups");
}

TEST(Large, TokensFarApart) {
  // A token stride of 2^27 elements: the sixteen tokens of a block span 2^31.
  constexpr int64_t kStride = int64_t{1} << 27;
  const Mapping mapping((15 * kStride + 2 * kDim + 4 * 16 * 256) * 2);
  REQUIRE_MAPPING(mapping);
  std::mt19937 random(4);
  // One block alone: 16 tokens, position 15.
  write_tokens(mapping.as<uint16_t>(), kStride, 16, random);
  TensorView cache = TensorView::contiguous(mapping.as<void>(), DType::bf16, {1, 1, 16, 2 * kDim});
  cache.strides[2] = kStride;
  int32_t table[] = {0};
  SmallRows rows(random);
  rows.positions.assign(SmallRows::kRows, 14);
  for (int64_t row = 0; row < SmallRows::kRows; ++row) {
    int32_t* entries = rows.regions.data() + row * SmallRows::kEntries;
    entries[0] = 0, entries[1] = 1, entries[2] = entries[3] = INT_MIN;  // two count
  }
  expect_served(rows.args(cache, TensorView::contiguous(table, DType::i32, {1, 1})), mapping,
                "tokens");
}

TEST(Large, QueryAndOutputsBeyondTwoToThe31Elements) {
  // Three rows, each 2^31 + 64 elements from the next, in the query, the output and lse.
  constexpr int64_t kStride = kElementLimit + 64, kRows = SmallRows::kRows,
                    kHeads = SmallRows::kHeads;
  const Mapping query(((kRows - 1) * kStride + kHeads * kDim) * 2);
  const Mapping output(((kRows - 1) * kStride + kHeads * kDim) * 4),
      lse(((kRows - 1) * kStride + kHeads) * 4);
  REQUIRE_MAPPING(query);
  REQUIRE_MAPPING(output);
  REQUIRE_MAPPING(lse);
  std::mt19937 random(5);
  std::vector<uint16_t> memory(8 * 8 * 2 * kDim + 8);
  uint16_t* tokens =
      memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16 / 2;
  write_tokens(tokens, 2 * kDim, 64, random);
  int32_t table[] = {4, 1, 7, 0, 2, 6, 3, 5};
  SmallRows rows(random);
  SparsePrefillArgs args =
      rows.args(TensorView::contiguous(tokens, DType::bf16, {8, 1, 8, 2 * kDim}),
                TensorView::contiguous(table, DType::i32, {1, 8}));
  const SparsePrefillArgs compact = args;
  for (int64_t row = 0; row < kRows; ++row) {
    std::copy_n(rows.query.data() + row * kHeads * kDim, kHeads * kDim,
                query.as<uint16_t>() + row * kStride);
  }
  args.query.data = query.as<void>();
  args.query.strides[0] = kStride;
  for (const char* backend : kBackends) {
    const Outcome expected = run(compact, on(backend));
    expect_call(expected, compact, Bounds::exact(), backend);
    expect_same_bits(run(args, on(backend)), expected, std::string(backend) + ", far query");
    SparsePrefillArgs far = args;
    far.output = TensorView::contiguous(output.as<void>(), DType::f32, {kRows, kHeads, kDim});
    far.output.strides[0] = kStride;
    far.lse = TensorView::contiguous(lse.as<void>(), DType::f32, {kRows, kHeads});
    far.lse.strides[0] = kStride;
    for (int64_t row = 0; row < kRows; ++row) {
      std::fill_n(output.as<float>() + row * kStride, kHeads * kDim, -7.0f);
      std::fill_n(lse.as<float>() + row * kStride, kHeads, -7.0f);
    }
    sparse_prefill(far, on(backend));
    for (int64_t row = 0; row < kRows; ++row) {
      const auto at = static_cast<size_t>(row * kHeads);
      ASSERT_EQ(std::memcmp(output.as<float>() + row * kStride,
                            expected.output.data() + at * kDim * 4, kHeads * kDim * 4),
                0)
          << backend << ", row " << row;
      ASSERT_EQ(std::memcmp(lse.as<float>() + row * kStride, &expected.lse[at], kHeads * 4), 0)
          << backend << row;
    }
    // A head stride beyond 2^31 too: rows and heads change places.
    SparsePrefillArgs heads = args;
    heads.query.data = query.as<void>();
    heads.query.shape[0] = kHeads;
    heads.query.strides = {kDim, kStride, 1};
    heads.output = {};
    for (TensorView* tensor : {&heads.owners, &heads.positions, &heads.regions})
      *tensor = tensor->slice(0, 0, kHeads);
    expect_call(run(heads, on(backend)), heads, Bounds::exact(),
                std::string(backend) + ", far heads");
  }
}

TEST(Large, SelectionsBeyondTwoToThe31Elements) {
  // Rows of the selections, owners, positions and the table lie far apart as well.
  constexpr int64_t kStride = (int64_t{1} << 30) + 8, kRows = SmallRows::kRows;
  const Mapping regions(((kRows - 1) * kStride + 4) * 4), table_memory((7 * (kStride / 2) + 1) * 4);
  REQUIRE_MAPPING(regions);
  REQUIRE_MAPPING(table_memory);
  std::mt19937 random(6);
  std::vector<uint16_t> memory(8 * 8 * 2 * kDim + 8);
  uint16_t* tokens =
      memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16 / 2;
  write_tokens(tokens, 2 * kDim, 64, random);
  int32_t table[] = {4, 1, 7, 0, 2, 6, 3, 5};
  SmallRows rows(random);
  SparsePrefillArgs args =
      rows.args(TensorView::contiguous(tokens, DType::bf16, {8, 1, 8, 2 * kDim}),
                TensorView::contiguous(table, DType::i32, {1, 8}));
  const SparsePrefillArgs compact = args;
  for (int64_t row = 0; row < kRows; ++row) {
    std::copy_n(rows.regions.data() + row * 4, 4, regions.as<int32_t>() + row * kStride);
  }
  for (int64_t column = 0; column < 8; ++column)
    table_memory.as<int32_t>()[column * (kStride / 2)] = table[column];
  args.regions.data = regions.as<void>();
  args.regions.strides[0] = kStride;
  args.block_table.data = table_memory.as<void>();
  args.block_table.strides[1] = kStride / 2;
  for (const char* backend : kBackends) {
    Options strict = on(backend);
    strict.strict = true;
    expect_same_bits(run(args, strict), run(compact, on(backend)), backend);
  }
}

TEST(Large, SeventyThousandRows) {
  constexpr int64_t kRows = kSanitized ? 66'000 : 70'000;
  Step step = make_synthetic_step({.rows = kRows,
                                   .requests = 3,
                                   .context = 24'000,
                                   .groups = 1,
                                   .heads = 1,
                                   .dim = kDim,
                                   .region_count = 3,
                                   .block_size = 16,
                                   .local_regions = 1,
                                   .seed = 9});
  // A few rows of nonsense far behind row 65,535.
  owner_of(step, 65'600) = 3;
  region_of(step, 65'700, 0, 0) = INT_MAX;
  position_of(step, 65'800) = -1;
  const SparsePrefillArgs args = args_of(step);
  for (const char* backend : kBackends) {
    const Outcome outcome = run(args, on(backend));
    EXPECT_EQ(outcome.status, status_owner | status_region);
    expect_empty_row(outcome, 65'600, backend);
    expect_empty_row(outcome, 65'800, backend);
    for (int64_t row = 0; row < kRows; row += row < 65'500 || row > 65'850 ? 977 : 1) {
      ASSERT_NO_FATAL_FAILURE(expect_line(outcome, row, args, row, 0, Bounds::exact(), backend));
    }
    ASSERT_NO_FATAL_FAILURE(
        expect_line(outcome, kRows - 1, args, kRows - 1, 0, Bounds::exact(), backend));
    // Every row was written.
    uint32_t poison;
    std::memset(&poison, kPoison, sizeof(poison));
    for (int64_t row = 0; row < kRows; ++row) {
      uint32_t bits;
      std::memcpy(&bits, &outcome.lse[static_cast<size_t>(row)], sizeof(bits));
      ASSERT_NE(bits, poison) << backend << ", row " << row;
    }
    Options strict = on(backend);
    strict.strict = true;
    expect_error([&] { run(args, strict); }, ErrorCode::invalid_entry, {"owners[row 65600] = 3"},
                 backend);
  }
  // The planned path lists 2^31 - 1 entries at most, and says so before it allocates.
  const std::vector<int64_t> positions(70'000, 1'000'000);
  CompactPagedPrefill plan;
  expect_error(
      [&] {
        plan.plan({.query_shape = {70'000, 1, kDim},
                   .dtype = DType::bf16,
                   .device = {},
                   .positions = positions,
                   .region_count = 40'000,
                   .scale = 1.0f,
                   .block_size = 16});
      },
      ErrorCode::invalid_argument, {}, "too many entries");
  EXPECT_FALSE(plan.planned());
}

}  // namespace
}  // namespace octopage::test
