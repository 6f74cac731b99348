#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "octopage/octopage.hpp"
#include "step/synthetic.hpp"

namespace octopage {
namespace {

std::vector<int32_t> values(const TensorView& t) {
  const auto* data = static_cast<const int32_t*>(t.data);
  return {data, data + t.size()};
}

class PrefillPlan : public testing::Test {
 protected:
  static constexpr int64_t kRows = 14, kHeads = 4, kDim = 64, kRegions = 9, kBlockSize = 16;
  Step step_ = make_synthetic_step({.rows = kRows,
                                    .requests = 2,
                                    .context = 150,
                                    .heads = kHeads,
                                    .dim = kDim,
                                    .region_count = kRegions,
                                    .block_size = kBlockSize,
                                    .local_regions = 2});
  std::vector<int64_t> positions_;
  std::vector<float> output_ = std::vector<float>(kRows * kHeads * kDim, -1.0f);
  TensorView out_ = TensorView::contiguous(output_.data(), DType::f32, {kRows, kHeads, kDim});
  TensorView regions_;

  void SetUp() override {
    for (int64_t r = 0; r < kRows; ++r) {
      positions_.push_back(step_.positions.dtype == DType::i64
                               ? static_cast<const int64_t*>(step_.positions.data)[r]
                               : static_cast<const int32_t*>(step_.positions.data)[r]);
    }
    regions_ = TensorView::contiguous(step_.regions.data, DType::i32, {kRows, kRegions});
  }
  PrefillPlanArgs args(const std::vector<int64_t>& positions, bool contiguous_query = false) const {
    return {.query_shape = {static_cast<int64_t>(positions.size()), kHeads, kDim},
            .dtype = DType::bf16,
            .device = {},
            .positions = positions,
            .region_count = kRegions,
            .scale = step_.scale,
            .block_size = kBlockSize,
            .contiguous_query = contiguous_query};
  }
  void attend(CompactPagedPrefill& plan) {
    plan.prepare_chunk(0, step_.query, step_.kv_cache, regions_, step_.block_table, step_.owners);
    plan.finish({}, step_.kv_cache, out_, {}, {}, {}, {.backend = "cpu", .threads = 1});
  }
};

void expect_code(ErrorCode code, const std::function<void()>& call, const char* part) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST_F(PrefillPlan, CallsOutOfOrder) {
  CompactPagedPrefill plan;
  EXPECT_FALSE(plan.planned());
  EXPECT_FALSE(plan.pages().present());
  const auto early = ErrorCode::wrong_state;
  expect_code(
      early, [&] { plan.fixup_positions(step_.positions); }, "fixup_positions");
  expect_code(
      early, [&] { plan.page_metadata(step_.block_table, step_.owners, 2); }, "page_metadata");
  expect_code(
      early, [&] { attend(plan); }, "prepare_chunk");
  expect_code(
      early, [&] { plan.finish(step_.query, step_.kv_cache, out_); }, "finish");
  expect_code(
      early, [&] { static_cast<void>(plan.finish_workspace_size(DType::bf16)); },
      "finish_workspace_size");
  plan.plan(args(positions_, true));
  expect_code(
      early, [&] { attend(plan); }, "owns no query copy");
}

TEST_F(PrefillPlan, AFailedPlanKeepsTheFormerOne) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  const auto before = values(plan.indptr());
  const auto refused = [&](const std::function<void(PrefillPlanArgs&)>& change, const char* part) {
    PrefillPlanArgs bad = args(positions_);
    change(bad);
    expect_code(
        ErrorCode::invalid_argument, [&] { plan.plan(bad); }, part);
    EXPECT_EQ(values(plan.indptr()), before);
    EXPECT_EQ(plan.block_size(), kBlockSize);
  };
  refused([](auto& a) { a.positions = {}; }, "at least one row");
  refused([](auto& a) { a.query_shape[0] = 3; }, "query_shape[0] = 3");
  refused([](auto& a) { a.query_shape[1] = 0; }, "heads");
  refused([](auto& a) { a.block_size = 12; }, "block_size = 12");
  refused([](auto& a) { a.region_count = -1; }, "region_count = -1");
  refused([](auto& a) { a.dtype = DType::f32; }, "dtype");
  refused([](auto& a) { a.scale = NAN; }, "scale");
  attend(plan);
}

TEST_F(PrefillPlan, AddressesHoldWhileTheCapacitySuffices) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  const auto addresses = [&] {
    return std::vector<const void*>{plan.pages().data, plan.indptr().data,
                                    plan.last_page_len().data, plan.positions().data,
                                    plan.query_buffer().data};
  };
  const auto before = addresses();
  plan.plan(args({3, 4}));
  plan.plan(args({positions_.begin(), positions_.end() - 1}));
  plan.plan(args(positions_));
  EXPECT_EQ(addresses(), before);
}

TEST_F(PrefillPlan, RowsNotFilledSinceThePlanSelectNothing) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  attend(plan);
  plan.plan(args(positions_));
  std::vector<float> lse(kRows * kHeads);
  const TensorView lse_view = TensorView::contiguous(lse.data(), DType::f32, {kRows, kHeads});
  for (const char* backend : {"cpu", "reference"}) {
    output_.assign(output_.size(), -1.0f);
    plan.finish({}, step_.kv_cache, out_, lse_view, {}, {}, {.backend = backend, .threads = 1});
    for (const float value : output_) ASSERT_EQ(value, 0.0f);
    for (const float value : lse) ASSERT_EQ(value, -std::numeric_limits<float>::infinity());
  }
}

TEST_F(PrefillPlan, AlteredRangesReadNothingElse) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  const auto wild = [](const TensorView& tensor, std::initializer_list<int32_t> written) {
    auto* data = static_cast<int32_t*>(tensor.data);
    for (int64_t i = 0; i < tensor.size(); ++i)
      data[i] = written.begin()[static_cast<size_t>(i) % written.size()];
  };
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  plan.prepare_chunk(0, step_.query, step_.kv_cache, regions_, step_.block_table, step_.owners);
  for (const char* backend : {"cpu", "reference"}) {
    const auto with_last = [&](int32_t tokens) {
      wild(plan.last_page_len(), {tokens});
      plan.finish({}, step_.kv_cache, out_, {}, {}, {}, {.backend = backend, .threads = 1});
      return output_;
    };
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    const std::vector<float> one = with_last(1), all = with_last(kPageTokens);
    for (const int32_t tokens : {kMin, -1, 0}) EXPECT_TRUE(same(with_last(tokens), one)) << tokens;
    for (const int32_t tokens : {9, 4096, kMax})
      EXPECT_TRUE(same(with_last(tokens), all)) << tokens;
    const std::vector<int32_t> before = values(plan.indptr());
    wild(plan.indptr(), {kMin, kMax, 0, kMax, -5, 3, kMax - 1, 40, 1});
    plan.finish({}, step_.kv_cache, out_, {}, {}, {}, {.backend = backend, .threads = 1});
    std::copy(before.begin(), before.end(), static_cast<int32_t*>(plan.indptr().data));
  }
}

TEST_F(PrefillPlan, OutputsMustNotShareMemory) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  // Outputs no larger than what they overlap: beyond its end anything may lie, and be named first.
  const auto inside_query =
      TensorView::contiguous(plan.query_buffer().data, DType::bf16, {kRows, kHeads, kDim});
  expect_code(
      ErrorCode::invalid_argument, [&] { plan.finish({}, step_.kv_cache, inside_query); }, "query");

  constexpr int64_t kLongRows = 6, kManyRegions = 40;
  const Step step = make_synthetic_step({.rows = kLongRows,
                                         .context = 1000,
                                         .heads = 1,
                                         .dim = kDim,
                                         .region_count = kManyRegions,
                                         .block_size = kBlockSize});
  const std::vector<int64_t> positions(kLongRows, 999);
  plan.plan({.query_shape = {kLongRows, 1, kDim},
             .dtype = DType::bf16,
             .device = {},
             .positions = positions,
             .region_count = kManyRegions,
             .scale = 1,
             .block_size = kBlockSize,
             .contiguous_query = false});
  const auto inside_pages =
      TensorView::contiguous(plan.pages().data, DType::bf16, {kLongRows, 1, kDim});
  ASSERT_LE(inside_pages.size() * 2, plan.pages().size() * 4);
  expect_code(
      ErrorCode::invalid_argument, [&] { plan.finish({}, step.kv_cache, inside_pages); }, "pages");
}

TEST_F(PrefillPlan, BoundsThenFixupEqualAnExactPlan) {
  CompactPagedPrefill exact, bounded;
  exact.plan(args(positions_));
  std::vector<int64_t> bounds = positions_;
  for (size_t i = 0; i < bounds.size(); ++i) bounds[i] += static_cast<int64_t>(i * 5 % 37);
  bounded.plan(args(bounds));
  int32_t status = 0;
  Options options;
  options.status = &status;
  for (int i = 0; i < 2; ++i) {  // once more changes nothing
    bounded.fixup_positions(step_.positions, options);
    EXPECT_EQ(values(bounded.indptr()), values(exact.indptr()));
    EXPECT_EQ(values(bounded.last_page_len()), values(exact.last_page_len()));
  }
  EXPECT_EQ(status, 0);
  attend(exact);
  const auto expected = output_;
  std::fill(output_.begin(), output_.end(), -1.0f);
  attend(bounded);
  EXPECT_EQ(std::memcmp(output_.data(), expected.data(), expected.size() * sizeof(float)), 0);
}

TEST_F(PrefillPlan, ABlockThatATableNamesTwiceCountsTwice) {
  auto* table = static_cast<int32_t*>(step_.block_table.data);
  const int64_t columns = step_.block_table.shape[1];
  for (int64_t request = 0; request < step_.block_table.shape[0]; ++request)
    for (int64_t column = 1; column < columns; ++column)
      table[request * columns + column] = table[request * columns + column % 2];
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  attend(plan);
  const std::vector<int32_t> pages = values(plan.pages()), ranges = values(plan.indptr());
  bool repeated = false;
  for (size_t row = 0; row < positions_.size(); ++row) {
    std::vector<int32_t> listed(pages.begin() + ranges[row], pages.begin() + ranges[row + 1]);
    std::sort(listed.begin(), listed.end());
    repeated |= std::adjacent_find(listed.begin(), listed.end()) != listed.end();
  }
  ASSERT_TRUE(repeated);
  std::vector<float> expected(output_.size());
  SparsePrefillArgs direct = {};
  direct.query = step_.query;
  direct.kv_cache = step_.kv_cache;
  direct.block_table = step_.block_table;
  direct.owners = step_.owners;
  direct.positions = step_.positions;
  direct.regions = step_.regions;
  direct.scale = step_.scale;
  direct.output = TensorView::contiguous(expected.data(), DType::f32, {kRows, kHeads, kDim});
  Options options;
  options.backend = "reference";
  sparse_prefill(direct, options);
  for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(output_[i], expected[i], 1e-4) << i;
}

TEST_F(PrefillPlan, StatusMustNotShareMemoryWithWhatAFixupWrites) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  const std::vector<int32_t> pages = values(plan.pages()), ranges = values(plan.indptr());
  std::vector<int32_t> given(positions_.begin(), positions_.end());
  const std::vector<int32_t> before = given;
  const auto positions = TensorView::contiguous(given.data(), DType::i32, {kRows});
  for (void* inside : {plan.pages().data, plan.indptr().data, plan.last_page_len().data,
                       static_cast<void*>(given.data() + 1)}) {
    Options options;
    options.status = static_cast<int32_t*>(inside);
    expect_code(
        ErrorCode::invalid_argument, [&] { plan.fixup_positions(positions, options); },
        "options.status");
  }
  EXPECT_EQ(values(plan.pages()), pages);
  EXPECT_EQ(values(plan.indptr()), ranges);
  EXPECT_EQ(given, before);
}

TEST_F(PrefillPlan, LongerThanPlannedIsCutAndReported) {
  CompactPagedPrefill plan;
  const std::vector<int64_t> bounds = {10, 20, 30};
  plan.plan(args(bounds));
  const std::vector<int32_t> exact = {11, 44, -1};
  int32_t status = 0;
  Options options;
  options.status = &status;
  plan.fixup_positions(TensorView::contiguous(exact.data(), DType::i32, {3}), options);
  EXPECT_EQ(values(plan.indptr()), (std::vector<int32_t>{0, 2, 5, 5}));
  EXPECT_EQ(values(plan.last_page_len()), (std::vector<int32_t>{4, 5, 8}));
  EXPECT_EQ(status, status_range_cut);
}

TEST_F(PrefillPlan, MetadataForAnIndexer) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  EXPECT_FALSE(
      plan.page_metadata(step_.block_table, step_.owners, 2).has_value());  // owns a query copy
  plan.plan(args(positions_, true));
  EXPECT_FALSE(plan.query_buffer().present());
  const auto metadata = plan.page_metadata(step_.block_table, step_.owners, 2, 3, 9);
  ASSERT_TRUE(metadata.has_value());
  EXPECT_EQ(metadata->owners.shape[0], 6);
  EXPECT_EQ(metadata->indptr.shape[0], 7);
  EXPECT_EQ(static_cast<const int32_t*>(metadata->indptr.data),
            static_cast<const int32_t*>(plan.indptr().data) + 3);
  EXPECT_EQ(static_cast<const int32_t*>(metadata->owners.data),
            static_cast<const int32_t*>(step_.owners.data) + 3);
  EXPECT_EQ(metadata->pages.data, plan.pages().data);
  EXPECT_EQ(metadata->page_stride, 2);
  EXPECT_THROW(plan.page_metadata(step_.block_table, step_.owners, 2, 5, 99), Error);
  EXPECT_THROW(plan.page_metadata(step_.block_table, step_.owners, 0), Error);
}

TEST_F(PrefillPlan, ShapesOfChunksAndFinish) {
  CompactPagedPrefill plan;
  plan.plan(args(positions_));
  const auto bad = ErrorCode::invalid_argument;
  expect_code(
      bad,
      [&] {
        plan.prepare_chunk(1, step_.query, step_.kv_cache, regions_, step_.block_table,
                           step_.owners);
      },
      "start = 1");
  expect_code(
      bad,
      [&] {
        plan.prepare_chunk(-1, step_.query, step_.kv_cache, regions_, step_.block_table,
                           step_.owners);
      },
      "start = -1");
  expect_code(
      bad,
      [&] {
        plan.prepare_chunk(0, step_.query, step_.kv_cache, regions_.slice(1, 0, 3),
                           step_.block_table, step_.owners);
      },
      "regions");
  expect_code(
      bad,
      [&] {
        plan.prepare_chunk(0, step_.query.slice(1, 0, 2), step_.kv_cache, regions_,
                           step_.block_table, step_.owners);
      },
      "query");
  plan.prepare_chunk(0, step_.query, step_.kv_cache, regions_, step_.block_table, step_.owners);
  expect_code(
      bad, [&] { plan.finish({}, step_.kv_cache, out_.slice(0, 0, 3)); }, "output");
  TensorView f8 = step_.kv_cache;
  f8.dtype = DType::u8;
  expect_code(
      bad, [&] { plan.finish({}, f8, out_); }, "k_scale");
  expect_code(
      bad,
      [&] {
        plan.finish({}, step_.kv_cache, out_,
                    TensorView::contiguous(output_.data(), DType::f32, {3}));
      },
      "lse");
}

}  // namespace
}  // namespace octopage
