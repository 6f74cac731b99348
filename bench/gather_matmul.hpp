#ifndef OCTOPAGE_BENCH_GATHER_MATMUL_HPP_
#define OCTOPAGE_BENCH_GATHER_MATMUL_HPP_

#include <cstdint>

namespace octopage::bench {

/// The straightforward way on a BLAS, for bf16 and one group: gather K and V of a row's tokens as
/// f32, S = Q K^T by sgemm, softmax, O = P V by sgemm. Every row's own region is its last entry.
struct GatherMatmulStep {
  const uint16_t* query;     // [rows, heads, dim] bf16
  const uint16_t* kv_cache;  // [blocks, 1, block_size, 2*dim] bf16
  const int32_t* table;      // [max_blocks], one request
  const int32_t* regions;    // [rows, region_count]
  const int64_t* positions;  // [rows]
  int64_t heads, dim, region_count, block_size;
  float scale;
};

/// Scratch f32 elements of one worker.
int64_t gather_matmul_scratch(const GatherMatmulStep& step);

/// One row into `output` [heads, dim] f32.
void gather_matmul_row(const GatherMatmulStep& step, int64_t row, float* scratch, float* output);

/// Side of the square sgemm, and one product of that size, C = A B.
void square_sgemm(int64_t n, const float* a, const float* b, float* c);
void set_blas_threads(int threads);
const char* blas_kernel();

}  // namespace octopage::bench

#endif  // OCTOPAGE_BENCH_GATHER_MATMUL_HPP_
