#include "backends/cuda/paged/launch.hpp"

#include "backends/cuda/paged/instances.hpp"
#include "backends/cuda/runtime/runtime.hpp"
#include "core/check.hpp"

namespace octopage::cuda {
namespace {

PagedInstance find(const PagedKernelKey& key) {
  const bool bf16 = key.query == DType::bf16;
  switch (key.cache) {
    case DType::bf16:
      return bf16 ? paged_bf16_bf16(key.dim) : paged_f16_bf16(key.dim);
    case DType::f16:
      return bf16 ? paged_bf16_f16(key.dim) : paged_f16_f16(key.dim);
    case DType::f8_e4m3fn:
      return bf16 ? paged_bf16_f8(key.dim) : paged_f16_f8(key.dim);
    default:
      return {};
  }
}

}  // namespace

int32_t paged_warps(const PagedKernelKey& key, int shared_bytes) {
  const PagedInstance instance = find(key);
  if (instance.launch == nullptr) return 0;
  for (const int warps : {4, 2, 1}) {
    if (instance.shared_bytes[warps] <= shared_bytes) return warps;
  }
  return 0;
}

int paged_shared_bytes(const PagedKernelKey& key, int32_t warps) {
  return find(key).shared_bytes[warps];
}

void launch_paged_attention(const PagedKernelKey& key, const PagedAttentionParams& params,
                            int64_t units, int32_t warps, void* stream) {
  find(key).launch(params, grid_size(units, 1, "paged_attention"), warps, stream);
}

}  // namespace octopage::cuda
