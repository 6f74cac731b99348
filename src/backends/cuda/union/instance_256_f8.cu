#include "backends/cuda/union/instance.cuh"

namespace octopage::cuda {

void union_attention_256_f8(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                            void* stream) {
  launch_type<256, F8>(params, map, grid, stream);
}

}  // namespace octopage::cuda
