// Planning on hostile numbers: every call either throws octopage::Error or keeps its promises.
// Memory behind the tensors is real where the planner may touch it.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "octopage/octopage.hpp"

namespace {

/// Takes numbers out of the input; zeros when it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  template <typename T>
  T take() {
    T value = {};
    const size_t bytes = size_ < sizeof(T) ? size_ : sizeof(T);
    std::memcpy(&value, data_, bytes);
    data_ += bytes;
    size_ -= bytes;
    return value;
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(take<uint16_t>()) % limit; }
  /// Mostly small, sometimes anything.
  int64_t number() { return below(3) == 0 ? take<int64_t>() : below(64) - 8; }

 private:
  const uint8_t* data_;
  size_t size_;
};

void require(bool holds) {
  if (!holds) std::abort();
}

void fuzz_cache(Input& in) {
  alignas(16) static char memory[64];
  octopage::TensorView t;
  t.data = memory;
  t.dtype = static_cast<octopage::DType>(in.below(9) - 1);
  t.rank = static_cast<int32_t>(in.below(5));
  for (size_t d = 0; d < 4; ++d) {
    t.shape[d] = in.number();
    t.strides[d] = in.number();
  }
  if (in.below(2) == 0)
    t.rank = 4, t.strides[3] = 1, t.shape[3] = 16 * (1 + in.below(40)),
    t.shape[2] = 8 * (1 + in.below(70));
  const octopage::KvCacheView view = octopage::kv_cache_view(t);
  require(view.block_size % 8 == 0 && view.stride_token >= 2 * view.dim && view.page_stride() >= 1);
  require(view.page_stride() * 8 * view.stride_token == view.stride_block);
  require(octopage::kv_page_count(view) >= 0);
  static_cast<void>(octopage::kv_page_stride(t));
  if (view.groups == 1) static_cast<void>(octopage::view_sparse_kv_pages(t));
}

void fuzz_staging(Input& in) {
  const int64_t requests = in.below(5), columns = in.below(9);
  std::vector<int32_t> table(static_cast<size_t>(requests * columns));
  for (auto& entry : table) entry = in.take<int32_t>();
  std::vector<int64_t> lengths(static_cast<size_t>(in.below(8) == 0 ? in.below(7) : requests));
  for (auto& length : lengths) length = in.number();
  const int64_t block_size = in.below(4) == 0 ? in.number() : 8 * (1 + in.below(5));
  const auto staged = octopage::plan_staged_prefill_pages(
      octopage::TensorView::contiguous(table.data(), octopage::DType::i32, {requests, columns}),
      lengths, block_size);
  require(static_cast<int64_t>(staged.blocks.size()) ==
          octopage::staged_block_count(lengths, block_size));
}

void fuzz_plan(Input& in) {
  const int64_t rows = in.below(20), heads = 1 + in.below(3), dim = 64, columns = in.below(9),
                blocks = 1 + in.below(6);
  std::vector<int64_t> positions(static_cast<size_t>(rows));
  for (auto& position : positions)
    position = in.below(6) == 0 ? in.take<int64_t>() : in.below(400) - 20;
  const int64_t region_count = in.below(12) == 0 ? in.number() : in.below(40);
  const auto metadata = octopage::compact_page_metadata(positions, region_count);
  require(metadata.indptr.size() == positions.size() + 1);
  if (metadata.indptr.back() > 100000) return;

  octopage::CompactPagedPrefill plan;
  const int64_t block_size = 8 * (1 + in.below(4));
  plan.plan({.query_shape = {in.below(9) == 0 ? in.number() : rows, heads, dim},
             .dtype = octopage::DType::bf16,
             .device = {},
             .positions = positions,
             .region_count = region_count,
             .scale = 1,
             .block_size = block_size,
             .contiguous_query = false});
  if (region_count > 5000) return;  // the plan is made; its selections would not fit memory
  std::vector<int32_t> owners(static_cast<size_t>(rows)), table(static_cast<size_t>(2 * columns));
  std::vector<int32_t> regions(static_cast<size_t>(rows * region_count)),
      exact(static_cast<size_t>(rows));
  for (auto& owner : owners) owner = static_cast<int32_t>(in.number());
  for (auto& entry : table) entry = static_cast<int32_t>(in.number());
  for (auto& region : regions) region = static_cast<int32_t>(in.number());
  for (auto& position : exact) position = static_cast<int32_t>(in.number());
  std::vector<uint16_t> query(static_cast<size_t>(rows * heads * dim));
  std::vector<uint16_t> cache(static_cast<size_t>(blocks * block_size * 2 * dim) + 8, 0x7fc0);
  void* aligned = cache.data();
  size_t space = cache.size() * 2;
  std::align(16, 16, aligned, space);
  using octopage::DType;
  using octopage::TensorView;
  const auto kv = TensorView::contiguous(aligned, DType::bf16, {blocks, 1, block_size, 2 * dim});
  int32_t status = 0;
  octopage::Options options;
  options.threads = 1;
  options.status = &status;
  if (in.below(2) == 0)
    plan.fixup_positions(TensorView::contiguous(exact.data(), DType::i32, {rows}), options);
  const int64_t start = in.below(6) == 0 ? in.number() : 0;
  plan.prepare_chunk(start, TensorView::contiguous(query.data(), DType::bf16, {rows, heads, dim}),
                     kv, TensorView::contiguous(regions.data(), DType::i32, {rows, region_count}),
                     TensorView::contiguous(table.data(), DType::i32, {2, columns}),
                     TensorView::contiguous(owners.data(), DType::i32, {rows}), options);
  // Whatever came in, the list holds pages of the cache or -1.
  const auto* pages = static_cast<const int32_t*>(plan.pages().data);
  const auto* indptr = static_cast<const int32_t*>(plan.indptr().data);
  for (int32_t i = 0; i < indptr[rows]; ++i)
    require(pages[i] >= -1 && pages[i] < blocks * (block_size / 8));
  std::vector<float> output(static_cast<size_t>(rows * heads * dim));
  plan.finish({}, kv, TensorView::contiguous(output.data(), DType::f32, {rows, heads, dim}), {}, {},
              {}, options);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  Input in(data + 1, size - 1);
  try {
    switch (data[0] % 3) {
      case 0:
        fuzz_cache(in);
        break;
      case 1:
        fuzz_staging(in);
        break;
      default:
        fuzz_plan(in);
        break;
    }
  } catch (const octopage::Error&) {
    // refused with a message: fine
  }
  return 0;
}
