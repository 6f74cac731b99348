// Attention of one row to one token: the output is that token's V.

#include <octopage/octopage.hpp>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main() {
  using octopage::DType;
  using octopage::TensorView;
  constexpr int64_t kDim = 64;
  std::vector<uint16_t> query(kDim, 0x3f80);  // 1.0 in bf16
  auto* cache = static_cast<uint16_t*>(std::aligned_alloc(64, 8 * 2 * kDim * 2));
  for (int64_t i = 0; i < 8 * 2 * kDim; ++i) cache[i] = 0x7fc0;  // NaN: never written
  for (int64_t i = 0; i < 2 * kDim; ++i) cache[i] = 0x4040;      // 3.0: token 0
  const int32_t zero = 0;
  std::vector<float> output(kDim);
  octopage::SparsePrefillArgs args;
  args.query = TensorView::contiguous(query.data(), DType::bf16, {1, 1, kDim});
  args.kv_cache = TensorView::contiguous(cache, DType::bf16, {1, 1, 8, 2 * kDim});
  args.block_table = TensorView::contiguous(&zero, DType::i32, {1, 1});
  args.owners = TensorView::contiguous(&zero, DType::i32, {1});
  args.positions = TensorView::contiguous(&zero, DType::i32, {1});
  args.regions = TensorView::contiguous(&zero, DType::i32, {1, 1});
  args.output = TensorView::contiguous(output.data(), DType::f32, {1, 1, kDim});
  octopage::sparse_prefill(args);
  for (const float value : output) {
    if (value != 3.0f) {
      std::printf("output %g, expected 3\n", static_cast<double>(value));
      return 1;
    }
  }
  std::free(cache);
  std::puts("consumer: ok");
  return 0;
}
