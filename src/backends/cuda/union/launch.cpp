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

constexpr int64_t kChunkBytes = 128;  // the width of the swizzle

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

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

/// [groups, chunks of K and V, tokens, elements of 128 bytes]. A copy takes one page of K or of V,
/// or of f8 both, see f8_copies(). A cache without a token has one that no page id names.
CUtensorMap encode(const PageSourceMap& source) {
  const int64_t element_bytes = itemsize(source.dtype);
  const int64_t chunk_elements = kChunkBytes / element_bytes;
  const int64_t chunks = 2 * source.dim / chunk_elements;
  const int64_t chunks_of_copy = chunks / (element_bytes == 1 ? f8_copies(source.dim) : 2);
  const auto tokens = static_cast<cuuint64_t>(std::max<int64_t>(source.tokens, 1));
  const cuuint64_t shape[4] = {static_cast<cuuint64_t>(chunk_elements), tokens,
                               static_cast<cuuint64_t>(chunks),
                               static_cast<cuuint64_t>(source.groups)};
  const int64_t token_bytes = source.stride_token * element_bytes;
  // With one group its stride means nothing.
  const int64_t group_bytes = source.groups > 1 ? source.stride_group * element_bytes : token_bytes;
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(token_bytes), kChunkBytes,
                                 static_cast<cuuint64_t>(group_bytes)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(chunk_elements),
                             static_cast<cuuint32_t>(kPageTokens),
                             static_cast<cuuint32_t>(chunks_of_copy), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, map_type(source.dtype), 4, const_cast<void*>(source.cache), shape, strides,
                box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(ErrorCode::device_error,
         "kv_cache: the driver refused its tensor map ({} tokens of {} bytes, {} groups of {} "
         "bytes): CUresult {}",
         source.tokens, token_bytes, source.groups, group_bytes, static_cast<int>(result));
  }
  return map;
}

void launch_attention(const UnionAttentionParams& params, const CUtensorMap& map, DType cache,
                      int64_t dim, int grid, void* stream) {
  const bool f8 = cache == DType::f8_e4m3fn;
  switch (dim) {
    case 64:
      return f8 ? union_attention_64_f8(params, map, grid, stream)
                : union_attention_64(cache, params, map, grid, stream);
    case 128:
      return f8 ? union_attention_128_f8(params, map, grid, stream)
                : union_attention_128(cache, params, map, grid, stream);
    case 192:
      return f8 ? union_attention_192_f8(params, map, grid, stream)
                : union_attention_192(cache, params, map, grid, stream);
    default:
      return f8 ? union_attention_256_f8(params, map, grid, stream)
                : union_attention_256(cache, params, map, grid, stream);
  }
}

}  // namespace

bool has_union_instance(DType query, DType cache) {
  return query == cache || cache == DType::f8_e4m3fn;
}

void launch_union_path(const UnionsParams& unions, int64_t selections,
                       const UnionAttentionParams& attention, const PageSourceMap& source,
                       int multiprocessors, void* stream) {
  const CUtensorMap map = encode(source);
  launch_unions(unions, selections, multiprocessors, stream);
  const int64_t units = attention.lists.spans * attention.groups << attention.lists.split_shift;
  launch_attention(attention, map, source.dtype, source.dim,
                   static_cast<int>(std::min<int64_t>(units, multiprocessors)), stream);
  if (attention.lists.split_shift > 0) launch_merge(attention, source.dim, stream);
}

}  // namespace octopage::cuda
