// The kernel `unions` on the host, against the definition of its lists: what every half computes,
// in which order, with which masks. Also contexts and owners that the tests on a GPU do not reach.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "cuda/host/cta.hpp"
// Then the code under test.
#include "backends/cuda/union/params.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage::cuda {
namespace {
using std::max;
using std::min;
alignas(16) unsigned char shared[232448];
}  // namespace
}  // namespace octopage::cuda

#include "unions_kernel.inc"

namespace octopage::test {
namespace {

/// Hundreds of threads under ThreadSanitizer take a minute for what takes a second: a sample there.
#ifdef __SANITIZE_THREAD__
constexpr bool kSample = true;
#else
constexpr bool kSample = false;
#endif

/// Inputs of a call, and what `unions` makes of them.
struct Call {
  int64_t heads = 16, region_count = 8, block_size = 16;
  std::vector<int32_t> owners, table, regions;  // regions [rows, selections, region_count]
  std::vector<int64_t> positions;
  int64_t requests = 1, columns = 0, blocks = 0, selections = 1;
  int32_t split_shift = 0;
  int64_t multiprocessors = 0;  // of a device whose launch chooses the window; 0: the smallest

  std::vector<std::byte> memory;
  cuda::UnionLists lists = {};
  uint32_t window = 0;  // that the run had
  int32_t status = 0;

  int64_t rows() const { return static_cast<int64_t>(owners.size()); }
  BlockTableView table_view() const { return {table.data(), requests, columns, columns, 1}; }
  PageGeometry geometry() const { return {blocks, block_size / 8, block_size / 8}; }

  void run() {
    cuda::UnionLists sizes;
    const size_t bytes =
        sizes.lay_out(nullptr, rows(), selections, region_count, heads, split_shift);
    memory.assign(bytes + 256, std::byte{0xff});
    auto* base = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
    lists.lay_out(base, rows(), selections, region_count, heads, split_shift);
    cuda::UnionsParams p = {};
    p.lists = lists;
    p.table = table_view();
    p.geometry = geometry();
    p.owners = owners.data();
    p.stride_owners = 1;
    p.positions = positions.data();
    p.stride_positions = 1;
    p.wide_positions = 1;
    p.regions = regions.data();
    p.stride_regions_row = selections * region_count;
    p.stride_regions_selection = region_count;
    p.stride_regions_entry = 1;
    p.region_count = region_count;
    p.rows = rows();
    p.status = &status;
    const auto ctas = static_cast<unsigned>(lists.spans * selections);
    // Shared memory of a CTA holds anything.
    std::memset(cuda::shared, 0xa5, sizeof(cuda::shared));
    if (lists.tile_rows <= 8) {
      launch<uint8_t>(p, ctas);
    } else {
      launch<uint32_t>(p, ctas);
    }
  }

  template <typename Mark>
  void launch(cuda::UnionsParams p, unsigned ctas) {
    p.window = multiprocessors > 0 ? cuda::window_of<Mark>(p, ctas, multiprocessors)
                                   : cuda::Marks<Mark>::kSmallestWindow;
    window = p.window;
    host_cta::run(ctas, cuda::kUnionThreads, [&] { cuda::unions<Mark>(p); });
    expect_untouched(cuda::SharedLayout<Mark>(lists.tile_rows, region_count, p.window).bytes());
  }

  /// What lies behind the shared memory that a launch asks for.
  static void expect_untouched(size_t bytes) {
    ASSERT_LE(bytes, sizeof(cuda::shared));
    EXPECT_TRUE(std::all_of(cuda::shared + bytes, std::end(cuda::shared),
                            [](unsigned char byte) { return byte == 0xa5; }));
  }

  /// Pages that a row selects, by region, and the status bits of its entries.
  std::map<int64_t, int64_t> expected_pages(int64_t row, int64_t selection, int32_t& bits) const {
    std::map<int64_t, int64_t> pages;
    const int64_t position = positions[static_cast<size_t>(row)];
    for (int64_t i = 0; i < selection_count(position, region_count); ++i) {
      const int32_t region =
          regions[static_cast<size_t>((row * selections + selection) * region_count + i)];
      const PageLookup page =
          page_of_region(table_view(), geometry(), owners[static_cast<size_t>(row)], region,
                         region_of_position(position));
      bits |= page.fault;
      if (page.fault == 0) pages[region] = page.page;
    }
    return pages;
  }

  void check(const std::string& what) {
    int32_t bits = 0;
    for (int64_t s = 0; s < selections; ++s) {
      for (int64_t span = 0; span < lists.spans; ++span)
        ASSERT_NO_FATAL_FAILURE(check_span(s, span, bits)) << what << ", span " << span;
    }
    EXPECT_EQ(status, bits) << what;
  }

  void check_span(int64_t selection, int64_t span, int32_t& bits) {
    const int64_t list = selection * lists.spans + span;
    const int64_t end = std::min<int64_t>((span + 1) * lists.tile_rows, rows());
    int64_t row = span * lists.tile_rows;
    int32_t first_batch = 0;
    int64_t steps = 0, entries = 0;
    for (int64_t r = row; r < end; ++r) {
      const int32_t owner = owners[static_cast<size_t>(r)];
      if (owner >= 0 && owner < requests)
        entries += selection_count(positions[static_cast<size_t>(r)], region_count);
    }
    for (int tile = 0; row < end; ++tile) {
      int64_t tile_end = row + 1;
      while (tile_end < end &&
             owners[static_cast<size_t>(tile_end)] == owners[static_cast<size_t>(row)])
        ++tile_end;
      const std::vector<cuda::TileHeader> splits = splits_of(list, tile);
      for (size_t split = 0; split < splits.size(); ++split) {
        const cuda::TileHeader& header = splits[split];
        ASSERT_EQ(header.row, row);
        ASSERT_EQ(header.rows, tile_end - row);
        ASSERT_EQ(header.last, tile_end == end ? 1 : 0);
        ASSERT_EQ(header.first_batch, first_batch);
        ASSERT_EQ(header.begin, split == 0 ? 0 : splits[split - 1].end);
        ASSERT_GE(header.end, header.begin);
        ASSERT_LE(header.end - header.begin, splits[0].end - splits[0].begin + 1) << "unequal";
        for (int half = 0; half < 2; ++half) {
          ASSERT_EQ(header.first_step[half], split == 0 ? first_batch
                                                        : splits[split - 1].first_step[half] +
                                                              splits[split - 1].steps[half]);
        }
        ASSERT_EQ(header.tail, splits[0].tail);
        ASSERT_EQ(header.live, splits[0].live);
        ASSERT_TRUE(std::equal(std::begin(header.own), std::end(header.own), splits[0].own));
      }
      ASSERT_LE(first_batch + splits.back().end, lists.capacity);
      ASSERT_NO_FATAL_FAILURE(check_tile(selection, list, splits, bits)) << "tile " << tile;
      for (const cuda::TileHeader& header : splits) steps += header.steps[0] + header.steps[1];
      first_batch += splits.back().end;
      row = tile_end;
    }
    ASSERT_EQ(lists.work[list].steps, steps);
    ASSERT_EQ(lists.work[list].entries, entries);
  }

  std::vector<cuda::TileHeader> splits_of(int64_t list, int64_t tile) const {
    std::vector<cuda::TileHeader> splits;
    for (int64_t split = 0; split < int64_t{1} << split_shift; ++split)
      splits.push_back(lists.headers[((list << split_shift) + split) * lists.tile_rows + tile]);
    return splits;
  }

  void check_tile(int64_t selection, int64_t list, const std::vector<cuda::TileHeader>& splits,
                  int32_t& bits) {
    const cuda::TileHeader& header = splits[0];
    const int32_t batches = splits.back().end;
    const int32_t* pages =
        lists.pages + (list * lists.capacity + header.first_batch) * cuda::kBatchPages;
    std::vector<std::map<int64_t, int64_t>> expected;
    int64_t newest = -1;
    for (int64_t r = 0; r < header.rows; ++r) {
      expected.push_back(expected_pages(header.row + r, selection, bits));
      const int64_t owner = owners[static_cast<size_t>(header.row + r)];
      if (owner >= 0 && owner < requests)
        newest = std::max(newest, positions[static_cast<size_t>(header.row + r)]);
    }
    std::vector<std::multiset<int64_t>> seen(static_cast<size_t>(header.rows));
    std::set<int32_t> used;
    for (int half = 0; half < 2; ++half) {
      int32_t before = -1;
      for (const cuda::TileHeader& split : splits) {
        for (int32_t step = 0; step < split.steps[half]; ++step) {
          const int64_t at = (list * 2 + half) * lists.capacity + split.first_step[half] + step;
          const uint32_t* words = lists.steps + at * lists.half_rows;
          const int32_t batch = cuda::batch_of_step(words[0]);
          ASSERT_GT(batch, before);
          ASSERT_LE(batch - before, 2) << "a half may skip one batch at most between two steps";
          ASSERT_GE(batch, split.begin);
          ASSERT_LT(batch, split.end);
          before = batch;
          used.insert(batch);
          for (int r = 0; r < lists.half_rows; ++r) {
            ASSERT_EQ(cuda::batch_of_step(words[r]), batch);
            const int64_t row = lists.tile_rows > 1 ? half * lists.half_rows + r : 0;
            const uint32_t mask = cuda::mask_of_step(words[r]);
            for (int j = 0; j < cuda::kBatchPages; ++j) {
              if ((mask >> j & 1) == 0) continue;
              ASSERT_LT(row, header.rows) << "a row that does not exist selects";
              if (lists.tile_rows > 1 || half == 0)
                seen[static_cast<size_t>(row)].insert(pages[batch * cuda::kBatchPages + j]);
            }
          }
        }
      }
    }
    ASSERT_EQ(static_cast<int32_t>(used.size()), batches) << "a batch that nobody computes";
    for (int32_t i = 0; i < batches * cuda::kBatchPages; ++i)
      ASSERT_LT(pages[i], blocks * (block_size / 8));
    uint32_t live = 0;
    for (int64_t r = 0; r < header.rows; ++r) {
      std::multiset<int64_t> wanted;
      for (const auto& [region, page] : expected[static_cast<size_t>(r)]) wanted.insert(page);
      ASSERT_EQ(seen[static_cast<size_t>(r)], wanted) << "row " << header.row + r;
      live |= wanted.empty() ? 0u : 1u << r;
      // The row's own page and what it sees of it.
      const int64_t position = positions[static_cast<size_t>(header.row + r)];
      const auto own = expected[static_cast<size_t>(r)].find(region_of_position(position));
      if (position < 0 || own == expected[static_cast<size_t>(r)].end()) {
        ASSERT_EQ(header.own[r], -1);
      } else {
        ASSERT_EQ(pages[header.own[r] / 8], own->second);
        ASSERT_EQ(header.own[r] % 8, position % 8);
      }
    }
    ASSERT_EQ(header.live, live);
    bool tail_selected = false;
    for (const auto& row : expected) tail_selected |= newest >= 0 && row.contains(newest / 8);
    ASSERT_EQ(header.tail >= 0, tail_selected);
    if (tail_selected) {
      ASSERT_EQ(header.tail % 8, newest % 8);
      for (const auto& row : expected) {
        if (row.contains(newest / 8)) {
          ASSERT_EQ(pages[header.tail / 8], row.at(newest / 8));
        }
      }
    }
  }
};

/// Neighbouring rows that share about `keep` of their selections, some of it hostile.
Call random_call(uint64_t seed, int64_t heads, int64_t rows, int64_t context, int64_t region_count,
                 double keep, bool hostile) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Call call;
  call.heads = heads;
  call.region_count = region_count;
  call.block_size = 8 * (1 + below(8));
  call.requests = 1 + below(3);
  call.selections = 1 + below(2);
  call.columns = context / call.block_size + 1;
  call.blocks = call.columns * 2;
  for (int64_t i = 0; i < call.requests * call.columns; ++i)
    call.table.push_back(static_cast<int32_t>(hostile && below(9) == 0 ? below(3) * call.blocks - 1
                                                                       : below(call.blocks)));
  if (hostile)
    call.columns -= call.columns / 3,
        call.table.resize(static_cast<size_t>(call.requests * call.columns));
  int32_t owner = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (below(hostile ? 5 : 40) == 0)
      owner = static_cast<int32_t>(hostile && below(6) == 0 ? -1 + below(2) * 99
                                                            : below(call.requests));
    call.owners.push_back(owner);
    call.positions.push_back(hostile && below(9) == 0 ? -below(20) : context - rows + row);
  }
  std::vector<int32_t> current;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t s = 0; s < call.selections; ++s) {
      const int64_t position = std::max<int64_t>(call.positions[static_cast<size_t>(row)], 0);
      std::set<int32_t> chosen;
      for (const int32_t region : current)
        if (static_cast<double>(below(1000)) < keep * 1000 && region <= position / 8 &&
            static_cast<int64_t>(chosen.size()) < region_count)
          chosen.insert(region);
      const int64_t want = std::min(region_count, position / 8 + 1);
      if (below(5) != 0 && static_cast<int64_t>(chosen.size()) < want)
        chosen.insert(static_cast<int32_t>(position / 8));
      while (static_cast<int64_t>(chosen.size()) < want)
        chosen.insert(static_cast<int32_t>(below(position / 8 + 1)));
      current.assign(chosen.begin(), chosen.end());
      std::shuffle(current.begin(), current.end(), random);
      std::vector<int32_t> entries = current;
      entries.resize(static_cast<size_t>(region_count), static_cast<int32_t>(random()));
      if (hostile) {
        const int32_t bad[] = {-1, INT32_MAX, INT32_MIN, 1 << 25};
        for (auto& entry : entries)
          if (below(20) == 0) entry = bad[below(4)];
      }
      call.regions.insert(call.regions.end(), entries.begin(), entries.end());
    }
  }
  return call;
}

TEST(Unions, EveryTileHeight) {
  uint64_t seed = 1;
  for (const int64_t heads : {1, 4, 8, 12, 16, 32, 64, 128}) {
    if (kSample && heads != 4 && heads != 16) continue;
    Call call = random_call(seed++, heads, 37, 900, 21, 0.8, false);
    call.run();
    ASSERT_NO_FATAL_FAILURE(call.check(std::to_string(heads) + " heads"));
  }
}

TEST(Unions, AnyOverlap) {
  uint64_t seed = 20;
  for (const double keep : {1.0, 0.95, 0.5, 0.0}) {
    if (kSample && keep != 0.5) continue;
    Call call = random_call(seed++, 16, 16, 3000, 64, keep, false);
    call.run();
    ASSERT_NO_FATAL_FAILURE(call.check("keep " + std::to_string(keep)));
  }
}

TEST(Unions, HostileInputs) {
  for (uint64_t seed = 40; seed < (kSample ? 42 : 48); ++seed) {
    const int64_t heads = std::vector<int64_t>{4, 8, 16, 128}[seed % 4];
    Call call = random_call(seed, heads, 33, 700, 19, 0.6, true);
    call.run();
    ASSERT_NO_FATAL_FAILURE(call.check("seed " + std::to_string(seed)));
  }
}

TEST(Unions, TilesAreCutIntoSplits) {
  for (int32_t shift = 1; shift <= cuda::kMostSplitShift; ++shift) {
    if (kSample && shift != 2) continue;
    for (const int64_t region_count : {1, 19, 160}) {
      const int64_t heads =
          std::vector<int64_t>{4, 16, 128}[static_cast<size_t>(shift + region_count) % 3];
      Call call = random_call(static_cast<uint64_t>(60 + shift * 9 + heads), heads, 11, 1500,
                              region_count, 0.7, region_count == 19);
      call.split_shift = shift;
      call.run();
      ASSERT_NO_FATAL_FAILURE(call.check(std::to_string(1 << shift) + " splits, " +
                                         std::to_string(heads) + " heads, " +
                                         std::to_string(region_count) + " regions"));
    }
  }
}

TEST(Unions, FewTilesAreSplitAndManyAreNot) {
  EXPECT_EQ(cuda::split_shift_of(512, 132, 512), 0);
  EXPECT_EQ(cuda::split_shift_of(2048, 132, 512), 0);
  EXPECT_GE(cuda::split_shift_of(32, 132, 512), 1);
  EXPECT_GE(cuda::split_shift_of(1, 132, 512), 2);
  EXPECT_EQ(cuda::split_shift_of(1, 132, 8), 0) << "a batch is not worth splitting";
  EXPECT_EQ(cuda::split_shift_of(1, 132, 0), 0);
  for (int64_t units = 1; units < 3000; units += 7) {
    const int32_t shift = cuda::split_shift_of(units, 132, 512);
    ASSERT_GE(shift, 0);
    ASSERT_LE(shift, cuda::kMostSplitShift);
  }
}

TEST(Unions, LongContextsNeedSeveralWindows) {
  // The smallest window holds 32,768 regions with up to eight rows to a tile, 8,192 with more; a
  // launch of so few CTAs on a large device chooses up to four times as many.
  for (const int64_t heads : {16, 4}) {
    for (const int64_t context : {8 * 32768 + 5, 1000000}) {
      for (const int64_t multiprocessors : {0, 132}) {
        if (kSample && (context == 1000000 || multiprocessors != 0)) continue;
        Call call =
            random_call(static_cast<uint64_t>(context + heads), heads, 20, context, 70, 0.9, false);
        call.multiprocessors = multiprocessors;
        call.run();
        const std::string what = std::to_string(context) + " tokens, " + std::to_string(heads) +
                                 " heads, windows of " + std::to_string(call.window);
        const uint32_t smallest = heads == 16 ? 32768 : 8192;
        const uint32_t chosen = heads == 16 && context < 1000000 ? 65536 : 4 * smallest;
        EXPECT_EQ(call.window, multiprocessors == 0 ? smallest : chosen) << what;
        ASSERT_NO_FATAL_FAILURE(call.check(what));
      }
    }
  }
}

/// Of launches that `unions_fit` lets through.
template <typename Mark>
void check_windows(int64_t heads) {
  constexpr uint32_t kSmallest = cuda::Marks<Mark>::kSmallestWindow;
  constexpr int64_t kMultiprocessors = 132;
  cuda::UnionsParams p = {};
  p.lists.tile_rows = cuda::tile_rows(heads);
  const auto bytes = [&](uint32_t window) {
    return cuda::SharedLayout<Mark>(p.lists.tile_rows, p.region_count, window).bytes();
  };
  for (p.region_count = 1; bytes(kSmallest) <= cuda::kMostDynamicBytes; p.region_count *= 2) {
    for (const int64_t regions : {0, 1000, 16384, 131072, 1 << 24}) {
      p.table = {nullptr, 1, regions / 2, regions / 2, 1};
      p.geometry = {regions, 2, 2};
      for (const int64_t ctas : {1, 132, 133, 264, 528, 100000}) {
        // A multiprocessor has 228 KiB, of which a CTA takes one, and two for what is not dynamic.
        const auto waves = [&](uint32_t window) {
          const int64_t room = 228 * 1024 / (bytes(window) + 3 * 1024);
          const int64_t side_by_side =
              kMultiprocessors * std::min<int64_t>(room, cuda::Entry<Mark>::kCtasOfMultiprocessor);
          return (ctas + side_by_side - 1) / side_by_side;
        };
        const uint32_t window = cuda::window_of<Mark>(p, ctas, kMultiprocessors);
        ASSERT_EQ(window % kSmallest, 0u);
        ASSERT_LE(bytes(window), cuda::kMostDynamicBytes);
        ASSERT_EQ(waves(window), waves(kSmallest)) << ctas << " CTAs, " << window << " regions";
        if (window > kSmallest) {
          ASSERT_LT(window / 2, regions) << "half of it holds every region";
        }
        if (ctas == 1 && bytes(2 * window) <= cuda::kMostDynamicBytes) {
          ASSERT_GE(window, regions) << "a larger one fits";
        }
      }
    }
  }
}

TEST(Unions, LargerWindowsCostNoWave) {
  for (const int64_t heads : {16, 128}) ASSERT_NO_FATAL_FAILURE(check_windows<uint8_t>(heads));
  for (const int64_t heads : {4, 8}) ASSERT_NO_FATAL_FAILURE(check_windows<uint32_t>(heads));
}

TEST(Unions, NothingToDo) {
  Call none = random_call(3, 16, 9, 500, 0, 0.5, false);
  none.run();
  none.check("no regions");
  Call padding = random_call(4, 16, 9, 500, 5, 0.5, false);
  for (auto& position : padding.positions) position = -1;
  padding.run();
  padding.check("padding");
  Call absent = random_call(5, 16, 9, 500, 5, 0.5, false);
  absent.columns = 0;
  absent.table.clear();
  absent.run();
  absent.check("a table without columns");
}

}  // namespace
}  // namespace octopage::test
