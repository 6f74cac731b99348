/* first_program.cpp through the C API: two query tokens of one request attend to two regions each
 * of a paged cache. All keys are 0 and V of token t is t, so the output is the mean of the visible
 * token numbers, and lse the logarithm of their count. */

#include <stdio.h>
#include <string.h>

#include "octopage/octopage.h"

enum { ROWS = 2, HEADS = 1, DIM = 64, BLOCKS = 4, BLOCK_SIZE = 16, TOKENS = 20 };

static uint16_t query[ROWS * HEADS * DIM];
static _Alignas(16) uint16_t kv_cache[BLOCKS * BLOCK_SIZE * 2 * DIM];
static float output[ROWS * HEADS * DIM], lse[ROWS * HEADS];

/* The upper half of a float; exact for small whole numbers. */
static uint16_t bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static octopage_tensor tensor(const void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  octopage_tensor made;
  octopage_tensor_init_contiguous(&made, sizeof made, data, dtype, rank, shape);
  return made;
}

int main(void) {
  /* The request's 20 tokens lie in physical blocks 3 and 1; nothing else of the cache is read. */
  const int32_t table[] = {3, 1}, owners[] = {0, 0}, positions[] = {18, 19};
  const int32_t regions[] = {2, 0,  /* row 0: tokens 16 .. 18 and 0 .. 7 */
                             1, 2}; /* row 1: tokens 8 .. 15 and 16 .. 19 */
  for (int t = 0; t < TOKENS; ++t) {
    const int slot = table[t / BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE;
    for (int d = 0; d < DIM; ++d) kv_cache[slot * 2 * DIM + DIM + d] = bf16((float)t);
  }
  for (int i = 0; i < ROWS * HEADS * DIM; ++i) query[i] = bf16(1);

  const octopage_tensor q = tensor(query, OCTOPAGE_BF16, 3, (const int64_t[]){ROWS, HEADS, DIM}),
                        kv = tensor(kv_cache, OCTOPAGE_BF16, 4,
                                    (const int64_t[]){BLOCKS, 1, BLOCK_SIZE, 2 * DIM}),
                        tb = tensor(table, OCTOPAGE_I32, 2, (const int64_t[]){1, 2}),
                        own = tensor(owners, OCTOPAGE_I32, 1, (const int64_t[]){ROWS}),
                        pos = tensor(positions, OCTOPAGE_I32, 1, (const int64_t[]){ROWS}),
                        reg = tensor(regions, OCTOPAGE_I32, 2, (const int64_t[]){ROWS, 2}),
                        out = tensor(output, OCTOPAGE_F32, 3, (const int64_t[]){ROWS, HEADS, DIM}),
                        log_sum = tensor(lse, OCTOPAGE_F32, 2, (const int64_t[]){ROWS, HEADS});
  octopage_sparse_prefill_args args;
  octopage_sparse_prefill_args_init(&args, sizeof args);
  args.query = &q;
  args.kv_cache = &kv;
  args.block_table = &tb;
  args.owners = &own;
  args.positions = &pos;
  args.regions = &reg;
  args.output = &out;
  args.lse = &log_sum;
  if (octopage_sparse_prefill(&args, NULL) != OCTOPAGE_OK) {
    fprintf(stderr, "octopage: %s\n", octopage_last_error());
    return 1;
  }
  for (int row = 0; row < ROWS; ++row) {
    printf("row %d: output %.4f %.4f ... lse %.4f\n", row, (double)output[row * DIM],
           (double)output[row * DIM + 1], (double)lse[row]);
  }
  return 0;
}
