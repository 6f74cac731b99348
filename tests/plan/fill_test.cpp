#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "octopage/octopage.hpp"

namespace octopage {
namespace {

struct Case {
  std::vector<int32_t> regions, table, owners, indptr;
  std::vector<int64_t> positions;
  int64_t rows, region_count, requests = 3, columns = 12, block_size = 24, blocks = 50,
                              page_stride = 5;
};

Case random_case(uint64_t seed, int64_t rows, int64_t region_count) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Case c;
  c.rows = rows;
  c.region_count = region_count;
  for (int64_t i = 0; i < c.requests * c.columns; ++i) {
    c.table.push_back(static_cast<int32_t>(below(12) == 0 ? below(300) - 150 : below(c.blocks)));
  }
  for (int64_t r = 0; r < rows; ++r) {
    c.owners.push_back(static_cast<int32_t>(below(9) == 0 ? below(9) - 3 : below(c.requests)));
    c.positions.push_back(below(8) == 0 ? -1 - below(9) : below(c.columns * c.block_size + 40));
    std::vector<int32_t> all(static_cast<size_t>(std::max<int64_t>(c.positions.back() / 8 + 1, 1)));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    all.resize(static_cast<size_t>(region_count), -7);
    if (below(4) != 0 && region_count > 0)
      all[static_cast<size_t>(below(region_count))] = static_cast<int32_t>(c.positions.back() / 8);
    for (auto& region : all) {
      if (below(20) == 0) region = static_cast<int32_t>(random());
    }
    c.regions.insert(c.regions.end(), all.begin(), all.end());
  }
  c.indptr = compact_page_metadata(c.positions, region_count).indptr;
  return c;
}

/// The contract's page of a region, or -1.
int64_t page_of(const Case& c, int64_t owner, int64_t region, int64_t limit) {
  if (owner < 0 || owner >= c.requests || region < 0 || region > limit) return -1;
  const int64_t column = 8 * region / c.block_size;
  if (column >= c.columns) return -1;
  const int64_t block = c.table[static_cast<size_t>(owner * c.columns + column)];
  if (block < 0 || block >= c.blocks) return -1;
  return block * c.page_stride + 8 * region % c.block_size / 8;
}

/// A row's pages: in the order of its regions, the own one last; all -1 without it.
std::vector<int32_t> expected_row(const Case& c, int64_t row, bool exact) {
  const int64_t count = c.indptr[static_cast<size_t>(row) + 1] - c.indptr[static_cast<size_t>(row)];
  const int64_t owner = c.owners[static_cast<size_t>(row)];
  const auto region = [&](int64_t i) {
    return int64_t{c.regions[static_cast<size_t>(row * c.region_count + i)]};
  };
  int64_t own = c.positions[static_cast<size_t>(row)] / 8, limit = own;
  if (!exact) {
    own = -1;
    limit = INT32_MAX;
    for (int64_t i = 0; i < count; ++i) {
      if (page_of(c, owner, region(i), limit) >= 0) own = std::max(own, region(i));
    }
  }
  std::vector<int32_t> pages;
  int32_t own_page = -1;
  for (int64_t i = 0; i < count; ++i) {
    const auto page = static_cast<int32_t>(page_of(c, owner, region(i), limit));
    if (page >= 0 && region(i) == own && own_page < 0) {
      own_page = page;
    } else {
      pages.push_back(page);
    }
  }
  if (own_page < 0) return std::vector<int32_t>(static_cast<size_t>(count), -1);
  pages.push_back(own_page);
  return pages;
}

template <typename T>
TensorView view(const std::vector<T>& v, DType dtype, std::initializer_list<int64_t> shape) {
  return TensorView::contiguous(v.data(), dtype, shape);
}

TEST(Fill, AgreesWithTheContractInChunksOfAnyOrder) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Case c = random_case(seed, 40, static_cast<int64_t>(seed % 35) + 1);
    for (const bool exact : {true, false}) {
      std::vector<int32_t> pages(static_cast<size_t>(c.indptr.back()) + 2,
                                 4242);  // a guard at each end
      const TensorView list =
          TensorView::contiguous(pages.data() + 1, DType::i32, {c.indptr.back()});
      std::vector<int64_t> cuts = {0, 7, 8, 31, 40};
      std::vector<size_t> order = {2, 0, 3, 1};
      for (const size_t i : order) {
        const int64_t begin = cuts[i], end = cuts[i + 1];
        FillPrefillPagesArgs args;
        args.regions = view(c.regions, DType::i32, {c.rows, c.region_count}).slice(0, begin, end);
        args.block_table = view(c.table, DType::i32, {c.requests, c.columns});
        args.owners = view(c.owners, DType::i32, {c.rows}).slice(0, begin, end);
        args.indptr = view(c.indptr, DType::i32, {c.rows + 1}).slice(0, begin, end + 1);
        args.pages = list;
        args.block_size = c.block_size;
        args.page_stride = c.page_stride;
        args.blocks = c.blocks;
        if (exact) args.positions = view(c.positions, DType::i64, {c.rows}).slice(0, begin, end);
        Options options;
        options.threads = 1;
        fill_prefill_pages(args, options);
      }
      EXPECT_EQ(pages.front(), 4242);
      EXPECT_EQ(pages.back(), 4242);
      for (int64_t row = 0; row < c.rows; ++row) {
        const std::vector<int32_t> actual(
            pages.begin() + 1 + c.indptr[static_cast<size_t>(row)],
            pages.begin() + 1 + c.indptr[static_cast<size_t>(row) + 1]);
        ASSERT_EQ(actual, expected_row(c, row, exact))
            << "seed " << seed << ", row " << row << (exact ? "" : ", no positions");
      }
    }
  }
}

TEST(Fill, CopiesAStridedQuery) {
  const Case c = random_case(5, 6, 3);
  std::vector<uint16_t> query(6 * 4 * 64), copy(6 * 2 * 64, 0);
  for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<uint16_t>(i);
  std::vector<int32_t> pages(static_cast<size_t>(c.indptr.back()));
  FillPrefillPagesArgs args;
  args.regions = view(c.regions, DType::i32, {6, 3});
  args.block_table = view(c.table, DType::i32, {3, 12});
  args.owners = view(c.owners, DType::i32, {6});
  args.indptr = view(c.indptr, DType::i32, {7});
  args.pages = view(pages, DType::i32, {c.indptr.back()});
  args.block_size = 24;
  args.page_stride = 3;
  args.query = view(query, DType::f16, {6, 4, 64}).slice(1, 1, 3);
  args.contiguous_query = view(copy, DType::f16, {6, 2, 64});
  fill_prefill_pages(args);
  for (size_t r = 0; r < 6; ++r) {
    for (size_t i = 0; i < 2 * 64; ++i) ASSERT_EQ(copy[r * 128 + i], query[r * 256 + 64 + i]);
  }
  args.contiguous_query = {};
  EXPECT_THROW(fill_prefill_pages(args), Error);
}

TEST(Fill, ATableWithoutColumnsHasNoMemory) {
  Case c = random_case(5, 6, 3);
  for (auto& owner : c.owners) owner = 2;
  std::vector<int32_t> pages(static_cast<size_t>(c.indptr.back()), 7);
  int32_t status = 0;
  Options options;
  options.status = &status;
  FillPrefillPagesArgs args;
  args.regions = view(c.regions, DType::i32, {6, 3});
  args.block_table = TensorView::contiguous(nullptr, DType::i32, {3, 0});
  args.block_table.strides = {1, 1};  // frameworks report anything here
  args.owners = view(c.owners, DType::i32, {6});
  args.indptr = view(c.indptr, DType::i32, {7});
  args.pages = view(pages, DType::i32, {c.indptr.back()});
  args.block_size = 24;
  args.page_stride = 3;
  fill_prefill_pages(args, options);
  for (size_t i = 0; i < pages.size(); ++i) ASSERT_EQ(pages[i], -1) << i;
  EXPECT_NE(status, 0);
}

TEST(Fill, MistakesAreRefused) {
  const Case c = random_case(5, 6, 3);
  std::vector<int32_t> pages(static_cast<size_t>(c.indptr.back()));
  FillPrefillPagesArgs good;
  good.regions = view(c.regions, DType::i32, {6, 3});
  good.block_table = view(c.table, DType::i32, {3, 12});
  good.owners = view(c.owners, DType::i32, {6});
  good.indptr = view(c.indptr, DType::i32, {7});
  good.pages = view(pages, DType::i32, {c.indptr.back()});
  good.block_size = 24;
  good.page_stride = 3;
  EXPECT_NO_THROW(fill_prefill_pages(good));
  const auto refused = [&](auto&& change) {
    FillPrefillPagesArgs args = good;
    change(args);
    EXPECT_THROW(fill_prefill_pages(args), Error);
  };
  refused([](auto& a) { a.block_size = 12; });
  refused([](auto& a) { a.page_stride = 0; });
  refused([](auto& a) { a.owners = a.owners.slice(0, 0, 5); });
  refused([](auto& a) { a.indptr = a.indptr.slice(0, 0, 6); });
  refused([](auto& a) { a.regions.dtype = DType::f32; });
  refused([](auto& a) { a.block_table.rank = 1; });
  refused([](auto& a) { a.pages.device = {DeviceType::cuda, 0}; });
}

}  // namespace
}  // namespace octopage
