#include "backends/cuda/union/instance.cuh"

namespace octopage::cuda {

void union_attention_128_f8(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                            void* stream) {
  launch_type<128, F8>(params, map, grid, stream);
}

}  // namespace octopage::cuda
