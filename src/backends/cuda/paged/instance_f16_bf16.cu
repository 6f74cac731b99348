#include "backends/cuda/paged/instance.cuh"

namespace octopage::cuda {

PagedInstance paged_f16_bf16(int64_t dim) {
  return paged_instance_of<__half, __nv_bfloat16>(dim);
}

}  // namespace octopage::cuda
