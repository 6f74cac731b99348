/* octopage for C: sparse prefill attention over a paged KV cache.
 *
 * Conventions that hold for every function here:
 *
 *   - A call returns OCTOPAGE_OK, or the reason why it failed; octopage_last_error() then says
 *     which argument broke which rule with which value. A call that is refused has left what it
 *     writes through its pointers as it was; after OCTOPAGE_DEVICE_ERROR, OCTOPAGE_OUT_OF_MEMORY or
 *     OCTOPAGE_INTERNAL tensors may be half written. Nothing is ever thrown, printed or aborted.
 *   - Pointers must not be null unless "may be null" is said; a null one is
 *     OCTOPAGE_INVALID_ARGUMENT and named in the message.
 *   - Every struct begins with `struct_size`, which the struct's `_init` function sets. A size
 *     below the one that the library knows is an error; a larger one, of a newer header, is taken,
 *     and the fields that the library does not know are ignored. Structs refer to each other by
 *     pointer, so that each can grow without moving the fields of another.
 *   - Strides are in elements, what is called `_bytes` is in bytes, ranges are half-open. A region
 *     and a page have eight tokens.
 *   - Nothing is kept beyond the call that takes it, except a plan's workspace (see
 *     octopage_prefill_create). Calls are safe from several threads; one octopage_prefill is for
 *     one thread at a time.
 */
#ifndef OCTOPAGE_OCTOPAGE_H_
#define OCTOPAGE_OCTOPAGE_H_

#include <stddef.h>
#include <stdint.h>

#include "octopage/export.h"
#include "octopage/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- Status and version ---------------------------------------------------------------------- */

/* The outcome of a call. */
typedef enum octopage_status {
  OCTOPAGE_OK = 0,
  OCTOPAGE_INVALID_ARGUMENT = 1, /* an argument breaks a rule */
  OCTOPAGE_UNSUPPORTED = 2,      /* legal, but no backend (or not the forced one) serves it */
  OCTOPAGE_INVALID_ENTRY = 3,    /* a strict call met an invalid region, owner or table entry */
  OCTOPAGE_WRONG_STATE = 4,      /* a call out of order, such as finish before plan */
  OCTOPAGE_OUT_OF_MEMORY = 5,    /* the library could not allocate memory */
  OCTOPAGE_DEVICE_ERROR = 6,     /* a device runtime call failed */
  OCTOPAGE_BAD_FILE = 7,         /* a step file breaks the format */
  OCTOPAGE_INTERNAL = 8          /* a broken invariant of the library: please report it */
} octopage_status;

/* The version of the library that is linked, major * 10000 + minor * 100 + patch. The header's own
 * is in OCTOPAGE_VERSION_MAJOR, _MINOR and _PATCH. */
OCTOPAGE_API int32_t octopage_version_number(void);

/* The same as text, "major.minor.patch"; a constant. */
OCTOPAGE_API const char* octopage_version_string(void);

/* "ok", "invalid_argument", ...; "unknown" for a value that is no octopage_status. A constant. */
OCTOPAGE_API const char* octopage_status_name(int32_t status);

/* The message of the last call of this thread that failed, "" before the first. Calls that succeed
 * leave it alone. Never null; valid until the thread's next call that fails. */
OCTOPAGE_API const char* octopage_last_error(void);

/* --- Tensors ---------------------------------------------------------------------------------- */

/* Element types. u8 given as a cache means the codes of f8_e4m3fn. */
enum octopage_dtype {
  OCTOPAGE_BF16 = 0,
  OCTOPAGE_F16 = 1,
  OCTOPAGE_F32 = 2,
  OCTOPAGE_F8_E4M3FN = 3,
  OCTOPAGE_U8 = 4,
  OCTOPAGE_I32 = 5,
  OCTOPAGE_I64 = 6
};

enum octopage_device_type { OCTOPAGE_CPU = 0, OCTOPAGE_CUDA = 1 };

#define OCTOPAGE_MAX_RANK 4

/* A strided array that somebody else owns. Inputs are never written through. */
typedef struct octopage_tensor {
  size_t struct_size;                 /* sizeof(octopage_tensor), in bytes */
  void* data;                         /* first element; may be null where some extent is 0 */
  int32_t dtype;                      /* an octopage_dtype */
  int32_t device_type;                /* an octopage_device_type */
  int32_t device_index;               /* number of the device; 0 on the CPU */
  int32_t rank;                       /* dimensions in use, 0 .. 4; 0 means "no tensor" */
  int64_t shape[OCTOPAGE_MAX_RANK];   /* [rank] extents, none negative */
  int64_t strides[OCTOPAGE_MAX_RANK]; /* [rank] in elements; meaningless where the extent is 1 */
} octopage_tensor;

/* Makes `tensor` "no tensor": rank 0, f32, on the CPU. `struct_size` is sizeof(octopage_tensor). */
OCTOPAGE_API octopage_status octopage_tensor_init(octopage_tensor* tensor, size_t struct_size);

/* Makes `tensor` a row-major CPU tensor without gaps. `shape` is [rank], rank 0 .. 4; `data` may be
 * null where some extent is 0 or for a size query. Set the device fields afterwards for device
 * memory. Fails for an unknown dtype, a bad rank, a negative extent or a size beyond 64 bits. */
OCTOPAGE_API octopage_status octopage_tensor_init_contiguous(octopage_tensor* tensor,
                                                             size_t struct_size, const void* data,
                                                             int32_t dtype, int32_t rank,
                                                             const int64_t* shape);

/* --- Options ---------------------------------------------------------------------------------- */

/* Bits that calls OR into `octopage_options.status`; only the caller clears them. */
enum octopage_status_bit {
  OCTOPAGE_STATUS_REGION = 1, /* a region that is negative, past the row, or the own one missing */
  OCTOPAGE_STATUS_OWNER = 2,  /* an owner outside 0 .. requests-1 */
  OCTOPAGE_STATUS_TABLE = 4,  /* a column past the table, or a block outside 0 .. blocks-1 */
  OCTOPAGE_STATUS_RANGE_CUT = 8 /* an exact range longer than the planned one */
};

/* One piece of a parallel loop. `context` is handed through; `worker` is below the concurrency. */
typedef void (*octopage_body)(void* context, int64_t index, int32_t worker);

/* Runs the library's parallel loops on threads of the caller's choosing (CPU). */
typedef struct octopage_executor {
  size_t struct_size; /* sizeof(octopage_executor), in bytes */
  void* user;         /* handed to both functions; may be null */
  /* How many calls of a body may run at the same time; at least 1 and constant. */
  int32_t (*concurrency)(void* user);
  /* Calls body(context, index, worker) once for every index in [0, count), in any order, and
   * returns when all have returned. `worker` is in [0, concurrency), and no two calls that run at
   * the same time share it. The body never throws. */
  void (*parallel_for)(void* user, int64_t count, octopage_body body, void* context);
} octopage_executor;

/* Sets struct_size, and everything else to null. */
OCTOPAGE_API octopage_status octopage_executor_init(octopage_executor* executor,
                                                    size_t struct_size);

/* How to run a call. Where a function takes options, null means the defaults. */
typedef struct octopage_options {
  size_t struct_size; /* sizeof(octopage_options), in bytes */
  /* Backend by name; null or "": the environment variable OCTOPAGE_BACKEND, or else by priority.
   * A named backend that cannot serve the call is an error, never replaced. May be null. */
  const char* backend;
  /* [1] i32 on the tensors' device; may be null. Invalid entries OR their octopage_status_bit in.
   */
  int32_t* status;
  const octopage_executor* executor; /* CPU: runs the loops; may be null (built-in threads) */
  void* stream;                      /* CUDA: a cudaStream_t; null is the default stream */
  /* Scratch on the tensors' device, any alignment; nothing lives in it between calls. Null lets a
   * call on the CPU allocate; a device call goes to backends that need none, which are slower on
   * Hopper, or fails where a backend that needs some is forced, and says how much. */
  void* workspace;
  size_t workspace_bytes; /* size of `workspace` */
  int32_t threads;        /* CPU threads; 0: all that the process may use; executor wins */
  /* Not 0: fail before any output is written at the first invalid or duplicate entry, named by row,
   * entry and value. 0: skip it, and raise its bit in `status`. */
  int32_t strict;
  int32_t batch_invariant; /* not 0: a row's bits do not depend on the other rows of the call */
} octopage_options;

/* Sets struct_size and the defaults: null and 0 everywhere. */
OCTOPAGE_API octopage_status octopage_options_init(octopage_options* options, size_t struct_size);

enum octopage_scale_kind {
  OCTOPAGE_SCALE_ABSENT = 0,
  OCTOPAGE_SCALE_VALUE = 1,  /* `value` holds */
  OCTOPAGE_SCALE_POINTER = 2 /* `pointer` holds */
};

/* An f8 cache's scale: the stored value times the scale is the real value. Caches of other types
 * have none, and theirs is not read. Where a function takes a scale, null means absent. */
typedef struct octopage_scale {
  size_t struct_size;   /* sizeof(octopage_scale), in bytes */
  const float* pointer; /* [1] on the cache's device, read when the call runs; else may be null */
  float value;          /* a factor without unit */
  int32_t kind;         /* an octopage_scale_kind */
} octopage_scale;

/* Sets struct_size and an absent scale (value 1, pointer null). */
OCTOPAGE_API octopage_status octopage_scale_init(octopage_scale* scale, size_t struct_size);

/* --- Attention straight from the paged cache ---------------------------------------------------
 */

/* The tensors of one prefill call, all on one device. */
typedef struct octopage_sparse_prefill_args {
  size_t struct_size;                 /* sizeof(octopage_sparse_prefill_args), in bytes */
  const octopage_tensor* query;       /* [rows, heads, dim] bf16 or f16, dim contiguous */
  const octopage_tensor* kv_cache;    /* [blocks, groups, block_size, 2*dim] bf16, f16 or f8 */
  const octopage_tensor* block_table; /* [requests, max_blocks] i32, physical block ids */
  const octopage_tensor* owners;      /* [rows] i32, the request of each row, in any order */
  const octopage_tensor* positions;   /* [rows] i32 or i64; negative: a padding row */
  /* [rows, groups, region_count] i32, or [rows, region_count] for all groups; any strides. Of a row
   * at position p the first min(p / 8 + 1, region_count) entries count. */
  const octopage_tensor* regions;
  const octopage_tensor* output; /* [rows, heads, dim], the query's type or f32; written in full */
  const octopage_tensor* lse;    /* [rows, heads] f32, natural logarithm; may be null or rank 0 */
  const octopage_scale* k_scale; /* f8 caches: required; may be null otherwise */
  const octopage_scale* v_scale; /* f8 caches: required; may be null otherwise */
  float scale;                   /* multiplies q . k before the softmax; finite */
} octopage_sparse_prefill_args;

/* Sets struct_size, scale = 1, and everything else to null. */
OCTOPAGE_API octopage_status octopage_sparse_prefill_args_init(octopage_sparse_prefill_args* args,
                                                               size_t struct_size);

/* Attention of every row to the tokens t <= position of its selected regions, all groups in one
 * call. Query head h reads group h / (heads / groups). A row that sees no token gives output 0 and
 * lse -inf. `options` may be null. Fails with invalid_argument, unsupported, invalid_entry
 * (strict), out_of_memory, device_error. */
OCTOPAGE_API octopage_status octopage_sparse_prefill(const octopage_sparse_prefill_args* args,
                                                     const octopage_options* options);

/* Bytes of workspace that octopage_sparse_prefill uses for the same arguments and options into
 * `*bytes`. The tensors' data pointers are not read and may be null. `options` may be null. */
OCTOPAGE_API octopage_status octopage_sparse_prefill_workspace_size(
    const octopage_sparse_prefill_args* args, const octopage_options* options, size_t* bytes);

/* Owners and positions of a batch as engines describe it: request i owns rows query_start_loc[i] ..
 * query_start_loc[i+1], which are the last tokens of its seq_lens[i].
 *
 * `query_start_loc` [requests+1] starts with 0 and does not fall; `seq_lens` [requests], none below
 * the request's rows, may be null where requests = 0. `owners` [rows] and `positions` [rows] are
 * written, rows = query_start_loc[requests]; both may be null where rows = 0. */
OCTOPAGE_API octopage_status octopage_rows_from_query_start_loc(const int32_t* query_start_loc,
                                                                const int32_t* seq_lens,
                                                                int64_t requests, int64_t rows,
                                                                int32_t* owners,
                                                                int64_t* positions);

/* --- Backends ----------------------------------------------------------------------------------
 */

/* What a backend is and whether this machine runs it. Text is cut to its array and always ends with
 * a zero byte. */
typedef struct octopage_backend_info {
  size_t struct_size;    /* sizeof(octopage_backend_info), in bytes */
  char name[32];         /* as given in octopage_options.backend */
  char description[256]; /* one line, with the instruction set or device in use */
  char reason[512];      /* why it is not available; "" where it is */
  int32_t device_type;   /* an octopage_device_type */
  int32_t priority;      /* the highest that supports a call serves it */
  int32_t available;     /* 1 or 0 */
} octopage_backend_info;

/* Sets struct_size, and everything else to 0. */
OCTOPAGE_API octopage_status octopage_backend_info_init(octopage_backend_info* info,
                                                        size_t struct_size);

/* How many backends octopage knows, those that this build lacks included, into `*count`. */
OCTOPAGE_API octopage_status octopage_backend_count(int32_t* count);

/* Describes backend `index`, 0 .. count-1, highest priority first. */
OCTOPAGE_API octopage_status octopage_backend_describe(int32_t index, octopage_backend_info* info);

/* Whether the named backend serves octopage_sparse_prefill with these arguments: 1 or 0 into
 * `*supported`, and in the latter case the reason, cut to `reason_bytes` with its final zero byte,
 * into `reason` ("" where supported). `reason` may be null where reason_bytes = 0, `options` may be
 * null. Data pointers are not read. Fails where the arguments break a rule of their own, or for an
 * unknown name. */
OCTOPAGE_API octopage_status octopage_backend_supports(const char* backend,
                                                       const octopage_sparse_prefill_args* args,
                                                       const octopage_options* options,
                                                       int32_t* supported, char* reason,
                                                       size_t reason_bytes);

/* The name of the backend that octopage_sparse_prefill would use into `name`, which has
 * `name_bytes` bytes; too few for the name and its final zero byte is an error. `options` may be
 * null. */
OCTOPAGE_API octopage_status octopage_choose_backend(const octopage_sparse_prefill_args* args,
                                                     const octopage_options* options, char* name,
                                                     size_t name_bytes);

/* --- Pages, compact metadata and staging -------------------------------------------------------
 */

/* Whole pages between neighbouring blocks of one group of `kv_cache` [blocks, groups, block_size,
 * 2*dim] into `*page_stride`: stride_block / (8 * stride_token), block_size / 8 with one block. */
OCTOPAGE_API octopage_status octopage_kv_page_stride(const octopage_tensor* kv_cache,
                                                     int64_t* page_stride);

/* Views a cache of one group [blocks, 1, block_size, 2*dim] as pages, gaps between blocks retained,
 * without a copy: `k` and `v` become [pages, 8, 1, dim] with strides (8*stride_token, stride_token,
 * 2*dim, 1), v starting dim elements further. Both must have been initialised. */
OCTOPAGE_API octopage_status octopage_view_sparse_kv_pages(const octopage_tensor* kv_cache,
                                                           octopage_tensor* k, octopage_tensor* v);

/* Where each row's pages stand in the flat page list: min(p / 8 + 1, region_count) pages for a row
 * at position p, none for a negative one.
 *
 * `positions` [rows], may be null where rows = 0. `indptr` [rows+1] is written, and `last_page_len`
 * [rows] (1 .. 8 tokens), which may be null where rows = 0. More than 2^31 - 1 pages in all is an
 * error. All are host memory. */
OCTOPAGE_API octopage_status octopage_compact_page_metadata(const int64_t* positions, int64_t rows,
                                                            int64_t region_count, int32_t* indptr,
                                                            int32_t* last_page_len);

/* Blocks that octopage_plan_staged_prefill_pages lists, the sum of ceil(length / block_size), into
 * `*count`. `lengths` [requests] tokens, host memory, may be null where requests = 0. */
OCTOPAGE_API octopage_status octopage_staged_block_count(const int64_t* lengths, int64_t requests,
                                                         int64_t block_size, int64_t* count);

/* Plans the staging of every live block of `block_table` [requests, max_blocks] i32, whose requests
 * hold `lengths` tokens ([requests], host memory, may be null where requests = 0). Written, on the
 * table's device: `staged_blocks` [staged] i32, the physical blocks request by request, with staged
 * from octopage_staged_block_count; `staged_table` [requests, max_blocks] i32, numbered 0, 1, 2,
 * ... and 0 past a length. `options` may be null. */
OCTOPAGE_API octopage_status octopage_plan_staged_prefill_pages(
    const octopage_tensor* block_table, const int64_t* lengths, int64_t requests,
    int64_t block_size, const octopage_tensor* staged_blocks, const octopage_tensor* staged_table,
    const octopage_options* options);

/* Gathers blocks of one group into a contiguous cache: `kv_cache` [blocks, 1, block_size, 2*dim],
 * `staged_blocks` [staged] i32, `output` [staged, 1, block_size, 2*dim] bf16 or f16. From f8, K
 * times `k_scale` and V times `v_scale`, rounded once; both are then required and may be null
 * otherwise. A block outside the cache becomes zeros and raises OCTOPAGE_STATUS_TABLE. `options`
 * may be null. */
OCTOPAGE_API octopage_status octopage_stage_prefill_pages(const octopage_tensor* kv_cache,
                                                          const octopage_tensor* staged_blocks,
                                                          const octopage_tensor* output,
                                                          const octopage_scale* k_scale,
                                                          const octopage_scale* v_scale,
                                                          const octopage_options* options);

/* The tensors of octopage_fill_prefill_pages, all on one device. */
typedef struct octopage_fill_prefill_pages_args {
  size_t struct_size;                      /* sizeof(octopage_fill_prefill_pages_args), in bytes */
  const octopage_tensor* regions;          /* [rows, region_count] i32, any strides */
  const octopage_tensor* block_table;      /* [requests, max_blocks] i32 */
  const octopage_tensor* owners;           /* [rows] i32 */
  const octopage_tensor* indptr;           /* [rows+1] i32, a slice of the plan's */
  const octopage_tensor* pages;            /* [capacity] i32, the plan's whole list; written */
  const octopage_tensor* positions;        /* [rows] i64, exact; may be null: see below */
  const octopage_tensor* query;            /* [rows, heads, dim] bf16 or f16; may be null */
  const octopage_tensor* contiguous_query; /* [rows, heads, dim], receives query; may be null */
  int64_t block_size;                      /* tokens, a multiple of 8 */
  int64_t page_stride;                     /* pages between neighbouring blocks */
  int64_t blocks;                          /* blocks of the cache; negative: not known */
} octopage_fill_prefill_pages_args;

/* Sets struct_size, blocks = -1, and everything else to null and 0. */
OCTOPAGE_API octopage_status
octopage_fill_prefill_pages_args_init(octopage_fill_prefill_pages_args* args, size_t struct_size);

/* Writes each row's pages at pages[indptr[row]] .., in the order of its regions with the row's own
 * region moved last; without positions the own region is the largest valid one. An invalid entry
 * becomes page -1; a selection without the own region becomes -1 entirely. Copies the query where
 * both query tensors are given. Rows can be filled in chunks of any order. `options` may be null.
 */
OCTOPAGE_API octopage_status octopage_fill_prefill_pages(
    const octopage_fill_prefill_pages_args* args, const octopage_options* options);

/* --- The planned path: one plan for a whole step, shared by its layers --------------------------
 */

/* plan -> [fixup_positions] -> per layer: fill (prepare_chunk, or page_metadata and the indexer's
 * own writes) -> finish. It serves one group at a time. Addresses of pages, indptr and the query
 * buffer stay the same across plans while the capacity reached so far suffices. */
typedef struct octopage_prefill octopage_prefill;

/* Makes an empty object in `*prefill`. `workspace`, contiguous and of any dtype, is scratch for
 * octopage_prefill_finish and must outlive the object; may be null (options.workspace wins over
 * it). */
OCTOPAGE_API octopage_status octopage_prefill_create(const octopage_tensor* workspace,
                                                     octopage_prefill** prefill);

/* Frees the object and all memory that its tensors name. `prefill` may be null. */
OCTOPAGE_API void octopage_prefill_destroy(octopage_prefill* prefill);

/* What a plan needs. */
typedef struct octopage_prefill_plan_args {
  size_t struct_size;       /* sizeof(octopage_prefill_plan_args), in bytes */
  int64_t query_shape[3];   /* rows, heads (of one group), dim; all positive */
  const int64_t* positions; /* [rows] host memory; upper bounds are allowed */
  int64_t region_count;     /* most regions that a row selects */
  int64_t block_size;       /* tokens, a multiple of 8 */
  int32_t dtype;            /* of the query: OCTOPAGE_BF16 or OCTOPAGE_F16 */
  int32_t device_type;      /* an octopage_device_type */
  int32_t device_index;     /* number of the device; 0 on the CPU */
  int32_t contiguous_query; /* 0: the plan owns a contiguous copy of the query */
  float scale;              /* multiplies q . k before the softmax; finite */
} octopage_prefill_plan_args;

/* Sets struct_size, dtype bf16, the CPU, contiguous_query = 1, scale = 1, all else null and 0. */
OCTOPAGE_API octopage_status octopage_prefill_plan_args_init(octopage_prefill_plan_args* args,
                                                             size_t struct_size);

/* Plans a step; where a rule is broken the former plan stays. `options` may be null. */
OCTOPAGE_API octopage_status octopage_prefill_plan(octopage_prefill* prefill,
                                                   const octopage_prefill_plan_args* args,
                                                   const octopage_options* options);

/* Exact `positions` [rows] i32 or i64 on the plan's device replace the bounds. A row whose exact
 * range is longer than planned is cut and raises OCTOPAGE_STATUS_RANGE_CUT. `options` may be null.
 */
OCTOPAGE_API octopage_status octopage_prefill_fixup_positions(octopage_prefill* prefill,
                                                              const octopage_tensor* positions,
                                                              const octopage_options* options);

/* What an indexer needs to write pages itself. The tensors are the caller's, each initialised; one
 * that is null is not wanted. */
typedef struct octopage_page_metadata {
  size_t struct_size;           /* sizeof(octopage_page_metadata), in bytes */
  octopage_tensor* owners;      /* receives [end-start] i32; may be null */
  octopage_tensor* block_table; /* receives [requests, max_blocks] i32; may be null */
  octopage_tensor* pages;       /* receives [capacity] i32, the whole list; may be null */
  octopage_tensor* indptr;      /* receives [end-start+1] i32; may be null */
  octopage_tensor* positions;   /* receives [end-start] i64, the plan's current ones; may be null */
  int64_t block_size;           /* written: tokens */
  int64_t page_stride;          /* written: pages between neighbouring blocks */
} octopage_page_metadata;

/* Sets struct_size, and everything else to null and 0. */
OCTOPAGE_API octopage_status octopage_page_metadata_init(octopage_page_metadata* metadata,
                                                         size_t struct_size);

/* Fills `metadata` for rows [start, end) and sets `*available` to 1. A plan that owns a query copy
 * sets it to 0 and leaves `metadata` alone: octopage_prefill_prepare_chunk must then see every row.
 * `block_table` [requests, max_blocks] i32, `owners` [rows] i32 of the whole plan; end = -1: the
 * last row. */
OCTOPAGE_API octopage_status
octopage_prefill_page_metadata(const octopage_prefill* prefill, const octopage_tensor* block_table,
                               const octopage_tensor* owners, int64_t page_stride, int64_t start,
                               int64_t end, octopage_page_metadata* metadata, int32_t* available);

/* Fills the pages of rows start .. start + chunk and copies their query; only with an owned query
 * buffer. `query` [chunk, heads, dim], `kv_cache` one group, `regions` [chunk, region_count],
 * `block_table` [requests, max_blocks], `owners` [chunk] or [rows]. `options` may be null. */
OCTOPAGE_API octopage_status
octopage_prefill_prepare_chunk(octopage_prefill* prefill, int64_t start,
                               const octopage_tensor* query, const octopage_tensor* kv_cache,
                               const octopage_tensor* regions, const octopage_tensor* block_table,
                               const octopage_tensor* owners, const octopage_options* options);

/* Attention over the prepared pages. `query` [rows, heads, dim], may be null where the plan owns a
 * copy; `kv_cache` one group; `output` [rows, heads, dim] of the query's type or f32; `lse` [rows,
 * heads] f32, may be null; `k_scale` and `v_scale` for f8 caches, may be null otherwise; `options`
 * may be null. Page ids outside the cache's view are skipped. */
OCTOPAGE_API octopage_status octopage_prefill_finish(
    octopage_prefill* prefill, const octopage_tensor* query, const octopage_tensor* kv_cache,
    const octopage_tensor* output, const octopage_tensor* lse, const octopage_scale* k_scale,
    const octopage_scale* v_scale, const octopage_options* options);

/* Bytes of workspace that octopage_prefill_finish uses for a cache of this octopage_dtype, after a
 * plan, into `*bytes`. `options` may be null. */
OCTOPAGE_API octopage_status octopage_prefill_finish_workspace_size(const octopage_prefill* prefill,
                                                                    int32_t cache_dtype,
                                                                    const octopage_options* options,
                                                                    size_t* bytes);

/* Tensors of the plan, on its device and owned by it, into an initialised `tensor`; rank 0 before
 * the first plan. They hold until the next plan or destroy. */
/* [capacity] i32 */
OCTOPAGE_API octopage_status octopage_prefill_pages(const octopage_prefill* prefill,
                                                    octopage_tensor* tensor);
/* [rows+1] i32 */
OCTOPAGE_API octopage_status octopage_prefill_indptr(const octopage_prefill* prefill,
                                                     octopage_tensor* tensor);
/* [rows] i32, tokens of each row's last page, 1 .. 8 */
OCTOPAGE_API octopage_status octopage_prefill_last_page_len(const octopage_prefill* prefill,
                                                            octopage_tensor* tensor);
/* [rows] i64 */
OCTOPAGE_API octopage_status octopage_prefill_positions(const octopage_prefill* prefill,
                                                        octopage_tensor* tensor);
/* [rows, heads, dim]; rank 0 also where the plan owns no query copy */
OCTOPAGE_API octopage_status octopage_prefill_query_buffer(const octopage_prefill* prefill,
                                                           octopage_tensor* tensor);

#ifdef __cplusplus
}
#endif

#endif /* OCTOPAGE_OCTOPAGE_H_ */
