// Every given step file on both CPU backends and all three paths, against results of an independent
// float64 program: output, lse, page lists and staging plan.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "backends/hostile_call.hpp"

namespace octopage::test {
namespace {

std::vector<std::filesystem::path> case_files() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(OCTOPAGE_TEST_CASES)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

template <typename T>
std::vector<T> values(const TensorView& t) {
  const auto* data = static_cast<const T*>(t.data);
  return {data, data + t.size()};
}

void expect_file(const Outcome& actual, const Step& step, double bound, const std::string& what) {
  const auto output = values<float>(step.expected_output), lse = values<float>(step.expected_lse);
  for (int64_t row = 0; row < step.rows(); ++row) {
    for (int64_t head = 0; head < step.heads(); ++head) {
      const auto line = static_cast<size_t>(row * step.heads() + head);
      double difference = 0, norm = 0, worst = -1;
      int64_t where = 0;
      for (int64_t d = 0; d < step.dim(); ++d) {
        const double e = output[line * static_cast<size_t>(step.dim()) + static_cast<size_t>(d)];
        const double error = actual.at(row, head, d) - e;
        difference += error * error;
        norm += e * e;
        if (!(std::fabs(error) <= worst)) worst = std::fabs(error), where = d;
      }
      const double error = std::sqrt(norm > 0 ? difference / norm : difference);
      ASSERT_TRUE(error <= bound)
          << what << ": row " << row << ", head " << head << ", relative error " << error
          << "; element " << where << " is " << actual.at(row, head, where) << ", expected "
          << output[line * static_cast<size_t>(step.dim()) + static_cast<size_t>(where)];
      if (std::isinf(lse[line])) {
        ASSERT_EQ(actual.lse_at(row, head), lse[line]) << what;
      } else {
        ASSERT_LE(std::fabs(double{actual.lse_at(row, head)} - lse[line]),
                  std::max(2e-3, 1e-5 * std::fabs(double{lse[line]})))
            << what << ": lse of row " << row << ", head " << head;
      }
    }
  }
}

double bound_of(const Step& step, DType output) {
  return Bounds::of(args_of(step), output).output;
}

TEST(Cases, Direct) {
  ASSERT_GE(case_files().size(), 20u);
  for (const auto& file : case_files()) {
    const Step step = read_step(file);
    for (const char* backend : kBackends) {
      const std::string what = file.stem().string() + ", " + backend;
      expect_file(run(step, backend), step, 1e-5, what + ", f32 output");
      expect_file(run(step, backend, step.query.dtype), step, bound_of(step, step.query.dtype),
                  what);
    }
  }
}

TEST(Cases, PlannedWithItsPageLists) {
  for (const auto& file : case_files()) {
    const Step step = read_step(file);
    const int64_t rows = step.rows(), groups = step.groups(), heads = step.heads() / groups;
    std::vector<int64_t> positions;
    for (int64_t row = 0; row < rows; ++row) {
      positions.push_back(step.positions.dtype == DType::i64
                              ? static_cast<const int64_t*>(step.positions.data)[row]
                              : static_cast<const int32_t*>(step.positions.data)[row]);
    }
    for (const char* backend : kBackends) {
      const std::string what = file.stem().string() + ", " + backend + ", planned";
      Outcome outcome{.heads = step.heads(), .dim = step.dim()};
      outcome.output.assign(static_cast<size_t>(step.query.size()) * 4, kPoison);
      outcome.lse.assign(static_cast<size_t>(rows * step.heads()), NAN);
      const auto output = TensorView::contiguous(outcome.output.data(), DType::f32,
                                                 {rows, step.heads(), step.dim()});
      const auto lse = TensorView::contiguous(outcome.lse.data(), DType::f32, {rows, step.heads()});
      CompactPagedPrefill plan;
      plan.plan(plan_args(step, positions));
      EXPECT_EQ(values<int32_t>(plan.indptr()), values<int32_t>(step.expected_indptr)) << what;
      EXPECT_EQ(values<int32_t>(plan.last_page_len()), values<int32_t>(step.expected_last_page_len))
          << what;
      std::vector<int32_t> pages;
      for (int64_t g = 0; g < groups; ++g) {
        const TensorView regions =
            step.regions.rank == 3 ? regions_of_group(step, g) : step.regions;
        const auto slice = [&](const TensorView& t) {
          return t.slice(1, g * heads, (g + 1) * heads);
        };
        const TensorView cache = step.kv_cache.slice(1, g, g + 1);
        const int64_t cut = rows / 2;  // chunks, the second first
        for (const auto& [begin, end] : {std::pair{cut, rows}, std::pair{int64_t{0}, cut}}) {
          plan.prepare_chunk(begin, slice(step.query).slice(0, begin, end), cache,
                             regions.slice(0, begin, end), step.block_table,
                             step.owners.slice(0, begin, end), on(backend));
        }
        const auto list = values<int32_t>(plan.pages());
        pages.insert(pages.end(), list.begin(), list.end());
        const auto args = args_of(step);
        plan.finish({}, cache, slice(output), slice(lse), args.k_scale, args.v_scale, on(backend));
      }
      EXPECT_EQ(pages, values<int32_t>(step.expected_pages)) << what;
      expect_file(outcome, step, 1e-5, what);
    }
  }
}

TEST(Cases, StagedWithItsPlan) {
  for (const auto& file : case_files()) {
    const Step step = read_step(file);
    std::vector<int64_t> lengths;
    for (const int32_t length : values<int32_t>(step.lengths)) lengths.push_back(length);
    const auto plan = plan_staged_prefill_pages(step.block_table, lengths, step.block_size());
    EXPECT_EQ(plan.blocks, values<int32_t>(step.expected_staged_blocks)) << file.stem();
    EXPECT_EQ(plan.table, values<int32_t>(step.expected_staged_table)) << file.stem();
    const auto staged = static_cast<int64_t>(plan.blocks.size());
    const int64_t heads = step.heads() / step.groups();
    TensorStorage storage;
    const TensorView cache =
        storage.allocate_tensor(step.query.dtype, {staged, 1, step.block_size(), 2 * step.dim()});
    for (int64_t g = 0; g < step.groups(); ++g) {
      const auto whole = args_of(step);
      stage_prefill_pages(step.kv_cache.slice(1, g, g + 1),
                          TensorView::contiguous(plan.blocks.data(), DType::i32, {staged}), cache,
                          whole.k_scale, whole.v_scale, on("cpu"));
      Step part = step;
      part.kv_cache = cache;
      part.block_table =
          TensorView::contiguous(plan.table.data(), DType::i32, {plan.requests, plan.max_blocks});
      part.query = step.query.slice(1, g * heads, (g + 1) * heads);
      if (step.regions.rank == 3) part.regions = step.regions.slice(1, g, g + 1);
      for (const char* backend : kBackends) {
        // From f8 the staged values are rounded once more: the bound holds for what was staged.
        const std::string what = file.stem().string() + ", " + backend + ", staged";
        expect_call(run(part, backend), args_of(part), Bounds::exact(), what);
      }
    }
  }
}

}  // namespace
}  // namespace octopage::test
