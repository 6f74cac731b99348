// An indexer that writes pages itself: for every row it picks the regions with the highest scores
// and emits their pages into the plan's list, without a selection tensor and without
// fill_prefill_pages. The result is compared with sparse_prefill on the same selections.

#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "octopage/device/page_writer.cuh"
#include "octopage/octopage.hpp"

namespace {

constexpr int64_t kRows = 40, kHeads = 16, kDim = 192, kBlockSize = 64, kContext = 1024,
                  kRegions = 24;
constexpr int64_t kBlocks = kContext / kBlockSize;
constexpr int64_t kLogicalRegions = kContext / 8;

void check(cudaError_t result) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(result));
  std::exit(1);
}

template <typename T>
T* to_device(const std::vector<T>& host) {
  T* data = nullptr;
  check(cudaMalloc(&data, host.size() * sizeof(T)));
  check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

/// One CTA per row. `scores` [rows, logical regions]; `chosen` [rows, region_count] is kept only so
/// that the example can check itself.
__global__ void pick_regions(const octopage::device::PageWriter writer, const float* scores,
                             int32_t* chosen) {
  const octopage::device::RowPages row = writer.row(blockIdx.x);
  const float* line = scores + blockIdx.x * kLogicalRegions;
  const auto own = static_cast<int32_t>(row.own_region());
  // The rank of a region among those before the own one is its slot. (A real indexer is faster.)
  for (int32_t region = threadIdx.x; region < own; region += blockDim.x) {
    int32_t rank = 0;
    for (int32_t other = 0; other < own; ++other) {
      rank += line[other] > line[region] || (line[other] == line[region] && other < region);
    }
    if (rank < row.count() - 1) {
      row.write(rank, region);
      chosen[blockIdx.x * kRegions + rank] = region;
    }
  }
  if (threadIdx.x == 0) {
    row.write_own();
    chosen[blockIdx.x * kRegions + row.count() - 1] = own;
  }
}

float next(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  using octopage::DType;
  using octopage::TensorView;
  const octopage::Device gpu = {octopage::DeviceType::cuda, 0};
  uint32_t seed = 7;
  std::vector<__nv_bfloat16> query(kRows * kHeads * kDim), cache(kBlocks * kBlockSize * 2 * kDim);
  for (auto& value : query) value = __float2bfloat16(next(seed));
  for (auto& value : cache) value = __float2bfloat16(next(seed));
  std::vector<int32_t> table(kBlocks), owners(kRows, 0);
  for (int64_t b = 0; b < kBlocks; ++b) table[b] = static_cast<int32_t>((b * 5 + 3) % kBlocks);
  std::vector<int64_t> positions(kRows);
  for (int64_t r = 0; r < kRows; ++r) positions[r] = kContext - kRows + r;
  std::vector<float> scores(kRows * kLogicalRegions);
  for (auto& value : scores) value = next(seed);

  const auto on_gpu = [&](auto* data, DType dtype, std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(data, dtype, shape, gpu);
  };
  octopage::SparsePrefillArgs args;
  args.query = on_gpu(to_device(query), DType::bf16, {kRows, kHeads, kDim});
  args.kv_cache = on_gpu(to_device(cache), DType::bf16, {kBlocks, 1, kBlockSize, 2 * kDim});
  args.block_table = on_gpu(to_device(table), DType::i32, {1, kBlocks});
  args.owners = on_gpu(to_device(owners), DType::i32, {kRows});
  args.positions = on_gpu(to_device(positions), DType::i64, {kRows});
  std::vector<float> planned(kRows * kHeads * kDim), direct(planned.size());
  args.output = on_gpu(to_device(planned), DType::f32, {kRows, kHeads, kDim});
  args.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  int32_t* status = to_device(std::vector<int32_t>{0});
  int32_t* chosen = to_device(std::vector<int32_t>(kRows * kRegions, -1));

  octopage::CompactPagedPrefill plan;
  plan.plan({.query_shape = {kRows, kHeads, kDim},
             .dtype = DType::bf16,
             .device = gpu,
             .positions = positions,
             .region_count = kRegions,
             .scale = args.scale,
             .block_size = kBlockSize});
  const auto metadata =
      plan.page_metadata(args.block_table, args.owners, octopage::kv_page_stride(args.kv_cache));
  pick_regions<<<kRows, 128>>>(octopage::device::make_page_writer(*metadata, kBlocks, status),
                               to_device(scores), chosen);
  check(cudaGetLastError());
  plan.finish(args.query, args.kv_cache, args.output);
  check(cudaMemcpy(planned.data(), args.output.data, planned.size() * sizeof(float),
                   cudaMemcpyDeviceToHost));

  args.regions = on_gpu(chosen, DType::i32, {kRows, kRegions});
  octopage::sparse_prefill(args);
  check(cudaMemcpy(direct.data(), args.output.data, direct.size() * sizeof(float),
                   cudaMemcpyDeviceToHost));
  int32_t bits = 0;
  check(cudaMemcpy(&bits, status, sizeof(bits), cudaMemcpyDeviceToHost));
  double difference = 0, norm = 0;
  for (size_t i = 0; i < planned.size(); ++i) {
    difference += std::pow(double{planned[i]} - direct[i], 2);
    norm += std::pow(double{direct[i]}, 2);
  }
  std::printf("planned against direct: relative difference %.2e, status %d\n",
              std::sqrt(difference / norm), bits);
  return norm > 0 && difference <= 1e-12 * norm && bits == 0 ? 0 : 1;
}
