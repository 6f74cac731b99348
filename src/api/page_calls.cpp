// The page functions of the planned path: arguments checked here, work done by src/plan.

#include <limits>
#include <optional>
#include <vector>

#include "api/overlap.hpp"
#include "api/validate.hpp"
#include "backends/page_device.hpp"
#include "core/check.hpp"
#include "core/read_once.hpp"
#include "octopage/page_plan.hpp"
#include "plan/page_functions.hpp"

namespace octopage {
namespace {

/// Runs a page function on the device of its tensors, with threads on the CPU.
template <typename Run>
void run_pages(Device device, const Options& options, Run&& run) {
  std::optional<Threads> threads;
  if (device.type == DeviceType::cpu) threads.emplace(options);
  run(page_device(device), PageContext{.device = device,
                                       .threads = threads ? &*threads : nullptr,
                                       .stream = options.stream,
                                       .status = options.status});
}

void check_lengths(const TensorView& block_table, std::span<const int64_t> lengths,
                   int64_t block_size) {
  const int64_t requests = block_table.shape[0];
  const int64_t max_blocks = block_table.shape[1];
  if (static_cast<int64_t>(lengths.size()) != requests) {
    fail_argument("lengths: must have one entry for each of the {} requests, has {}", requests,
                  lengths.size());
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t blocks = lengths[i] / block_size + (lengths[i] % block_size != 0 ? 1 : 0);
    if (blocks > max_blocks) {
      fail_argument("lengths[{}] = {}: needs {} blocks of {} tokens, block_table has {} columns", i,
                    lengths[i], blocks, block_size, max_blocks);
    }
  }
}

/// Strict: the first bad entry of a fill.
void check_fill_entries(const FillPrefillPagesArgs& args, const FillParams& params,
                        const Options& options) {
  std::vector<std::byte> storage[5];
  const TensorView table_view = host_view("block_table", args.block_table, options, &storage[0]);
  const TensorView owners_view = host_view("owners", args.owners, options, &storage[1]);
  const TensorView positions_view = host_view("positions", args.positions, options, &storage[2]);
  const TensorView regions_view = host_view("regions", args.regions, options, &storage[3]);
  const TensorView indptr_view = host_view("indptr", args.indptr, options, &storage[4]);
  BlockTableView table = params.table;
  table.data = static_cast<const int32_t*>(table_view.data);
  const auto* owners = static_cast<const int32_t*>(owners_view.data);
  const auto* positions = static_cast<const int64_t*>(positions_view.data);
  const auto* regions = static_cast<const int32_t*>(regions_view.data);
  const auto* indptr = static_cast<const int32_t*>(indptr_view.data);
  for (int64_t row = 0; row < params.rows; ++row) {
    const int64_t planned = int64_t{read_once(indptr + row + 1)} - read_once(indptr + row);
    const int64_t count = planned < params.region_count ? planned : params.region_count;
    if (count <= 0) continue;
    const int64_t owner = read_once(owners + row * params.stride_owners);
    const bool exact = positions != nullptr;
    const int64_t own = exact ? region_of_position(read_once(positions + row))
                              : int64_t{std::numeric_limits<int32_t>::max()};
    const BadEntry bad =
        check_selection(table, params.geometry, owner, regions + row * params.stride_regions_row,
                        params.stride_regions_entry, count, own, exact);
    if (bad.fault != 0) fail_entry(bad, row, 0, 1, table, params.geometry, own, owner);
  }
}

}  // namespace

StagedPrefillPages plan_staged_prefill_pages(const TensorView& block_table,
                                             std::span<const int64_t> lengths_given,
                                             int64_t block_size) {
  const BlockTableView table = check_block_table(block_table, {});
  const std::vector<int64_t> lengths = copy_once(lengths_given);
  StagedPrefillPages staged;
  const int64_t count = staged_block_count(lengths, block_size);
  check_lengths(block_table, lengths, block_size);
  staged.requests = table.requests;
  staged.max_blocks = table.max_blocks;
  staged.blocks.resize(static_cast<size_t>(count));
  staged.table.resize(static_cast<size_t>(table.requests * table.max_blocks));
  write_staging_plan(table, lengths, block_size, staged.blocks.data(), staged.table.data(),
                     table.max_blocks, 1);
  return staged;
}

void plan_staged_prefill_pages(const TensorView& block_table,
                               std::span<const int64_t> lengths_given, int64_t block_size,
                               const TensorView& staged_blocks, const TensorView& staged_table,
                               const Options& options) {
  const BlockTableView table = check_block_table(block_table, block_table.device);
  const std::vector<int64_t> lengths = copy_once(lengths_given);
  const int64_t count = staged_block_count(lengths, block_size);
  check_lengths(block_table, lengths, block_size);
  check_tensor("staged_blocks", staged_blocks, {DType::i32}, {count}, block_table.device);
  check_last_contiguous("staged_blocks", staged_blocks);
  check_tensor("staged_table", staged_table, {DType::i32}, {table.requests, table.max_blocks},
               block_table.device);
  check_writable("staged_table", staged_table);
  check_disjoint({{"staged_blocks", staged_blocks},
                  {"staged_table", staged_table},
                  {"options.status", status_view(options, block_table.device)}},
                 {{"block_table", block_table}});
  run_pages(block_table.device, options, [&](const PageDevice& device, const PageContext& context) {
    device.write_staging_plan(table, lengths, block_size, static_cast<int32_t*>(staged_blocks.data),
                              static_cast<int32_t*>(staged_table.data), staged_table.strides[0],
                              staged_table.strides[1], context);
  });
}

void stage_prefill_pages(const TensorView& kv_cache, const TensorView& staged_blocks,
                         const TensorView& output, Scale k_scale, Scale v_scale,
                         const Options& options) {
  const KvCacheView cache = kv_cache_view(kv_cache);
  if (cache.groups != 1) {
    fail_argument("kv_cache.shape[1] = {}: staging copies one group; slice the cache first",
                  cache.groups);
  }
  check_tensor("staged_blocks", staged_blocks, {DType::i32}, {-1}, cache.device);
  const int64_t staged = staged_blocks.shape[0];
  check_tensor("output", output, {DType::bf16, DType::f16},
               {staged, 1, cache.block_size, 2 * cache.dim}, cache.device);
  if (!output.is_contiguous()) fail_argument("output: must be contiguous");
  check_disjoint({{"output", output}, {"options.status", status_view(options, cache.device)}},
                 {{"kv_cache", kv_cache},
                  {"staged_blocks", staged_blocks},
                  {"k_scale", scale_view(k_scale, cache.device)},
                  {"v_scale", scale_view(v_scale, cache.device)}});
  const ScaleValues scales = check_scales(cache, k_scale, v_scale);
  const StageParams params = {.cache = cache,
                              .staged_blocks = static_cast<const int32_t*>(staged_blocks.data),
                              .staged = staged,
                              .stride_staged = staged_blocks.strides[0],
                              .output = output.data,
                              .output_dtype = output.dtype,
                              .k_scale = scales.k,
                              .v_scale = scales.v,
                              .k_scale_pointer = scales.k_pointer,
                              .v_scale_pointer = scales.v_pointer};
  if (options.strict) {
    std::vector<std::byte> storage;
    const TensorView blocks = host_view("staged_blocks", staged_blocks, options, &storage);
    for (int64_t i = 0; i < staged; ++i) {
      const int64_t block =
          read_once(static_cast<const int32_t*>(blocks.data) + i * params.stride_staged);
      if (block < 0 || block >= cache.blocks) {
        fail(ErrorCode::invalid_entry, "staged_blocks[{}] = {}: must be in 0 .. {}", i, block,
             cache.blocks - 1);
      }
    }
  }
  run_pages(cache.device, options, [&](const PageDevice& device, const PageContext& context) {
    device.stage(params, context);
  });
}

void fill_prefill_pages(const FillPrefillPagesArgs& args, const Options& options) {
  fill_prefill_pages(args, options, "contiguous_query");
}

void fill_prefill_pages(const FillPrefillPagesArgs& args, const Options& options,
                        const char* copy_name) {
  const Device device = args.regions.device;
  check_tensor("regions", args.regions, {DType::i32}, {-1, -1}, device);
  const int64_t rows = args.regions.shape[0];
  const BlockTableView table = check_block_table(args.block_table, device);
  check_tensor("owners", args.owners, {DType::i32}, {rows}, device);
  check_tensor("indptr", args.indptr, {DType::i32}, {rows + 1}, device);
  check_last_contiguous("indptr", args.indptr);
  check_tensor("pages", args.pages, {DType::i32}, {-1}, device);
  check_last_contiguous("pages", args.pages);
  check_block_size(args.block_size);
  if (args.page_stride < 1 || args.page_stride > std::numeric_limits<int32_t>::max()) {
    fail_argument("page_stride = {}: must be in 1 .. 2^31 - 1", args.page_stride);
  }
  if (args.positions.present()) {
    check_tensor("positions", args.positions, {DType::i64}, {rows}, device);
    check_last_contiguous("positions", args.positions);
  }
  FillParams params = {};
  params.rows = rows;
  params.region_count = args.regions.shape[1];
  params.regions = static_cast<const int32_t*>(args.regions.data);
  params.stride_regions_row = args.regions.strides[0];
  params.stride_regions_entry = args.regions.strides[1];
  params.table = table;
  params.geometry = {.blocks = args.blocks >= 0 ? args.blocks : int64_t{1} << 31,
                     .regions_per_block = args.block_size / kPageTokens,
                     .page_stride = args.page_stride};
  params.owners = static_cast<const int32_t*>(args.owners.data);
  params.stride_owners = args.owners.strides[0];
  params.indptr = static_cast<const int32_t*>(args.indptr.data);
  params.positions = static_cast<const int64_t*>(args.positions.data);
  params.pages = static_cast<int32_t*>(args.pages.data);
  params.pages_capacity = args.pages.shape[0];
  if (args.query.present() != args.contiguous_query.present()) {
    fail_argument("{}: is required where {} is given",
                  args.query.present() ? "contiguous_query" : "query",
                  args.query.present() ? "query" : "contiguous_query");
  }
  if (args.query.present()) {
    check_tensor("query", args.query, {DType::bf16, DType::f16}, {rows, -1, -1}, device);
    check_last_contiguous("query", args.query);
    check_tensor("contiguous_query", args.contiguous_query, {args.query.dtype},
                 {rows, args.query.shape[1], args.query.shape[2]}, device);
    if (!args.contiguous_query.is_contiguous())
      fail_argument("contiguous_query: must be contiguous");
    params.query = args.query.data;
    params.stride_query_row = args.query.strides[0];
    params.stride_query_head = args.query.strides[1];
    params.contiguous_query = args.contiguous_query.data;
    params.heads = args.query.shape[1];
    params.dim = args.query.shape[2];
    params.element_bytes = itemsize(args.query.dtype);
  }
  if (rows == 0) return;
  check_disjoint({{"pages", args.pages},
                  {copy_name, args.contiguous_query},
                  {"options.status", status_view(options, device)}},
                 {{"regions", args.regions},
                  {"block_table", args.block_table},
                  {"owners", args.owners},
                  {"indptr", args.indptr},
                  {"positions", args.positions},
                  {"query", args.query}});
  if (options.strict) check_fill_entries(args, params, options);
  run_pages(device, options, [&](const PageDevice& pages, const PageContext& context) {
    pages.fill(params, context);
  });
}

}  // namespace octopage
