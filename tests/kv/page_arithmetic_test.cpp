#include "octopage/page_arithmetic.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <vector>

#include "kv/host_lookup.hpp"
#include "octopage/error.hpp"
#include "octopage/kv_cache.hpp"

namespace octopage {
namespace {

TEST(PageArithmetic, PositionsAreFloored) {
  const struct {
    int64_t position, region, last;
  } cases[] = {{0, 0, 1},
               {7, 0, 8},
               {8, 1, 1},
               {150, 18, 7},
               {-1, -1, 8},
               {-2, -1, 7},
               {-8, -1, 1},
               {-9, -2, 8},
               {INT64_MIN, INT64_MIN / 8, 1},
               {INT64_MAX, INT64_MAX / 8, 8}};
  for (const auto& c : cases) {
    EXPECT_EQ(region_of_position(c.position), c.region) << c.position;
    EXPECT_EQ(last_page_len(c.position), c.last) << c.position;
  }
}

TEST(PageArithmetic, SelectionCounts) {
  EXPECT_EQ(selection_count(-1, 5), 0);
  EXPECT_EQ(selection_count(INT64_MIN, 5), 0);
  EXPECT_EQ(selection_count(0, 5), 1);
  EXPECT_EQ(selection_count(39, 5), 5);
  EXPECT_EQ(selection_count(1000, 5), 5);
  EXPECT_EQ(selection_count(1000, 0), 0);
}

TEST(PageArithmetic, RegionsOfATable) {
  const struct {
    int64_t columns, per_block, regions;
  } cases[] = {{0, 8, 0},
               {1, 1, 1},
               {100, 8, 800},
               {int64_t{1} << 28, 8, int64_t{1} << 31},
               {(int64_t{1} << 28) + 1, 8, int64_t{1} << 31},
               {(int64_t{1} << 31) / 3 + 1, 3, int64_t{1} << 31},
               {int64_t{1} << 55, int64_t{1} << 10, int64_t{1} << 31},  // 2^65
               {INT64_MAX, INT32_MAX, int64_t{1} << 31}};
  for (const auto& c : cases) {
    const BlockTableView table = {nullptr, 1, c.columns, 0, 0};
    const PageGeometry geometry = {1, c.per_block, c.per_block};
    EXPECT_EQ(table_regions(table, geometry), c.regions) << c.columns << " x " << c.per_block;
  }
}

TEST(PageArithmetic, AgreesWithTheContractsFormula) {
  EXPECT_TRUE(rc::check("page of a region", [] {
    const int64_t requests = *rc::gen::inRange<int64_t>(1, 4),
                  columns = *rc::gen::inRange<int64_t>(0, 6);
    const int64_t blocks = *rc::gen::inRange<int64_t>(0, 9),
                  per_block = *rc::gen::inRange<int64_t>(1, 7);
    const int64_t gap = *rc::gen::inRange<int64_t>(0, 5);
    const auto entries = *rc::gen::container<std::vector<int32_t>>(
        static_cast<size_t>(requests * columns),
        rc::gen::oneOf(rc::gen::inRange<int32_t>(-2, 12), rc::gen::arbitrary<int32_t>()));
    const int64_t owner = *rc::gen::oneOf(rc::gen::inRange<int64_t>(-2, 6),
                                          rc::gen::cast<int64_t>(rc::gen::arbitrary<int32_t>()));
    const int64_t region = *rc::gen::oneOf(rc::gen::inRange<int64_t>(-3, 60),
                                           rc::gen::cast<int64_t>(rc::gen::arbitrary<int32_t>()));
    const int64_t own = *rc::gen::inRange<int64_t>(0, 50);
    const BlockTableView table = {entries.data(), requests, columns, columns, 1};
    const PageGeometry geometry = {blocks, per_block, per_block + gap};
    const PageLookup page = page_of_region(table, geometry, owner, region, own);
    // block_table[owner][8g / block_size] * page_stride + (8g % block_size) / 8
    if (owner < 0 || owner >= requests) {
      RC_ASSERT(page.fault == status_owner);
    } else if (region < 0 || region > own) {
      RC_ASSERT(page.fault == status_region);
    } else if (8 * region / (8 * per_block) >= columns) {
      RC_ASSERT(page.fault == status_table);
    } else {
      const int32_t block =
          entries[static_cast<size_t>(owner * columns + 8 * region / (8 * per_block))];
      if (block < 0 || block >= blocks) {
        RC_ASSERT(page.fault == status_table);
      } else {
        RC_ASSERT(page.fault == 0);
        RC_ASSERT(page.page == block * (per_block + gap) + 8 * region % (8 * per_block) / 8);
      }
    }
    RC_ASSERT((page.page == -1) == (page.fault != 0));
    const PageLookup on_host = host_page_of_region(table, geometry, owner, region, own);
    RC_ASSERT(on_host.page == page.page && on_host.fault == page.fault);
  }));
}

TEST(PageArithmetic, AddressOfARegion) {
  alignas(16) static uint16_t memory[4 * 2 * 16 * 128];
  const KvCacheView cache =
      kv_cache_view(TensorView::contiguous(memory, DType::bf16, {4, 2, 16, 128}));
  const int32_t entries[] = {3, 1, 9};
  const BlockTableView table = {entries, 1, 3, 3, 1};
  const RegionAddress found =
      region_address(cache, table, 1, 0, 3, 30);  // logical block 1 -> block 1, second page
  EXPECT_EQ(found.page.fault, 0);
  EXPECT_EQ(found.data, memory + (1 * 2 + 1) * 16 * 128 + 8 * 128);
  EXPECT_EQ(region_address(cache, table, 0, 0, 4, 30).page.fault, status_region);
  EXPECT_EQ(region_address(cache, table, 0, 0, 4, 40).page.fault, status_table);  // block 9 of 4
  EXPECT_EQ(region_address(cache, table, 0, 0, int64_t{1} << 40, int64_t{1} << 50).page.fault,
            status_region);
  EXPECT_EQ(region_address(cache, table, 0, 1, 0, 30).data, nullptr);
  EXPECT_THROW(region_address(cache, table, 2, 0, 0, 30), Error);
}

}  // namespace
}  // namespace octopage
