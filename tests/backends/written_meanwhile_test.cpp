// Another thread writes to a call's ids, owners, positions, tables, ranges and lengths while the
// call runs on the CPU. What comes out for those rows may be anything; nothing outside of the
// tensors is read or written (AddressSanitizer watches), and all other rows are as they would be.

#include <atomic>
#include <chrono>
#include <climits>
#include <random>
#include <thread>
#include <variant>

#include "backends/hostile_call.hpp"
#include "octopage/octopage.h"

#if defined(__SANITIZE_THREAD__)
#define OCTOPAGE_TEST_RACES 0
#else
#define OCTOPAGE_TEST_RACES 1
#endif

namespace octopage::test {
namespace {

/// Words that the library writes as well, plainly: a race on purpose, which ThreadSanitizer would
/// report. So would it where ranges of rows overlap, whose pages then have two writers.
constexpr bool kRaces = OCTOPAGE_TEST_RACES != 0;

Step many_rows(int64_t groups) {
  return clone(make_synthetic_step({.rows = 300,
                                    .requests = 3,
                                    .context = 700,
                                    .groups = groups,
                                    .heads = 2 * groups,
                                    .dim = 64,
                                    .region_count = 9,
                                    .block_size = 24,
                                    .keep = 0.8,
                                    .sink_regions = 1,
                                    .local_regions = 2,
                                    .seed = 7}));
}

/// Words that a thread writes to for as long as it lives: nonsense and what they held before, in
/// turn. Whole words, atomically, so that ThreadSanitizer sees whether the library reads them so.
class Writer {
 public:
  /// Elements `first`, `first + every`, ... of contiguous integers.
  Writer& on(const TensorView& integers, int64_t first = 0, int64_t every = 1) {
    for (int64_t i = first; i < integers.size(); i += every) {
      if (integers.dtype == DType::i64) {
        add(static_cast<int64_t*>(integers.data) + i);
      } else {
        add(static_cast<int32_t*>(integers.data) + i);
      }
    }
    return *this;
  }
  Writer& on(std::vector<int64_t>& integers) {
    for (int64_t& integer : integers) add(&integer);
    return *this;
  }

  /// Calls again and again while the thread writes. Refusals are as good as results.
  template <typename Call>
  void during(Call&& call) {
    constexpr auto kPatience = std::chrono::milliseconds(150);
    constexpr int kFewest = 10;
    std::atomic<bool> over{false};
    std::thread thread([&] { write(over); });
    const auto begin = std::chrono::steady_clock::now();
    for (int calls = 0; calls < kFewest || std::chrono::steady_clock::now() - begin < kPatience;
         ++calls) {
      try {
        call();
      } catch (const Error&) {
      }
    }
    over = true;
    thread.join();
  }

 private:
  struct Word {
    std::variant<int32_t*, int64_t*> at;
    int64_t former;
  };

  template <typename T>
  void add(T* at) {
    words_.push_back({at, *at});
  }

  static void store(const Word& word, int64_t value) {
    std::visit(
        [&](auto* at) {
          using T = std::remove_pointer_t<decltype(at)>;
          std::atomic_ref<T>(*at).store(static_cast<T>(value), std::memory_order_relaxed);
        },
        word.at);
  }

  void write(const std::atomic<bool>& over) {
    std::mt19937_64 random(11);
    while (!over) {
      const Word& word = words_[random() % words_.size()];
      const int64_t nonsense[] = {word.former + static_cast<int64_t>(random() % 9) - 4,
                                  static_cast<int64_t>(random() % 4096),
                                  static_cast<int32_t>(random()),
                                  static_cast<int64_t>(random()),
                                  -1,
                                  INT_MIN,
                                  INT_MAX,
                                  LLONG_MAX};
      store(word, random() % 2 == 0 ? word.former : nonsense[random() % std::size(nonsense)]);
    }
    for (const Word& word : words_) store(word, word.former);
  }

  std::vector<Word> words_;
};

/// The step's positions as i64.
void widen_positions(Step& step, std::vector<int64_t>& wide) {
  for (int64_t row = 0; row < step.rows(); ++row) wide.push_back(position_of(step, row));
  step.positions = TensorView::contiguous(wide.data(), DType::i64, {step.rows()});
}

TEST(WrittenMeanwhile, DirectCallsStayInside) {
  for (const bool wide : {false, true}) {
    for (const bool strict : {false, true}) {
      for (const char* backend : kBackends) {
        Step step = many_rows(2);
        std::vector<int64_t> positions;
        if (wide) widen_positions(step, positions);
        Options options = on(backend);
        options.strict = strict;
        const Outcome before = run(args_of(step), options);
        Writer()
            .on(step.regions)
            .on(step.block_table)
            .on(step.owners)
            .on(step.positions)
            .during([&] { run(args_of(step), options); });
        expect_same_bits(run(args_of(step), options), before, backend);
      }
    }
  }
}

TEST(WrittenMeanwhile, OtherRowsKeepTheirBits) {
  for (const char* backend : kBackends) {
    const Step step = many_rows(1);
    Options options = on(backend);
    options.batch_invariant = true;  // elsewhere a row's rounding depends on its tile
    const Outcome before = run(args_of(step), options);
    const int64_t rows = step.rows();
    Writer writer;
    writer.on(step.owners, 1, 2).on(step.positions, 1, 2);
    for (int64_t row = 1; row < rows; row += 2) writer.on(step.regions.slice(0, row, row + 1));
    writer.during([&] {
      const Outcome now = run(args_of(step), options);
      for (int64_t row = 0; row < rows; row += 2)
        ASSERT_TRUE(same_row(now, before, row)) << backend << ": row " << row;
    });
  }
}

/// One group's selections as [rows, region_count].
TensorView regions_of_group(const Step& step) {
  TensorView regions = step.regions;
  regions.rank = 2;
  regions.shape = {step.rows(), step.region_count()};
  regions.strides = {step.regions.strides[0], step.regions.strides[2]};
  return regions;
}

TEST(WrittenMeanwhile, PlannedCallsStayInside) {
  for (const char* backend : kBackends) {
    Step step = many_rows(1);
    const int64_t rows = step.rows();
    const Options options = on(backend);
    std::vector<int64_t> positions;
    for (int64_t row = 0; row < rows; ++row) positions.push_back(position_of(step, row));
    CompactPagedPrefill plan;
    const auto make_plan = [&] {
      plan.plan({.query_shape = {rows, step.heads(), step.dim()},
                 .dtype = step.query.dtype,
                 .device = {},
                 .positions = positions,
                 .region_count = step.region_count(),
                 .scale = step.scale,
                 .block_size = step.block_size(),
                 .contiguous_query = false},
                options);
    };
    Fenced output(static_cast<size_t>(step.query.size()) * sizeof(float));
    const auto view =
        TensorView::contiguous(output.data(), DType::f32, {rows, step.heads(), step.dim()});
    const auto prepare = [&] {
      plan.prepare_chunk(0, step.query, step.kv_cache, regions_of_group(step), step.block_table,
                         step.owners, options);
    };
    const auto finish = [&] { plan.finish({}, step.kv_cache, view, {}, {}, {}, options); };
    const auto fixup = [&] { plan.fixup_positions(step.positions, options); };
    const auto result = [&] {
      make_plan(), prepare(), finish();
      return std::vector<uint8_t>(output.data(), output.data() + output.size());
    };
    const std::vector<uint8_t> before = result();
    Writer()
        .on(step.regions)
        .on(step.block_table)
        .on(step.owners)
        .on(step.positions)
        .on(positions)
        .during([&] { make_plan(), fixup(), prepare(), finish(); });
    EXPECT_EQ(result(), before) << backend;
    // The plan's own list, which others may write as well.
    if (kRaces) {
      Writer().on(plan.pages()).on(plan.indptr()).on(plan.last_page_len()).during([&] {
        prepare(), finish();
      });
    }
    Writer().on(plan.pages()).on(plan.indptr()).on(plan.last_page_len()).during(finish);
    EXPECT_EQ(result(), before) << backend;
    EXPECT_TRUE(output.fences_intact()) << backend;
  }
}

TEST(WrittenMeanwhile, PageFunctionsStayInside) {
  Step step = many_rows(1);
  const int64_t rows = step.rows();
  std::vector<int64_t> positions;
  widen_positions(step, positions);
  const CompactPageMetadata metadata = compact_page_metadata(positions, step.region_count());
  std::vector<int32_t> ranges = metadata.indptr;
  const auto entries = int64_t{ranges.back()};
  Fenced pages(static_cast<size_t>(entries) * sizeof(int32_t));
  for (const bool exact : {false, true}) {
    for (const bool strict : {false, true}) {
      FillPrefillPagesArgs fill = {};
      fill.regions = regions_of_group(step);
      fill.block_table = step.block_table;
      fill.owners = step.owners;
      fill.indptr = TensorView::contiguous(ranges.data(), DType::i32, {rows + 1});
      fill.pages = TensorView::contiguous(pages.data(), DType::i32, {entries});
      fill.block_size = step.block_size();
      fill.page_stride = kv_page_stride(step.kv_cache);
      fill.blocks = step.kv_cache.shape[0];
      if (exact) fill.positions = step.positions;
      Options options = on("cpu");
      options.strict = strict;
      Writer writer;
      writer.on(step.regions).on(step.block_table).on(step.owners).on(step.positions);
      if (kRaces) writer.on(fill.indptr);
      writer.during([&] { fill_prefill_pages(fill, options); });
    }
  }
  Writer().on(positions).during([&] { compact_page_metadata(positions, step.region_count()); });

  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < step.block_table.shape[0]; ++i)
    lengths.push_back(static_cast<const int32_t*>(step.lengths.data)[i]);
  const int64_t live = staged_block_count(lengths, step.block_size());
  Fenced blocks(static_cast<size_t>(live) * sizeof(int32_t));
  Fenced table(static_cast<size_t>(step.block_table.size()) * sizeof(int32_t));
  const auto listed = TensorView::contiguous(blocks.data(), DType::i32, {live});
  const auto numbered = TensorView::contiguous(
      table.data(), DType::i32, {step.block_table.shape[0], step.block_table.shape[1]});
  Writer().on(lengths).on(step.block_table).during([&] {
    plan_staged_prefill_pages(step.block_table, lengths, step.block_size(), listed, numbered,
                              on("cpu"));
  });
  Writer().on(lengths).on(step.block_table).during([&] {
    plan_staged_prefill_pages(step.block_table, lengths, step.block_size());
  });

  plan_staged_prefill_pages(step.block_table, lengths, step.block_size(), listed, numbered,
                            on("cpu"));
  Fenced staged(static_cast<size_t>(live * step.block_size() * 2 * step.dim()) * 2);
  const auto copy = TensorView::contiguous(staged.data(), step.query.dtype,
                                           {live, 1, step.block_size(), 2 * step.dim()});
  for (const bool strict : {false, true}) {
    Options options = on("cpu");
    options.strict = strict;
    Writer().on(listed).during(
        [&] { stage_prefill_pages(step.kv_cache, listed, copy, {}, {}, options); });
  }
  for (const Fenced* memory : {&pages, &blocks, &table, &staged})
    EXPECT_TRUE(memory->fences_intact());
}

TEST(WrittenMeanwhile, RowsOfABatchStayInside) {
  std::vector<int32_t> starts = {0, 700, 1000}, lens = {4096, 4096};
  Fenced owners(1000 * sizeof(int32_t)), positions(1000 * sizeof(int64_t));
  const auto expand = [&] {
    return octopage_rows_from_query_start_loc(starts.data(), lens.data(), 2, 1000,
                                              reinterpret_cast<int32_t*>(owners.data()),
                                              reinterpret_cast<int64_t*>(positions.data()));
  };
  Writer()
      .on(TensorView::contiguous(starts.data(), DType::i32, {3}))
      .on(TensorView::contiguous(lens.data(), DType::i32, {2}))
      .during([&] { expand(); });
  EXPECT_TRUE(owners.fences_intact());
  EXPECT_TRUE(positions.fences_intact());
  EXPECT_EQ(expand(), OCTOPAGE_OK) << octopage_last_error();
}

}  // namespace
}  // namespace octopage::test
