// The fast CPU backend: cuts the rows into tiles, unites the selections of each tile and hands it
// to the kernel. Every id, owner and table entry is read once and checked here.

#include <algorithm>
#include <vector>

#include <hwy/contrib/sort/vqsort.h>

#include "backends/backend.hpp"
#include "backends/cpu/tile_kernel.hpp"
#include "core/read_once.hpp"
#include "kv/host_lookup.hpp"

namespace octopage {
namespace {

constexpr int64_t kTileQueries = 256;  // (row, head) pairs of a tile: Q and O stay in the L2 cache
constexpr int64_t kMaxTileEntries = 1 << 15;  // page keys of a tile, unless one row has more
constexpr size_t kAlignment = 64;

/// Hands out aligned pieces of memory, or only counts them where the memory is null: the size of a
/// workspace and its layout are one body.
class Carver {
 public:
  explicit Carver(std::byte* memory) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    base_ = memory == nullptr ? nullptr : memory + (kAlignment - address % kAlignment) % kAlignment;
  }
  template <typename T>
  T* take(int64_t count) {
    std::byte* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }
  /// Bytes that any memory must have, aligned or not.
  size_t bytes() const { return used_ == 0 ? 0 : used_ + kAlignment - 1; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

struct Worker {
  TileScratch scratch;
  uint64_t* keys;   // [tile entries]
  TilePage* pages;  // [tile entries]
};

struct Layout {
  int64_t tile_rows = 1;
  TileRow* ordered = nullptr;  // [rows], direct path only
  int32_t* order = nullptr;    // [rows]
  int32_t* starts = nullptr;   // [rows+1]
  Worker* workers = nullptr;   // [concurrency]
  size_t bytes = 0;

  Layout(const Problem& problem, int32_t concurrency, std::byte* memory) {
    const int64_t heads = problem.heads_per_group;
    const int64_t entries_per_row = std::max<int64_t>(problem.region_count, 1);
    if (!problem.batch_invariant) {
      tile_rows = std::clamp<int64_t>(
          std::min(kTileQueries / heads, kMaxTileEntries / entries_per_row), 1, kMaxTileRows);
    }
    const int64_t lanes = tile_lanes();
    // A tile may have fewer rows than tile_rows; a smaller pack of such a tile never needs more.
    const PackShape pack = PackShape::of(heads, tile_rows, lanes);
    const PackShape single = PackShape::of(heads, 1, lanes);
    const int64_t width = std::max(pack.vectors, single.vectors) * lanes;
    const int64_t lanes_of_tile = ((tile_rows + pack.rows - 1) / pack.rows) * width;
    const int64_t entries = tile_rows * entries_per_row;
    Carver carver(memory);
    ordered = carver.take<TileRow>(problem.path == Problem::Path::direct ? problem.rows : 0);
    order = carver.take<int32_t>(problem.rows);
    starts = carver.take<int32_t>(problem.path == Problem::Path::direct ? problem.rows + 1 : 0);
    workers = carver.take<Worker>(concurrency);
    for (int32_t i = 0; i < concurrency; ++i) {
      Worker worker;
      worker.scratch.k = carver.take<float>(kChunkPages * kPageTokens * kTokenStride);
      worker.scratch.v = carver.take<float>(kChunkPages * kPageTokens * kTokenStride);
      worker.scratch.query = carver.take<float>(lanes_of_tile * problem.dim);
      worker.scratch.sums = carver.take<float>(lanes_of_tile * problem.dim);
      worker.scratch.largest = carver.take<float>(lanes_of_tile);
      worker.scratch.normaliser = carver.take<float>(lanes_of_tile);
      worker.scratch.scores = carver.take<float>(kChunkPages * kPageTokens * width);
      worker.scratch.correction = carver.take<float>(width);
      worker.scratch.visible = carver.take<uint8_t>(kChunkPages * kMaxTileRows);
      worker.keys = carver.take<uint64_t>(entries);
      worker.pages = carver.take<TilePage>(entries);
      if (workers != nullptr) workers[i] = worker;
    }
    bytes = carver.bytes();
  }
};

/// What a row means that names an id twice.
enum class Repeats {
  count_once,  ///< a region: it is selected
  count_each,  ///< a listed page: two blocks of a table may be the same one
};

/// Groups sorted keys into pages: `offset_of(id)` gives a page's offset or -1 to skip it. A page
/// has one key of a row at most where repeats count each.
template <Repeats kRepeats, typename OffsetOf>
int64_t group_keys(const uint64_t* keys, int64_t count, TilePage* pages, OffsetOf&& offset_of) {
  const auto joins = [&](int64_t i) {
    return PageKey::id(keys[i]) == PageKey::id(keys[i - 1]) &&
           (kRepeats == Repeats::count_once || PageKey::row(keys[i]) > PageKey::row(keys[i - 1]));
  };
  int64_t found = 0;
  for (int64_t begin = 0; begin < count;) {
    int64_t end = begin + 1;
    while (end < count && joins(end)) ++end;
    const int64_t offset = offset_of(static_cast<int64_t>(PageKey::id(keys[begin])));
    if (offset >= 0) pages[found++] = {.offset = offset, .first_key = begin, .end_key = end};
    begin = end;
  }
  return found;
}

/// The part of a job that a call's tiles share.
TileJob make_job(const Problem& problem, const AttentionTensors& t, int64_t group) {
  const int64_t head = group * problem.heads_per_group;
  TileJob job = {};
  job.cache = t.cache.data;
  job.cache_dtype = t.cache.dtype;
  job.stride_token = t.cache.stride_token;
  job.dim = problem.dim;
  job.heads = problem.heads_per_group;
  job.query = static_cast<const char*>(t.query) +
              head * t.stride_query_head * itemsize(problem.query_dtype);
  job.query_dtype = problem.query_dtype;
  job.stride_query_row = t.stride_query_row;
  job.stride_query_head = t.stride_query_head;
  job.output =
      static_cast<char*>(t.output) + head * t.stride_output_head * itemsize(problem.output_dtype);
  job.output_dtype = problem.output_dtype;
  job.stride_output_row = t.stride_output_row;
  job.stride_output_head = t.stride_output_head;
  job.lse = t.lse == nullptr ? nullptr : t.lse + head * t.stride_lse_head;
  job.stride_lse_row = t.stride_lse_row;
  job.stride_lse_head = t.stride_lse_head;
  job.scale = t.scale;
  job.v_scale = t.v_scale;
  return job;
}

class CpuBackend final : public Backend {
 public:
  BackendInfo info() const override {
    return {.name = "cpu",
            .description = std::string("SIMD (") + tile_target() + ") and threads",
            .priority = 100,
            .available = true,
            .reason = ""};
  }
  Support supports(const Problem& problem) const override {
    return supports_on_cpu("cpu", problem);
  }
  size_t workspace_bytes(const Problem& problem, int32_t workers) const override {
    return Layout(problem, workers, nullptr).bytes;
  }
  void attend_direct(const DirectParams& params, const RunContext& context) const override;
  void attend_paged(const PagedParams& params, const RunContext& context) const override;
};

void CpuBackend::attend_direct(const DirectParams& p, const RunContext& context) const {
  const Problem& problem = p.problem;
  const Layout layout(problem, context.threads->concurrency(), context.workspace.data());
  std::vector<hwy::Sorter> sorters(static_cast<size_t>(context.threads->concurrency()));
  const int64_t tiles =
      cut_row_tiles(p.rows, problem.rows, layout.tile_rows, layout.ordered, layout.starts);
  for (int64_t i = 0; i < problem.rows; ++i) layout.order[i] = layout.ordered[i].row;
  const PageGeometry geometry = p.tensors.cache.geometry();
  context.threads->parallel_for(tiles * problem.groups, [&](int64_t index, int32_t worker_index) {
    const int64_t group = index / tiles;
    const int64_t tile = index % tiles;
    const Worker& worker = layout.workers[worker_index];
    TileJob job = make_job(problem, p.tensors, group);
    const TileRow* rows = layout.ordered + layout.starts[tile];
    job.row_ids = layout.order + layout.starts[tile];
    job.rows = layout.starts[tile + 1] - layout.starts[tile];
    job.scratch = worker.scratch;
    job.keys = worker.keys;
    job.pages = worker.pages;

    int32_t status = 0;
    int64_t count = 0;
    int64_t largest_own = -1;
    const int64_t owner = rows[0].owner;
    const bool owner_valid = owner >= 0 && owner < p.table.requests;
    for (int64_t r = 0; r < job.rows; ++r) {
      const int64_t row = rows[r].row;
      const int64_t position = rows[r].position;
      const int64_t own = region_of_position(position);
      const int64_t entries = selection_count(position, problem.region_count);
      if (entries > 0 && !owner_valid) status |= status_owner;
      if (!owner_valid) continue;
      largest_own = std::max(largest_own, own);
      const int32_t* regions =
          p.regions + row * p.stride_regions_row + group * p.stride_regions_group;
      for (int64_t i = 0; i < entries; ++i) {
        const int64_t region = read_once(regions + i * p.stride_regions_entry);
        if (region < 0 || region > own) {
          status |= status_region;
          continue;
        }
        const int64_t visible = region == own ? last_page_len(position) : kPageTokens;
        worker.keys[count++] = PageKey::make(static_cast<uint64_t>(region), r, visible);
      }
    }
    sorters[static_cast<size_t>(worker_index)](worker.keys, static_cast<size_t>(count),
                                               hwy::SortAscending());
    // Regions have been checked against each row's own one: what is left is the table.
    const auto offset_of = [&](int64_t region) -> int64_t {
      const PageLookup page = host_page_of_region(p.table, geometry, owner, region, largest_own);
      status |= page.fault;
      return page.fault != 0 ? -1 : page_offset(p.tensors.cache, group, page.page);
    };
    job.page_count = group_keys<Repeats::count_once>(worker.keys, count, worker.pages, offset_of);
    attend_tile(job);
    raise_status(context.status, status);
  });
}

void CpuBackend::attend_paged(const PagedParams& p, const RunContext& context) const {
  const Problem& problem = p.problem;
  const Layout layout(problem, context.threads->concurrency(), context.workspace.data());
  std::vector<hwy::Sorter> sorters(static_cast<size_t>(context.threads->concurrency()));
  for (int64_t row = 0; row < problem.rows; ++row) layout.order[row] = static_cast<int32_t>(row);
  const int64_t tiles = (problem.rows + layout.tile_rows - 1) / layout.tile_rows;
  context.threads->parallel_for(tiles, [&](int64_t tile, int32_t worker_index) {
    const Worker& worker = layout.workers[worker_index];
    TileJob job = make_job(problem, p.tensors, 0);
    job.row_ids = layout.order + tile * layout.tile_rows;
    job.rows = std::min(layout.tile_rows, problem.rows - tile * layout.tile_rows);
    job.scratch = worker.scratch;
    job.keys = worker.keys;
    job.pages = worker.pages;
    int64_t count = 0;
    for (int64_t r = 0; r < job.rows; ++r) {
      const int64_t row = job.row_ids[r];
      const PageRange range = page_range(p, row);
      for (int64_t i = range.begin; i < range.end; ++i) {
        const int64_t page = read_once(p.pages + i);
        if (page < 0 || page >= p.page_count) continue;
        const int64_t visible = i + 1 == range.end ? range.last_tokens : kPageTokens;
        worker.keys[count++] = PageKey::make(static_cast<uint64_t>(page), r, visible);
      }
    }
    // One row keeps the order of its list, which does not depend on where its blocks lie.
    if (job.rows > 1) {
      sorters[static_cast<size_t>(worker_index)](worker.keys, static_cast<size_t>(count),
                                                 hwy::SortAscending());
    }
    job.page_count = group_keys<Repeats::count_each>(
        worker.keys, count, worker.pages,
        [&](int64_t page) { return page_offset(p.tensors.cache, 0, page); });
    attend_tile(job);
  });
}

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace octopage
