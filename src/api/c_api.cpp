// The C boundary: plain structs become views, exceptions become codes, and nothing else happens.

#include "octopage/octopage.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/read_once.hpp"
#include "octopage/octopage.hpp"

struct octopage_prefill {
  octopage::CompactPagedPrefill impl;
};

namespace octopage {
namespace {

// One numbering on both sides, so that conversions are casts.
constexpr bool same(auto c, auto cpp) {
  return static_cast<int32_t>(c) == static_cast<int32_t>(cpp);
}
static_assert(same(OCTOPAGE_INVALID_ARGUMENT, ErrorCode::invalid_argument));
static_assert(same(OCTOPAGE_UNSUPPORTED, ErrorCode::unsupported));
static_assert(same(OCTOPAGE_INVALID_ENTRY, ErrorCode::invalid_entry));
static_assert(same(OCTOPAGE_WRONG_STATE, ErrorCode::wrong_state));
static_assert(same(OCTOPAGE_OUT_OF_MEMORY, ErrorCode::out_of_memory));
static_assert(same(OCTOPAGE_DEVICE_ERROR, ErrorCode::device_error));
static_assert(same(OCTOPAGE_BAD_FILE, ErrorCode::bad_file));
static_assert(same(OCTOPAGE_INTERNAL, ErrorCode::internal));
static_assert(same(OCTOPAGE_BF16, DType::bf16) && same(OCTOPAGE_F16, DType::f16));
static_assert(same(OCTOPAGE_F32, DType::f32) && same(OCTOPAGE_F8_E4M3FN, DType::f8_e4m3fn));
static_assert(same(OCTOPAGE_U8, DType::u8) && same(OCTOPAGE_I32, DType::i32));
static_assert(same(OCTOPAGE_I64, DType::i64));
static_assert(same(OCTOPAGE_CPU, DeviceType::cpu) && same(OCTOPAGE_CUDA, DeviceType::cuda));
static_assert(same(OCTOPAGE_STATUS_REGION, status_region));
static_assert(same(OCTOPAGE_STATUS_OWNER, status_owner));
static_assert(same(OCTOPAGE_STATUS_TABLE, status_table));
static_assert(same(OCTOPAGE_STATUS_RANGE_CUT, status_range_cut));
static_assert(same(OCTOPAGE_SCALE_ABSENT, Scale::Kind::absent));
static_assert(same(OCTOPAGE_SCALE_VALUE, Scale::Kind::value));
static_assert(same(OCTOPAGE_SCALE_POINTER, Scale::Kind::pointer));
static_assert(OCTOPAGE_MAX_RANK == kMaxRank);

// --- Errors

thread_local std::string last_message;
thread_local const char* last_error = "";

void remember(const char* message) noexcept {
  try {
    last_message = message;
    last_error = last_message.c_str();
  } catch (...) {
    last_error = "out of memory, also for the message";
  }
}

/// Runs a call's body; whatever it throws becomes a code and a message.
template <typename Body>
octopage_status guarded(Body&& body) noexcept {
  try {
    body();
    return OCTOPAGE_OK;
  } catch (const Error& error) {
    remember(error.what());
    return static_cast<octopage_status>(error.code());
  } catch (const std::bad_alloc&) {
    remember("out of memory");
    return OCTOPAGE_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    remember(error.what());
    return OCTOPAGE_INTERNAL;
  } catch (...) {
    remember("an exception of an unknown type");
    return OCTOPAGE_INTERNAL;
  }
}

// --- Structs

template <typename T>
constexpr const char* kStructName = nullptr;
template <>
constexpr const char* kStructName<octopage_tensor> = "octopage_tensor";
template <>
constexpr const char* kStructName<octopage_executor> = "octopage_executor";
template <>
constexpr const char* kStructName<octopage_options> = "octopage_options";
template <>
constexpr const char* kStructName<octopage_scale> = "octopage_scale";
template <>
constexpr const char* kStructName<octopage_sparse_prefill_args> = "octopage_sparse_prefill_args";
template <>
constexpr const char* kStructName<octopage_backend_info> = "octopage_backend_info";
template <>
constexpr const char* kStructName<octopage_fill_prefill_pages_args> =
    "octopage_fill_prefill_pages_args";
template <>
constexpr const char* kStructName<octopage_prefill_plan_args> = "octopage_prefill_plan_args";
template <>
constexpr const char* kStructName<octopage_page_metadata> = "octopage_page_metadata";

void require(const char* argument, const void* pointer) {
  if (pointer == nullptr) fail_argument("{}: must not be null", argument);
}

template <typename T>
void check_size(const char* argument, size_t struct_size) {
  if (struct_size < sizeof(T)) {
    fail_argument("{}: must be at least {}, sizeof({}), is {}", argument, sizeof(T), kStructName<T>,
                  struct_size);
  }
}

/// A struct of the caller's, known to be there and large enough.
template <typename T>
T& checked(const char* argument, T* value) {
  using Struct = std::remove_const_t<T>;
  static_assert(std::is_standard_layout_v<Struct> && std::is_trivially_copyable_v<Struct>);
  static_assert(offsetof(Struct, struct_size) == 0);
  require(argument, value);
  check_size<Struct>(fmt::format("{}.struct_size", argument).c_str(), value->struct_size);
  return *value;
}

/// Writes defaults, and zeros into fields that only the caller's newer header knows.
template <typename T>
octopage_status init(const char* argument, T* value, size_t struct_size, T defaults) noexcept {
  return guarded([&] {
    require(argument, value);
    check_size<T>("struct_size", struct_size);
    defaults.struct_size = struct_size;
    std::memcpy(value, &defaults, sizeof(T));
    std::memset(reinterpret_cast<char*>(value) + sizeof(T), 0, struct_size - sizeof(T));
  });
}

/// An array of the caller's; null only where it is empty.
template <typename T>
std::span<T> array(const char* argument, T* data, const char* count_name, int64_t count) {
  if (count < 0) fail_argument("{} = {}: must not be negative", count_name, count);
  if (count > 0) require(argument, data);
  return {data, static_cast<size_t>(count)};
}

DType to_dtype(const char* argument, int32_t dtype) {
  if (dtype < OCTOPAGE_BF16 || dtype > OCTOPAGE_I64) {
    fail_argument("{} = {}: must be an octopage_dtype, {} .. {}", argument, dtype,
                  static_cast<int>(OCTOPAGE_BF16), static_cast<int>(OCTOPAGE_I64));
  }
  return static_cast<DType>(dtype);
}

Device to_device(const std::string& prefix, int32_t type, int32_t index) {
  if (type != OCTOPAGE_CPU && type != OCTOPAGE_CUDA) {
    fail_argument("{}device_type = {}: must be OCTOPAGE_CPU (0) or OCTOPAGE_CUDA (1)", prefix,
                  type);
  }
  if (index < 0 || (type == OCTOPAGE_CPU && index != 0)) {
    fail_argument("{}device_index = {}: must {}", prefix, index,
                  type == OCTOPAGE_CPU ? "be 0 on the CPU" : "not be negative");
  }
  return {static_cast<DeviceType>(type), index};
}

/// A rank in 0 .. 4 and extents whose product is a size.
void check_shape(const std::string& prefix, int32_t rank, const int64_t* shape, DType dtype) {
  if (rank < 0 || rank > OCTOPAGE_MAX_RANK) {
    fail_argument("{}rank = {}: must be in 0 .. {}", prefix, rank, OCTOPAGE_MAX_RANK);
  }
  int64_t bytes = itemsize(dtype);
  for (int32_t d = 0; d < rank; ++d) {
    if (shape[d] < 0) fail_argument("{}shape[{}] = {}: must not be negative", prefix, d, shape[d]);
    if (shape[d] > 0)
      bytes = checked_mul(bytes, shape[d], fmt::format("{}shape in bytes", prefix).c_str());
  }
}

TensorView to_view(const char* argument, const octopage_tensor* tensor) {
  const octopage_tensor& from = checked(argument, tensor);
  const std::string prefix = std::string(argument) + ".";
  TensorView view;
  view.data = from.data;
  view.dtype = to_dtype((prefix + "dtype").c_str(), from.dtype);
  view.device = to_device(prefix, from.device_type, from.device_index);
  check_shape(prefix, from.rank, from.shape, view.dtype);
  view.rank = from.rank;
  std::copy_n(from.shape, from.rank, view.shape.begin());
  std::copy_n(from.strides, from.rank, view.strides.begin());
  return view;
}

TensorView to_optional_view(const char* argument, const octopage_tensor* tensor) {
  return tensor == nullptr ? TensorView{} : to_view(argument, tensor);
}

/// Known fields only: struct_size stays the caller's.
void write_tensor(const TensorView& view, octopage_tensor* tensor) {
  tensor->data = view.data;
  tensor->dtype = static_cast<int32_t>(view.dtype);
  tensor->device_type = static_cast<int32_t>(view.device.type);
  tensor->device_index = view.device.index;
  tensor->rank = view.rank;
  std::copy(view.shape.begin(), view.shape.end(), tensor->shape);
  std::copy(view.strides.begin(), view.strides.end(), tensor->strides);
}

Scale to_scale(const char* argument, const octopage_scale* scale) {
  if (scale == nullptr) return {};
  const octopage_scale& from = checked(argument, scale);
  if (from.kind < OCTOPAGE_SCALE_ABSENT || from.kind > OCTOPAGE_SCALE_POINTER) {
    fail_argument("{}.kind = {}: must be an octopage_scale_kind, 0 .. 2", argument, from.kind);
  }
  return {static_cast<Scale::Kind>(from.kind), from.value, from.pointer};
}

class CallerExecutor final : public Executor {
 public:
  explicit CallerExecutor(const octopage_executor& functions) : functions_(functions) {}
  int32_t concurrency() const override { return functions_.concurrency(functions_.user); }
  void parallel_for(int64_t count, void (*body)(void*, int64_t, int32_t), void* context) override {
    functions_.parallel_for(functions_.user, count, body, context);
  }

 private:
  const octopage_executor& functions_;
};

/// Options as the C++ API takes them, with the executor that they may point to.
class CallOptions {
 public:
  explicit CallOptions(const octopage_options* options) {
    if (options == nullptr) return;
    const octopage_options& from = checked("options", options);
    if (from.backend != nullptr) options_.backend = from.backend;
    options_.strict = from.strict != 0;
    options_.batch_invariant = from.batch_invariant != 0;
    options_.status = from.status;
    options_.threads = from.threads;
    options_.stream = from.stream;
    options_.workspace = from.workspace;
    options_.workspace_bytes = from.workspace_bytes;
    if (from.executor == nullptr) return;
    const octopage_executor& executor = checked("options.executor", from.executor);
    if (executor.concurrency == nullptr)
      fail_argument("options.executor.concurrency: must not be null");
    if (executor.parallel_for == nullptr)
      fail_argument("options.executor.parallel_for: must not be null");
    options_.executor = &executor_.emplace(executor);
  }
  CallOptions(const CallOptions&) = delete;
  CallOptions& operator=(const CallOptions&) = delete;

  const Options& operator*() const { return options_; }

 private:
  std::optional<CallerExecutor> executor_;
  Options options_;
};

SparsePrefillArgs to_args(const octopage_sparse_prefill_args* args) {
  const octopage_sparse_prefill_args& from = checked("args", args);
  return {.query = to_view("query", from.query),
          .kv_cache = to_view("kv_cache", from.kv_cache),
          .block_table = to_view("block_table", from.block_table),
          .owners = to_view("owners", from.owners),
          .positions = to_view("positions", from.positions),
          .regions = to_view("regions", from.regions),
          .output = to_view("output", from.output),
          .lse = to_optional_view("lse", from.lse),
          .scale = from.scale,
          .k_scale = to_scale("k_scale", from.k_scale),
          .v_scale = to_scale("v_scale", from.v_scale)};
}

/// As much of the text as fits with a final zero byte; nothing into no bytes.
void write_text(std::string_view text, char* buffer, size_t bytes) {
  if (bytes == 0) return;
  const size_t length = std::min(text.size(), bytes - 1);
  std::memcpy(buffer, text.data(), length);
  buffer[length] = '\0';
}

/// A getter of the plan into the caller's tensor.
octopage_status get(const octopage_prefill* prefill, octopage_tensor* tensor,
                    TensorView (CompactPagedPrefill::*getter)() const) noexcept {
  return guarded([&] {
    require("prefill", prefill);
    checked("tensor", tensor);
    write_tensor((prefill->impl.*getter)(), tensor);
  });
}

}  // namespace
}  // namespace octopage

using namespace octopage;  // NOLINT: C functions are outside every namespace

// --- Status and version

int32_t octopage_version_number(void) {
  return OCTOPAGE_VERSION_MAJOR * 10000 + OCTOPAGE_VERSION_MINOR * 100 + OCTOPAGE_VERSION_PATCH;
}

const char* octopage_version_string(void) {
  return OCTOPAGE_VERSION_STRING;
}

const char* octopage_status_name(int32_t status) {
  switch (status) {
    case OCTOPAGE_OK:
      return "ok";
    case OCTOPAGE_INVALID_ARGUMENT:
      return "invalid_argument";
    case OCTOPAGE_UNSUPPORTED:
      return "unsupported";
    case OCTOPAGE_INVALID_ENTRY:
      return "invalid_entry";
    case OCTOPAGE_WRONG_STATE:
      return "wrong_state";
    case OCTOPAGE_OUT_OF_MEMORY:
      return "out_of_memory";
    case OCTOPAGE_DEVICE_ERROR:
      return "device_error";
    case OCTOPAGE_BAD_FILE:
      return "bad_file";
    case OCTOPAGE_INTERNAL:
      return "internal";
    default:
      return "unknown";
  }
}

const char* octopage_last_error(void) {
  return last_error;
}

// --- Structs

octopage_status octopage_tensor_init(octopage_tensor* tensor, size_t struct_size) {
  octopage_tensor defaults = {};
  defaults.dtype = OCTOPAGE_F32;
  return init("tensor", tensor, struct_size, defaults);
}

octopage_status octopage_tensor_init_contiguous(octopage_tensor* tensor, size_t struct_size,
                                                const void* data, int32_t dtype, int32_t rank,
                                                const int64_t* shape) {
  octopage_tensor value = {};
  const octopage_status status = guarded([&] {
    const DType type = to_dtype("dtype", dtype);
    if (rank > 0) require("shape", shape);
    check_shape("", rank, shape, type);
    value.data = const_cast<void*>(data);
    value.dtype = dtype;
    value.rank = rank;
    int64_t stride = 1;
    for (int32_t d = rank; d-- > 0;) {
      value.shape[d] = shape[d];
      value.strides[d] = stride;
      if (shape[d] > 0) stride *= shape[d];
    }
  });
  return status == OCTOPAGE_OK ? init("tensor", tensor, struct_size, value) : status;
}

octopage_status octopage_executor_init(octopage_executor* executor, size_t struct_size) {
  return init("executor", executor, struct_size, octopage_executor{});
}

octopage_status octopage_options_init(octopage_options* options, size_t struct_size) {
  return init("options", options, struct_size, octopage_options{});
}

octopage_status octopage_scale_init(octopage_scale* scale, size_t struct_size) {
  octopage_scale defaults = {};
  defaults.value = 1.0f;
  return init("scale", scale, struct_size, defaults);
}

octopage_status octopage_sparse_prefill_args_init(octopage_sparse_prefill_args* args,
                                                  size_t struct_size) {
  octopage_sparse_prefill_args defaults = {};
  defaults.scale = 1.0f;
  return init("args", args, struct_size, defaults);
}

octopage_status octopage_backend_info_init(octopage_backend_info* info, size_t struct_size) {
  return init("info", info, struct_size, octopage_backend_info{});
}

octopage_status octopage_fill_prefill_pages_args_init(octopage_fill_prefill_pages_args* args,
                                                      size_t struct_size) {
  octopage_fill_prefill_pages_args defaults = {};
  defaults.blocks = -1;
  return init("args", args, struct_size, defaults);
}

octopage_status octopage_prefill_plan_args_init(octopage_prefill_plan_args* args,
                                                size_t struct_size) {
  octopage_prefill_plan_args defaults = {};
  defaults.contiguous_query = 1;
  defaults.scale = 1.0f;
  return init("args", args, struct_size, defaults);
}

octopage_status octopage_page_metadata_init(octopage_page_metadata* metadata, size_t struct_size) {
  return init("metadata", metadata, struct_size, octopage_page_metadata{});
}

// --- Attention straight from the paged cache

octopage_status octopage_sparse_prefill(const octopage_sparse_prefill_args* args,
                                        const octopage_options* options) {
  return guarded([&] {
    const SparsePrefillArgs given = to_args(args);
    sparse_prefill(given, *CallOptions(options));
  });
}

octopage_status octopage_sparse_prefill_workspace_size(const octopage_sparse_prefill_args* args,
                                                       const octopage_options* options,
                                                       size_t* bytes) {
  return guarded([&] {
    require("bytes", bytes);
    const SparsePrefillArgs given = to_args(args);
    *bytes = sparse_prefill_workspace_size(given, *CallOptions(options));
  });
}

octopage_status octopage_rows_from_query_start_loc(const int32_t* query_start_loc,
                                                   const int32_t* seq_lens, int64_t requests,
                                                   int64_t rows, int32_t* owners,
                                                   int64_t* positions) {
  return guarded([&] {
    const auto lens = array("seq_lens", seq_lens, "requests", requests);
    require("query_start_loc", query_start_loc);
    array("owners", owners, "rows", rows);
    array("positions", positions, "rows", rows);
    // Copies: what was checked must be what is expanded.
    const std::vector<int32_t> starts =
        copy_once(std::span(query_start_loc, static_cast<size_t>(requests) + 1));
    // Before rows are allocated: the last entry may be anything.
    if (starts.back() != rows) {
      fail_argument("rows = {}: must be query_start_loc[{}] = {}", rows, requests, starts.back());
    }
    const Rows expanded = rows_from_query_start_loc(starts, copy_once(lens));
    std::copy(expanded.owners.begin(), expanded.owners.end(), owners);
    std::copy(expanded.positions.begin(), expanded.positions.end(), positions);
  });
}

// --- Backends

octopage_status octopage_backend_count(int32_t* count) {
  return guarded([&] {
    require("count", count);
    *count = static_cast<int32_t>(backends().size());
  });
}

octopage_status octopage_backend_describe(int32_t index, octopage_backend_info* info) {
  return guarded([&] {
    checked("info", info);
    const std::vector<BackendInfo> all = backends();
    if (index < 0 || static_cast<size_t>(index) >= all.size()) {
      fail_argument("index = {}: must be in 0 .. {}", index, all.size() - 1);
    }
    const BackendInfo& from = all[static_cast<size_t>(index)];
    write_text(from.name, info->name, sizeof(info->name));
    write_text(from.description, info->description, sizeof(info->description));
    write_text(from.reason, info->reason, sizeof(info->reason));
    info->device_type = static_cast<int32_t>(from.device);
    info->priority = from.priority;
    info->available = from.available ? 1 : 0;
  });
}

octopage_status octopage_backend_supports(const char* backend,
                                          const octopage_sparse_prefill_args* args,
                                          const octopage_options* options, int32_t* supported,
                                          char* reason, size_t reason_bytes) {
  return guarded([&] {
    require("backend", backend);
    require("supported", supported);
    if (reason_bytes > 0) require("reason", reason);
    const SparsePrefillArgs given = to_args(args);
    const Support support = backend_supports(backend, given, *CallOptions(options));
    *supported = support.ok ? 1 : 0;
    write_text(support.reason, reason, reason_bytes);
  });
}

octopage_status octopage_choose_backend(const octopage_sparse_prefill_args* args,
                                        const octopage_options* options, char* name,
                                        size_t name_bytes) {
  return guarded([&] {
    require("name", name);
    const SparsePrefillArgs given = to_args(args);
    const std::string chosen = choose_backend(given, *CallOptions(options));
    if (name_bytes <= chosen.size()) {
      fail_argument("name_bytes = {}: must be at least {} for '{}'", name_bytes, chosen.size() + 1,
                    chosen);
    }
    write_text(chosen, name, name_bytes);
  });
}

// --- Pages, compact metadata and staging

octopage_status octopage_kv_page_stride(const octopage_tensor* kv_cache, int64_t* page_stride) {
  return guarded([&] {
    require("page_stride", page_stride);
    *page_stride = kv_page_stride(to_view("kv_cache", kv_cache));
  });
}

octopage_status octopage_view_sparse_kv_pages(const octopage_tensor* kv_cache, octopage_tensor* k,
                                              octopage_tensor* v) {
  return guarded([&] {
    checked("k", k);
    checked("v", v);
    const SparseKvPages pages = view_sparse_kv_pages(to_view("kv_cache", kv_cache));
    write_tensor(pages.k, k);
    write_tensor(pages.v, v);
  });
}

octopage_status octopage_compact_page_metadata(const int64_t* positions, int64_t rows,
                                               int64_t region_count, int32_t* indptr,
                                               int32_t* last_page_len) {
  return guarded([&] {
    const auto given = array("positions", positions, "rows", rows);
    require("indptr", indptr);
    array("last_page_len", last_page_len, "rows", rows);
    const CompactPageMetadata metadata = compact_page_metadata(given, region_count);
    std::copy(metadata.indptr.begin(), metadata.indptr.end(), indptr);
    std::copy(metadata.last_page_len.begin(), metadata.last_page_len.end(), last_page_len);
  });
}

octopage_status octopage_staged_block_count(const int64_t* lengths, int64_t requests,
                                            int64_t block_size, int64_t* count) {
  return guarded([&] {
    require("count", count);
    *count = staged_block_count(array("lengths", lengths, "requests", requests), block_size);
  });
}

octopage_status octopage_plan_staged_prefill_pages(const octopage_tensor* block_table,
                                                   const int64_t* lengths, int64_t requests,
                                                   int64_t block_size,
                                                   const octopage_tensor* staged_blocks,
                                                   const octopage_tensor* staged_table,
                                                   const octopage_options* options) {
  return guarded([&] {
    plan_staged_prefill_pages(to_view("block_table", block_table),
                              array("lengths", lengths, "requests", requests), block_size,
                              to_view("staged_blocks", staged_blocks),
                              to_view("staged_table", staged_table), *CallOptions(options));
  });
}

octopage_status octopage_stage_prefill_pages(const octopage_tensor* kv_cache,
                                             const octopage_tensor* staged_blocks,
                                             const octopage_tensor* output,
                                             const octopage_scale* k_scale,
                                             const octopage_scale* v_scale,
                                             const octopage_options* options) {
  return guarded([&] {
    stage_prefill_pages(to_view("kv_cache", kv_cache), to_view("staged_blocks", staged_blocks),
                        to_view("output", output), to_scale("k_scale", k_scale),
                        to_scale("v_scale", v_scale), *CallOptions(options));
  });
}

octopage_status octopage_fill_prefill_pages(const octopage_fill_prefill_pages_args* args,
                                            const octopage_options* options) {
  return guarded([&] {
    const octopage_fill_prefill_pages_args& from = checked("args", args);
    const FillPrefillPagesArgs fill = {
        .regions = to_view("regions", from.regions),
        .block_table = to_view("block_table", from.block_table),
        .owners = to_view("owners", from.owners),
        .indptr = to_view("indptr", from.indptr),
        .pages = to_view("pages", from.pages),
        .block_size = from.block_size,
        .page_stride = from.page_stride,
        .blocks = from.blocks,
        .positions = to_optional_view("positions", from.positions),
        .query = to_optional_view("query", from.query),
        .contiguous_query = to_optional_view("contiguous_query", from.contiguous_query)};
    fill_prefill_pages(fill, *CallOptions(options));
  });
}

// --- The planned path

octopage_status octopage_prefill_create(const octopage_tensor* workspace,
                                        octopage_prefill** prefill) {
  return guarded([&] {
    require("prefill", prefill);
    *prefill = new octopage_prefill{CompactPagedPrefill(to_optional_view("workspace", workspace))};
  });
}

void octopage_prefill_destroy(octopage_prefill* prefill) {
  delete prefill;
}

octopage_status octopage_prefill_plan(octopage_prefill* prefill,
                                      const octopage_prefill_plan_args* args,
                                      const octopage_options* options) {
  return guarded([&] {
    require("prefill", prefill);
    const octopage_prefill_plan_args& from = checked("args", args);
    const int64_t* shape = from.query_shape;
    prefill->impl.plan(
        {.query_shape = {shape[0], shape[1], shape[2]},
         .dtype = to_dtype("dtype", from.dtype),
         .device = to_device("", from.device_type, from.device_index),
         .positions = array("positions", from.positions, "query_shape[0] (rows)", shape[0]),
         .region_count = from.region_count,
         .scale = from.scale,
         .block_size = from.block_size,
         .contiguous_query = from.contiguous_query != 0},
        *CallOptions(options));
  });
}

octopage_status octopage_prefill_fixup_positions(octopage_prefill* prefill,
                                                 const octopage_tensor* positions,
                                                 const octopage_options* options) {
  return guarded([&] {
    require("prefill", prefill);
    prefill->impl.fixup_positions(to_view("positions", positions), *CallOptions(options));
  });
}

octopage_status octopage_prefill_page_metadata(const octopage_prefill* prefill,
                                               const octopage_tensor* block_table,
                                               const octopage_tensor* owners, int64_t page_stride,
                                               int64_t start, int64_t end,
                                               octopage_page_metadata* metadata,
                                               int32_t* available) {
  return guarded([&] {
    require("prefill", prefill);
    octopage_page_metadata& to = checked("metadata", metadata);
    require("available", available);
    for (const auto& [argument, tensor] : {std::pair{"metadata.owners", to.owners},
                                           {"metadata.block_table", to.block_table},
                                           {"metadata.pages", to.pages},
                                           {"metadata.indptr", to.indptr},
                                           {"metadata.positions", to.positions}}) {
      if (tensor != nullptr) checked(argument, tensor);
    }
    const std::optional<PagedPrefillMetadata> from = prefill->impl.page_metadata(
        to_view("block_table", block_table), to_view("owners", owners), page_stride, start, end);
    *available = from ? 1 : 0;
    if (!from) return;
    if (to.owners != nullptr) write_tensor(from->owners, to.owners);
    if (to.block_table != nullptr) write_tensor(from->block_table, to.block_table);
    if (to.pages != nullptr) write_tensor(from->pages, to.pages);
    if (to.indptr != nullptr) write_tensor(from->indptr, to.indptr);
    if (to.positions != nullptr) write_tensor(from->positions, to.positions);
    to.block_size = from->block_size;
    to.page_stride = from->page_stride;
  });
}

octopage_status octopage_prefill_prepare_chunk(octopage_prefill* prefill, int64_t start,
                                               const octopage_tensor* query,
                                               const octopage_tensor* kv_cache,
                                               const octopage_tensor* regions,
                                               const octopage_tensor* block_table,
                                               const octopage_tensor* owners,
                                               const octopage_options* options) {
  return guarded([&] {
    require("prefill", prefill);
    prefill->impl.prepare_chunk(start, to_view("query", query), to_view("kv_cache", kv_cache),
                                to_view("regions", regions), to_view("block_table", block_table),
                                to_view("owners", owners), *CallOptions(options));
  });
}

octopage_status octopage_prefill_finish(octopage_prefill* prefill, const octopage_tensor* query,
                                        const octopage_tensor* kv_cache,
                                        const octopage_tensor* output, const octopage_tensor* lse,
                                        const octopage_scale* k_scale,
                                        const octopage_scale* v_scale,
                                        const octopage_options* options) {
  return guarded([&] {
    require("prefill", prefill);
    prefill->impl.finish(to_optional_view("query", query), to_view("kv_cache", kv_cache),
                         to_view("output", output), to_optional_view("lse", lse),
                         to_scale("k_scale", k_scale), to_scale("v_scale", v_scale),
                         *CallOptions(options));
  });
}

octopage_status octopage_prefill_finish_workspace_size(const octopage_prefill* prefill,
                                                       int32_t cache_dtype,
                                                       const octopage_options* options,
                                                       size_t* bytes) {
  return guarded([&] {
    require("prefill", prefill);
    require("bytes", bytes);
    *bytes = prefill->impl.finish_workspace_size(to_dtype("cache_dtype", cache_dtype),
                                                 *CallOptions(options));
  });
}

octopage_status octopage_prefill_pages(const octopage_prefill* prefill, octopage_tensor* tensor) {
  return get(prefill, tensor, &CompactPagedPrefill::pages);
}

octopage_status octopage_prefill_indptr(const octopage_prefill* prefill, octopage_tensor* tensor) {
  return get(prefill, tensor, &CompactPagedPrefill::indptr);
}

octopage_status octopage_prefill_last_page_len(const octopage_prefill* prefill,
                                               octopage_tensor* tensor) {
  return get(prefill, tensor, &CompactPagedPrefill::last_page_len);
}

octopage_status octopage_prefill_positions(const octopage_prefill* prefill,
                                           octopage_tensor* tensor) {
  return get(prefill, tensor, &CompactPagedPrefill::positions);
}

octopage_status octopage_prefill_query_buffer(const octopage_prefill* prefill,
                                              octopage_tensor* tensor) {
  return get(prefill, tensor, &CompactPagedPrefill::query_buffer);
}
