// Inputs that an engine never means to send: ids of nonsense, garbage in slots that nobody wrote,
// non-finite values, foreign layouts. Each with the exact behaviour that the contract asks for.

#include <algorithm>
#include <climits>
#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kNanPattern = 0x7fc00000;  // what a float NaN reads as

SyntheticSpec small(int64_t heads, int64_t groups, int64_t dim, uint64_t seed) {
  return {.rows = 14,
          .requests = 3,
          .context = 260,
          .groups = groups,
          .heads = heads * groups,
          .dim = dim,
          .region_count = 11,
          .block_size = 24,
          .keep = 0.8,
          .sink_regions = 1,
          .local_regions = 2,
          .seed = seed};
}

/// Both paths over one step, under their names.
struct Path {
  const char* name;
  Outcome (*run)(const Step&, const char* backend, DType dtype);
};
Outcome run_direct(const Step& step, const char* backend, DType dtype) {
  return run(step, backend, dtype);
}
constexpr Path kPaths[] = {{"direct", run_direct}, {"planned", run_planned}};

std::string label(const char* backend, const char* path, const std::string& rest) {
  return std::string(backend) + " " + path + ", " + rest;
}

// --- ids that must not be followed ----------------------------------------------------------

TEST(HostileIds, RegionsOutOfRangeAreSkipped) {
  const Step clean = make_synthetic_step(small(3, 2, 64, 1));
  struct Variant {
    const char* name;
    std::function<int32_t(int64_t own)> value;
  };
  const Variant variants[] = {
      {"NaN pattern", [](int64_t) { return kNanPattern; }},
      {"-1", [](int64_t) { return -1; }},
      {"INT_MIN", [](int64_t) { return INT_MIN; }},
      {"INT_MAX", [](int64_t) { return INT_MAX; }},
      {"one past the own region", [](int64_t own) { return static_cast<int32_t>(own + 1); }}};
  for (const Variant& variant : variants) {
    Step step = clone(clean);
    // Every second row, at the front and in the middle; the own region stays last.
    for (int64_t row = 0; row < step.rows(); row += 2) {
      const auto value = variant.value(position_of(step, row) / 8);
      for (int64_t group = 0; group < step.groups(); ++group) {
        region_of(step, row, group, 0) = value;
        region_of(step, row, group, entries_of(step, row) / 2) = value;
      }
    }
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const Outcome outcome = path.run(step, backend, DType::f32);
        EXPECT_EQ(outcome.status, status_region) << label(backend, path.name, variant.name);
        expect_call(outcome, args_of(step), Bounds::exact(),
                    label(backend, path.name, variant.name));
      }
    }
  }
}

TEST(HostileIds, NothingBehindTheCountedEntriesIsRead) {
  // Positions below 8 * region_count: most entries of these rows lie behind the first n.
  SyntheticSpec spec = small(2, 2, 64, 2);
  spec.context = 50;
  Step zero = make_synthetic_step(spec);
  Step garbage = clone(zero);
  const int32_t values[] = {kNanPattern, INT_MIN, INT_MAX, -1, 3, 0};
  size_t next = 0;
  for (int64_t row = 0; row < zero.rows(); ++row) {
    ASSERT_LT(entries_of(zero, row), zero.region_count());
    for (int64_t group = 0; group < zero.groups(); ++group) {
      for (int64_t entry = entries_of(zero, row); entry < zero.region_count(); ++entry) {
        region_of(zero, row, group, entry) = 0;
        region_of(garbage, row, group, entry) = values[next++ % std::size(values)];
      }
    }
  }
  // Table tails past each request's length.
  const int64_t live = (spec.context + spec.block_size - 1) / spec.block_size;
  for (int64_t request = 0; request < spec.requests; ++request) {
    for (int64_t column = live; column < garbage.block_table.shape[1]; ++column) {
      table_of(zero, request, column) = 0;
      table_of(garbage, request, column) = values[next++ % 4];
    }
  }
  for (const char* backend : kBackends) {
    for (const Path& path : kPaths) {
      const Outcome expected = path.run(zero, backend, DType::f32);
      const Outcome actual = path.run(garbage, backend, DType::f32);
      EXPECT_EQ(actual.status, 0) << backend;
      expect_same_bits(actual, expected, label(backend, path.name, "garbage behind"));
    }
  }
}

TEST(HostileIds, ColumnsPastTheTableAreSkipped) {
  const Step step = make_synthetic_step(small(3, 1, 64, 3));
  for (const int64_t columns : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{10}}) {
    // A table of its own memory, so that an address sanitizer sees a read past it.
    std::vector<int32_t> narrow;
    for (int64_t request = 0; request < step.requests(); ++request) {
      for (int64_t column = 0; column < columns; ++column) {
        narrow.push_back(table_of(const_cast<Step&>(step), request, column));
      }
    }
    narrow.shrink_to_fit();
    Step hostile = step;
    hostile.block_table = TensorView::contiguous(narrow.empty() ? nullptr : narrow.data(),
                                                 DType::i32, {step.requests(), columns});
    for (const char* backend : kBackends) {
      const std::string what = label(backend, "direct", std::to_string(columns) + " columns");
      const Outcome outcome = run(hostile, backend);
      EXPECT_EQ(outcome.status, status_table) << what;
      expect_call(outcome, args_of(hostile), Bounds::exact(), what);
      if (columns == 0) {
        for (int64_t row = 0; row < step.rows(); ++row) expect_empty_row(outcome, row, what);
      }
    }
    // On the planned path the own region is invalid here: the whole selection becomes -1.
    const Outcome planned = run_planned(hostile, "cpu");
    EXPECT_EQ(planned.status, status_table) << columns;
    for (int64_t row = 0; row < step.rows(); ++row) expect_empty_row(planned, row, "planned");
  }
}

TEST(HostileIds, TableEntriesOutOfRangeAreSkipped) {
  const Step clean = make_synthetic_step(small(2, 2, 64, 4));
  const auto blocks = static_cast<int32_t>(clean.kv_cache.shape[0]);
  for (const int32_t value : {-1, INT_MIN, kNanPattern, INT_MAX, blocks}) {
    Step step = clone(clean);
    // The first block of request 0 (every row's sink) and one in the middle of request 2.
    table_of(step, 0, 0) = value;
    table_of(step, 2, 5) = value;
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const std::string what = label(backend, path.name, "entry " + std::to_string(value));
        const Outcome outcome = path.run(step, backend, DType::f32);
        EXPECT_EQ(outcome.status, status_table) << what;
        expect_call(outcome, args_of(step), Bounds::exact(), what);
      }
    }
  }
  // One below the number of blocks is a block like any other.
  Step last = clone(clean);
  table_of(last, 0, 0) = blocks - 1;
  std::fill_n(static_cast<uint16_t*>(last.kv_cache.data) + (blocks - 1) * last.kv_cache.strides[0],
              last.kv_cache.strides[0], f32_to_bf16(0.25f));
  for (const char* backend : kBackends) {
    const Outcome outcome = run(last, backend);
    EXPECT_EQ(outcome.status, 0) << backend;
    expect_call(outcome, args_of(last), Bounds::exact(), label(backend, "direct", "last block"));
  }
}

TEST(HostileIds, OwnersOutOfRangeGiveEmptyRows) {
  const Step clean = make_synthetic_step(small(3, 2, 64, 5));
  const int32_t values[] = {-1, INT_MIN, kNanPattern, INT_MAX,
                            static_cast<int32_t>(clean.requests())};
  Step step = clone(clean);
  for (int64_t i = 0; i < 5; ++i) owner_of(step, 1 + 2 * i) = values[i];
  for (const char* backend : kBackends) {
    for (const Path& path : kPaths) {
      const std::string what = label(backend, path.name, "bad owners");
      const Outcome outcome = path.run(step, backend, DType::f32);
      EXPECT_EQ(outcome.status, status_owner) << what;
      expect_call(outcome, args_of(step), Bounds::exact(), what);
      for (int64_t i = 0; i < 5; ++i) expect_empty_row(outcome, 1 + 2 * i, what);
      EXPECT_NE(outcome.lse_at(0, 0), -kInf) << what;
    }
  }
}

TEST(HostileIds, OwnersInAnyOrder) {
  // Rows of three requests dealt out like cards, positions falling.
  const Step clean = make_synthetic_step(small(2, 1, 64, 6));
  std::vector<int64_t> order(static_cast<size_t>(clean.rows()));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  Step step = clone(clean);
  const int64_t line = clean.heads() * clean.dim(), count = clean.region_count();
  for (int64_t row = 0; row < clean.rows(); ++row) {
    const int64_t from = order[static_cast<size_t>(row)];
    owner_of(step, row) = static_cast<const int32_t*>(clean.owners.data)[from];
    position_of(step, row) = static_cast<const int32_t*>(clean.positions.data)[from];
    std::copy_n(static_cast<const int32_t*>(clean.regions.data) + from * count, count,
                &region_of(step, row, 0, 0));
    std::copy_n(static_cast<const uint16_t*>(clean.query.data) + from * line, line,
                static_cast<uint16_t*>(step.query.data) + row * line);
  }
  for (const char* backend : kBackends) {
    for (const Path& path : kPaths) {
      const Outcome outcome = path.run(step, backend, DType::f32);
      EXPECT_EQ(outcome.status, 0);
      expect_call(outcome, args_of(step), Bounds::exact(), label(backend, path.name, "shuffled"));
    }
    // The reference works row by row: not a bit may depend on the order.
    if (std::string(backend) == "reference") {
      const Outcome shuffled = run(step, backend), straight = run(clean, backend);
      for (int64_t row = 0; row < clean.rows(); ++row) {
        ASSERT_EQ(shuffled.at(row, 0, 0), straight.at(order[static_cast<size_t>(row)], 0, 0))
            << row;
      }
    }
  }
}

TEST(HostileIds, StatusBitsAccumulateAndAreNeverCleared) {
  const Step clean = make_synthetic_step(small(2, 1, 64, 8));
  Step bad_region = clone(clean), bad_owner = clone(clean), bad_table = clone(clean);
  region_of(bad_region, 4, 0, 1) = -9;
  owner_of(bad_owner, 4) = 99;
  table_of(bad_table, 1, 0) = -2;
  for (const char* backend : kBackends) {
    const auto status_after = [&](std::initializer_list<const Step*> calls, int32_t status) {
      for (const Step* call : calls) {
        Options options = on(backend);
        options.status = &status;
        run(args_of(*call), options);
      }
      return status;
    };
    const int32_t kept = 0x40000000 | status_range_cut;
    EXPECT_EQ(status_after({&clean}, 0), 0) << backend;
    EXPECT_EQ(status_after({&clean}, kept), kept) << backend;
    EXPECT_EQ(status_after({&bad_region}, kept), kept | status_region) << backend;
    EXPECT_EQ(status_after({&bad_owner}, kept), kept | status_owner) << backend;
    EXPECT_EQ(status_after({&bad_table}, kept), kept | status_table) << backend;
    EXPECT_EQ(status_after({&bad_region, &clean}, 0), status_region) << backend;
    EXPECT_EQ(status_after({&bad_region, &bad_owner}, 0), status_region | status_owner) << backend;
    EXPECT_EQ(status_after({&bad_table, &bad_region, &bad_owner}, 0),
              status_region | status_owner | status_table)
        << backend;
    EXPECT_EQ(status_after({&bad_region}, -1), -1) << backend;
    // Without a status the same call works.
    Options silent = on(backend);
    SparsePrefillArgs args = args_of(bad_region);
    std::vector<float> output(static_cast<size_t>(args.query.size()));
    args.output = TensorView::contiguous(output.data(), DType::f32,
                                         {clean.rows(), clean.heads(), clean.dim()});
    EXPECT_NO_THROW(sparse_prefill(args, silent)) << backend;
  }
}

TEST(HostileIds, RowWithoutAnyValidRegionBetweenGoodRows) {
  for (const int64_t heads : {1, 2, 8, 16}) {
    const Step clean = make_synthetic_step(small(heads, 1, 64, 9));
    Step step = clone(clean);
    const int32_t values[] = {-1, INT_MAX, kNanPattern, INT_MIN};
    for (const int64_t row : {1, 2, 6, 13}) {
      for (int64_t entry = 0; entry < step.region_count(); ++entry)
        region_of(step, row, 0, entry) = values[entry % 4];
    }
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const std::string what = label(backend, path.name, std::to_string(heads) + " heads");
        const Outcome outcome = path.run(step, backend, DType::bf16);
        EXPECT_EQ(outcome.status, status_region) << what;
        for (const int64_t row : {1, 2, 6, 13}) expect_empty_row(outcome, row, what);
        expect_call(outcome, args_of(step), Bounds::of(args_of(step), DType::bf16), what);
      }
    }
  }
}

TEST(HostileIds, PaddingRowsReadNothing) {
  // Everything about a padding row is garbage: it gives zeros, and raises nothing.
  const Step clean = make_synthetic_step(small(4, 2, 64, 10));
  Step step = clone(clean);
  const int32_t positions[] = {-1, -8, -9, INT_MIN};
  int64_t next = 0;
  for (const int64_t row : {0, 3, 7, 13}) {
    position_of(step, row) = positions[next];
    owner_of(step, row) = next % 2 == 0 ? INT_MAX : -5;
    ++next;
    for (int64_t group = 0; group < step.groups(); ++group) {
      for (int64_t entry = 0; entry < step.region_count(); ++entry)
        region_of(step, row, group, entry) = kNanPattern;
    }
    for (int64_t i = 0; i < step.heads() * step.dim(); ++i)
      put(step.query, row * step.heads() * step.dim() + i, kNan);
  }
  for (const char* backend : kBackends) {
    for (const Path& path : kPaths) {
      const std::string what = label(backend, path.name, "padding");
      const Outcome outcome = path.run(step, backend, DType::f32);
      EXPECT_EQ(outcome.status, 0) << what;
      for (const int64_t row : {0, 3, 7, 13}) expect_empty_row(outcome, row, what);
      expect_line(outcome, 1, args_of(step), 1, 0, Bounds::exact(), what);
    }
  }
}

TEST(HostileIds, ExtremeWidePositions) {
  // i64 positions at both ends: padding below, and a row that may select any region above.
  const Step clean = make_synthetic_step(small(2, 1, 64, 11));
  std::vector<int64_t> positions;
  for (int64_t row = 0; row < clean.rows(); ++row)
    positions.push_back(position_of(const_cast<Step&>(clean), row));
  positions[1] = INT64_MIN;
  positions[2] = INT64_MIN + 7;
  positions[5] = INT64_MAX;  // selects what it did, and sees all eight tokens of each
  positions[8] = int64_t{1} << 40;
  Step step = clone(clean);
  step.positions = TensorView::contiguous(positions.data(), DType::i64, {clean.rows()});
  for (const int64_t row :
       {5, 8}) {  // the former own region holds unwritten slots: take written ones
    region_of(step, row, 0, step.region_count() - 1) = INT_MAX;
  }
  for (const char* backend : kBackends) {
    const Outcome outcome = run(step, backend);
    EXPECT_EQ(outcome.status, status_table) << backend;  // INT_MAX is below the own region here
    expect_empty_row(outcome, 1, backend);
    expect_empty_row(outcome, 2, backend);
    expect_call(outcome, args_of(step), Bounds::exact(),
                label(backend, "direct", "wide positions"));
  }
}

// --- garbage in slots that nobody wrote ------------------------------------------------------

enum class Half { k, v, both };

const char* name(Half half) {
  return half == Half::k ? "K" : half == Half::v ? "V" : "K and V";
}

/// Writes NaN, inf and -inf in turn over one half of `tokens` cache rows.
void spoil(const Step& step, int64_t offset, Half half) {
  const float values[] = {kNan, kInf, -kInf};
  const int64_t dim = step.dim();
  for (int64_t d = 0; d < 2 * dim; ++d) {
    const bool is_k = d < dim;
    if ((is_k && half == Half::v) || (!is_k && half == Half::k)) continue;
    put(step.kv_cache, offset + d, values[d % 3]);
  }
}

TEST(HostileSlots, UnwrittenSlotsNeverShow) {
  for (int64_t context = 96; context < 104; ++context) {
    for (const int64_t heads : {1, 2, 3, 8, 16}) {
      if (kSanitized && heads != 2 && heads != 8) continue;
      SyntheticSpec spec = small(heads, 1, 64, static_cast<uint64_t>(context));
      spec.rows = 11;
      spec.requests = 1;
      spec.context = context;
      spec.block_size = 16;
      spec.poison = false;
      const Step zeros = make_synthetic_step(spec);
      for (const Half half : {Half::v, Half::k, Half::both}) {
        Step step = clone(zeros);
        // The rest of the last block, and all blocks that belong to nobody.
        const int64_t last = table_of(step, 0, (context - 1) / 16);
        std::set<int64_t> owned;
        for (int64_t column = 0; column * 16 < context; ++column)
          owned.insert(table_of(step, 0, column));
        for (int64_t slot = 0; slot < step.kv_cache.shape[0] * 16; ++slot) {
          const bool unwritten =
              !owned.contains(slot / 16) || (slot / 16 == last && slot % 16 > (context - 1) % 16);
          if (unwritten) spoil(step, slot * 2 * spec.dim, half);
        }
        for (const char* backend : kBackends) {
          if (std::string(backend) == "reference" && heads != 2) continue;
          for (const Path& path : kPaths) {
            const std::string what =
                label(backend, path.name,
                      "p % 8 = " + std::to_string((context - 1) % 8) + ", " +
                          std::to_string(heads) + " heads, garbage in " + name(half));
            expect_same_bits(path.run(step, backend, DType::f32),
                             path.run(zeros, backend, DType::f32), what);
          }
        }
      }
    }
  }
}

TEST(HostileSlots, OtherTypesOfCacheToo) {
  for (const DType kv : {DType::f16, DType::f8_e4m3fn}) {
    SyntheticSpec spec = small(2, 2, 64, 31);
    spec.kv_dtype = kv;
    spec.context = 100;
    spec.poison = false;
    const Step zeros = make_synthetic_step(spec);
    Step step = clone(zeros);
    std::set<int64_t> live;  // slots of written tokens
    for (int64_t request = 0; request < spec.requests; ++request) {
      for (int64_t token = 0; token < spec.context; ++token) {
        for (int64_t group = 0; group < 2; ++group)
          live.insert(token_offset(step, request, group, token));
      }
    }
    for (int64_t offset = 0; offset < step.kv_cache.size(); offset += 2 * spec.dim) {
      if (!live.contains(offset)) spoil(step, offset, Half::both);
    }
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        expect_same_bits(path.run(step, backend, DType::f32), path.run(zeros, backend, DType::f32),
                         label(backend, path.name, octopage::name(kv)));
      }
    }
  }
}

TEST(HostileSlots, OtherRequestsDoNotShow) {
  const Step clean = make_synthetic_step(small(2, 2, 64, 12));
  for (const Half half : {Half::v, Half::k, Half::both}) {
    Step step = clone(clean);
    for (int64_t token = 0; token < 260; ++token) {
      for (int64_t group = 0; group < 2; ++group)
        spoil(step, token_offset(step, 1, group, token), half);
    }
    const int64_t line = step.heads() * step.dim();
    for (int64_t row = 0; row < step.rows(); ++row) {
      if (owner_of(step, row) == 1) put(step.query, row * line + 5, kInf);
    }
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const Outcome expected = path.run(clean, backend, DType::f32),
                      actual = path.run(step, backend, DType::f32);
        int64_t others = 0;
        for (int64_t row = 0; row < step.rows(); ++row) {
          const std::string what =
              label(backend, path.name, name(half)) + ", row " + std::to_string(row);
          if (owner_of(step, row) == 1) {
            EXPECT_TRUE(std::isnan(actual.at(row, 0, 0))) << what;
          } else {
            EXPECT_TRUE(same_row(actual, expected, row)) << what;
            ++others;
          }
        }
        EXPECT_GT(others, 0);
      }
    }
  }
}

TEST(HostileSlots, NonFiniteTokenShowsOnlyInRowsThatSelectIt) {
  // Row 5 alone selects region `only`. Small head counts: a vector packs several rows.
  for (const int64_t heads : {1, 2, 3, 4, 8, 16}) {
    SyntheticSpec spec = small(heads, 1, 64, 13);
    spec.rows = 12;
    spec.requests = 1;
    spec.poison = false;
    Step base = make_synthetic_step(spec);
    std::set<int32_t> selected;
    for (int64_t row = 0; row < spec.rows; ++row) {
      for (int64_t entry = 0; entry < spec.region_count; ++entry)
        selected.insert(region_of(base, row, 0, entry));
    }
    int32_t only = 0;
    while (selected.contains(only)) ++only;
    ASSERT_LT(only, 29);
    region_of(base, 5, 0, 2) = only;
    for (const Half half : {Half::v, Half::k}) {
      for (const float value : {kNan, kInf, -kInf}) {
        Step step = clone(base);
        const int64_t offset =
            token_offset(step, 0, 0, 8 * only + 3) + (half == Half::v ? spec.dim : 0);
        for (int64_t d = 0; d < spec.dim; ++d) put(step.kv_cache, offset + d, value);
        for (const char* backend : kBackends) {
          for (const Path& path : kPaths) {
            const std::string what = label(
                backend, path.name,
                std::to_string(heads) + " heads, " + name(half) + " = " + std::to_string(value));
            const Outcome expected = path.run(base, backend, DType::f32),
                          actual = path.run(step, backend, DType::f32);
            for (int64_t row = 0; row < spec.rows; ++row) {
              if (row != 5) {
                EXPECT_TRUE(same_row(actual, expected, row)) << what << ", row " << row;
              }
            }
            for (int64_t head = 0; head < heads; ++head) {
              const OracleLine line = oracle(args_of(step), 5, head);
              for (int64_t d = 0; d < spec.dim; ++d) {
                const double e = line.output[static_cast<size_t>(d)];
                const double a = actual.at(5, head, d);
                if (std::isnan(e)) {
                  ASSERT_TRUE(std::isnan(a))
                      << what << ", head " << head << ", element " << d << " is " << a;
                } else if (std::isinf(e)) {
                  ASSERT_EQ(a, e) << what << ", head " << head << ", element " << d;
                } else {
                  ASSERT_NEAR(a, e, 1e-4) << what << ", head " << head << ", element " << d;
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(HostileSlots, NonFiniteTokenDoesNotReachRowsBeforeIt) {
  // The last row's own token: rows just before it select the same region and must not see it.
  for (const int64_t heads : {1, 2, 4, 8}) {
    SyntheticSpec spec = small(heads, 1, 64, 14);
    spec.rows = 8;
    spec.requests = 1;
    spec.context = 264;  // positions 256 .. 263: all eight rows share their own region
    const Step clean = make_synthetic_step(spec);
    for (const Half half : {Half::v, Half::k, Half::both}) {
      Step step = clone(clean);
      spoil(step, token_offset(step, 0, 0, 263), half);
      for (const char* backend : kBackends) {
        for (const Path& path : kPaths) {
          const Outcome expected = path.run(clean, backend, DType::f32),
                        actual = path.run(step, backend, DType::f32);
          const std::string what =
              label(backend, path.name, std::to_string(heads) + " heads, " + name(half));
          for (int64_t row = 0; row < 7; ++row)
            EXPECT_TRUE(same_row(actual, expected, row)) << what << ", row " << row;
          EXPECT_TRUE(std::isnan(actual.at(7, 0, 2))) << what;  // V[2] is NaN
        }
      }
    }
  }
}

TEST(HostileValues, NonFiniteQueryStaysInItsRowAndShows) {
  for (const int64_t heads : {1, 3, 8, 16}) {
    const Step clean = make_synthetic_step(small(heads, 1, 64, 15));
    Step step = clone(clean);
    const int64_t line = heads * 64;
    const int64_t last_head = (heads - 1) * 64;
    put(step.query, 3 * line + last_head + 7, kNan);
    put(step.query, 9 * line + last_head + 40, kInf);
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const std::string what = label(backend, path.name, std::to_string(heads) + " heads");
        const Outcome expected = path.run(clean, backend, DType::f32),
                      actual = path.run(step, backend, DType::f32);
        for (int64_t row = 0; row < step.rows(); ++row) {
          if (row != 3 && row != 9) {
            EXPECT_TRUE(same_row(actual, expected, row)) << what << ", row " << row;
            continue;
          }
          for (int64_t d = 0; d < 64; ++d)
            ASSERT_TRUE(std::isnan(actual.at(row, heads - 1, d))) << what << row;
          EXPECT_FALSE(std::isfinite(actual.lse_at(row, heads - 1))) << what << row;
          // Heads do not mix either.
          for (int64_t head = 0; head + 1 < heads; ++head) {
            ASSERT_EQ(actual.at(row, head, 11), expected.at(row, head, 11))
                << what << ", head " << head;
          }
        }
      }
    }
  }
}

TEST(HostileValues, InfiniteKeys) {
  // +inf in one K element: the score is +inf where the query is positive (NaN, as inf - inf), and
  // -inf where it is negative (the token weighs nothing).
  const Step clean = make_synthetic_step(small(4, 1, 64, 16));
  Step step = clone(clean);
  const int64_t token = int64_t{8} * region_of(step, 4, 0, 1) + 2;
  put(step.kv_cache, token_offset(step, owner_of(step, 4), 0, token) + 9, kInf);
  for (int64_t head = 0; head < 4; ++head)
    put(step.query, (4 * 4 + head) * 64 + 9, head % 2 == 0 ? 0.5f : -0.5f);
  for (const char* backend : kBackends) {
    for (const Path& path : kPaths) {
      const Outcome outcome = path.run(step, backend, DType::f32);
      const std::string what = label(backend, path.name, "K = inf");
      for (int64_t head = 0; head < 4; ++head) {
        if (head % 2 == 0) {
          EXPECT_TRUE(std::isnan(outcome.at(4, head, 0))) << what << head;
        } else {
          expect_line(outcome, 4, args_of(step), 4, head, Bounds::exact(), what);
        }
      }
    }
  }
}

TEST(HostileValues, EveryScoreMinusInfinity) {
  // The row sees tokens, but each weighs exp(-inf): 0 / 0 by the formula, which zeros would hide.
  const Step clean = make_synthetic_step(small(2, 1, 64, 17));
  Step step = clone(clean);
  put(step.query, 0, 1.0f);
  put(step.query, 64, 1.0f);
  for (int64_t token = 0; token < 260; ++token)
    put(step.kv_cache, token_offset(step, owner_of(step, 0), 0, token), -kInf);
  for (const char* backend : kBackends) {
    for (const Path& path : kPaths) {
      const Outcome outcome = path.run(step, backend, DType::f32);
      for (int64_t d = 0; d < 64; ++d) {
        ASSERT_TRUE(std::isnan(outcome.at(0, 0, d))) << label(backend, path.name, "element ") << d;
      }
    }
  }
}

// --- large scores ---------------------------------------------------------------------------

TEST(HostileValues, ScoresOfAHundredThousand) {
  // 63 products of 2 and one of j / 1024, times 1024: scores of 129024 + j. Every product and sum
  // is exact in f32, so that not even scores of this size cost accuracy and the small bounds hold.
  SyntheticSpec spec = small(3, 2, 64, 18);
  spec.poison = false;
  for (const float sign : {1.0f, -1.0f}) {
    Step step = make_synthetic_step(spec);
    step.scale = sign * 1024.0f;
    std::mt19937 random(19);
    for (int64_t i = 0; i < step.query.size(); ++i) put(step.query, i, 1.0f);
    for (int64_t i = 0; i < step.kv_cache.size(); ++i) {
      if (i % 128 < 64)
        put(step.kv_cache, i, i % 128 == 0 ? static_cast<float>(random() % 6) / 1024 : 2.0f);
    }
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const Outcome outcome = path.run(step, backend, DType::f32);
        EXPECT_GT(std::fabs(outcome.lse_at(0, 0)), 1e5f);
        expect_call(outcome, args_of(step), Bounds::exact(),
                    label(backend, path.name, "scores of 1e5"));
      }
    }
  }
  // Any numbers: finite, and lse within the contract's relative bound.
  Step step = make_synthetic_step(spec);
  step.scale = 5000.0f;
  for (const char* backend : kBackends) {
    const Outcome outcome = run(step, backend);
    for (int64_t row = 0; row < step.rows(); ++row) {
      for (int64_t head = 0; head < step.heads(); ++head) {
        for (int64_t d = 0; d < 64; ++d)
          ASSERT_TRUE(std::isfinite(outcome.at(row, head, d))) << backend;
        const double lse = oracle(args_of(step), row, head).lse;
        ASSERT_NEAR(outcome.lse_at(row, head), lse, std::max(2e-3, 1e-5 * std::fabs(lse)))
            << backend;
      }
    }
  }
}

TEST(HostileValues, FirstVisitedPagesAreMasked) {
  // Two rows of one tile whose selections do not meet: each finds nothing in the other's pages,
  // which come first for one of them. Scores around -1e4 show a maximum that starts at 0.
  for (const int64_t heads : {1, 2, 4, 16}) {
    SyntheticSpec spec = small(heads, 1, 64, 20);
    spec.rows = 4;
    spec.requests = 1;
    spec.context = 2400;
    spec.region_count = 100;
    spec.poison = false;
    Step step = make_synthetic_step(spec);
    for (int64_t row = 0; row < 4; ++row) {
      for (int64_t entry = 0; entry < 99; ++entry) {
        region_of(step, row, 0, entry) = static_cast<int32_t>(row % 2 == 0 ? entry : 150 + entry);
      }
      region_of(step, row, 0, 99) = position_of(step, row) / 8;
    }
    for (int64_t i = 0; i < step.query.size(); ++i) put(step.query, i, 1.0f);
    for (int64_t i = 0; i < step.kv_cache.size(); ++i) {
      if (i % 128 < 64) put(step.kv_cache, i, static_cast<float>(i / 128 % 3) - 160.0f);
    }
    step.scale = 1.0f;
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const Outcome outcome = path.run(step, backend, DType::f32);
        expect_call(outcome, args_of(step), Bounds::exact(),
                    label(backend, path.name, std::to_string(heads) + " heads"));
      }
    }
  }
}

TEST(HostileValues, FirstPagesOfTheListAreInvalid) {
  // Planned path: the list starts with entries -1, only the own region is left.
  Step step = make_synthetic_step(small(4, 1, 64, 21));
  for (int64_t row = 0; row < step.rows(); ++row) {
    for (int64_t entry = 0; entry + 1 < entries_of(step, row); ++entry)
      region_of(step, row, 0, entry) = -3;
  }
  for (const char* backend : kBackends) {
    for (const Path& path : kPaths) {
      const Outcome outcome = path.run(step, backend, DType::f32);
      EXPECT_EQ(outcome.status, status_region);
      expect_call(outcome, args_of(step), Bounds::exact(),
                  label(backend, path.name, "own region alone"));
    }
  }
}

TEST(HostileValues, ScoresUpTo64InEveryType) {
  uint64_t seed = 40;
  for (const DType query : {DType::bf16, DType::f16}) {
    for (const DType kv : {DType::bf16, DType::f16, DType::f8_e4m3fn}) {
      for (const int64_t dim : {64, 128, 192, 256}) {
        SyntheticSpec spec = small(2, 1, dim, seed++);
        spec.query_dtype = query;
        spec.kv_dtype = kv;
        spec.rows = 6;
        Step step = make_synthetic_step(spec);
        // The largest score of any row and head becomes 64.
        double largest = 0;
        for (int64_t row = 0; row < step.rows(); ++row) {
          for (int64_t head = 0; head < step.heads(); ++head) {
            largest = std::max(largest, std::fabs(oracle(args_of(step), row, head).lse));
          }
        }
        step.scale *= static_cast<float>(64.0 / largest);
        for (const char* backend : kBackends) {
          for (const Path& path : kPaths) {
            const std::string what = label(backend, path.name,
                                           std::string(octopage::name(query)) + " " +
                                               octopage::name(kv) + " " + std::to_string(dim));
            expect_call(path.run(step, backend, DType::f32), args_of(step), Bounds::exact(), what);
            expect_call(path.run(step, backend, query), args_of(step),
                        Bounds::of(args_of(step), query), what);
          }
        }
      }
    }
  }
}

// --- foreign layouts ------------------------------------------------------------------------

/// A step whose tensors lie in memory of odd strides; everything between the elements is garbage.
struct Strided {
  SparsePrefillArgs args;
  std::vector<uint16_t> query, cache;
  std::vector<int32_t> regions, owners, table;
  std::vector<int64_t> positions;
};

struct CacheLayout {
  const char* name;
  bool groups_per_token;  // [blocks, block_size, groups, 2*dim] instead of [blocks, groups, ...]
  int64_t token_gap;      // elements behind each token
  int64_t block_gap;      // tokens behind each block, a multiple of 8
};

Strided strided(const Step& step, const CacheLayout& layout, bool backwards) {
  constexpr uint16_t kGarbage = 0x7fc0;  // NaN in bf16
  Strided s;
  s.args = args_of(step);
  const int64_t rows = step.rows(), heads = step.heads(), dim = step.dim(), groups = step.groups();
  const int64_t stride_head = dim + 3, stride_row = heads * stride_head + 5;
  s.query.assign(static_cast<size_t>(rows * stride_row), kGarbage);
  const auto row_at = [&](int64_t row) { return (backwards ? rows - 1 - row : row) * stride_row; };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      std::copy_n(static_cast<const uint16_t*>(step.query.data) + (row * heads + head) * dim, dim,
                  s.query.data() + row_at(row) + head * stride_head);
    }
  }
  s.args.query.data = s.query.data() + row_at(0);
  s.args.query.strides = {backwards ? -stride_row : stride_row, stride_head, 1};

  const auto& shape = step.kv_cache.shape;
  const int64_t cell = 2 * dim + layout.token_gap;
  const int64_t stride_token = layout.groups_per_token ? groups * cell : cell;
  const int64_t span = (shape[2] + layout.block_gap) * stride_token;
  const int64_t stride_group = layout.groups_per_token ? cell : span;
  const int64_t stride_block = layout.groups_per_token ? span : groups * span;
  s.cache.assign(static_cast<size_t>(shape[0] * stride_block + 8), kGarbage);
  uint16_t* begin =
      s.cache.data() + (16 - reinterpret_cast<uintptr_t>(s.cache.data()) % 16) % 16 / 2;
  for (int64_t block = 0; block < shape[0]; ++block) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t token = 0; token < shape[2]; ++token) {
        std::copy_n(static_cast<const uint16_t*>(step.kv_cache.data) +
                        ((block * groups + group) * shape[2] + token) * 2 * dim,
                    2 * dim,
                    begin + block * stride_block + group * stride_group + token * stride_token);
      }
    }
  }
  s.args.kv_cache.data = begin;
  s.args.kv_cache.strides = {stride_block, stride_group, stride_token, 1};

  // Regions as [region_count, groups, rows] and more; owners, positions and table every third
  // place.
  const int64_t count = step.region_count();
  s.regions.assign(static_cast<size_t>(2 * count * groups * rows), kNanPattern);
  s.args.regions.strides = {2, 2 * rows, 2 * rows * groups};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t entry = 0; entry < count; ++entry) {
        s.regions[static_cast<size_t>(2 * (row + rows * (group + groups * entry)))] =
            static_cast<const int32_t*>(step.regions.data)[(row * groups + group) * count + entry];
      }
    }
  }
  s.args.regions.data = s.regions.data();
  s.owners.assign(static_cast<size_t>(3 * rows), INT_MAX);
  s.positions.assign(static_cast<size_t>(3 * rows), INT64_MAX);
  for (int64_t row = 0; row < rows; ++row) {
    s.owners[static_cast<size_t>(3 * row)] = static_cast<const int32_t*>(step.owners.data)[row];
    s.positions[static_cast<size_t>(3 * row)] =
        static_cast<const int32_t*>(step.positions.data)[row];
  }
  s.args.owners.data = s.owners.data();
  s.args.owners.strides[0] = 3;
  s.args.positions = TensorView::contiguous(s.positions.data(), DType::i64, {rows});
  s.args.positions.strides[0] = 3;
  const int64_t requests = step.requests(), columns = step.block_table.shape[1];
  s.table.assign(static_cast<size_t>(3 * requests * columns), -1);  // column by column
  for (int64_t request = 0; request < requests; ++request) {
    for (int64_t column = 0; column < columns; ++column) {
      s.table[static_cast<size_t>(3 * (request + requests * column))] =
          static_cast<const int32_t*>(step.block_table.data)[request * columns + column];
    }
  }
  s.args.block_table.data = s.table.data();
  s.args.block_table.strides = {3, 3 * requests};
  return s;
}

constexpr CacheLayout kLayouts[] = {{"gaps between blocks", false, 0, 16},
                                    {"long tokens", false, 24, 0},
                                    {"groups per token", true, 0, 0},
                                    {"groups per token, gaps everywhere", true, 8, 8}};

TEST(HostileLayouts, StridesOfEveryTensor) {
  for (const int64_t heads : {1, 5, 16}) {
    const Step step = make_synthetic_step(small(heads, 2, 64, 23));
    for (const CacheLayout& layout : kLayouts) {
      for (const bool backwards : {false, true}) {
        const Strided s = strided(step, layout, backwards);
        for (const char* backend : kBackends) {
          const std::string what =
              label(backend, layout.name, backwards ? "query backwards" : "query forwards");
          const Outcome outcome = run(s.args, on(backend));
          EXPECT_EQ(outcome.status, 0) << what;
          expect_call(outcome, args_of(step), Bounds::exact(), what);
          // Layout is no part of the computation: the bits are those of contiguous tensors.
          expect_same_bits(outcome, run(step, backend), what);
          Step foreign = step;
          foreign.query = s.args.query;
          foreign.kv_cache = s.args.kv_cache;
          foreign.regions = s.args.regions;
          foreign.owners = s.args.owners;
          foreign.block_table = s.args.block_table;
          const Outcome planned = run_planned(foreign, backend);
          EXPECT_EQ(planned.status, 0) << what;
          expect_same_bits(planned, run_planned(step, backend), what + ", planned");
        }
      }
    }
  }
}

TEST(HostileLayouts, GapsOfTheOutputsStayAsTheyWere) {
  const Step step = make_synthetic_step(small(3, 2, 64, 24));
  const int64_t rows = step.rows(), heads = step.heads(), dim = step.dim();
  const int64_t stride_head = dim + 5, stride_row = heads * stride_head + 3;
  const int64_t lse_head = 3, lse_row = heads * 3 + 2;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const int64_t bytes = itemsize(dtype);
    for (const bool backwards : {false, true}) {
      for (const char* backend : kBackends) {
        const std::string what =
            label(backend, octopage::name(dtype), backwards ? "backwards" : "forwards");
        Fenced output(static_cast<size_t>(rows * stride_row * bytes));
        Fenced lse(static_cast<size_t>(rows * lse_row) * 4);
        SparsePrefillArgs args = args_of(step);
        const auto place = [&](int64_t row) { return backwards ? rows - 1 - row : row; };
        args.output = TensorView::contiguous(output.data() + place(0) * stride_row * bytes, dtype,
                                             {rows, heads, dim});
        args.output.strides = {backwards ? -stride_row : stride_row, stride_head, 1};
        args.lse =
            TensorView::contiguous(lse.data() + place(0) * lse_row * 4, DType::f32, {rows, heads});
        args.lse.strides = {backwards ? -lse_row : lse_row, lse_head};
        sparse_prefill(args, on(backend));
        const Outcome expected = run(step, backend, dtype);
        std::vector<bool> written(output.size(), false), lse_written(lse.size(), false);
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t head = 0; head < heads; ++head) {
            const auto at =
                static_cast<size_t>((place(row) * stride_row + head * stride_head) * bytes);
            const auto from = static_cast<size_t>((row * heads + head) * dim * bytes);
            ASSERT_EQ(std::memcmp(output.data() + at, expected.output.data() + from,
                                  static_cast<size_t>(dim * bytes)),
                      0)
                << what << ", row " << row << ", head " << head;
            std::fill_n(written.begin() + static_cast<int64_t>(at), dim * bytes, true);
            const auto lse_at = static_cast<size_t>(place(row) * lse_row + head * lse_head) * 4;
            ASSERT_EQ(std::memcmp(lse.data() + lse_at,
                                  &expected.lse[static_cast<size_t>(row * heads + head)], 4),
                      0)
                << what << ", lse of row " << row;
            std::fill_n(lse_written.begin() + static_cast<int64_t>(lse_at), 4, true);
          }
        }
        for (size_t i = 0; i < written.size(); ++i) {
          ASSERT_TRUE(written[i] || output.data()[i] == kPoison)
              << what << ": byte " << i << " of a gap was written";
        }
        for (size_t i = 0; i < lse_written.size(); ++i) {
          ASSERT_TRUE(lse_written[i] || lse.data()[i] == kPoison)
              << what << ": byte " << i << " of a gap of lse";
        }
        EXPECT_TRUE(output.fences_intact() && lse.fences_intact()) << what;
      }
    }
  }
}

TEST(HostileLayouts, StridesOfSingleElementsMeanNothing) {
  // One block, one group, one row, one head: whatever the strides say.
  SyntheticSpec spec = small(1, 1, 64, 25);
  spec.rows = 1;
  spec.requests = 1;
  spec.context = 24;
  Step step = make_synthetic_step(spec);
  step.kv_cache = step.kv_cache.slice(0, table_of(step, 0, 0), table_of(step, 0, 0) + 1);
  table_of(step, 0, 0) = 0;
  const Outcome reference = run(step, "reference"), cpu = run(step, "cpu");
  for (const int64_t garbage : {int64_t{0}, int64_t{1}, int64_t{-77}, INT64_MAX, INT64_MIN}) {
    SparsePrefillArgs args = args_of(step);
    args.kv_cache.strides[0] = args.kv_cache.strides[1] = garbage;
    args.query.strides[0] = args.query.strides[1] = garbage;
    args.owners.strides[0] = args.positions.strides[0] = garbage;
    args.regions.strides[0] = args.regions.strides[1] = garbage;
    args.block_table.strides[0] = garbage;
    expect_same_bits(run(args, on("reference")), reference,
                     "reference, stride " + std::to_string(garbage));
    expect_same_bits(run(args, on("cpu")), cpu, "cpu, stride " + std::to_string(garbage));
  }
}

TEST(HostileLayouts, RegionsSharedByAllGroups) {
  const Step step = make_synthetic_step(small(2, 3, 64, 26));
  Step same = clone(step);  // the same selection written out for each group
  for (int64_t row = 0; row < step.rows(); ++row) {
    for (int64_t group = 1; group < 3; ++group) {
      for (int64_t entry = 0; entry < step.region_count(); ++entry) {
        region_of(same, row, group, entry) = region_of(same, row, 0, entry);
      }
    }
  }
  for (const char* backend : kBackends) {
    SparsePrefillArgs shared = args_of(same);
    shared.regions.rank = 2;
    shared.regions.shape = {step.rows(), step.region_count()};
    shared.regions.strides = {same.regions.strides[0], 1};
    expect_same_bits(run(shared, on(backend)), run(same, backend), backend);
    // A group stride of 0 says the same.
    SparsePrefillArgs broadcast = args_of(same);
    broadcast.regions.strides[1] = 0;
    expect_same_bits(run(broadcast, on(backend)), run(same, backend), backend);
  }
}

// --- f8 caches ------------------------------------------------------------------------------

/// Request `code` has one token; K[0] and V[0 .. 63] of it hold f8 code `code`, the rest of K is 0.
Step all_codes() {
  auto storage = std::make_shared<TensorStorage>();
  Step step;
  step.query = storage->allocate_tensor(DType::f16, {256, 2, 64});
  step.kv_cache = storage->allocate_tensor(DType::f8_e4m3fn, {256, 1, 8, 128});
  step.block_table = storage->allocate_tensor(DType::i32, {256, 1});
  step.owners = storage->allocate_tensor(DType::i32, {256});
  step.positions = storage->allocate_tensor(DType::i32, {256});
  step.regions = storage->allocate_tensor(DType::i32, {256, 1, 1});
  step.storage = storage;
  step.scale = 0.5f;
  step.k_scale = 0.25f;
  step.v_scale = 2.0f;
  std::memset(step.query.data, 0, static_cast<size_t>(step.query.size()) * 2);
  std::memset(step.kv_cache.data, 0x7f,
              static_cast<size_t>(step.kv_cache.size()));  // unwritten: NaN
  auto* cache = static_cast<uint8_t*>(step.kv_cache.data);
  for (int32_t code = 0; code < 256; ++code) {
    put(step.query, code * 128, 1.0f);
    put(step.query, code * 128 + 64, -2.0f);
    std::memset(cache + code * 1024, 0, 64);
    cache[code * 1024] = static_cast<uint8_t>(code);
    std::memset(cache + code * 1024 + 64, code, 64);
    table_of(step, code, 0) = code;
    owner_of(step, code) = code;
    position_of(step, code) = 0;
    region_of(step, code, 0, 0) = 0;
  }
  return step;
}

TEST(HostileF8, EveryCode) {
  const Step both = all_codes();
  for (const bool in_k : {false, true}) {
    Step step = clone(both);
    auto* cache = static_cast<uint8_t*>(step.kv_cache.data);
    for (int64_t code = 0; code < 256; ++code) {
      std::memset(cache + code * 1024 + (in_k ? 64 : 0), in_k ? 0x38 : 0, 64);  // 0x38 is 1
    }
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        const Outcome outcome = path.run(step, backend, DType::f32);
        EXPECT_EQ(outcome.status, 0);
        for (int64_t code = 0; code < 256; ++code) {
          const std::string what =
              label(backend, path.name, (in_k ? "K code " : "V code ") + std::to_string(code));
          // Exponent bias 7, three bits of mantissa, no infinity, 0x7f and 0xff are NaN.
          const int64_t exponent = code >> 3 & 15, mantissa = code & 7;
          const bool nan = (code & 0x7f) == 0x7f;
          const double magnitude = exponent == 0
                                       ? std::ldexp(mantissa, -9)
                                       : std::ldexp(8 + mantissa, static_cast<int>(exponent) - 10);
          const double value = (code & 0x80) != 0 ? -magnitude : magnitude;
          for (int64_t head = 0; head < 2; ++head) {
            // One visible token: out = V, lse = its score. All powers of two: exact.
            const double score = in_k ? value * 0.25 * 0.5 * (head == 0 ? 1 : -2) : 0;
            for (int64_t d = 0; d < 64; ++d) {
              const float actual = outcome.at(code, head, d);
              if (nan) {
                ASSERT_TRUE(std::isnan(actual)) << what << ", element " << d << " is " << actual;
              } else {
                ASSERT_EQ(actual, in_k ? 2.0 : 2.0 * value) << what << ", element " << d;
              }
            }
            if (nan && in_k) {
              ASSERT_TRUE(std::isnan(outcome.lse_at(code, head))) << what;
            } else {
              ASSERT_EQ(outcome.lse_at(code, head), score) << what << ", head " << head;
            }
          }
        }
      }
    }
  }
}

TEST(HostileF8, ScalesAndTypes) {
  SyntheticSpec spec = small(3, 2, 64, 27);
  spec.kv_dtype = DType::f8_e4m3fn;
  const Step step = make_synthetic_step(spec);
  const float k_scale = step.k_scale, v_scale = step.v_scale;
  for (const char* backend : kBackends) {
    const Outcome expected = run(step, backend);
    expect_call(expected, args_of(step), Bounds::exact(), backend);
    SparsePrefillArgs codes = args_of(step);
    codes.kv_cache.dtype = DType::u8;
    expect_same_bits(run(codes, on(backend)), expected, label(backend, "direct", "u8"));
    SparsePrefillArgs pointers = args_of(step);
    pointers.k_scale = Scale::at(&k_scale);
    pointers.v_scale = Scale::at(&v_scale);
    expect_same_bits(run(pointers, on(backend)), expected,
                     label(backend, "direct", "scales by pointer"));
    for (const bool k : {true, false}) {
      const char* scale = k ? "k_scale" : "v_scale";
      for (const Scale& bad : {Scale{}, Scale::at(nullptr)}) {
        SparsePrefillArgs missing = args_of(step);
        (k ? missing.k_scale : missing.v_scale) = bad;
        expect_error([&] { run(missing, on(backend)); }, ErrorCode::invalid_argument, {scale},
                     scale);
      }
    }
    // Planned path: the same rule.
    CompactPagedPrefill plan;
    const std::vector<int64_t> positions(static_cast<size_t>(step.rows()), 7);
    plan.plan({.query_shape = {step.rows(), 3, 64},
               .dtype = DType::bf16,
               .device = {},
               .positions = positions,
               .region_count = step.region_count(),
               .scale = step.scale,
               .block_size = step.block_size()});
    std::vector<float> output(static_cast<size_t>(step.rows() * 3 * 64));
    const auto view = TensorView::contiguous(output.data(), DType::f32, {step.rows(), 3, 64});
    expect_error(
        [&] {
          plan.finish(step.query.slice(1, 0, 3), step.kv_cache.slice(1, 0, 1), view, {},
                      Scale::of(1.0f), {}, on(backend));
        },
        ErrorCode::invalid_argument, {"v_scale", "f8_e4m3fn"}, "planned");
  }
  // Caches of other types have no scales, and what is given for them is not read.
  const Step plain = make_synthetic_step(small(3, 2, 64, 27));
  for (const char* backend : kBackends) {
    SparsePrefillArgs args = args_of(plain);
    args.k_scale = Scale::at(nullptr);
    args.v_scale = Scale::of(kNan);
    expect_same_bits(run(args, on(backend)), run(plain, backend),
                     label(backend, "direct", "scales of bf16"));
  }
}

// --- head counts and shapes ------------------------------------------------------------------

TEST(HostileShapes, EveryHeadCount) {
  std::vector<int64_t> counts(17);
  std::iota(counts.begin(), counts.end(), 1);
  for (const int64_t heads : {31, 32, 33, 64, 127, 128}) counts.push_back(heads);
  for (const int64_t heads : counts) {
    SyntheticSpec spec = small(heads, heads < 32 ? 2 : 1, 64, static_cast<uint64_t>(heads));
    spec.rows = 7;
    spec.requests = 2;
    const Step step = make_synthetic_step(spec);
    for (const char* backend : kBackends) {
      if (std::string(backend) == "reference" && heads > 17 && heads != 128) continue;
      for (const Path& path : kPaths) {
        expect_call(path.run(step, backend, DType::f32), args_of(step), Bounds::exact(),
                    label(backend, path.name, std::to_string(heads) + " heads per group"));
      }
    }
  }
  const Step many = make_synthetic_step(small(129, 1, 64, 1));
  for (const char* backend : kBackends) {
    expect_error([&] { run(many, backend); }, ErrorCode::unsupported,
                 {backend, "heads per group", "128", "129"}, backend);
  }
}

TEST(HostileShapes, OtherHeadDimsAreRefusedWithTheList) {
  for (const int64_t dim : {32, 96, 104, 320}) {
    Step step = make_synthetic_step(small(2, 1, 64, 1));
    std::vector<uint16_t> query(static_cast<size_t>(step.rows() * 2 * dim));
    std::vector<uint16_t> cache(static_cast<size_t>(step.kv_cache.shape[0] * 24 * 2 * dim + 8));
    const auto skew = (16 - reinterpret_cast<uintptr_t>(cache.data()) % 16) % 16 / 2;
    step.query = TensorView::contiguous(query.data(), DType::bf16, {step.rows(), 2, dim});
    step.kv_cache = TensorView::contiguous(cache.data() + skew, DType::bf16,
                                           {step.kv_cache.shape[0], 1, 24, 2 * dim});
    for (const char* backend : kBackends) {
      expect_error([&] { run(step, backend); }, ErrorCode::unsupported,
                   {"64, 128, 192, 256", std::to_string(dim), backend}, backend);
    }
    SparsePrefillArgs args = args_of(step);
    std::vector<float> output(static_cast<size_t>(step.rows() * 2 * dim));
    args.output = TensorView::contiguous(output.data(), DType::f32, {step.rows(), 2, dim});
    expect_error([&] { sparse_prefill(args); }, ErrorCode::unsupported,
                 {"64, 128, 192, 256", std::to_string(dim)}, "no backend forced");
  }
}

TEST(HostileShapes, ZeroWork) {
  const Step step = make_synthetic_step(small(2, 2, 64, 22));
  for (const char* backend : kBackends) {
    {
      SparsePrefillArgs args = args_of(step);  // rows = 0, without any memory
      args.query = TensorView::contiguous(nullptr, DType::bf16, {0, 4, 64});
      args.owners = TensorView::contiguous(nullptr, DType::i32, {0});
      args.positions = TensorView::contiguous(nullptr, DType::i64, {0});
      args.regions = TensorView::contiguous(nullptr, DType::i32, {0, 2, 11});
      args.output = TensorView::contiguous(nullptr, DType::bf16, {0, 4, 64});
      args.lse = TensorView::contiguous(nullptr, DType::f32, {0, 4});
      Options options = on(backend);
      EXPECT_NO_THROW(sparse_prefill(args, options)) << backend;
      options.strict = true;
      EXPECT_NO_THROW(sparse_prefill(args, options)) << backend;
      args.output = TensorView::contiguous(nullptr, DType::i32, {0, 4, 64});
      EXPECT_THROW(sparse_prefill(args, options), Error) << "no rows, but the type is still wrong";
    }
    {
      SparsePrefillArgs args = args_of(step);
      args.regions = TensorView::contiguous(nullptr, DType::i32, {step.rows(), 2, 0});
      Options options = on(backend);
      options.strict = true;
      const Outcome outcome = run(args, options);
      EXPECT_EQ(outcome.status, 0);
      for (int64_t row = 0; row < step.rows(); ++row)
        expect_empty_row(outcome, row, "region_count = 0");
    }
    {
      SparsePrefillArgs args = args_of(step);
      args.block_table = TensorView::contiguous(nullptr, DType::i32, {0, 4});
      const Outcome outcome = run(args, on(backend));
      EXPECT_EQ(outcome.status, status_owner);
      for (int64_t row = 0; row < step.rows(); ++row)
        expect_empty_row(outcome, row, "requests = 0");
    }
    {
      SparsePrefillArgs args = args_of(step);
      args.kv_cache = TensorView::contiguous(nullptr, DType::bf16, {0, 2, 24, 128});
      const Outcome outcome = run(args, on(backend));
      EXPECT_EQ(outcome.status, status_table);
      for (int64_t row = 0; row < step.rows(); ++row) expect_empty_row(outcome, row, "blocks = 0");
    }
  }
}

TEST(HostileShapes, BlockSizes) {
  for (const int64_t size : {8, 24, 528}) {
    SyntheticSpec spec = small(2, 2, 64, static_cast<uint64_t>(size));
    spec.block_size = size;
    const Step step = make_synthetic_step(spec);
    for (const char* backend : kBackends) {
      for (const Path& path : kPaths) {
        expect_call(path.run(step, backend, DType::f32), args_of(step), Bounds::exact(),
                    label(backend, path.name, "block size " + std::to_string(size)));
      }
    }
  }
}

}  // namespace
}  // namespace octopage::test
