#include "backends/cuda/paged/instance.cuh"

namespace octopage::cuda {

PagedInstance paged_f16_f8(int64_t dim) {
  return paged_instance_of<__half, __nv_fp8_e4m3>(dim);
}

}  // namespace octopage::cuda
