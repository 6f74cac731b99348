#include "backends/cuda/union/instance.cuh"

namespace octopage::cuda {

void union_attention_64_f8(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                           void* stream) {
  launch_type<64, F8>(params, map, grid, stream);
}

}  // namespace octopage::cuda
