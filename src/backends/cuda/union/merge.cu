// Puts the splits of a call together: a warp to each (row, head).

#include <cuda_runtime.h>

#include <cmath>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/device/ptx/bulk.cuh"
#include "backends/cuda/runtime/runtime.hpp"
#include "backends/cuda/union/epilogue.cuh"
#include "backends/cuda/union/launch.hpp"
#include "backends/cuda/union/params.hpp"

namespace octopage::cuda {
namespace {

constexpr int kMergeWarps = 4;

/// Splits in ascending order, so that the bits are the same every time.
template <int kDim>
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge(const __grid_constant__ UnionAttentionParams p) {
  constexpr int kPairs = kDim / 64;  // of a lane: elements 64 i + 2 lane
  const int lane = threadIdx.x % 32;
  const int64_t heads = int64_t{p.groups} * p.heads_per_group;
  const int64_t part = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / 32;
  ptx::wait_for_previous_grid();
  if (part >= p.rows * heads || (p.most_steps != 0 && *p.lists.row_by_row != 0)) return;
  const auto* stats = reinterpret_cast<const float2*>(p.partials.stats);
  const int64_t stride = p.rows * heads;

  float largest = -INFINITY;
  bool sees = true;
  for (int split = 0; split < 1 << p.lists.split_shift; ++split) {
    const float2 of_split = stats[split * stride + part];
    sees = of_split.y != -1.0f;
    largest = fmaxf(largest, of_split.x);
  }
  float normaliser = 0.0f;
  float2 sums[kPairs] = {};
  for (int split = 0; sees && split < 1 << p.lists.split_shift; ++split) {
    const float2 of_split = stats[split * stride + part];
    // A split in which the row sees no token has no say, whatever its sums are.
    if (of_split.y == 0.0f) continue;
    const float weight = of_split.x == largest ? 1.0f : exp2f(of_split.x - largest);
    normaliser += weight * of_split.y;
    const auto* from =
        reinterpret_cast<const float2*>(p.partials.sums + (split * stride + part) * kDim);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 pair = from[32 * i + lane];
      sums[i].x += weight * pair.x;
      sums[i].y += weight * pair.y;
    }
  }
  const float output_scale = p.output_scale * (p.v_scale != nullptr ? *p.v_scale : 1.0f);
  const float factor = sees ? output_scale / normaliser : 0.0f;
  const int64_t row = part / heads, head = part % heads;
  const int64_t to = row * p.stride_output_row + head * p.stride_output_head + 2 * lane;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float x = sums[i].x * factor, y = sums[i].y * factor;
    if (p.output_is_f32 != 0) {
      *reinterpret_cast<float2*>(static_cast<float*>(p.output) + to + 64 * i) = make_float2(x, y);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.output) + to + 64 * i) =
          p.query_is_f16 != 0 ? device::pack(__half(), x, y) : device::pack(__nv_bfloat16(), x, y);
    }
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[row * p.stride_lse_row + head * p.stride_lse_head] =
        sees ? lse_of(largest, normaliser) : -INFINITY;
  }
}

template <int kDim>
void launch(const UnionAttentionParams& params, void* stream) {
  const int64_t parts = params.rows * params.groups * params.heads_per_group;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid_size(parts, kMergeWarps, "merge")));
  config.blockDim = dim3(32 * kMergeWarps);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, merge<kDim>, params), "merge");
}

}  // namespace

void launch_merge(const UnionAttentionParams& params, int64_t dim, void* stream) {
  switch (dim) {
    case 64:
      return launch<64>(params, stream);
    case 128:
      return launch<128>(params, stream);
    case 192:
      return launch<192>(params, stream);
    default:
      return launch<256>(params, stream);
  }
}

}  // namespace octopage::cuda
