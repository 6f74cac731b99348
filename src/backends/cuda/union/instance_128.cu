#include "backends/cuda/union/instance.cuh"

namespace octopage::cuda {

void union_attention_128(DType dtype, const UnionAttentionParams& params, const CUtensorMap& map,
                         int grid, void* stream) {
  launch_dim<128>(dtype, params, map, grid, stream);
}

}  // namespace octopage::cuda
