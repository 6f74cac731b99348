#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_INSTANCES_HPP_
#define OCTOPAGE_BACKENDS_CUDA_UNION_INSTANCES_HPP_

#include <cuda.h>

#include "backends/cuda/union/params.hpp"
#include "octopage/tensor.hpp"

namespace octopage::cuda {

void union_attention_64(DType dtype, const UnionAttentionParams& params, const CUtensorMap& map,
                        int grid, void* stream);
void union_attention_128(DType dtype, const UnionAttentionParams& params, const CUtensorMap& map,
                         int grid, void* stream);
void union_attention_192(DType dtype, const UnionAttentionParams& params, const CUtensorMap& map,
                         int grid, void* stream);
void union_attention_256(DType dtype, const UnionAttentionParams& params, const CUtensorMap& map,
                         int grid, void* stream);

void union_attention_64_f8(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                           void* stream);
void union_attention_128_f8(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                            void* stream);
void union_attention_192_f8(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                            void* stream);
void union_attention_256_f8(const UnionAttentionParams& params, const CUtensorMap& map, int grid,
                            void* stream);

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_INSTANCES_HPP_
