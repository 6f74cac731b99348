#include "octopage/kv_cache.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "octopage/error.hpp"

namespace octopage {
namespace {

alignas(64) char memory[1 << 16];

TensorView cache(int64_t blocks, int64_t groups, int64_t block_size, int64_t dim,
                 DType dtype = DType::bf16) {
  return TensorView::contiguous(memory, dtype, {blocks, groups, block_size, 2 * dim});
}

void expect_refused(const TensorView& t, std::initializer_list<const char*> parts) {
  try {
    kv_cache_view(t);
    ADD_FAILURE() << "accepted; expected " << *parts.begin();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    for (const char* part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << error.what() << " lacks " << part;
    }
  }
}

TEST(KvCache, RulesNameArgumentRuleAndValue) {
  const auto changed = [](const std::function<void(TensorView&)>& change) {
    TensorView t = cache(3, 2, 16, 64);
    change(t);
    return t;
  };
  expect_refused(changed([](TensorView& t) { t.rank = 3; }), {"kv_cache", "4 dimensions", "3"});
  expect_refused(changed([](TensorView& t) { t.dtype = DType::f32; }),
                 {"kv_cache", "dtype", "f32"});
  expect_refused(changed([](TensorView& t) { t.shape[0] = -1; }), {"kv_cache.shape[0]", "-1"});
  expect_refused(changed([](TensorView& t) { t.shape[1] = 0; }),
                 {"kv_cache.shape[1]", "group", "0"});
  expect_refused(changed([](TensorView& t) { t.shape[3] = 127; }),
                 {"kv_cache.shape[3]", "127", "even"});
  expect_refused(changed([](TensorView& t) { t.strides[3] = 2; }),
                 {"kv_cache.strides[3]", "2", "contiguous"});
  expect_refused(changed([](TensorView& t) { t.strides[2] = 64; }), {"stride_token", "64", "128"});
  expect_refused(changed([](TensorView& t) { t.strides[2] = 132, t.strides[0] = 4 * 8 * 132; }),
                 {"stride_token", "132", "16-byte"});
  expect_refused(changed([](TensorView& t) { t.strides[1] = 2052; }),
                 {"stride_group", "2052", "16-byte"});
  expect_refused(changed([](TensorView& t) { t.strides[1] = -2048; }),
                 {"stride_group", "negative"});
  expect_refused(changed([](TensorView& t) { t.strides[0] = 0; }),
                 {"stride_block", "0", "positive"});
  expect_refused(changed([](TensorView& t) { t.strides[0] = 4100; }),
                 {"stride_block", "4100", "1024", "eight-token pages"});
  expect_refused(changed([](TensorView& t) { t.strides[0] = int64_t{1} << 60; }), {"2^31"});
  expect_refused(changed([](TensorView& t) {
                   t.shape[0] = INT64_MAX / 1024;
                   t.strides[0] = 1 << 20;
                 }),
                 {"overflows"});
  expect_refused(changed([](TensorView& t) { t.data = memory + 8; }), {"kv_cache.data", "16-byte"});
  expect_refused(changed([](TensorView& t) { t.data = nullptr; }), {"kv_cache.data", "null", "3"});
}

TEST(KvCache, BlockSizes) {
  for (const int64_t bad : {0, 1, 4, 12, 20}) {
    expect_refused(cache(1, 1, bad, 64),
                   {"block_size", std::to_string(bad).c_str(), "multiple of 8"});
  }
  for (const int64_t good : {8, 24, 528})
    EXPECT_EQ(kv_cache_view(cache(1, 1, good, 64)).block_size, good);
}

TEST(KvCache, MeaninglessStridesOfOneBlockAreReplaced) {
  for (const int64_t stride :
       {int64_t{0}, int64_t{-1}, int64_t{INT64_MAX}, int64_t{INT64_MIN}, int64_t{5}}) {
    TensorView t = cache(1, 1, 16, 64);
    t.strides[0] = stride;
    t.strides[1] = stride;
    EXPECT_EQ(kv_page_stride(t), 2) << stride;
  }
  EXPECT_EQ(kv_page_stride(cache(0, 1, 16, 64)), 2);
}

TEST(KvCache, PageStridesOfOtherLayouts) {
  EXPECT_EQ(kv_page_stride(cache(3, 1, 16, 64)), 2);
  EXPECT_EQ(kv_page_stride(cache(3, 4, 16, 64)), 8);  // the other groups' pages lie between
  // [blocks, block_size, groups, 2*dim]: groups interleaved per token.
  TensorView t = cache(3, 4, 16, 64);
  t.strides = {16 * 4 * 128, 128, 4 * 128, 1};
  EXPECT_EQ(kv_page_stride(t), 2);
  const KvCacheView view = kv_cache_view(t);
  EXPECT_EQ(page_offset(view, 2, 5), 2 * 128 + 5 * 8 * 512);
  EXPECT_EQ(kv_cache_view(cache(1, 1, 16, 64, DType::u8)).dtype, DType::f8_e4m3fn);
}

TEST(KvCache, PageViewKeepsGapsAndSplitsKAndV) {
  TensorView t = cache(3, 4, 16, 64);
  const SparseKvPages pages = view_sparse_kv_pages(t.slice(1, 2, 3));
  EXPECT_EQ(pages.k.shape[0], 2 * 8 + 2);  // two strides of eight pages, then the last block's two
  EXPECT_EQ(pages.k.shape[1], 8);
  EXPECT_EQ(pages.k.shape[2], 1);
  EXPECT_EQ(pages.k.shape[3], 64);
  EXPECT_EQ(pages.k.strides[0], 8 * 128);
  EXPECT_EQ(pages.k.strides[1], 128);
  EXPECT_EQ(pages.k.strides[2], 128);
  EXPECT_EQ(pages.k.strides[3], 1);
  EXPECT_EQ(pages.k.data, memory + 2 * 16 * 128 * 2);
  EXPECT_EQ(pages.v.data, memory + 2 * 16 * 128 * 2 + 64 * 2);
  EXPECT_EQ(pages.v.strides, pages.k.strides);
  EXPECT_THROW(view_sparse_kv_pages(t), Error);  // four groups
  EXPECT_EQ(view_sparse_kv_pages(cache(0, 1, 16, 64)).k.shape[0], 0);
}

TEST(KvCache, SlicesOfGroups) {
  const KvCacheView view = kv_cache_view(cache(3, 4, 16, 64));
  const KvCacheView two = view.slice_groups(1, 3);
  EXPECT_EQ(two.groups, 2);
  EXPECT_EQ(two.data, memory + 16 * 128 * 2);
  EXPECT_THROW(view.slice_groups(2, 5), Error);
  EXPECT_THROW(view.slice_groups(-1, 2), Error);
}

}  // namespace
}  // namespace octopage
