// The numbers of src/inspect against definitions that are written out naively, on random hostile
// steps.

#include <gtest/gtest.h>
#include <png.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "inspect/inspection.hpp"
#include "inspect/map_png.hpp"
#include "octopage/error.hpp"
#include "octopage/page_arithmetic.hpp"
#include "plan/row_tiles.hpp"
#include "step/synthetic.hpp"

namespace octopage {
namespace {

/// A synthetic step with some of its entries, owners, positions and blocks broken.
Step random_step(bool broken) {
  SyntheticSpec spec;
  spec.requests = *rc::gen::inRange<int64_t>(1, 4);
  spec.rows = *rc::gen::inRange<int64_t>(0, 60);
  spec.context = *rc::gen::inRange<int64_t>(60, 400);
  spec.groups = *rc::gen::inRange<int64_t>(1, 4);
  spec.heads = spec.groups * 2;
  spec.dim = 8;
  spec.region_count = *rc::gen::inRange<int64_t>(0, 20);
  spec.block_size = 8 * *rc::gen::inRange<int64_t>(1, 4);
  spec.keep = *rc::gen::element(0.0, 0.5, 0.95, 1.0);
  spec.seed = *rc::gen::arbitrary<uint32_t>();
  Step step = make_synthetic_step(spec);
  if (!broken) return step;
  const auto break_some = [](const TensorView& tensor, const std::vector<int32_t>& values) {
    for (int64_t i = 0; i < tensor.size(); ++i) {
      if (*rc::gen::inRange(0, 8) == 0) {
        static_cast<int32_t*>(tensor.data)[i] = *rc::gen::elementOf(values);
      }
    }
  };
  const int32_t most = std::numeric_limits<int32_t>::max();
  step.lengths = {};
  break_some(step.regions, {-1, 0, 1, most, std::numeric_limits<int32_t>::min(), 30});
  break_some(step.owners, {-1, 0, 2, most});
  break_some(step.positions, {-1, 0, 7, 8, most});
  break_some(step.block_table, {-1, 0, 1, most});
  return step;
}

struct Naive {
  EntryCount entries;
  std::map<std::pair<int64_t, int64_t>, std::set<int64_t>> selected;  // (group, row)
};

Naive naive_selection(const Step& step) {
  Naive naive;
  const auto* owners = static_cast<const int32_t*>(step.owners.data);
  const auto* positions = static_cast<const int32_t*>(step.positions.data);
  const auto* regions = static_cast<const int32_t*>(step.regions.data);
  const auto* table = static_cast<const int32_t*>(step.block_table.data);
  const int64_t columns = step.block_table.shape[1];
  for (int64_t group = 0; group < step.groups(); ++group) {
    for (int64_t row = 0; row < step.rows(); ++row) {
      auto& selected = naive.selected[{group, row}];
      const int64_t position = positions[row];
      for (int64_t entry = 0; entry < step.region_count(); ++entry) {
        if (position < 0 || entry > position / 8) break;
        ++naive.entries.counted;
        const int64_t region = regions[(row * step.groups() + group) * step.region_count() + entry];
        if (owners[row] < 0 || owners[row] >= step.requests()) {
          ++naive.entries.invalid_owner;
          continue;
        }
        if (region < 0 || region > position / 8) {
          ++naive.entries.invalid_region;
          continue;
        }
        const int64_t column = 8 * region / step.block_size();
        const int64_t block = column < columns ? table[owners[row] * columns + column] : -1;
        if (block < 0 || block >= step.kv_cache.shape[0]) {
          ++naive.entries.invalid_table;
          continue;
        }
        if (!selected.insert(region).second) {
          ++naive.entries.duplicate;
          continue;
        }
        ++naive.entries.valid;
        for (int64_t token = 8 * region; token < 8 * region + 8; ++token) {
          naive.entries.visible_tokens += token <= position ? 1 : 0;
        }
      }
    }
  }
  return naive;
}

TEST(Sharing, CountsEveryEntryOnceByItsKind) {
  rc::check([] {
    const Step step = random_step(true);
    const Naive naive = naive_selection(step);
    const EntryCount entries = measure_sharing(step, {0, step.groups()}).entries;
    RC_ASSERT(entries.counted == naive.entries.counted);
    RC_ASSERT(entries.valid == naive.entries.valid);
    RC_ASSERT(entries.duplicate == naive.entries.duplicate);
    RC_ASSERT(entries.invalid_region == naive.entries.invalid_region);
    RC_ASSERT(entries.invalid_owner == naive.entries.invalid_owner);
    RC_ASSERT(entries.invalid_table == naive.entries.invalid_table);
    RC_ASSERT(entries.visible_tokens == naive.entries.visible_tokens);
    RC_ASSERT(entries.counted == entries.valid + entries.duplicate + entries.invalid_region +
                                     entries.invalid_owner + entries.invalid_table);
  });
}

TEST(Sharing, TilesAgesAndOverlapAreTheirDefinitions) {
  rc::check([] {
    const Step step = random_step(true);
    const Naive naive = naive_selection(step);
    const Sharing sharing = measure_sharing(step, {0, step.groups()});
    const auto* positions = static_cast<const int32_t*>(step.positions.data);
    for (const TileSharing& tile : sharing.tiles) {
      const RowTiles tiles = make_row_tiles(step.owners, step.positions, tile.height);
      int64_t loaded = 0, multiplied = 0;
      for (size_t i = 0; i + 1 < tiles.starts.size(); ++i) {
        for (int64_t group = 0; group < step.groups(); ++group) {
          std::set<int64_t> all;
          for (int32_t place = tiles.starts[i]; place < tiles.starts[i + 1]; ++place) {
            const auto& row = naive.selected.at({group, tiles.order[static_cast<size_t>(place)]});
            all.insert(row.begin(), row.end());
          }
          loaded += static_cast<int64_t>(all.size());
          multiplied += static_cast<int64_t>(all.size()) * (tiles.starts[i + 1] - tiles.starts[i]);
        }
      }
      RC_ASSERT(tile.loaded == loaded);
      RC_ASSERT(tile.multiplied == multiplied);
    }
    int64_t aged = 0;
    for (const AgeBin& bin : sharing.ages) {
      int64_t expected = 0;
      for (const auto& [key, regions] : naive.selected) {
        for (const int64_t region : regions) {
          const int64_t age = positions[key.second] / 8 - region;
          expected += age >= bin.begin && age < bin.end ? 1 : 0;
        }
      }
      RC_ASSERT(bin.entries == expected);
      aged += bin.entries;
    }
    RC_ASSERT(aged == naive.entries.valid);
  });
}

TEST(Sharing, AgreesWithThePlanWhereEveryEntryIsValid) {
  rc::check([] {
    const Step step = random_step(false);
    const Sharing sharing = measure_sharing(step, {0, step.groups()});
    for (const TileSharing& tile : sharing.tiles) {
      const UnionFactor factor =
          measure_union_factor(step.owners, step.positions, step.regions, tile.height);
      RC_ASSERT(std::abs(tile.factor - factor.factor) < 1e-9);
      RC_ASSERT(tile.tiles == factor.tiles);
    }
    const double overlap = measure_neighbour_overlap(step.owners, step.positions, step.regions);
    RC_ASSERT(std::abs(sharing.overlap.share() - overlap) < 1e-12);
  });
}

TEST(SelectionMapTest, BinsHoldEveryValidEntryInItsPlace) {
  rc::check([] {
    const Step step = random_step(true);
    const GroupRange groups = {0, step.groups()};
    const int64_t most_rows = *rc::gen::inRange<int64_t>(1, 70);
    const int64_t most_regions = *rc::gen::inRange<int64_t>(1, 70);
    const SelectionMap map =
        make_selection_map(step, groups, measure_sharing(step, groups), most_rows, most_regions);
    RC_ASSERT(map.row_bins <= most_rows);
    RC_ASSERT(map.region_bins <= most_regions);
    std::vector<int64_t> counts(map.counts.size());
    const Naive naive = naive_selection(step);
    const RowTiles order = make_row_tiles(step.owners, step.positions, 1);
    for (int64_t place = 0; place < step.rows(); ++place) {
      for (int64_t group = 0; group < step.groups(); ++group) {
        for (const int64_t region :
             naive.selected.at({group, order.order[static_cast<size_t>(place)]})) {
          ++counts.at(static_cast<size_t>(place / map.rows_per_bin * map.region_bins +
                                          region / map.regions_per_bin));
        }
      }
    }
    RC_ASSERT(counts == map.counts);
    int64_t rows = 0;
    for (const RowBin& bin : map.bins) rows += bin.end - bin.begin;
    RC_ASSERT(rows == step.rows());
  });
}

TEST(BlockUseTest, RunsAndUses) {
  Step step =
      make_synthetic_step({.rows = 1, .context = 56, .dim = 8, .region_count = 1, .block_size = 8});
  ASSERT_EQ(step.kv_cache.shape[0], 9);
  const std::vector<int32_t> blocks = {2, 3, 4, 0, 77, 5, 5, -1};  // five runs
  std::copy(blocks.begin(), blocks.end(), static_cast<int32_t*>(step.block_table.data));
  const BlockUse use = measure_block_use(step, 4);
  EXPECT_EQ(use.runs, 5);
  EXPECT_EQ(use.pairs, 6);
  EXPECT_EQ(use.adjacent, 2);
  EXPECT_EQ(use.outside, 1);
  EXPECT_EQ(use.used, 5);
  EXPECT_EQ(use.shared, 1);
  ASSERT_EQ(use.run_lengths.size(), 2u);
  EXPECT_EQ(use.run_lengths[0].runs, 4);
  EXPECT_EQ(use.run_lengths[1].blocks, 3);
  ASSERT_EQ(use.cache.size(), 3u);
  EXPECT_EQ(use.cache[1].begin, 3);
  EXPECT_EQ(use.cache[1].used, 3);
  EXPECT_EQ(use.cache[1].shared, 1);
}

TEST(RoofsTest, LongestPartBinds) {
  // Rows that select all of the same: every tile of n rows loads what one row does.
  const Step step = make_synthetic_step(
      {.rows = 16, .context = 128, .heads = 4, .dim = 64, .region_count = 100, .block_size = 8});
  const Sharing sharing = measure_sharing(step, {0, 1});
  const Card card = {"card", 1e12, 1e9, 1e6, "made up"};
  const Roofs roofs = predict_roofs(step, {0, 1}, sharing, card);
  // Positions 112 .. 127: 15 regions for the first eight rows, 16 for the others.
  const double page = 8 * 2 * 64 * 2;
  EXPECT_EQ(roofs.ways[0].gather_bytes, (8 * 15 + 8 * 16) * page);
  EXPECT_EQ(roofs.ways[4].gather_bytes, 16 * page);
  EXPECT_EQ(roofs.ways[4].matrix_flops, 4.0 * 64 * 4 * 8 * 16 * 16);
  EXPECT_EQ(roofs.memory_bytes, 16 * page + 2 * 16 * 4 * 64 * 2);
  EXPECT_EQ(roofs.useful_flops, 4.0 * 64 * 4 * (113 + 128) * 16 / 2);
  EXPECT_EQ(roofs.ways[0].binds(), RoofKind::memory);
  EXPECT_DOUBLE_EQ(roofs.ways[0].seconds(), roofs.memory_bytes / 1e6);
  EXPECT_EQ(predict_roofs(step, {0, 1}, sharing, {"", 1e6, 1e9, 1e9, ""}).ways[0].binds(),
            RoofKind::matrix);
  EXPECT_EQ(predict_roofs(step, {0, 1}, sharing, {"", 1e15, 1e6, 1e9, ""}).ways[0].binds(),
            RoofKind::gather);
  EXPECT_EQ(roofs.ways.back().load_rows, 8);
  EXPECT_EQ(roofs.ways.back().compute_rows, 4);
}

TEST(MapPng, PixelsAreTheBinsColours) {
  SelectionMap map;
  map.rows = map.row_bins = 1;
  map.regions = map.region_bins = 3;
  map.counts = {1, 0, 0};
  map.bins = {{0, 1, 0, 0, 9, 9, {}}};  // own region 1
  const std::string file = map_png(map);
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  ASSERT_NE(png_image_begin_read_from_memory(&image, file.data(), file.size()), 0);
  image.format = PNG_FORMAT_RGB;
  ASSERT_EQ(image.width, 3u * 170);
  ASSERT_EQ(image.height, 170u);
  std::vector<uint8_t> pixels(PNG_IMAGE_SIZE(image));
  ASSERT_NE(png_image_finish_read(&image, nullptr, pixels.data(), 0, nullptr), 0);
  const auto pixel = [&](size_t x) {
    return Rgb{pixels[3 * x], pixels[3 * x + 1], pixels[3 * x + 2]};
  };
  EXPECT_EQ(pixel(0), kLightMap.stops.back());
  EXPECT_EQ(pixel(169), kLightMap.stops.back());
  EXPECT_EQ(pixel(170), kLightMap.stops.front());
  EXPECT_EQ(pixel(340), kLightMap.beyond);
  EXPECT_FALSE(map_png({}).empty());
}

TEST(InspectTest, RefusesGroupsThatAreNotThere) {
  const Step step = make_synthetic_step({.rows = 1, .context = 8, .dim = 8, .region_count = 1});
  EXPECT_THROW(inspect(step, {0, 2}, known_cards().front()), Error);
  EXPECT_THROW(inspect(step, {1, 1}, known_cards().front()), Error);
  EXPECT_NO_THROW(inspect(step, {0, 1}, known_cards().front()));
}

}  // namespace
}  // namespace octopage
