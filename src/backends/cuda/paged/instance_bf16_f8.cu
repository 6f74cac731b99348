#include "backends/cuda/paged/instance.cuh"

namespace octopage::cuda {

PagedInstance paged_bf16_f8(int64_t dim) {
  return paged_instance_of<__nv_bfloat16, __nv_fp8_e4m3>(dim);
}

}  // namespace octopage::cuda
