#include "api/validate.hpp"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <limits>
#include <string>

#include "api/overlap.hpp"
#include "backends/page_device.hpp"
#include "core/check.hpp"
#include "core/read_once.hpp"
#include "plan/page_functions.hpp"

namespace octopage {
namespace {

std::string shape_text(const TensorView& tensor) {
  std::string text = "[";
  for (int32_t d = 0; d < tensor.rank; ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(tensor.shape[static_cast<size_t>(d)]);
  }
  return text + "]";
}

std::string strides_text(const TensorView& tensor) {
  TensorView strides = tensor;
  strides.shape = tensor.strides;
  return shape_text(strides);
}

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += extent < 0 ? "*" : std::to_string(extent);
  }
  return text + "]";
}

void check_device(const char* argument, Device actual, Device expected) {
  if (actual != expected) {
    fail_argument("{}: must be on {}, is on {}", argument, name(expected), name(actual));
  }
}

}  // namespace

void check_tensor(const char* argument, const TensorView& tensor,
                  std::initializer_list<DType> dtypes, std::initializer_list<int64_t> shape,
                  Device device, Pointers pointers) {
  if (static_cast<size_t>(tensor.rank) != shape.size()) {
    if (!tensor.present())
      fail_argument("{}: is required, with shape {}", argument, shape_text(shape));
    fail_argument("{}: must have {} dimensions {}, has shape {}", argument, shape.size(),
                  shape_text(shape), shape_text(tensor));
  }
  bool known = false;
  std::string wanted;
  for (const DType dtype : dtypes) {
    known |= dtype == tensor.dtype;
    wanted += (wanted.empty() ? "" : " or ") + std::string(name(dtype));
  }
  if (!known) fail_argument("{}: dtype must be {}, is {}", argument, wanted, name(tensor.dtype));
  size_t d = 0;
  for (const int64_t extent : shape) {
    if (tensor.shape[d] < 0)
      fail_argument("{}.shape[{}] = {} is negative", argument, d, tensor.shape[d]);
    if (extent >= 0 && tensor.shape[d] != extent) {
      fail_argument("{}: must have shape {}, has {}", argument, shape_text(shape),
                    shape_text(tensor));
    }
    ++d;
  }
  check_device(argument, tensor.device, device);
  if (pointers == Pointers::ignored || tensor.size() == 0) return;
  if (tensor.data == nullptr)
    fail_argument("{}.data is null, but its shape is {}", argument, shape_text(tensor));
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(itemsize(tensor.dtype)) !=
      0) {
    fail_argument("{}.data = {}: must be aligned to its {}-byte elements", argument,
                  fmt::ptr(tensor.data), itemsize(tensor.dtype));
  }
}

void check_last_contiguous(const char* argument, const TensorView& tensor) {
  const auto last = static_cast<size_t>(tensor.rank) - 1;
  if (tensor.shape[last] > 1 && tensor.strides[last] != 1) {
    fail_argument("{}.strides[{}] = {}: the last dimension must be contiguous", argument, last,
                  tensor.strides[last]);
  }
}

void check_writable(const char* argument, const TensorView& tensor) {
  for (int32_t i = 0; i < tensor.rank; ++i) {
    const auto d = static_cast<size_t>(i);
    if (tensor.shape[d] > 1 && tensor.strides[d] == 0) {
      fail_argument("{}.strides[{}] = 0: elements that are written must not share memory", argument,
                    d);
    }
  }
  if (overlaps_itself(tensor)) {
    fail_argument(
        "{}: elements that are written must not share memory; shape {} with strides {} does",
        argument, shape_text(tensor), strides_text(tensor));
  }
}

TensorView workspace_view(const Options& options, Device device) {
  if (options.workspace == nullptr || options.workspace_bytes == 0) return {};
  constexpr size_t kMost = std::numeric_limits<int64_t>::max();
  return TensorView::contiguous(options.workspace, DType::u8,
                                {static_cast<int64_t>(std::min(options.workspace_bytes, kMost))},
                                device);
}

TensorView status_view(const Options& options, Device device) {
  if (options.status == nullptr) return {};
  if (reinterpret_cast<uintptr_t>(options.status) % alignof(int32_t) != 0)
    fail_argument("options.status: must be aligned to {} bytes", alignof(int32_t));
  return TensorView::contiguous(options.status, DType::i32, {1}, device);
}

TensorView scale_view(const Scale& scale, Device device) {
  if (scale.kind != Scale::Kind::pointer) return {};
  return TensorView::contiguous(scale.pointer, DType::f32, {1}, device);
}

KvCacheView check_cache(const TensorView& kv_cache, Pointers pointers) {
  if (pointers == Pointers::checked) return kv_cache_view(kv_cache);
  TensorView shape_only = kv_cache;
  shape_only.data = reinterpret_cast<void*>(uintptr_t{16});  // aligned, never dereferenced
  KvCacheView view = kv_cache_view(shape_only);
  view.data = nullptr;
  return view;
}

BlockTableView check_block_table(const TensorView& block_table, Device device, Pointers pointers) {
  check_tensor("block_table", block_table, {DType::i32}, {-1, -1}, device, pointers);
  // A table without entries may have no memory: nothing is added to its address.
  const bool empty = block_table.size() == 0;
  return {.data = static_cast<const int32_t*>(block_table.data),
          .requests = block_table.shape[0],
          .max_blocks = block_table.shape[1],
          .stride_request = empty ? 0 : block_table.strides[0],
          .stride_block = empty ? 0 : block_table.strides[1]};
}

ScaleValues check_scales(const KvCacheView& cache, const Scale& k_scale, const Scale& v_scale,
                         Pointers pointers) {
  ScaleValues values;
  if (cache.dtype != DType::f8_e4m3fn) return values;
  const auto read = [&](const char* argument, const Scale& scale, float* value,
                        const float** pointer) {
    switch (scale.kind) {
      case Scale::Kind::value:
        if (!std::isfinite(scale.value)) {
          fail_argument("{} = {}: must be finite", argument, scale.value);
        }
        *value = scale.value;
        return;
      case Scale::Kind::pointer:
        if (scale.pointer == nullptr) fail_argument("{}.pointer is null", argument);
        if (reinterpret_cast<uintptr_t>(scale.pointer) % alignof(float) != 0) {
          fail_argument("{}.pointer: must be aligned to {} bytes, is {}", argument, alignof(float),
                        fmt::ptr(scale.pointer));
        }
        if (pointers == Pointers::ignored) return;
        if (cache.device.type == DeviceType::cpu) {
          *value = read_once(scale.pointer);
          if (!std::isfinite(*value)) fail_argument("{} = {}: must be finite", argument, *value);
        } else {
          *pointer = scale.pointer;
        }
        return;
      default:
        fail_argument("{}: is required for a cache of f8_e4m3fn", argument);
    }
  };
  read("k_scale", k_scale, &values.k, &values.k_pointer);
  read("v_scale", v_scale, &values.v, &values.v_pointer);
  return values;
}

void apply_scales(const ScaleValues& scales, AttentionTensors* tensors) {
  tensors->scale *= static_cast<double>(scales.k);
  tensors->v_scale = static_cast<double>(scales.v);
  tensors->k_scale_pointer = scales.k_pointer;
  tensors->v_scale_pointer = scales.v_pointer;
}

void check_attention(const TensorView& query, const KvCacheView& cache, const TensorView& output,
                     const TensorView& lse, float scale, Pointers pointers, Problem* problem,
                     AttentionTensors* tensors) {
  const Device device = query.device;
  check_tensor("query", query, {DType::bf16, DType::f16}, {-1, -1, -1}, device, pointers);
  check_last_contiguous("query", query);
  check_device("kv_cache", cache.device, device);
  const int64_t rows = query.shape[0];
  const int64_t heads = query.shape[1];
  const int64_t dim = query.shape[2];
  if (dim != cache.dim) {
    fail_argument(
        "query.shape[2] (dim) = {}: must be that of kv_cache, {} (its last dimension is 2*dim = "
        "{})",
        dim, cache.dim, 2 * cache.dim);
  }
  if (heads == 0 || heads % cache.groups != 0) {
    fail_argument(
        "query.shape[1] (heads) = {}: must be a positive multiple of the cache's {} groups", heads,
        cache.groups);
  }
  if (rows > std::numeric_limits<int32_t>::max()) {
    fail_argument("query.shape[0] (rows) = {}: must be at most 2^31 - 1", rows);
  }
  check_tensor("output", output, {query.dtype, DType::f32}, {rows, heads, dim}, device, pointers);
  check_last_contiguous("output", output);
  check_writable("output", output);
  if (lse.present()) {
    check_tensor("lse", lse, {DType::f32}, {rows, heads}, device, pointers);
    check_writable("lse", lse);
  }
  if (!std::isfinite(scale)) fail_argument("scale = {}: must be finite", scale);
  problem->device = device;
  problem->query_dtype = query.dtype;
  problem->cache_dtype = cache.dtype;
  problem->output_dtype = output.dtype;
  problem->rows = rows;
  problem->heads_per_group = heads / cache.groups;
  problem->groups = cache.groups;
  problem->dim = dim;
  *tensors = {.query = query.data,
              .stride_query_row = query.strides[0],
              .stride_query_head = query.strides[1],
              .output = output.data,
              .stride_output_row = output.strides[0],
              .stride_output_head = output.strides[1],
              .lse = lse.present() ? static_cast<float*>(lse.data) : nullptr,
              .stride_lse_row = lse.strides[0],
              .stride_lse_head = lse.strides[1],
              .cache = cache,
              .scale = static_cast<double>(scale),
              .v_scale = 1.0,
              .k_scale_pointer = nullptr,
              .v_scale_pointer = nullptr};
}

DirectParams check_sparse_prefill(const SparsePrefillArgs& args, const Options& options,
                                  Pointers pointers) {
  DirectParams params = {};
  const KvCacheView cache = check_cache(args.kv_cache, pointers);
  check_attention(args.query, cache, args.output, args.lse, args.scale, pointers, &params.problem,
                  &params.tensors);
  const Device device = args.query.device;
  const int64_t rows = params.problem.rows;
  params.table = check_block_table(args.block_table, device, pointers);
  check_tensor("owners", args.owners, {DType::i32}, {rows}, device, pointers);
  check_tensor("positions", args.positions, {DType::i32, DType::i64}, {rows}, device, pointers);
  const bool shared = args.regions.rank == 2;
  if (shared) {
    check_tensor("regions", args.regions, {DType::i32}, {rows, -1}, device, pointers);
  } else {
    check_tensor("regions", args.regions, {DType::i32}, {rows, cache.groups, -1}, device, pointers);
  }
  apply_scales(check_scales(cache, args.k_scale, args.v_scale, pointers), &params.tensors);
  if (pointers == Pointers::checked) {
    check_disjoint({{"output", args.output},
                    {"lse", args.lse},
                    {"options.workspace", workspace_view(options, device)},
                    {"options.status", status_view(options, device)}},
                   {{"query", args.query},
                    {"kv_cache", args.kv_cache},
                    {"block_table", args.block_table},
                    {"owners", args.owners},
                    {"positions", args.positions},
                    {"regions", args.regions},
                    {"k_scale", scale_view(args.k_scale, device)},
                    {"v_scale", scale_view(args.v_scale, device)}});
  }
  params.problem.path = Problem::Path::direct;
  params.problem.region_count = args.regions.shape[shared ? 1 : 2];
  if (params.problem.region_count > std::numeric_limits<int32_t>::max()) {
    fail_argument("regions: at most 2^31 - 1 to a row, there are {}", params.problem.region_count);
  }
  params.problem.batch_invariant = options.batch_invariant;
  params.rows = row_view(args.owners, args.positions);
  params.regions = static_cast<const int32_t*>(args.regions.data);
  params.stride_regions_row = args.regions.strides[0];
  params.stride_regions_group = shared ? 0 : args.regions.strides[1];
  params.stride_regions_entry = args.regions.strides[shared ? 1 : 2];
  const auto even = [](const void* data, int64_t element_bytes,
                       std::initializer_list<int64_t> strides) {
    return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(2 * element_bytes) == 0 &&
           std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s % 2 == 0; });
  };
  const AttentionTensors& t = params.tensors;
  params.problem.layout = {.even_query = even(t.query, itemsize(args.query.dtype),
                                              {t.stride_query_row, t.stride_query_head}),
                           .even_output = even(t.output, itemsize(args.output.dtype),
                                               {t.stride_output_row, t.stride_output_head}),
                           .positive_scale = t.scale >= FLT_MIN && t.scale <= FLT_MAX / 2,
                           .selections = shared ? 1 : cache.groups,
                           .table_regions = table_regions(params.table, cache.geometry()),
                           .tokens = kv_page_count(cache) * kPageTokens,
                           .stride_token = cache.stride_token,
                           .stride_group = cache.groups > 1 ? cache.stride_group : 0};
  return params;
}

void fail_entry(const BadEntry& bad, int64_t row, int64_t group, int64_t groups,
                const BlockTableView& table, const PageGeometry& geometry, int64_t own_region,
                int64_t owner) {
  const std::string where =
      groups > 1 ? fmt::format("row {}, group {}", row, group) : fmt::format("row {}", row);
  const std::string entry = fmt::format("regions[{}, entry {}] = {}", where, bad.entry, bad.value);
  switch (bad.fault) {
    case status_owner:
      fail(ErrorCode::invalid_entry, "owners[row {}] = {}: must be in 0 .. {}", row, bad.value,
           table.requests - 1);
    case status_region:
      fail(ErrorCode::invalid_entry, "{}: must be in 0 .. {}, the row's own region", entry,
           own_region);
    case kDuplicate:
      fail(ErrorCode::invalid_entry, "{}: the row lists this region twice", entry);
    case kOwnMissing:
      fail(ErrorCode::invalid_entry,
           "regions[{}]: the row's own region {} is not among its entries", where, own_region);
    default:
      break;
  }
  if (bad.table_column >= table.max_blocks) {
    fail(ErrorCode::invalid_entry, "{}: needs column {} of block_table, which has {} columns",
         entry, bad.table_column, table.max_blocks);
  }
  fail(ErrorCode::invalid_entry, "{}: block_table[request {}, column {}] = {}: must be in 0 .. {}",
       entry, owner, bad.table_column, bad.table_value, geometry.blocks - 1);
}

TensorView host_view(const char* argument, const TensorView& tensor, const Options& options,
                     std::vector<std::byte>* storage) {
  if (tensor.device.type == DeviceType::cpu || tensor.size() == 0) return tensor;
  int64_t last = 0;
  for (int32_t i = 0; i < tensor.rank; ++i) {
    const auto d = static_cast<size_t>(i);
    if (tensor.shape[d] > 1 && tensor.strides[d] < 0) {
      fail_argument("{}.strides[{}] = {}: a strict call takes no negative strides on a device",
                    argument, d, tensor.strides[d]);
    }
    if (tensor.shape[d] > 1) last += (tensor.shape[d] - 1) * tensor.strides[d];
  }
  storage->resize(static_cast<size_t>((last + 1) * itemsize(tensor.dtype)));
  page_device(tensor.device)
      .download(tensor.data, storage->size(), storage->data(),
                {.device = tensor.device,
                 .threads = nullptr,
                 .stream = options.stream,
                 .status = nullptr});
  TensorView view = tensor;
  view.data = storage->data();
  view.device = {};
  return view;
}

void check_entries(const SparsePrefillArgs& args, const Options& options) {
  DirectParams params = check_sparse_prefill(args, options);
  std::vector<std::byte> storage[4];
  const TensorView table = host_view("block_table", args.block_table, options, &storage[0]);
  const TensorView owners = host_view("owners", args.owners, options, &storage[1]);
  const TensorView positions = host_view("positions", args.positions, options, &storage[2]);
  const TensorView regions = host_view("regions", args.regions, options, &storage[3]);
  params.table.data = static_cast<const int32_t*>(table.data);
  params.rows = row_view(owners, positions);
  params.regions = static_cast<const int32_t*>(regions.data);
  check_entries(params);
}

void check_entries(const DirectParams& params) {
  const PageGeometry geometry = params.tensors.cache.geometry();
  for (int64_t row = 0; row < params.problem.rows; ++row) {
    const int64_t position = params.rows.position(row);
    const int64_t own = region_of_position(position);
    const int64_t count = selection_count(position, params.problem.region_count);
    const int64_t owner = count > 0 ? params.rows.owner(row) : 0;
    for (int64_t group = 0; group < params.problem.groups; ++group) {
      const BadEntry bad = check_selection(
          params.table, geometry, owner,
          params.regions + row * params.stride_regions_row + group * params.stride_regions_group,
          params.stride_regions_entry, count, own, false);
      if (bad.fault != 0) {
        fail_entry(bad, row, group, params.problem.groups, params.table, geometry, own, owner);
      }
    }
  }
}

}  // namespace octopage
