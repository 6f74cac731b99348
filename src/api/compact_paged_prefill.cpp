#include <cmath>
#include <memory>
#include <vector>

#include "api/backend_choice.hpp"
#include "api/overlap.hpp"
#include "api/validate.hpp"
#include "backends/page_device.hpp"
#include "core/check.hpp"
#include "core/read_once.hpp"
#include "octopage/page_plan.hpp"
#include "plan/compact_metadata.hpp"
#include "plan/page_functions.hpp"

namespace octopage {
namespace {

void check_plan(const PrefillPlanArgs& args) {
  const auto [rows, heads, dim] = args.query_shape;
  if (args.dtype != DType::bf16 && args.dtype != DType::f16) {
    fail_argument("dtype: must be bf16 or f16, is {}", name(args.dtype));
  }
  if (args.positions.empty()) fail_argument("positions: a plan needs at least one row");
  if (rows != static_cast<int64_t>(args.positions.size())) {
    fail_argument("query_shape[0] = {}: must be the number of positions, {}", rows,
                  args.positions.size());
  }
  if (heads < 1) fail_argument("query_shape[1] (heads) = {}: must be positive", heads);
  if (dim < 1) fail_argument("query_shape[2] (dim) = {}: must be positive", dim);
  if (!std::isfinite(args.scale)) fail_argument("scale = {}: must be finite", args.scale);
  check_block_size(args.block_size);
}

}  // namespace

struct CompactPagedPrefill::State {
  TensorView workspace;
  bool planned = false;
  PrefillPlanArgs args;  // the last plan's; its positions live in the storage
  int64_t planned_entries = 0;
  std::unique_ptr<PlanStorage> storage;  // null before the first plan

  int64_t rows() const { return args.query_shape[0]; }
  bool owns_query() const { return !args.contiguous_query; }

  void require_plan(const char* call) const {
    if (!planned) fail(ErrorCode::wrong_state, "{}: needs a plan first", call);
  }

  Problem problem(DType cache_dtype, DType output_dtype, const Options& options) const {
    return {.path = Problem::Path::paged,
            .device = args.device,
            .query_dtype = args.dtype,
            .cache_dtype = cache_dtype == DType::u8 ? DType::f8_e4m3fn : cache_dtype,
            .output_dtype = output_dtype,
            .rows = rows(),
            .heads_per_group = args.query_shape[1],
            .groups = 1,
            .dim = args.query_shape[2],
            .region_count = args.region_count,
            .batch_invariant = options.batch_invariant};
  }
};

CompactPagedPrefill::CompactPagedPrefill(const TensorView& workspace)
    : state_(std::make_unique<State>()) {
  if (workspace.present() && !workspace.is_contiguous()) {
    fail_argument("workspace: must be contiguous");
  }
  state_->workspace = workspace;
}
CompactPagedPrefill::~CompactPagedPrefill() = default;
CompactPagedPrefill::CompactPagedPrefill(CompactPagedPrefill&&) noexcept = default;
CompactPagedPrefill& CompactPagedPrefill::operator=(CompactPagedPrefill&&) noexcept = default;

void CompactPagedPrefill::plan(const PrefillPlanArgs& args, const Options& options) {
  State& s = *state_;
  check_plan(args);
  if (s.workspace.present() && s.workspace.device != args.device) {
    fail_argument("workspace: must be on {}, is on {}", name(args.device),
                  name(s.workspace.device));
  }
  const std::vector<int64_t> positions = copy_once(args.positions);
  const int64_t entries = compact_entry_count(positions, args.region_count);
  const auto [rows, heads, dim] = args.query_shape;
  const int64_t query_elements =
      args.contiguous_query
          ? 0
          : checked_mul(checked_mul(rows, heads, "query_shape"), dim, "query_shape");
  const PageDevice& device = page_device(args.device);
  const bool moved = s.storage == nullptr || s.args.device != args.device;
  std::unique_ptr<PlanStorage> fresh = moved ? device.make_plan_storage(args.device) : nullptr;
  PlanStorage& storage = moved ? *fresh : *s.storage;
  storage.plan(positions, args.region_count, entries,
               static_cast<size_t>(query_elements * itemsize(args.dtype)),
               {.device = args.device,
                .threads = nullptr,
                .stream = options.stream,
                .status = options.status});
  if (moved) s.storage = std::move(fresh);
  s.args = args;
  s.args.positions = {};
  s.planned_entries = entries;
  s.planned = true;
}

void CompactPagedPrefill::fixup_positions(const TensorView& positions, const Options& options) {
  State& s = *state_;
  s.require_plan("fixup_positions");
  check_tensor("positions", positions, {DType::i32, DType::i64}, {s.rows()}, s.args.device);
  check_disjoint({{"options.status", status_view(options, s.args.device)}},
                 {{"positions", positions},
                  {"pages", pages()},
                  {"indptr", indptr()},
                  {"last_page_len", last_page_len()}});
  s.storage->fixup(positions, s.args.region_count,
                   {.device = s.args.device,
                    .threads = nullptr,
                    .stream = options.stream,
                    .status = options.status});
}

std::optional<PagedPrefillMetadata> CompactPagedPrefill::page_metadata(
    const TensorView& block_table, const TensorView& owners, int64_t page_stride, int64_t start,
    int64_t end) const {
  const State& s = *state_;
  s.require_plan("page_metadata");
  if (end < 0) end = s.rows();
  if (start < 0 || start > end || end > s.rows()) {
    fail_argument("[start, end) = [{}, {}): must be inside the plan's {} rows", start, end,
                  s.rows());
  }
  check_block_table(block_table, s.args.device);
  check_tensor("owners", owners, {DType::i32}, {s.rows()}, s.args.device);
  if (page_stride < 1) fail_argument("page_stride = {}: must be positive", page_stride);
  if (s.owns_query()) return std::nullopt;
  return PagedPrefillMetadata{.owners = owners.slice(0, start, end),
                              .block_table = block_table,
                              .pages = pages(),
                              .indptr = indptr().slice(0, start, end + 1),
                              .positions = this->positions().slice(0, start, end),
                              .block_size = s.args.block_size,
                              .page_stride = page_stride};
}

void CompactPagedPrefill::prepare_chunk(int64_t start, const TensorView& query,
                                        const TensorView& kv_cache, const TensorView& regions,
                                        const TensorView& block_table, const TensorView& owners,
                                        const Options& options) {
  State& s = *state_;
  s.require_plan("prepare_chunk");
  if (!s.owns_query()) {
    fail(ErrorCode::wrong_state,
         "prepare_chunk: the plan owns no query copy (contiguous_query = true); write its pages "
         "through page_metadata");
  }
  const auto [rows, heads, dim] = s.args.query_shape;
  check_tensor("query", query, {s.args.dtype}, {-1, heads, dim}, s.args.device);
  const int64_t chunk = query.shape[0];
  if (start < 0 || start > rows || chunk > rows - start) {
    fail_argument("start = {}: rows {} .. {} are not inside the plan's {} rows", start, start,
                  start + chunk, rows);
  }
  const KvCacheView cache = kv_cache_view(kv_cache);
  if (cache.groups != 1) {
    fail_argument(
        "kv_cache.shape[1] = {}: the planned path serves one group; slice the cache first",
        cache.groups);
  }
  if (cache.block_size != s.args.block_size) {
    fail_argument("kv_cache.shape[2] (block_size) = {}: must be the plan's, {}", cache.block_size,
                  s.args.block_size);
  }
  check_tensor("regions", regions, {DType::i32}, {chunk, s.args.region_count}, s.args.device);
  check_disjoint({{"query_buffer", query_buffer()}, {"pages", pages()}}, {{"query", query}});
  FillPrefillPagesArgs fill = {};
  fill.regions = regions;
  fill.block_table = block_table;
  fill.owners =
      owners.rank == 1 && owners.shape[0] == rows ? owners.slice(0, start, start + chunk) : owners;
  fill.indptr = indptr().slice(0, start, start + chunk + 1);
  fill.pages = pages();
  fill.block_size = s.args.block_size;
  fill.page_stride = cache.page_stride();
  fill.blocks = cache.blocks;
  fill.positions = positions().slice(0, start, start + chunk);
  fill.query = query;
  fill.contiguous_query = query_buffer().slice(0, start, start + chunk);
  fill_prefill_pages(fill, options);
}

void CompactPagedPrefill::finish(const TensorView& query, const TensorView& kv_cache,
                                 const TensorView& output, const TensorView& lse, Scale k_scale,
                                 Scale v_scale, const Options& options) {
  const State& s = *state_;
  s.require_plan("finish");
  const auto [rows, heads, dim] = s.args.query_shape;
  if (!s.owns_query())
    check_tensor("query", query, {s.args.dtype}, {rows, heads, dim}, s.args.device);
  const TensorView& source = s.owns_query() ? query_buffer() : query;
  const KvCacheView cache = kv_cache_view(kv_cache);
  if (cache.groups != 1) {
    fail_argument(
        "kv_cache.shape[1] = {}: the planned path serves one group; slice the cache first",
        cache.groups);
  }
  PagedParams params = {};
  check_attention(source, cache, output, lse, s.args.scale, Pointers::checked, &params.problem,
                  &params.tensors);
  apply_scales(check_scales(cache, k_scale, v_scale), &params.tensors);
  Options with_workspace = options;
  if (options.workspace == nullptr && s.workspace.present() && s.workspace.data != nullptr) {
    with_workspace.workspace = s.workspace.data;
    with_workspace.workspace_bytes =
        static_cast<size_t>(s.workspace.size() * itemsize(s.workspace.dtype));
  }
  check_disjoint({{"output", output},
                  {"lse", lse},
                  {"workspace", workspace_view(with_workspace, s.args.device)},
                  {"options.status", status_view(options, s.args.device)}},
                 {{"query", source},
                  {"kv_cache", kv_cache},
                  {"pages", pages()},
                  {"indptr", indptr()},
                  {"last_page_len", last_page_len()},
                  {"k_scale", scale_view(k_scale, s.args.device)},
                  {"v_scale", scale_view(v_scale, s.args.device)}});
  params.problem = s.problem(cache.dtype, output.dtype, options);
  const PlanStorage::Views views = s.storage->views();
  params.pages = views.pages;
  params.indptr = views.indptr;
  params.last_page_len = views.last_page_len;
  params.page_count = kv_page_count(cache);
  params.page_capacity = s.planned_entries;
  const Backend& backend = pick_backend(params.problem, options);
  run_on(backend, params.problem, with_workspace,
         [&](const RunContext& context) { backend.attend_paged(params, context); });
}

size_t CompactPagedPrefill::finish_workspace_size(DType cache_dtype, const Options& options) const {
  const State& s = *state_;
  s.require_plan("finish_workspace_size");
  const Problem problem = s.problem(cache_dtype, s.args.dtype, options);
  return workspace_bytes(pick_backend(problem, options, Workspace::any), problem, options);
}

bool CompactPagedPrefill::planned() const {
  return state_->planned;
}

TensorView CompactPagedPrefill::pages() const {
  if (!planned()) return {};
  return TensorView::contiguous(state_->storage->views().pages, DType::i32,
                                {state_->planned_entries}, state_->args.device);
}
TensorView CompactPagedPrefill::indptr() const {
  if (!planned()) return {};
  return TensorView::contiguous(state_->storage->views().indptr, DType::i32, {state_->rows() + 1},
                                state_->args.device);
}
TensorView CompactPagedPrefill::last_page_len() const {
  if (!planned()) return {};
  return TensorView::contiguous(state_->storage->views().last_page_len, DType::i32,
                                {state_->rows()}, state_->args.device);
}
TensorView CompactPagedPrefill::positions() const {
  if (!planned()) return {};
  return TensorView::contiguous(state_->storage->views().positions, DType::i64, {state_->rows()},
                                state_->args.device);
}
TensorView CompactPagedPrefill::query_buffer() const {
  if (!planned() || !state_->owns_query()) return {};
  const auto [rows, heads, dim] = state_->args.query_shape;
  return TensorView::contiguous(state_->storage->views().query, state_->args.dtype,
                                {rows, heads, dim}, state_->args.device);
}
std::array<int64_t, 3> CompactPagedPrefill::query_shape() const {
  return state_->args.query_shape;
}
int64_t CompactPagedPrefill::region_count() const {
  return state_->args.region_count;
}
int64_t CompactPagedPrefill::block_size() const {
  return state_->args.block_size;
}

}  // namespace octopage
