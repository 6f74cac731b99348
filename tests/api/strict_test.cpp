// Strict calls: the first invalid entry fails the call before anything is written.

#include <algorithm>
#include <climits>
#include <functional>

#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

constexpr int32_t kNanPattern = 0x7fc00000;

SyntheticSpec spec_of(int64_t groups) {
  return {.rows = 9,
          .requests = 2,
          .context = 200,
          .groups = groups,
          .heads = 2 * groups,
          .dim = 64,
          .region_count = 7,
          .block_size = 16,
          .keep = 0.7,
          .sink_regions = 1,
          .local_regions = 1,
          .seed = 5};
}

struct Strict {
  bool failed = false;
  ErrorCode code = ErrorCode::internal;
  std::string message;
  int32_t status = 0x1000;
};

/// A strict call. Output, lse and workspace must stay untouched where it fails.
Strict call(const SparsePrefillArgs& given, const char* backend) {
  SparsePrefillArgs args = given;
  const auto& shape = args.query.shape;
  Fenced output(static_cast<size_t>(args.query.size()) * 4),
      lse(static_cast<size_t>(shape[0] * shape[1]) * 4);
  args.output = TensorView::contiguous(output.data(), DType::f32, {shape[0], shape[1], shape[2]});
  args.lse = TensorView::contiguous(lse.data(), DType::f32, {shape[0], shape[1]});
  Strict result;
  Options options = on(backend);
  options.strict = true;
  options.status = &result.status;
  Fenced workspace(sparse_prefill_workspace_size(args, options));
  options.workspace = workspace.data();
  options.workspace_bytes = workspace.size();
  try {
    sparse_prefill(args, options);
  } catch (const Error& error) {
    result.failed = true;
    result.code = error.code();
    result.message = error.what();
    EXPECT_TRUE(output.untouched()) << "the output was written before: " << result.message;
    EXPECT_TRUE(lse.untouched()) << "lse was written before: " << result.message;
  }
  if (!result.failed) {
    EXPECT_FALSE(output.untouched()) << "nothing was written";
  }
  EXPECT_TRUE(output.fences_intact() && lse.fences_intact() && workspace.fences_intact());
  return result;
}

TEST(Strict, EachFaultNamesRowEntryAndValue) {
  struct Case {
    const char* name;
    int64_t groups;
    std::function<void(Step&)> spoil;
    std::vector<std::string> pieces;
    std::vector<std::string> absent;
  };
  Step first = make_synthetic_step(spec_of(1));
  const auto blocks = std::to_string(first.kv_cache.shape[0] - 1);
  const auto own = std::to_string(position_of(first, 6) / 8);
  const Case cases[] = {
      {"negative region",
       1,
       [](Step& s) { region_of(s, 6, 0, 3) = -4; },
       {"row 6", "entry 3", "-4", own},
       {"group"}},
      {"INT_MIN",
       1,
       [](Step& s) { region_of(s, 6, 0, 0) = INT_MIN; },
       {"row 6", "entry 0", "-2147483648"},
       {}},
      {"INT_MAX",
       1,
       [](Step& s) { region_of(s, 6, 0, 6) = INT_MAX; },
       {"row 6", "entry 6", "2147483647"},
       {}},
      {"NaN pattern",
       1,
       [](Step& s) { region_of(s, 8, 0, 1) = kNanPattern; },
       {"row 8", "entry 1", "2143289344"},
       {}},
      {"one past",
       1,
       [](Step& s) { region_of(s, 6, 0, 2) = position_of(s, 6) / 8 + 1; },
       {"row 6", "entry 2", std::to_string(std::stol(own) + 1), own},
       {}},
      {"with groups",
       2,
       [](Step& s) { region_of(s, 6, 1, 3) = -4; },
       {"row 6", "group 1", "entry 3", "-4"},
       {}},
      {"owner too large",
       1,
       [](Step& s) { owner_of(s, 4) = 2; },
       {"owners", "row 4", "2", "0 .. 1"},
       {}},
      {"owner negative", 1, [](Step& s) { owner_of(s, 0) = -3; }, {"owners", "row 0", "-3"}, {}},
      {"table entry negative",
       1,
       [](Step& s) { table_of(s, 0, 0) = -7; },
       {"row 0", "entry 0", "= 0", "block_table", "request 0", "column 0", "-7", blocks},
       {}},
      {"table entry too large",
       1,
       [](Step& s) { table_of(s, 1, 0) = static_cast<int32_t>(s.kv_cache.shape[0]); },
       {"row 5", "entry 0", "block_table", "request 1", "column 0",
        std::to_string(std::stol(blocks) + 1)},
       {}},
      {"column past the table",
       1,
       [](Step& s) {
         s.block_table = s.block_table.slice(1, 0, 2);  // regions 0 .. 3 only
         for (int64_t row = 0; row < 9; ++row) {
           for (int64_t entry = 0; entry < 7; ++entry)
             region_of(s, row, 0, entry) = 99;  // never reached: row 0 fails
         }
         region_of(s, 0, 0, 0) = 3, region_of(s, 0, 0, 1) = 4;
       },
       {"row 0", "entry 1", "= 4", "column 2", "2 columns"},
       {}},
      {"duplicate",
       1,
       [](Step& s) { region_of(s, 6, 0, 5) = region_of(s, 6, 0, 2); },
       {"row 6", "entry 5", "twice"},
       {}},
      {"duplicate in a group",
       2,
       [](Step& s) { region_of(s, 2, 1, 1) = region_of(s, 2, 1, 0); },
       {"row 2", "group 1", "entry 1", "twice"},
       {}},
  };
  for (const char* backend : kBackends) {
    for (const Case& c : cases) {
      Step step = make_synthetic_step(spec_of(c.groups));
      ASSERT_FALSE(call(args_of(step), backend).failed) << "the step is clean before " << c.name;
      c.spoil(step);
      const Strict result = call(args_of(step), backend);
      ASSERT_TRUE(result.failed) << backend << ", " << c.name;
      EXPECT_EQ(result.code, ErrorCode::invalid_entry) << c.name;
      for (const std::string& piece : c.pieces) {
        EXPECT_NE(result.message.find(piece), std::string::npos)
            << c.name << ": '" << piece << "' is missing in: " << result.message;
      }
      for (const std::string& piece : c.absent) {
        EXPECT_EQ(result.message.find(piece), std::string::npos)
            << c.name << ": '" << piece << "' has no place in: " << result.message;
      }
    }
  }
}

TEST(Strict, TheFirstInOrderIsNamed) {
  const Step clean = make_synthetic_step(spec_of(2));
  // Later rows, groups and entries spoilt first: each new fault stands before the former ones.
  Step step = clone(clean);
  struct Fault {
    int64_t row, group, entry;
  };
  const Fault faults[] = {{8, 1, 6}, {8, 1, 2}, {8, 0, 5}, {5, 1, 6},
                          {5, 1, 0}, {2, 0, 4}, {0, 1, 1}, {0, 0, 0}};
  for (const Fault& f : faults) {
    region_of(step, f.row, f.group, f.entry) =
        static_cast<int32_t>(-100 * f.row - 10 * f.group - f.entry - 1);
    const std::string value = std::to_string(region_of(step, f.row, f.group, f.entry));
    const Strict result = call(args_of(step), "cpu");
    ASSERT_TRUE(result.failed);
    for (const std::string& piece :
         {"row " + std::to_string(f.row), "group " + std::to_string(f.group),
          "entry " + std::to_string(f.entry), value}) {
      EXPECT_NE(result.message.find(piece), std::string::npos)
          << piece << " is missing in: " << result.message;
    }
  }
  // The owner of a row comes before its entries, and rows come before kinds.
  owner_of(step, 0) = 55;
  EXPECT_NE(call(args_of(step), "cpu").message.find("owners[row 0] = 55"), std::string::npos);
}

TEST(Strict, PaddingRowsAndUncountedEntriesRaiseNothing) {
  SyntheticSpec spec = spec_of(2);
  spec.context = 30;  // rows count 4 of 7 entries at most
  Step step = make_synthetic_step(spec);
  const int32_t garbage[] = {INT_MIN, INT_MAX, kNanPattern, -1, 0};
  int64_t next = 0;
  for (int64_t row = 0; row < step.rows(); ++row) {
    for (int64_t group = 0; group < 2; ++group) {
      for (int64_t entry = entries_of(step, row); entry < 7; ++entry)
        region_of(step, row, group, entry) = garbage[next++ % 5];
    }
  }
  for (const int64_t row : {1, 4}) {
    position_of(step, row) = row == 1 ? -1 : INT_MIN;
    owner_of(step, row) = row == 1 ? -9 : INT_MAX;
    for (int64_t i = 0; i < 14; ++i) region_of(step, row, i / 7, i % 7) = garbage[i % 5];
  }
  for (int64_t request = 0; request < 2; ++request)
    table_of(step, request, step.block_table.shape[1] - 1) = INT_MIN;
  for (const char* backend : kBackends) {
    const Strict result = call(args_of(step), backend);
    EXPECT_FALSE(result.failed) << backend << ": " << result.message;
    EXPECT_EQ(result.status, 0x1000) << backend;
  }
}

TEST(Strict, StridedTensorsAreCheckedWhereTheyLie) {
  // The same selection in a layout of [region_count, groups, rows]; garbage between is no entry.
  Step step = make_synthetic_step(spec_of(2));
  std::vector<int32_t> regions(static_cast<size_t>(step.regions.size() * 2), kNanPattern);
  SparsePrefillArgs args = args_of(step);
  args.regions.data = regions.data();
  args.regions.strides = {2, 18, 36};
  const auto at = [&](int64_t row, int64_t group, int64_t entry) -> int32_t& {
    return regions[static_cast<size_t>(2 * row + 18 * group + 36 * entry)];
  };
  for (int64_t row = 0; row < 9; ++row) {
    for (int64_t i = 0; i < 14; ++i) at(row, i / 7, i % 7) = region_of(step, row, i / 7, i % 7);
  }
  EXPECT_FALSE(call(args, "cpu").failed);
  at(3, 1, 4) = -12;
  const Strict result = call(args, "cpu");
  ASSERT_TRUE(result.failed);
  for (const char* piece : {"row 3", "group 1", "entry 4", "-12"}) {
    EXPECT_NE(result.message.find(piece), std::string::npos) << result.message;
  }
}

TEST(Strict, LenientCallsSkipDuplicatesWithoutABit) {
  // Counted once or twice, but never an error and never a status bit.
  Step step = make_synthetic_step(spec_of(1));
  region_of(step, 6, 0, 5) = region_of(step, 6, 0, 2);
  for (const char* backend : kBackends) {
    const Outcome outcome = run(step, backend);
    EXPECT_EQ(outcome.status, 0) << backend;
    for (int64_t d = 0; d < 64; ++d) ASSERT_TRUE(std::isfinite(outcome.at(6, 0, d))) << backend;
  }
}

TEST(Strict, FillNamesItsEntryAndWritesNoPage) {
  Step step = make_synthetic_step(spec_of(1));
  std::vector<int32_t> indptr, pages(9 * 7, 12345);
  for (int32_t row = 0; row <= 9; ++row) indptr.push_back(7 * row);
  std::vector<int64_t> positions;
  for (int64_t row = 0; row < 9; ++row) positions.push_back(position_of(step, row));
  FillPrefillPagesArgs args;
  args.regions = step.regions;
  args.regions.rank = 2;
  args.regions.shape = {9, 7};
  args.regions.strides = {7, 1};
  args.block_table = step.block_table;
  args.owners = step.owners;
  args.indptr = TensorView::contiguous(indptr.data(), DType::i32, {10});
  args.pages = TensorView::contiguous(pages.data(), DType::i32, {63});
  args.block_size = 16;
  args.page_stride = 2;
  args.blocks = step.kv_cache.shape[0];
  args.positions = TensorView::contiguous(positions.data(), DType::i64, {9});
  Options options;
  options.strict = true;
  region_of(step, 5, 0, 2) = -6;
  expect_error([&] { fill_prefill_pages(args, options); }, ErrorCode::invalid_entry,
               {"row 5", "entry 2", "-6"}, "region");
  EXPECT_EQ(std::count(pages.begin(), pages.end(), 12345), 63);
  // Here the own region has to be listed.
  step = make_synthetic_step(spec_of(1));
  args.regions.data = step.regions.data;
  args.owners = step.owners;
  args.block_table = step.block_table;
  int32_t unused = 0;
  const auto used = [&](int32_t region) {
    for (int64_t entry = 0; entry < 7; ++entry) {
      if (region_of(step, 8, 0, entry) == region) return true;
    }
    return false;
  };
  while (used(unused)) ++unused;
  region_of(step, 8, 0, 6) = unused;
  const std::string own = std::to_string(positions[8] / 8);
  expect_error([&] { fill_prefill_pages(args, options); }, ErrorCode::invalid_entry, {"row 8", own},
               "own region");
  EXPECT_EQ(std::count(pages.begin(), pages.end(), 12345), 63);
}

}  // namespace
}  // namespace octopage::test
