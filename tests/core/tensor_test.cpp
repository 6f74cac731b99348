#include "octopage/tensor.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "octopage/error.hpp"

namespace octopage {
namespace {

TEST(Tensor, ContiguousStrides) {
  std::vector<float> data(24);
  const auto t = TensorView::contiguous(data.data(), DType::f32, {2, 3, 4});
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.size(), 24);
  EXPECT_EQ(t.strides[0], 12);
  EXPECT_EQ(t.strides[1], 4);
  EXPECT_EQ(t.strides[2], 1);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_FALSE(TensorView().present());
  EXPECT_EQ(TensorView::contiguous(nullptr, DType::f32, {3, 0, 5}).size(), 0);
}

TEST(Tensor, StridesOfSingleElementsMeanNothing) {
  std::vector<float> data(12);
  auto t = TensorView::contiguous(data.data(), DType::f32, {3, 1, 4});
  t.strides[1] = -77;
  EXPECT_TRUE(t.is_contiguous());
  t.strides[0] = 5;
  EXPECT_FALSE(t.is_contiguous());
  t.shape[0] = 0;
  EXPECT_TRUE(t.is_contiguous());
}

TEST(Tensor, Slices) {
  std::vector<uint16_t> data(24);
  const auto t = TensorView::contiguous(data.data(), DType::bf16, {2, 3, 4});
  const auto s = t.slice(1, 1, 3);
  EXPECT_EQ(s.shape[1], 2);
  EXPECT_EQ(s.data, data.data() + 4);
  EXPECT_EQ(s.strides, t.strides);
  EXPECT_FALSE(s.is_contiguous());
  EXPECT_EQ(t.slice(0, 2, 2).size(), 0);
  EXPECT_THROW(t.slice(3, 0, 1), Error);
  EXPECT_THROW(t.slice(0, 1, 3), Error);
  EXPECT_THROW(t.slice(0, -1, 1), Error);
  EXPECT_THROW(t.slice(0, 2, 1), Error);
}

TEST(Tensor, BadShapesAreRefused) {
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::f32, {1, 2, 3, 4, 5}), Error);
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::f32, {1, -2}), Error);
  EXPECT_THROW(TensorView::contiguous(nullptr, DType::f32, {1, INT64_MAX, 3}), Error);
}

TEST(Tensor, Names) {
  EXPECT_EQ(std::string(name(DType::f8_e4m3fn)), "f8_e4m3fn");
  EXPECT_EQ(name(Device{}), "cpu");
  EXPECT_EQ(name(Device{DeviceType::cuda, 3}), "cuda:3");
  EXPECT_EQ(itemsize(DType::i64), 8);
  EXPECT_EQ(itemsize(DType::u8), 1);
  EXPECT_THROW(itemsize(static_cast<DType>(99)), Error);
}

}  // namespace
}  // namespace octopage
