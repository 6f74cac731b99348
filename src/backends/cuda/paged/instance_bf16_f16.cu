#include "backends/cuda/paged/instance.cuh"

namespace octopage::cuda {

PagedInstance paged_bf16_f16(int64_t dim) {
  return paged_instance_of<__nv_bfloat16, __half>(dim);
}

}  // namespace octopage::cuda
