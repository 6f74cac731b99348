/* Every function of octopage.h from C11, linked against the library as a user links it: what is
 * missing from the header, or hidden in the library, fails here. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "octopage/octopage.h"

static int failures = 0;

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      ++failures;                                                                             \
      fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
              octopage_last_error());                                                         \
    }                                                                                         \
  } while (0)

#define CHECK_OK(call) CHECK((call) == OCTOPAGE_OK)

enum {
  ROWS = 2,
  DIM = 64,
  BLOCKS = 4,
  BLOCK_SIZE = 16,
  REGIONS = 2,
  TOKENS = 20,
  MAX_BLOCKS = 2,
  CACHE = BLOCKS * BLOCK_SIZE * 2 * DIM
};

/* One request whose 20 tokens lie in blocks 3 and 1. K is 0 and V of token t is t: outputs are
 * means of token numbers, and lse the logarithm of a count. The rest of the cache is NaN. */
static uint16_t query_data[ROWS * DIM];
static _Alignas(16) uint16_t cache_data[CACHE];
static _Alignas(16) uint8_t cache8_data[CACHE];
static int32_t table_data[MAX_BLOCKS] = {3, 1};
static int32_t owner_data[ROWS] = {0, 0};
static int32_t position_data[ROWS] = {18, 19};
static int64_t position64_data[ROWS] = {18, 19};
static int32_t region_data[ROWS * REGIONS] = {2, 0, 1, 2};
static float output_data[ROWS * DIM];
static float lse_data[ROWS];

static octopage_tensor query, cache, cache8, table, owners, positions, positions64, regions, output,
    lse;

static uint16_t bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static octopage_tensor tensor(const void* data, int32_t dtype, int32_t rank, int64_t a, int64_t b,
                              int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  octopage_tensor made;
  memset(&made, 0xee, sizeof made);
  CHECK_OK(octopage_tensor_init_contiguous(&made, sizeof made, data, dtype, rank, shape));
  return made;
}

static octopage_tensor no_tensor(void) {
  octopage_tensor made;
  memset(&made, 0xee, sizeof made);
  CHECK_OK(octopage_tensor_init(&made, sizeof made));
  return made;
}

static void build_step(void) {
  for (int i = 0; i < ROWS * DIM; ++i) query_data[i] = bf16(1);
  for (int i = 0; i < CACHE; ++i) {
    cache_data[i] = 0x7fc0; /* NaN */
    cache8_data[i] = 0x7f;  /* NaN */
  }
  for (int t = 0; t < TOKENS; ++t) {
    const int slot = table_data[t / BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE;
    for (int d = 0; d < DIM; ++d) {
      cache_data[slot * 2 * DIM + d] = bf16(0);
      cache_data[slot * 2 * DIM + DIM + d] = bf16((float)t);
      cache8_data[slot * 2 * DIM + d] = 0;
      cache8_data[slot * 2 * DIM + DIM + d] = 0x38; /* 1.0 */
    }
  }
  query = tensor(query_data, OCTOPAGE_BF16, 3, ROWS, 1, DIM, 0);
  cache = tensor(cache_data, OCTOPAGE_BF16, 4, BLOCKS, 1, BLOCK_SIZE, 2 * DIM);
  cache8 = tensor(cache8_data, OCTOPAGE_F8_E4M3FN, 4, BLOCKS, 1, BLOCK_SIZE, 2 * DIM);
  table = tensor(table_data, OCTOPAGE_I32, 2, 1, MAX_BLOCKS, 0, 0);
  owners = tensor(owner_data, OCTOPAGE_I32, 1, ROWS, 0, 0, 0);
  positions = tensor(position_data, OCTOPAGE_I32, 1, ROWS, 0, 0, 0);
  positions64 = tensor(position64_data, OCTOPAGE_I64, 1, ROWS, 0, 0, 0);
  regions = tensor(region_data, OCTOPAGE_I32, 2, ROWS, REGIONS, 0, 0);
  output = tensor(output_data, OCTOPAGE_F32, 3, ROWS, 1, DIM, 0);
  lse = tensor(lse_data, OCTOPAGE_F32, 2, ROWS, 1, 0, 0);
}

static octopage_sparse_prefill_args step_args(void) {
  octopage_sparse_prefill_args args;
  memset(&args, 0xee, sizeof args);
  CHECK_OK(octopage_sparse_prefill_args_init(&args, sizeof args));
  CHECK(args.lse == NULL && args.k_scale == NULL && args.scale == 1.0f);
  args.query = &query;
  args.kv_cache = &cache;
  args.block_table = &table;
  args.owners = &owners;
  args.positions = &positions;
  args.regions = &regions;
  args.output = &output;
  args.lse = &lse;
  return args;
}

static octopage_options default_options(void) {
  octopage_options options;
  memset(&options, 0xee, sizeof options);
  CHECK_OK(octopage_options_init(&options, sizeof options));
  return options;
}

/* Row 0 sees tokens 16 .. 18 and 0 .. 7, row 1 tokens 8 .. 19. */
static int results_hold(void) {
  const float means[ROWS] = {79.0f / 11, 162.0f / 12};
  const float counts[ROWS] = {11, 12};
  for (int row = 0; row < ROWS; ++row) {
    if (!(fabsf(lse_data[row] - logf(counts[row])) <= 1e-5f)) return 0;
    for (int d = 0; d < DIM; ++d) {
      if (!(fabsf(output_data[row * DIM + d] - means[row]) <= 1e-4f)) return 0;
    }
  }
  return 1;
}

static void poison_results(void) {
  for (int i = 0; i < ROWS * DIM; ++i) output_data[i] = NAN;
  for (int i = 0; i < ROWS; ++i) lse_data[i] = NAN;
}

static void test_version_and_status(void) {
  CHECK(octopage_version_number() ==
        OCTOPAGE_VERSION_MAJOR * 10000 + OCTOPAGE_VERSION_MINOR * 100 + OCTOPAGE_VERSION_PATCH);
  CHECK(strcmp(octopage_version_string(), OCTOPAGE_VERSION_STRING) == 0);
  CHECK(strcmp(octopage_status_name(OCTOPAGE_OK), "ok") == 0);
  CHECK(strcmp(octopage_status_name(OCTOPAGE_INTERNAL), "internal") == 0);
  CHECK(strcmp(octopage_status_name(77), "unknown") == 0);
  CHECK(strcmp(octopage_last_error(), "") == 0);
}

static void test_tensors(void) {
  const octopage_tensor none = no_tensor();
  CHECK(none.struct_size == sizeof none && none.rank == 0 && none.data == NULL);
  CHECK(none.dtype == OCTOPAGE_F32 && none.device_type == OCTOPAGE_CPU && none.device_index == 0);
  CHECK(cache.struct_size == sizeof cache && cache.rank == 4 && cache.data == cache_data);
  CHECK(cache.shape[0] == BLOCKS && cache.shape[3] == 2 * DIM);
  CHECK(cache.strides[0] == BLOCK_SIZE * 2 * DIM && cache.strides[3] == 1);
}

/* Runs the indices last to first on one thread and counts them. */
static int64_t executed = 0;
static int32_t serial_concurrency(void* user) {
  (void)user;
  return 1;
}
static void serial_for(void* user, int64_t count, octopage_body body, void* context) {
  for (int64_t i = count; i-- > 0;) body(context, i, 0);
  *(int64_t*)user += count;
}

static void test_sparse_prefill(void) {
  octopage_sparse_prefill_args args = step_args();
  poison_results();
  CHECK_OK(octopage_sparse_prefill(&args, NULL));
  CHECK(results_hold());

  octopage_options options = default_options();
  CHECK(options.backend == NULL && options.strict == 0 && options.executor == NULL);
  size_t bytes = 12345;
  options.threads = 1;
  CHECK_OK(octopage_sparse_prefill_workspace_size(&args, &options, &bytes));
  CHECK(bytes != 12345 && bytes < ((size_t)1 << 30));
  void* workspace = malloc(bytes + 1);
  CHECK(workspace != NULL);
  options.workspace = workspace;
  options.workspace_bytes = bytes;
  options.strict = 1;
  options.batch_invariant = 1;
  poison_results();
  CHECK_OK(octopage_sparse_prefill(&args, &options));
  CHECK(results_hold());
  free(workspace);

  octopage_executor executor;
  memset(&executor, 0xee, sizeof executor);
  CHECK_OK(octopage_executor_init(&executor, sizeof executor));
  CHECK(executor.user == NULL);
  executor.user = &executed;
  executor.concurrency = serial_concurrency;
  executor.parallel_for = serial_for;
  options = default_options();
  options.executor = &executor;
  int32_t status = 0;
  options.status = &status;
  region_data[0] = 99; /* past the row: skipped, and told */
  CHECK_OK(octopage_sparse_prefill(&args, &options));
  CHECK(status == OCTOPAGE_STATUS_REGION);
  CHECK(fabsf(output_data[0] - 3.5f) <= 1e-4f);
  options.strict = 1;
  CHECK(octopage_sparse_prefill(&args, &options) == OCTOPAGE_INVALID_ENTRY);
  CHECK(strstr(octopage_last_error(), "99") != NULL);
  region_data[0] = 2;
  poison_results();
  CHECK_OK(octopage_sparse_prefill(&args, &options));
  CHECK(results_hold());
  CHECK(executed > 0);

  const float v_factor = 3.0f;
  octopage_scale k_scale, v_scale;
  memset(&k_scale, 0xee, sizeof k_scale);
  CHECK_OK(octopage_scale_init(&k_scale, sizeof k_scale));
  CHECK_OK(octopage_scale_init(&v_scale, sizeof v_scale));
  CHECK(k_scale.kind == OCTOPAGE_SCALE_ABSENT && k_scale.value == 1.0f && k_scale.pointer == NULL);
  k_scale.kind = OCTOPAGE_SCALE_VALUE;
  v_scale.kind = OCTOPAGE_SCALE_POINTER;
  v_scale.pointer = &v_factor;
  args.kv_cache = &cache8;
  CHECK(octopage_sparse_prefill(&args, NULL) == OCTOPAGE_INVALID_ARGUMENT);
  args.k_scale = &k_scale;
  args.v_scale = &v_scale;
  CHECK_OK(octopage_sparse_prefill(&args, NULL));
  CHECK(fabsf(output_data[0] - 3.0f) <= 1e-4f);
}

static void test_rows(void) {
  const int32_t starts[3] = {0, 2, 3};
  const int32_t lens[2] = {10, 4};
  int32_t got_owners[3] = {-7, -7, -7};
  int64_t got_positions[3] = {-7, -7, -7};
  CHECK(octopage_rows_from_query_start_loc(starts, lens, 2, 2, got_owners, got_positions) ==
        OCTOPAGE_INVALID_ARGUMENT);
  CHECK(got_owners[0] == -7 && got_positions[0] == -7);
  CHECK_OK(octopage_rows_from_query_start_loc(starts, lens, 2, 3, got_owners, got_positions));
  CHECK(got_owners[0] == 0 && got_owners[1] == 0 && got_owners[2] == 1);
  CHECK(got_positions[0] == 8 && got_positions[1] == 9 && got_positions[2] == 3);
  CHECK_OK(octopage_rows_from_query_start_loc(starts, NULL, 0, 0, NULL, NULL));
}

static void test_backends(void) {
  const octopage_sparse_prefill_args args = step_args();
  int32_t count = 0;
  CHECK_OK(octopage_backend_count(&count));
  CHECK(count >= 2);
  int32_t last_priority = INT32_MAX;
  int found_reference = 0;
  octopage_backend_info info;
  memset(&info, 0xee, sizeof info);
  CHECK_OK(octopage_backend_info_init(&info, sizeof info));
  for (int32_t i = 0; i < count; ++i) {
    CHECK_OK(octopage_backend_describe(i, &info));
    CHECK(info.name[0] != '\0' && info.description[0] != '\0');
    CHECK((info.available != 0) == (info.reason[0] == '\0'));
    CHECK(info.priority <= last_priority);
    last_priority = info.priority;
    if (strcmp(info.name, "reference") == 0) {
      found_reference = info.available == 1 && info.device_type == OCTOPAGE_CPU;
    }
  }
  CHECK(found_reference);
  CHECK(octopage_backend_describe(count, &info) == OCTOPAGE_INVALID_ARGUMENT);

  int32_t supported = -1;
  char reason[8] = "1234567";
  CHECK_OK(octopage_backend_supports("reference", &args, NULL, &supported, reason, sizeof reason));
  CHECK(supported == 1 && strcmp(reason, "") == 0);
  CHECK_OK(octopage_backend_supports("cuda-sm80", &args, NULL, &supported, reason, sizeof reason));
  CHECK(supported == 0 && strlen(reason) == sizeof reason - 1);
  CHECK_OK(octopage_backend_supports("cuda-sm80", &args, NULL, &supported, NULL, 0));

  octopage_options options = default_options();
  options.backend = "reference";
  char name[32] = "";
  CHECK_OK(octopage_choose_backend(&args, &options, name, sizeof name));
  CHECK(strcmp(name, "reference") == 0);
  CHECK(octopage_choose_backend(&args, &options, name, strlen("reference")) ==
        OCTOPAGE_INVALID_ARGUMENT);
  CHECK_OK(octopage_choose_backend(&args, &options, name, strlen("reference") + 1));
}

static void test_pages_and_staging(void) {
  int64_t stride = 0;
  CHECK_OK(octopage_kv_page_stride(&cache, &stride));
  CHECK(stride == BLOCK_SIZE / 8);

  octopage_tensor k = no_tensor(), v = no_tensor();
  CHECK_OK(octopage_view_sparse_kv_pages(&cache, &k, &v));
  CHECK(k.rank == 4 && k.shape[0] == BLOCKS * 2 && k.shape[1] == 8 && k.shape[2] == 1);
  CHECK(k.shape[3] == DIM && k.strides[0] == 8 * 2 * DIM && k.data == cache_data);
  CHECK(v.data == cache_data + DIM && v.dtype == OCTOPAGE_BF16);

  int32_t indptr[ROWS + 1], last_page_len[ROWS];
  CHECK_OK(octopage_compact_page_metadata(position64_data, ROWS, REGIONS, indptr, last_page_len));
  CHECK(indptr[0] == 0 && indptr[1] == 2 && indptr[2] == 4);
  CHECK(last_page_len[0] == 3 && last_page_len[1] == 4);

  const int64_t lengths[1] = {TOKENS};
  int64_t staged = 0;
  CHECK_OK(octopage_staged_block_count(lengths, 1, BLOCK_SIZE, &staged));
  CHECK(staged == 2);
  int32_t block_data[2], staged_table_data[MAX_BLOCKS];
  octopage_tensor blocks = tensor(block_data, OCTOPAGE_I32, 1, 2, 0, 0, 0);
  octopage_tensor staged_table = tensor(staged_table_data, OCTOPAGE_I32, 2, 1, MAX_BLOCKS, 0, 0);
  CHECK_OK(octopage_plan_staged_prefill_pages(&table, lengths, 1, BLOCK_SIZE, &blocks,
                                              &staged_table, NULL));
  CHECK(block_data[0] == 3 && block_data[1] == 1);
  CHECK(staged_table_data[0] == 0 && staged_table_data[1] == 1);

  static uint16_t copy_data[2 * BLOCK_SIZE * 2 * DIM];
  octopage_tensor copy = tensor(copy_data, OCTOPAGE_BF16, 4, 2, 1, BLOCK_SIZE, 2 * DIM);
  CHECK_OK(octopage_stage_prefill_pages(&cache, &blocks, &copy, NULL, NULL, NULL));
  CHECK(memcmp(copy_data, cache_data + 3 * BLOCK_SIZE * 2 * DIM, BLOCK_SIZE * 2 * DIM * 2) == 0);

  int32_t page_data[4] = {-9, -9, -9, -9};
  octopage_tensor pages = tensor(page_data, OCTOPAGE_I32, 1, 4, 0, 0, 0);
  octopage_tensor ranges = tensor(indptr, OCTOPAGE_I32, 1, ROWS + 1, 0, 0, 0);
  octopage_fill_prefill_pages_args fill;
  memset(&fill, 0xee, sizeof fill);
  CHECK_OK(octopage_fill_prefill_pages_args_init(&fill, sizeof fill));
  CHECK(fill.blocks == -1 && fill.positions == NULL && fill.query == NULL);
  fill.regions = &regions;
  fill.block_table = &table;
  fill.owners = &owners;
  fill.indptr = &ranges;
  fill.pages = &pages;
  fill.positions = &positions64;
  fill.block_size = BLOCK_SIZE;
  fill.page_stride = stride;
  fill.blocks = BLOCKS;
  CHECK_OK(octopage_fill_prefill_pages(&fill, NULL));
  /* Regions {2, 0} and {1, 2}; the own region 2 goes last: pages 3*2+0, 1*2+0 and 3*2+1, 1*2+0. */
  CHECK(page_data[0] == 6 && page_data[1] == 2 && page_data[2] == 7 && page_data[3] == 2);
}

static octopage_prefill_plan_args plan_args(void) {
  octopage_prefill_plan_args args;
  memset(&args, 0xee, sizeof args);
  CHECK_OK(octopage_prefill_plan_args_init(&args, sizeof args));
  CHECK(args.contiguous_query == 1 && args.scale == 1.0f && args.dtype == OCTOPAGE_BF16);
  args.query_shape[0] = ROWS;
  args.query_shape[1] = 1;
  args.query_shape[2] = DIM;
  args.positions = position64_data;
  args.region_count = REGIONS;
  args.block_size = BLOCK_SIZE;
  return args;
}

/* The indexer writes the pages itself; the query stays where it is. */
static void test_plan_with_metadata(void) {
  octopage_prefill* prefill = NULL;
  CHECK_OK(octopage_prefill_create(NULL, &prefill));
  CHECK(prefill != NULL);
  octopage_tensor pages = no_tensor(), indptr = no_tensor(), own = no_tensor(), pos = no_tensor();
  octopage_tensor seen_table = no_tensor();
  CHECK_OK(octopage_prefill_pages(prefill, &pages));
  CHECK(pages.rank == 0);
  CHECK(octopage_prefill_fixup_positions(prefill, &positions, NULL) == OCTOPAGE_WRONG_STATE);
  CHECK(strstr(octopage_last_error(), "plan") != NULL);

  octopage_prefill_plan_args args = plan_args();
  const int64_t bounds[ROWS] = {19, 19};
  args.positions = bounds;
  CHECK_OK(octopage_prefill_plan(prefill, &args, NULL));
  CHECK_OK(octopage_prefill_fixup_positions(prefill, &positions, NULL));

  octopage_page_metadata metadata;
  memset(&metadata, 0xee, sizeof metadata);
  CHECK_OK(octopage_page_metadata_init(&metadata, sizeof metadata));
  CHECK(metadata.pages == NULL);
  metadata.owners = &own;
  metadata.block_table = &seen_table;
  metadata.pages = &pages;
  metadata.indptr = &indptr;
  metadata.positions = &pos;
  int32_t available = -1;
  CHECK_OK(
      octopage_prefill_page_metadata(prefill, &table, &owners, 2, 0, -1, &metadata, &available));
  CHECK(available == 1 && metadata.block_size == BLOCK_SIZE && metadata.page_stride == 2);
  CHECK(own.data == owner_data && seen_table.data == table_data);
  CHECK(indptr.shape[0] == ROWS + 1 && pages.shape[0] == 4);
  CHECK(pos.dtype == OCTOPAGE_I64 && pos.shape[0] == ROWS);
  CHECK(((const int64_t*)pos.data)[0] == 18 && ((const int64_t*)pos.data)[1] == 19);
  const int32_t wanted[4] = {6, 2, 7, 2};
  CHECK(((const int32_t*)indptr.data)[2] == 4);
  memcpy(pages.data, wanted, sizeof wanted);

  size_t bytes = 12345;
  CHECK_OK(octopage_prefill_finish_workspace_size(prefill, OCTOPAGE_BF16, NULL, &bytes));
  CHECK(bytes != 12345);
  poison_results();
  CHECK_OK(octopage_prefill_finish(prefill, &query, &cache, &output, &lse, NULL, NULL, NULL));
  CHECK(results_hold());
  octopage_prefill_destroy(prefill);
}

/* The plan owns a copy of the query, filled in chunks; workspace is the caller's. */
static void test_plan_with_chunks(void) {
  static uint8_t workspace_data[8 << 20];
  octopage_tensor workspace =
      tensor(workspace_data, OCTOPAGE_U8, 1, (int64_t)sizeof workspace_data, 0, 0, 0);
  octopage_prefill* prefill = NULL;
  CHECK_OK(octopage_prefill_create(&workspace, &prefill));
  octopage_prefill_plan_args args = plan_args();
  args.contiguous_query = 0;
  octopage_options options = default_options();
  options.threads = 1;
  CHECK_OK(octopage_prefill_plan(prefill, &args, &options));

  octopage_page_metadata metadata;
  CHECK_OK(octopage_page_metadata_init(&metadata, sizeof metadata));
  int32_t available = -1;
  CHECK_OK(
      octopage_prefill_page_metadata(prefill, &table, &owners, 2, 0, -1, &metadata, &available));
  CHECK(available == 0);

  for (int row = ROWS - 1; row >= 0; --row) {
    octopage_tensor query_row = tensor(query_data + row * DIM, OCTOPAGE_BF16, 3, 1, 1, DIM, 0);
    octopage_tensor region_row =
        tensor(region_data + row * REGIONS, OCTOPAGE_I32, 2, 1, REGIONS, 0, 0);
    CHECK_OK(octopage_prefill_prepare_chunk(prefill, row, &query_row, &cache, &region_row, &table,
                                            &owners, &options));
  }
  octopage_tensor seen = no_tensor();
  CHECK_OK(octopage_prefill_pages(prefill, &seen));
  CHECK(((const int32_t*)seen.data)[0] == 6 && ((const int32_t*)seen.data)[2] == 7);
  CHECK_OK(octopage_prefill_indptr(prefill, &seen));
  CHECK(seen.shape[0] == ROWS + 1 && ((const int32_t*)seen.data)[2] == 4);
  CHECK_OK(octopage_prefill_last_page_len(prefill, &seen));
  CHECK(seen.shape[0] == ROWS && ((const int32_t*)seen.data)[0] == 3);
  CHECK_OK(octopage_prefill_positions(prefill, &seen));
  CHECK(((const int64_t*)seen.data)[1] == 19);
  CHECK_OK(octopage_prefill_query_buffer(prefill, &seen));
  CHECK(seen.rank == 3 && memcmp(seen.data, query_data, sizeof query_data) == 0);

  poison_results();
  CHECK_OK(octopage_prefill_finish(prefill, NULL, &cache, &output, &lse, NULL, NULL, &options));
  CHECK(results_hold());
  octopage_prefill_destroy(prefill);
  octopage_prefill_destroy(NULL);
}

int main(void) {
  test_version_and_status();
  build_step();
  test_tensors();
  test_sparse_prefill();
  test_rows();
  test_backends();
  test_pages_and_staging();
  test_plan_with_metadata();
  test_plan_with_chunks();
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
