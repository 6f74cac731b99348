#include "backends/cuda/union/launch.hpp"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "backends/cuda/runtime/runtime.hpp"
#include "backends/cuda/union/instances.hpp"
#include "core/check.hpp"

namespace octopage::cuda {
namespace {

constexpr int64_t kChunkElements = 64;  // 128 bytes, the width of the swizzle

/// The driver's encoder, found at run time: the library does not link the driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      fail(ErrorCode::device_error, "cuTensorMapEncodeTiled: this driver does not have it");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return found;
}

/// [groups, 2*dim / 64 chunks, tokens, 64 elements]; a copy takes one page of K or of V.
CUtensorMap encode(const PageSourceMap& source) {
  const cuuint64_t shape[4] = {kChunkElements, static_cast<cuuint64_t>(source.tokens),
                               static_cast<cuuint64_t>(2 * source.dim / kChunkElements),
                               static_cast<cuuint64_t>(source.groups)};
  const int64_t token_bytes = source.stride_token * 2;
  // With one group its stride means nothing.
  const int64_t group_bytes = source.groups > 1 ? source.stride_group * 2 : token_bytes;
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(token_bytes), kChunkElements * 2,
                                 static_cast<cuuint64_t>(group_bytes)};
  const cuuint32_t box[4] = {kChunkElements, static_cast<cuuint32_t>(kPageTokens),
                             static_cast<cuuint32_t>(source.dim / kChunkElements), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map,
                source.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                4, const_cast<void*>(source.cache), shape, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(ErrorCode::device_error,
         "kv_cache: the driver refused its tensor map ({} tokens of {} bytes, {} groups of {} "
         "bytes): CUresult {}",
         source.tokens, token_bytes, source.groups, group_bytes, static_cast<int>(result));
  }
  return map;
}

}  // namespace

void launch_union_attention(const UnionAttentionParams& params, const PageSourceMap& source,
                            int ctas, void* stream) {
  const CUtensorMap map = encode(source);
  const int64_t units = params.lists.spans * params.groups;
  const int grid = static_cast<int>(std::min<int64_t>(units, ctas));
  switch (source.dim) {
    case 64:
      return union_attention_64(source.dtype, params, map, grid, stream);
    case 128:
      return union_attention_128(source.dtype, params, map, grid, stream);
    case 192:
      return union_attention_192(source.dtype, params, map, grid, stream);
    default:
      return union_attention_256(source.dtype, params, map, grid, stream);
  }
}

}  // namespace octopage::cuda
