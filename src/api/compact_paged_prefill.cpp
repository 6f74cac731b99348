#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "api/backend_choice.hpp"
#include "api/validate.hpp"
#include "core/check.hpp"
#include "octopage/page_plan.hpp"
#include "plan/compact_metadata.hpp"
#include "plan/page_functions.hpp"

namespace octopage {
namespace {

/// Host memory that keeps its address while the capacity reached so far suffices. Growing is split
/// in two, so that a plan whose memory cannot be had leaves the former one as it was.
template <typename T>
class GrowingBuffer {
 public:
  void prepare(int64_t size) {
    if (size <= capacity_) return;
    try {
      next_ = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(size));
    } catch (const std::bad_alloc&) {
      fail(ErrorCode::out_of_memory, "plan: could not allocate {} bytes",
           size * static_cast<int64_t>(sizeof(T)));
    }
    next_capacity_ = size;
  }
  /// Takes over what `prepare` allocated; true where the memory is new.
  bool commit() noexcept {
    if (!next_) return false;
    data_ = std::move(next_);
    capacity_ = next_capacity_;
    return true;
  }
  T* data() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_, next_;
  int64_t capacity_ = 0, next_capacity_ = 0;
};

void check_plan(const PrefillPlanArgs& args) {
  const auto [rows, heads, dim] = args.query_shape;
  if (args.device.type != DeviceType::cpu) {
    fail(ErrorCode::unsupported, "device = {}: this version plans for the cpu only", name(args.device));
  }
  if (args.dtype != DType::bf16 && args.dtype != DType::f16) {
    fail_argument("dtype: must be bf16 or f16, is {}", name(args.dtype));
  }
  if (args.positions.empty()) fail_argument("positions: a plan needs at least one row");
  if (rows != static_cast<int64_t>(args.positions.size())) {
    fail_argument("query_shape[0] = {}: must be the number of positions, {}", rows, args.positions.size());
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
  // The last plan's arguments; positions lives in the buffer of that name.
  PrefillPlanArgs args;
  int64_t planned_entries = 0;
  GrowingBuffer<int64_t> positions;       // [rows] current: bounds, or exact after a fixup
  GrowingBuffer<int32_t> planned_indptr;  // [rows+1] of the bounds
  GrowingBuffer<int32_t> indptr;          // [rows+1] current
  GrowingBuffer<int32_t> last_page_len;   // [rows] current
  GrowingBuffer<int32_t> pages;           // [planned_entries]
  GrowingBuffer<uint16_t> query;          // [rows, heads, dim] where the plan owns a copy

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

CompactPagedPrefill::CompactPagedPrefill(const TensorView& workspace) : state_(std::make_unique<State>()) {
  if (workspace.present() && !workspace.is_contiguous()) {
    fail_argument("workspace: must be contiguous");
  }
  state_->workspace = workspace;
}
CompactPagedPrefill::~CompactPagedPrefill() = default;
CompactPagedPrefill::CompactPagedPrefill(CompactPagedPrefill&&) noexcept = default;
CompactPagedPrefill& CompactPagedPrefill::operator=(CompactPagedPrefill&&) noexcept = default;

void CompactPagedPrefill::plan(const PrefillPlanArgs& args, const Options&) {
  State& s = *state_;
  check_plan(args);
  const int64_t entries = compact_entry_count(args.positions, args.region_count);
  const auto [rows, heads, dim] = args.query_shape;
  const int64_t query_elements =
      args.contiguous_query
          ? 0
          : checked_mul(checked_mul(rows, heads, "query_shape"), dim, "query_shape");
  s.positions.prepare(rows);
  s.planned_indptr.prepare(rows + 1);
  s.indptr.prepare(rows + 1);
  s.last_page_len.prepare(rows);
  s.pages.prepare(entries);
  s.query.prepare(query_elements);
  // From here on nothing fails.
  s.positions.commit();
  s.planned_indptr.commit();
  s.indptr.commit();
  s.last_page_len.commit();
  s.query.commit();
  if (s.pages.commit()) std::fill_n(s.pages.data(), entries, -1);  // rows never filled select nothing
  std::copy(args.positions.begin(), args.positions.end(), s.positions.data());
  write_compact_metadata(args.positions, args.region_count, s.planned_indptr.data(), s.last_page_len.data());
  std::copy_n(s.planned_indptr.data(), rows + 1, s.indptr.data());
  s.args = args;
  s.args.positions = {};
  s.planned_entries = entries;
  s.planned = true;
}

void CompactPagedPrefill::fixup_positions(const TensorView& positions, const Options& options) {
  State& s = *state_;
  s.require_plan("fixup_positions");
  check_tensor("positions", positions, {DType::i32, DType::i64}, {s.rows()}, s.args.device);
  for (int64_t row = 0; row < s.rows(); ++row) {
    const int64_t offset = row * positions.strides[0];
    s.positions.data()[row] = positions.dtype == DType::i64
                                  ? static_cast<const int64_t*>(positions.data)[offset]
                                  : static_cast<const int32_t*>(positions.data)[offset];
  }
  raise_status(options.status,
               fixup_compact_metadata({s.positions.data(), static_cast<size_t>(s.rows())},
                                      s.args.region_count, s.planned_indptr.data(), s.indptr.data(),
                                      s.last_page_len.data()));
}

std::optional<PagedPrefillMetadata> CompactPagedPrefill::page_metadata(const TensorView& block_table,
                                                                       const TensorView& owners,
                                                                       int64_t page_stride,
                                                                       int64_t start,
                                                                       int64_t end) const {
  const State& s = *state_;
  s.require_plan("page_metadata");
  if (end < 0) end = s.rows();
  if (start < 0 || start > end || end > s.rows()) {
    fail_argument("[start, end) = [{}, {}): must be inside the plan's {} rows", start, end, s.rows());
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

void CompactPagedPrefill::prepare_chunk(int64_t start, const TensorView& query, const TensorView& kv_cache,
                                        const TensorView& regions, const TensorView& block_table,
                                        const TensorView& owners, const Options& options) {
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
    fail_argument("kv_cache.shape[1] = {}: the planned path serves one group; slice the cache first",
                  cache.groups);
  }
  if (cache.block_size != s.args.block_size) {
    fail_argument("kv_cache.shape[2] (block_size) = {}: must be the plan's, {}", cache.block_size,
                  s.args.block_size);
  }
  check_tensor("regions", regions, {DType::i32}, {chunk, s.args.region_count}, s.args.device);
  FillPrefillPagesArgs fill = {};
  fill.regions = regions;
  fill.block_table = block_table;
  fill.owners = owners.rank == 1 && owners.shape[0] == rows ? owners.slice(0, start, start + chunk) : owners;
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

void CompactPagedPrefill::finish(const TensorView& query, const TensorView& kv_cache, const TensorView& output,
                                 const TensorView& lse, Scale k_scale, Scale v_scale, const Options& options) {
  const State& s = *state_;
  s.require_plan("finish");
  const auto [rows, heads, dim] = s.args.query_shape;
  if (!s.owns_query()) check_tensor("query", query, {s.args.dtype}, {rows, heads, dim}, s.args.device);
  const TensorView& source = s.owns_query() ? query_buffer() : query;
  const KvCacheView cache = kv_cache_view(kv_cache);
  if (cache.groups != 1) {
    fail_argument("kv_cache.shape[1] = {}: the planned path serves one group; slice the cache first",
                  cache.groups);
  }
  PagedParams params = {};
  check_attention(source, cache, output, lse, s.args.scale, Pointers::checked, &params.problem, &params.tensors);
  const ScaleValues scales = check_scales(cache.dtype, k_scale, v_scale);
  params.tensors.scale *= static_cast<double>(scales.k);
  params.tensors.v_scale = static_cast<double>(scales.v);
  params.problem = s.problem(cache.dtype, output.dtype, options);
  params.pages = s.pages.data();
  params.indptr = s.indptr.data();
  params.last_page_len = s.last_page_len.data();
  params.page_count = kv_page_count(cache);
  const Backend& backend = pick_backend(params.problem, options);
  Options with_workspace = options;
  if (options.workspace == nullptr && s.workspace.present() && s.workspace.data != nullptr) {
    with_workspace.workspace = s.workspace.data;
    with_workspace.workspace_bytes =
        static_cast<size_t>(s.workspace.size() * itemsize(s.workspace.dtype));
  }
  Threads threads(options);
  const Workspace workspace(with_workspace, backend.workspace_bytes(params.problem, threads.concurrency()));
  backend.attend_paged(params, {.threads = &threads,
                                .stream = options.stream,
                                .workspace = workspace.span(),
                                .status = options.status});
}

size_t CompactPagedPrefill::finish_workspace_size(DType cache_dtype, const Options& options) const {
  const State& s = *state_;
  s.require_plan("finish_workspace_size");
  const Problem problem = s.problem(cache_dtype, s.args.dtype, options);
  const Backend& backend = pick_backend(problem, options);
  const Threads threads(options);
  return backend.workspace_bytes(problem, threads.concurrency());
}

bool CompactPagedPrefill::planned() const { return state_->planned; }

TensorView CompactPagedPrefill::pages() const {
  return TensorView::contiguous(state_->pages.data(), DType::i32, {state_->planned_entries}, state_->args.device);
}
TensorView CompactPagedPrefill::indptr() const {
  return TensorView::contiguous(state_->indptr.data(), DType::i32, {state_->rows() + 1}, state_->args.device);
}
TensorView CompactPagedPrefill::last_page_len() const {
  return TensorView::contiguous(state_->last_page_len.data(), DType::i32, {state_->rows()}, state_->args.device);
}
TensorView CompactPagedPrefill::positions() const {
  return TensorView::contiguous(state_->positions.data(), DType::i64, {state_->rows()}, state_->args.device);
}
TensorView CompactPagedPrefill::query_buffer() const {
  if (!state_->planned || !state_->owns_query()) return {};
  const auto [rows, heads, dim] = state_->args.query_shape;
  return TensorView::contiguous(state_->query.data(), state_->args.dtype, {rows, heads, dim}, state_->args.device);
}
std::array<int64_t, 3> CompactPagedPrefill::query_shape() const { return state_->args.query_shape; }
int64_t CompactPagedPrefill::region_count() const { return state_->args.region_count; }
int64_t CompactPagedPrefill::block_size() const { return state_->args.block_size; }

}  // namespace octopage
