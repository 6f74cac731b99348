#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstring>
#include <vector>

#include "core/dtype.hpp"
#include "octopage/octopage.hpp"

namespace octopage {
namespace {

TensorView table_view(const std::vector<int32_t>& table, int64_t requests, int64_t columns) {
  return TensorView::contiguous(table.data(), DType::i32, {requests, columns});
}

TEST(StagingPlan, ListsLiveBlocksRequestByRequest) {
  EXPECT_TRUE(rc::check("staging plan", [] {
    const int64_t requests = *rc::gen::inRange<int64_t>(0, 5),
                  columns = *rc::gen::inRange<int64_t>(0, 7);
    const int64_t block_size = 8 * *rc::gen::inRange<int64_t>(1, 5);
    const auto table = *rc::gen::container<std::vector<int32_t>>(
        static_cast<size_t>(requests * columns),
        rc::gen::inRange<int32_t>(0, 9));  // shared blocks occur
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < requests; ++i)
      lengths.push_back(*rc::gen::inRange<int64_t>(0, columns * block_size + 1));
    const auto staged =
        plan_staged_prefill_pages(table_view(table, requests, columns), lengths, block_size);
    RC_ASSERT(staged.max_blocks == columns);  // the width stays
    RC_ASSERT(static_cast<int64_t>(staged.blocks.size()) ==
              staged_block_count(lengths, block_size));
    int32_t next = 0;
    for (int64_t i = 0; i < requests; ++i) {
      for (int64_t c = 0; c < columns; ++c) {
        const auto at = static_cast<size_t>(i * columns + c);
        if (c * block_size < lengths[static_cast<size_t>(i)]) {
          RC_ASSERT(staged.table[at] == next);
          RC_ASSERT(staged.blocks[static_cast<size_t>(next)] == table[at]);
          ++next;
        } else {
          RC_ASSERT(staged.table[at] == 0);
        }
      }
    }
  }));
}

TEST(StagingPlan, MistakesAreNamed) {
  const std::vector<int32_t> table(6, 0);
  const auto view = table_view(table, 2, 3);
  const auto refused = [&](std::vector<int64_t> lengths, int64_t block_size, const char* part) {
    try {
      plan_staged_prefill_pages(view, lengths, block_size);
      ADD_FAILURE() << part;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused({48, 49}, 16, "lengths[1] = 49");
  refused({1}, 16, "lengths");
  refused({1, -2}, 16, "lengths[1] = -2");
  refused({1, 2}, 12, "block_size = 12");
}

TEST(StagingPlan, IntoTheCallersStridedTensors) {
  const std::vector<int32_t> table = {7, 8, 9, 4, 5, 6};
  const std::vector<int64_t> lengths = {9, 24};
  std::vector<int32_t> blocks(5, -1), wide(2 * 5, -1);
  TensorView target = TensorView::contiguous(wide.data(), DType::i32, {2, 5}).slice(1, 0, 3);
  plan_staged_prefill_pages(table_view(table, 2, 3), lengths, 8,
                            TensorView::contiguous(blocks.data(), DType::i32, {5}), target);
  EXPECT_EQ(blocks, (std::vector<int32_t>{7, 8, 4, 5, 6}));
  EXPECT_EQ(wide, (std::vector<int32_t>{0, 1, 0, -1, -1, 2, 3, 4, -1, -1}));
}

class StagingCopy : public testing::Test {
 protected:
  static constexpr int64_t kBlocks = 4, kGroups = 2, kBlockSize = 16, kDim = 64;
  alignas(16) uint8_t codes_[kBlocks * kGroups * kBlockSize * 2 * kDim];
  TensorView cache_ =
      TensorView::contiguous(codes_, DType::u8, {kBlocks, kGroups, kBlockSize, 2 * kDim});
  void SetUp() override {
    uint32_t state = 3;
    for (auto& code : codes_)
      code = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  }
};

TEST_F(StagingCopy, ScalesInF32AndRoundsOnce) {
  const std::vector<int32_t> list = {2, 0, 2};
  std::vector<uint16_t> output(3 * kBlockSize * 2 * kDim, 0xabab);
  const auto out = TensorView::contiguous(output.data(), DType::bf16, {3, 1, kBlockSize, 2 * kDim});
  stage_prefill_pages(cache_.slice(1, 1, 2), TensorView::contiguous(list.data(), DType::i32, {3}),
                      out, Scale::of(0.37f), Scale::of(2.25f));
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t t = 0; t < kBlockSize; ++t) {
      for (int64_t d = 0; d < 2 * kDim; ++d) {
        const float stored = f8_e4m3fn_to_f32(
            codes_[((list[static_cast<size_t>(i)] * kGroups + 1) * kBlockSize + t) * 2 * kDim + d]);
        const uint16_t expected = f32_to_bf16(stored * (d < kDim ? 0.37f : 2.25f));
        const uint16_t actual = output[static_cast<size_t>((i * kBlockSize + t) * 2 * kDim + d)];
        if (std::isnan(stored)) {
          ASSERT_TRUE(std::isnan(bf16_to_f32(actual)));
        } else {
          ASSERT_EQ(actual, expected) << i << " " << t << " " << d;
        }
      }
    }
  }
}

TEST_F(StagingCopy, BlocksOutsideAreZerosAndReported) {
  const std::vector<int32_t> list = {-1, 1, static_cast<int32_t>(kBlocks)};
  const auto blocks = TensorView::contiguous(list.data(), DType::i32, {3});
  std::vector<uint16_t> output(3 * kBlockSize * 2 * kDim, 0xabab);
  const auto out = TensorView::contiguous(output.data(), DType::f16, {3, 1, kBlockSize, 2 * kDim});
  int32_t status = 64;
  Options options;
  options.status = &status;
  options.threads = 1;
  options.strict = true;
  EXPECT_THROW(
      stage_prefill_pages(cache_.slice(1, 0, 1), blocks, out, Scale::of(1), Scale::of(1), options),
      Error);
  for (const uint16_t value : output) ASSERT_EQ(value, 0xabab);  // strict: nothing written
  options.strict = false;
  stage_prefill_pages(cache_.slice(1, 0, 1), blocks, out, Scale::of(1), Scale::of(1), options);
  EXPECT_EQ(status, 64 | status_table);
  const size_t block = kBlockSize * 2 * kDim;
  for (size_t i = 0; i < block; ++i) {
    ASSERT_EQ(output[i], 0);
    ASSERT_EQ(output[2 * block + i], 0);
  }
}

TEST_F(StagingCopy, MistakesAreRefused) {
  const std::vector<int32_t> list = {0};
  const auto blocks = TensorView::contiguous(list.data(), DType::i32, {1});
  std::vector<uint16_t> output(kBlockSize * 2 * kDim);
  const auto out = TensorView::contiguous(output.data(), DType::bf16, {1, 1, kBlockSize, 2 * kDim});
  EXPECT_THROW(stage_prefill_pages(cache_.slice(1, 0, 1), blocks, out), Error);  // no scales
  EXPECT_THROW(stage_prefill_pages(cache_.slice(1, 0, 1), blocks, out, Scale::of(1)),
               Error);  // no v_scale
  EXPECT_THROW(stage_prefill_pages(cache_, blocks, out, Scale::of(1), Scale::of(1)),
               Error);  // two groups
  EXPECT_THROW(stage_prefill_pages(cache_.slice(1, 0, 1), blocks,
                                   TensorView::contiguous(output.data(), DType::f32, {1, 1, 8, 64}),
                                   Scale::of(1), Scale::of(1)),
               Error);
}

}  // namespace
}  // namespace octopage
