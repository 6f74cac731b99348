#include "plan/row_tiles.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "octopage/error.hpp"

namespace octopage {
namespace {

struct Rows {
  std::vector<int32_t> owners, positions, regions;
  int64_t count, region_count = 6;
  TensorView owners_view() const {
    return TensorView::contiguous(owners.data(), DType::i32, {count});
  }
  TensorView positions_view() const {
    return TensorView::contiguous(positions.data(), DType::i32, {count});
  }
  TensorView regions_view() const {
    return TensorView::contiguous(regions.data(), DType::i32, {count, region_count});
  }
  std::set<int32_t> valid(int64_t row) const {
    std::set<int32_t> found;
    const int32_t own = positions[static_cast<size_t>(row)] / 8;
    for (int64_t i = 0; i < std::min<int64_t>(own + 1, region_count); ++i) {
      const int32_t region = regions[static_cast<size_t>(row * region_count + i)];
      if (region >= 0 && region <= own) found.insert(region);
    }
    return found;
  }
};

Rows random_rows(uint64_t seed, int64_t count) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  Rows rows;
  rows.count = count;
  for (int64_t i = 0; i < count; ++i) {
    rows.owners.push_back(static_cast<int32_t>(random() % 3));
    rows.positions.push_back(static_cast<int32_t>(random() % 200));
    for (int64_t j = 0; j < rows.region_count; ++j)
      rows.regions.push_back(static_cast<int32_t>(random() % 30) - 1);
  }
  return rows;
}

TEST(RowTiles, EachRowOnceInOrderAndOneOwnerPerTile) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const Rows rows = random_rows(seed, static_cast<int64_t>(seed));
    const int64_t height = 1 + static_cast<int64_t>(seed % 9);
    const RowTiles tiles = make_row_tiles(rows.owners_view(), rows.positions_view(), height);
    std::set<int32_t> seen;
    for (int64_t t = 0; t < tiles.count(); ++t) {
      const auto begin = static_cast<size_t>(tiles.starts[static_cast<size_t>(t)]);
      const auto end = static_cast<size_t>(tiles.starts[static_cast<size_t>(t) + 1]);
      ASSERT_LT(begin, end);
      ASSERT_LE(static_cast<int64_t>(end - begin), height);
      for (size_t place = begin; place < end; ++place) {
        const auto row = static_cast<size_t>(tiles.order[place]);
        ASSERT_TRUE(seen.insert(tiles.order[place]).second);
        ASSERT_EQ(rows.owners[row], rows.owners[static_cast<size_t>(tiles.order[begin])]);
        if (place > begin) {
          ASSERT_LE(rows.positions[static_cast<size_t>(tiles.order[place - 1])],
                    rows.positions[row]);
        }
      }
    }
    ASSERT_EQ(static_cast<int64_t>(seen.size()), rows.count);
  }
  const Rows rows = random_rows(1, 4);
  EXPECT_THROW(make_row_tiles(rows.owners_view(), rows.positions_view(), 0), Error);
}

TEST(RowTiles, UnionFactorAndOverlapAgreeWithSets) {
  for (uint64_t seed = 1; seed < 20; ++seed) {
    const Rows rows = random_rows(seed, 40);
    for (const int64_t height : {1, 2, 4, 8}) {
      const RowTiles tiles = make_row_tiles(rows.owners_view(), rows.positions_view(), height);
      double weighted = 0, weight = 0;
      for (int64_t t = 0; t < tiles.count(); ++t) {
        const auto begin = static_cast<size_t>(tiles.starts[static_cast<size_t>(t)]);
        const auto end = static_cast<size_t>(tiles.starts[static_cast<size_t>(t) + 1]);
        if (static_cast<int64_t>(end - begin) != height) continue;
        std::set<int32_t> together;
        double selected = 0;
        for (size_t place = begin; place < end; ++place) {
          const auto valid = rows.valid(tiles.order[place]);
          together.insert(valid.begin(), valid.end());
          selected += static_cast<double>(valid.size());
        }
        if (together.empty()) continue;
        weighted += static_cast<double>(together.size()) /
                    (selected / static_cast<double>(height)) * static_cast<double>(height);
        weight += static_cast<double>(height);
      }
      const UnionFactor factor = measure_union_factor(rows.owners_view(), rows.positions_view(),
                                                      rows.regions_view(), height);
      if (weight > 0) {
        EXPECT_NEAR(factor.factor, weighted / weight, 1e-9) << seed << " " << height;
      }
      if (height == 1) {
        EXPECT_NEAR(factor.factor, 1.0, 1e-12);
      }
    }
    const RowTiles all = make_row_tiles(rows.owners_view(), rows.positions_view(), 40);
    double shared = 0, selected = 0;
    for (size_t place = 1; place < all.order.size(); ++place) {
      const auto row = all.order[place], before = all.order[place - 1];
      if (rows.owners[static_cast<size_t>(row)] != rows.owners[static_cast<size_t>(before)])
        continue;
      const auto now = rows.valid(row), then = rows.valid(before);
      for (const int32_t region : now) shared += then.count(region) > 0 ? 1.0 : 0.0;
      selected += static_cast<double>(now.size());
    }
    EXPECT_NEAR(
        measure_neighbour_overlap(rows.owners_view(), rows.positions_view(), rows.regions_view()),
        shared / selected, 1e-9);
  }
}

}  // namespace
}  // namespace octopage
