#include "backends/cuda/paged/instance.cuh"

namespace octopage::cuda {

PagedInstance paged_f16_f16(int64_t dim) {
  return paged_instance_of<__half, __half>(dim);
}

}  // namespace octopage::cuda
