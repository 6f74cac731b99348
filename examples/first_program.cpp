// Two query tokens of one request attend to two regions each of a paged cache.
//
// All keys are 0, so every visible token weighs the same, and V of token t is t: the output is the
// mean of the visible token numbers, and lse the logarithm of their count.

#include <bit>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "octopage/octopage.hpp"

namespace {

constexpr int64_t kRows = 2, kHeads = 1, kDim = 64, kBlocks = 4, kBlockSize = 16, kTokens = 20;

/// The upper half of a float; exact for small whole numbers.
uint16_t bf16(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}

}  // namespace

int main() {
  using octopage::DType;
  using octopage::TensorView;

  // The request's 20 tokens lie in physical blocks 3 and 1; nothing else of the cache is read.
  const std::vector<int32_t> block_table = {3, 1};
  std::vector<uint16_t> kv_cache(kBlocks * kBlockSize * 2 * kDim, bf16(0));
  for (int64_t t = 0; t < kTokens; ++t) {
    const int64_t slot = block_table[t / kBlockSize] * kBlockSize + t % kBlockSize;
    for (int64_t d = 0; d < kDim; ++d) {
      kv_cache[slot * 2 * kDim + kDim + d] = bf16(static_cast<float>(t));
    }
  }

  const std::vector<uint16_t> query(kRows * kHeads * kDim, bf16(1));
  const std::vector<int32_t> owners = {0, 0};
  const std::vector<int32_t> positions = {18, 19};  // the last two tokens
  const std::vector<int32_t> regions = {2, 0,       // row 0: tokens 16 .. 18 and 0 .. 7
                                        1, 2};      // row 1: tokens 8 .. 15 and 16 .. 19
  std::vector<float> output(kRows * kHeads * kDim), lse(kRows * kHeads);

  octopage::SparsePrefillArgs args;
  args.query = TensorView::contiguous(query.data(), DType::bf16, {kRows, kHeads, kDim});
  args.kv_cache =
      TensorView::contiguous(kv_cache.data(), DType::bf16, {kBlocks, 1, kBlockSize, 2 * kDim});
  args.block_table = TensorView::contiguous(block_table.data(), DType::i32, {1, 2});
  args.owners = TensorView::contiguous(owners.data(), DType::i32, {kRows});
  args.positions = TensorView::contiguous(positions.data(), DType::i32, {kRows});
  args.regions = TensorView::contiguous(regions.data(), DType::i32, {kRows, 2});
  args.output = TensorView::contiguous(output.data(), DType::f32, {kRows, kHeads, kDim});
  args.lse = TensorView::contiguous(lse.data(), DType::f32, {kRows, kHeads});
  try {
    octopage::sparse_prefill(args);
  } catch (const octopage::Error& error) {
    std::fprintf(stderr, "octopage: %s\n", error.what());
    return 1;
  }
  for (int64_t row = 0; row < kRows; ++row) {
    std::printf("row %d: output %.4f %.4f ... lse %.4f\n", static_cast<int>(row),
                output[row * kDim], output[row * kDim + 1], lse[row]);
  }
  return 0;
}
