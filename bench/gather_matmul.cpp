#include "gather_matmul.hpp"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace octopage::bench {
namespace {

void convert(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i)
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
}

}  // namespace

int64_t gather_matmul_scratch(const GatherMatmulStep& step) {
  return step.region_count * 8 * (2 * step.dim + step.heads) + step.heads * step.dim;
}

void gather_matmul_row(const GatherMatmulStep& s, int64_t row, float* scratch, float* output) {
  const int64_t count = std::min(s.positions[row] / 8 + 1, s.region_count);
  const int64_t most = s.region_count * 8;
  float* k = scratch;
  float* v = k + most * s.dim;
  float* p = v + most * s.dim;
  float* q = p + most * s.heads;
  int64_t tokens = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = int64_t{s.regions[row * s.region_count + i]} * 8;
    const int64_t visible = std::min<int64_t>(8, s.positions[row] - first + 1);
    const int64_t block = s.table[first / s.block_size];
    const uint16_t* from = s.kv_cache + (block * s.block_size + first % s.block_size) * 2 * s.dim;
    for (int64_t t = 0; t < visible; ++t, ++tokens, from += 2 * s.dim) {
      convert(from, s.dim, k + tokens * s.dim);
      convert(from + s.dim, s.dim, v + tokens * s.dim);
    }
  }
  convert(s.query + row * s.heads * s.dim, s.heads * s.dim, q);
  const auto m = static_cast<int>(s.heads), n = static_cast<int>(tokens),
             d = static_cast<int>(s.dim);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, d, s.scale, q, d, k, d, 0.0f, p, n);
  for (int64_t h = 0; h < s.heads; ++h) {
    float* line = p + h * tokens;
    float largest = line[0];
    for (int64_t t = 1; t < tokens; ++t) largest = std::max(largest, line[t]);
    float sum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      line[t] = std::exp(line[t] - largest);
      sum += line[t];
    }
    for (int64_t t = 0; t < tokens; ++t) line[t] /= sum;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, d, n, 1.0f, p, n, v, d, 0.0f, output,
              d);
}

void square_sgemm(int64_t side, const float* a, const float* b, float* c) {
  const auto n = static_cast<int>(side);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, a, n, b, n, 0.0f, c, n);
}

void set_blas_threads(int threads) {
  openblas_set_num_threads(threads);
}
const char* blas_kernel() {
  return openblas_get_config();
}

}  // namespace octopage::bench
