// rows_from_query_start_loc: a batch as engines describe it.

#include <climits>

#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

Rows rows_of(std::vector<int32_t> start, std::vector<int32_t> lens) {
  return rows_from_query_start_loc(start, lens);
}

TEST(Rows, LastTokensOfEachRequest) {
  // Three rows of a request of ten tokens, none of one of five, two of a fresh one.
  const Rows rows = rows_of({0, 3, 3, 5}, {10, 5, 2});
  EXPECT_EQ(rows.owners, (std::vector<int32_t>{0, 0, 0, 2, 2}));
  EXPECT_EQ(rows.positions, (std::vector<int64_t>{7, 8, 9, 0, 1}));
}

TEST(Rows, EmptyBatches) {
  for (const Rows& rows : {rows_of({0}, {}), rows_of({0, 0, 0}, {0, 7})}) {
    EXPECT_TRUE(rows.owners.empty());
    EXPECT_TRUE(rows.positions.empty());
  }
}

TEST(Rows, LongestRequest) {
  const Rows rows = rows_of({0, 2}, {INT_MAX});
  EXPECT_EQ(rows.positions, (std::vector<int64_t>{INT_MAX - 2, INT_MAX - 1}));
}

TEST(Rows, FeedsACall) {
  // Owners and positions of a synthetic step, whose rows are the last tokens of its requests.
  Step step = make_synthetic_step({.rows = 7,
                                   .requests = 3,
                                   .context = 40,
                                   .groups = 1,
                                   .heads = 2,
                                   .dim = 64,
                                   .region_count = 3,
                                   .block_size = 8,
                                   .local_regions = 1,
                                   .seed = 3});
  const Rows rows = rows_of({0, 3, 5, 7}, {40, 40, 40});
  ASSERT_EQ(rows.owners.size(), 7u);
  for (int64_t row = 0; row < 7; ++row) {
    EXPECT_EQ(rows.owners[static_cast<size_t>(row)], owner_of(step, row)) << row;
    EXPECT_EQ(rows.positions[static_cast<size_t>(row)], position_of(step, row)) << row;
  }
}

TEST(Rows, BrokenBatchesAreRefused) {
  struct Case {
    const char* name;
    std::vector<int32_t> start, lens;
    std::vector<std::string> pieces;
  };
  const Case cases[] = {
      {"falling", {0, 5, 3}, {9, 9}, {"query_start_loc[2]", "3", "query_start_loc[1]", "5"}},
      {"falling from INT_MAX",
       {0, INT_MAX, INT_MIN},
       {INT_MAX, 1},
       {"query_start_loc[2]", "-2147483648"}},
      {"negative", {0, -1}, {4}, {"query_start_loc[1]", "-1"}},
      {"too short", {0, 4, 9}, {4, 4}, {"seq_lens[1]", "4", "5 rows"}},
      {"negative length", {0, 0}, {-1}, {"seq_lens[0]", "-1"}},
      {"not from 0", {1, 4}, {8}, {"query_start_loc[0]", "1", "0"}},
      {"no entry", {}, {}, {"query_start_loc", "1", "has 0"}},
      {"one entry missing", {0, 4}, {8, 8}, {"query_start_loc", "3", "has 2"}},
      {"one entry more", {0, 4, 8}, {8}, {"query_start_loc", "2", "has 3"}},
  };
  for (const Case& c : cases) {
    expect_error([&] { rows_of(c.start, c.lens); }, ErrorCode::invalid_argument, c.pieces, c.name);
  }
}

}  // namespace
}  // namespace octopage::test
