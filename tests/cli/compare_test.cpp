#include "tools/octopage/compare.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace octopage::cli {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// Two rows with one head of dim 2.
OutputError output_error(std::vector<float> output, std::vector<float> expected,
                         double bound = 1e-3) {
  return compare_output(TensorView::contiguous(output.data(), DType::f32, {2, 1, 2}),
                        TensorView::contiguous(expected.data(), DType::f32, {2, 1, 2}), bound);
}

LseError lse_error(std::vector<float> lse, std::vector<float> expected) {
  const auto rows = static_cast<int64_t>(lse.size());
  return compare_lse(TensorView::contiguous(lse.data(), DType::f32, {rows, 1}),
                     TensorView::contiguous(expected.data(), DType::f32, {rows, 1}));
}

TEST(CompareOutput, IsRelativeToEachRowAndHead) {
  const OutputError error = output_error({3, 4, 0.3f, 0.5f}, {3, 4, 0.3f, 0.4f});
  EXPECT_NEAR(error.largest, 0.1 / 0.5, 1e-6);
  EXPECT_EQ(error.over, 1);
  EXPECT_EQ(error.worst, (std::array<int64_t, 3>{1, 0, 1}));
  EXPECT_EQ(error.value, 0.5f);
  EXPECT_EQ(error.expected, 0.4f);
}

TEST(CompareOutput, ZerosMustBeZeros) {
  EXPECT_EQ(output_error({0, 0, 1, 1}, {0, 0, 1, 1}).over, 0);
  EXPECT_EQ(output_error({0, 0, 1, 1}, {0, 0, 1, 1}, 0).over, 0);
  EXPECT_EQ(output_error({0, 1e-20f, 1, 1}, {0, 0, 1, 1}).over, 1);
}

TEST(CompareOutput, NotFiniteWhereFiniteIsExpectedIsOver) {
  for (const float value : {kNan, kInf, -kInf}) {
    const OutputError error = output_error({1, 1, value, 1}, {1, 1, 1, 1}, 1e30);
    EXPECT_EQ(error.over, 1);
    EXPECT_TRUE(std::isinf(error.largest));
    EXPECT_EQ(error.worst, (std::array<int64_t, 3>{1, 0, 0}));
    EXPECT_EQ(output_error({1, 1, 1, 1}, {1, 1, value, 1}, 1e30).over, 1);
    EXPECT_EQ(output_error({1, 1, kNan, 1}, {1, 1, value, 1}).over, 0);
  }
}

TEST(CompareOutput, AllowanceWidensItsRowAlone) {
  const std::vector<float> output = {1.1f, 0, 1.1f, 0};
  const std::vector<float> expected = {1, 0, 1, 0};
  const OutputError error = compare_output(
      TensorView::contiguous(output.data(), DType::f32, {2, 1, 2}),
      TensorView::contiguous(expected.data(), DType::f32, {2, 1, 2}), 0.01, {0.2, 0.0});
  EXPECT_EQ(error.over, 1);
  EXPECT_EQ(error.worst[0], 1);
}

TEST(CompareLse, IsAbsoluteOrRelative) {
  EXPECT_EQ(lse_error({1.0019f}, {1.0f}).over, 0);
  EXPECT_EQ(lse_error({1.0021f}, {1.0f}).over, 1);
  EXPECT_EQ(lse_error({100000.9f}, {100000.0f}).over, 0);
  EXPECT_EQ(lse_error({100001.1f}, {100000.0f}).over, 1);
}

TEST(CompareLse, InfinitiesMustBeTheSame) {
  EXPECT_EQ(lse_error({-kInf, 1}, {-kInf, 1}).over, 0);
  EXPECT_EQ(lse_error({kInf, 1}, {-kInf, 1}).over, 1);
  EXPECT_EQ(lse_error({kNan, 1}, {-kInf, 1}).over, 1);
  EXPECT_EQ(lse_error({-1e30f, 1}, {-kInf, 1}).over, 1);
  EXPECT_EQ(lse_error({-kInf, 1}, {-1e30f, 1}).over, 1);
  EXPECT_EQ(lse_error({kNan, 1}, {1, 1}).over, 1);
  EXPECT_EQ(lse_error({kNan, 1}, {kNan, 1}).over, 0);
}

TEST(CompareList, NamesTheFirstDifference) {
  const std::vector<int32_t> expected = {1, 2, 3, 4, 5, 6};
  const TensorView tensor = TensorView::contiguous(expected.data(), DType::i32, {2, 3});
  EXPECT_TRUE(compare_list("list", tensor, {1, 2, 3, 4, 5, 6}).ok);
  const ListComparison changed = compare_list("list", tensor, {1, 2, 3, 4, 9, 9});
  EXPECT_FALSE(changed.ok);
  EXPECT_EQ(changed.text(), "list[1, 1] = 9, expected 5");
  const ListComparison shorter = compare_list("list", tensor, {1, 2, 3});
  EXPECT_FALSE(shorter.ok);
  EXPECT_EQ(shorter.value, 3);
  EXPECT_EQ(shorter.expected, 6);
}

TEST(DefaultTolerance, FollowsTheTypes) {
  EXPECT_EQ(default_tolerance(DType::bf16, DType::f16, DType::f32), 4e-3);
  EXPECT_EQ(default_tolerance(DType::f16, DType::bf16, DType::f32), 4e-3);
  EXPECT_EQ(default_tolerance(DType::f16, DType::f16, DType::f16), 1e-3);
  EXPECT_EQ(default_tolerance(DType::f16, DType::f8_e4m3fn, DType::f32), 1e-3);
}

}  // namespace
}  // namespace octopage::cli
