#include "plan/page_functions.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "core/dtype.hpp"
#include "core/read_once.hpp"
#include "kv/host_lookup.hpp"

namespace octopage {
namespace {

/// Rows or blocks that one parallel task handles: small enough to balance, large enough to pay.
constexpr int64_t kTaskRows = 64;

void convert_row(const StageParams& params, const void* source, void* target, int64_t elements,
                 float scale, int64_t source_index, int64_t target_index) {
  const bool scaled = params.cache.dtype == DType::f8_e4m3fn;
  for (int64_t i = 0; i < elements; ++i) {
    const float value = load_f32(source, params.cache.dtype, source_index + i);
    store_f32(target, params.output_dtype, target_index + i, scaled ? value * scale : value);
  }
}

void stage_block(const StageParams& params, int64_t block, int64_t staged_index) {
  const KvCacheView& cache = params.cache;
  const int64_t row = 2 * cache.dim;
  for (int64_t token = 0; token < cache.block_size; ++token) {
    const int64_t source = block * cache.stride_block + token * cache.stride_token;
    const int64_t target = (staged_index * cache.block_size + token) * row;
    if (cache.dtype == params.output_dtype) {
      const int64_t bytes = itemsize(cache.dtype);
      std::memcpy(static_cast<char*>(params.output) + target * bytes,
                  static_cast<const char*>(cache.data) + source * bytes,
                  static_cast<size_t>(row * bytes));
      continue;
    }
    convert_row(params, cache.data, params.output, cache.dim, params.k_scale, source, target);
    convert_row(params, cache.data, params.output, cache.dim, params.v_scale, source + cache.dim,
                target + cache.dim);
  }
}

/// The own region where positions are not at hand: the largest id that is valid otherwise.
int64_t largest_valid_region(const FillParams& p, int64_t owner, const int32_t* regions,
                             int64_t count) {
  int64_t largest = -1;
  for (int64_t entry = 0; entry < count; ++entry) {
    const int64_t region = read_once(regions + entry * p.stride_regions_entry);
    if (region <= largest) continue;
    const PageLookup page = host_page_of_region(p.table, p.geometry, owner, region, region);
    if (page.fault == 0) largest = region;
  }
  return largest;
}

int32_t fill_row(const FillParams& p, int64_t row) {
  const int64_t begin = read_once(p.indptr + row);
  const int64_t end = std::min<int64_t>(read_once(p.indptr + row + 1), p.pages_capacity);
  if (begin < 0 || begin >= end) return 0;
  const int64_t count = std::min(end - begin, p.region_count);
  const int32_t* regions = p.regions + row * p.stride_regions_row;
  const int64_t owner = read_once(p.owners + row * p.stride_owners);
  int32_t* pages = p.pages + begin;
  const int64_t own = p.positions != nullptr ? region_of_position(read_once(p.positions + row))
                                             : largest_valid_region(p, owner, regions, count);
  // Without positions a row that has no valid entry still reports why each entry is refused.
  const int64_t limit = p.positions != nullptr ? own : std::numeric_limits<int32_t>::max();
  int32_t status = 0;
  int64_t own_page = -1;
  bool own_listed = p.positions == nullptr;  // without positions no region can be missing
  int64_t written = 0;
  for (int64_t entry = 0; entry < count; ++entry) {
    const int64_t region = read_once(regions + entry * p.stride_regions_entry);
    const PageLookup page = host_page_of_region(p.table, p.geometry, owner, region, limit);
    status |= page.fault;
    own_listed |= region == own;
    // The first valid own region waits for the last place; everything else keeps its order.
    if (page.fault == 0 && region == own && own_page < 0) {
      own_page = page.page;
      continue;
    }
    // A page number that i32 cannot hold is refused rather than wrapped.
    const bool fits = page.page <= std::numeric_limits<int32_t>::max();
    if (!fits) status |= status_table;
    if (written < count) pages[written++] = fits ? static_cast<int32_t>(page.page) : -1;
  }
  if (own_page >= 0 && own_page <= std::numeric_limits<int32_t>::max()) {
    pages[count - 1] = static_cast<int32_t>(own_page);
  } else {
    if (!own_listed) status |= status_region;
    if (own_page >= 0) status |= status_table;  // its number does not fit i32
    std::fill(pages, pages + count, -1);
  }
  // A range longer than the selection (a caller's own indptr) holds no more pages.
  std::fill(pages + count, pages + (end - begin), -1);
  return status;
}

void copy_query_row(const FillParams& p, int64_t row) {
  for (int64_t head = 0; head < p.heads; ++head) {
    const int64_t source = row * p.stride_query_row + head * p.stride_query_head;
    const int64_t target = (row * p.heads + head) * p.dim;
    std::memcpy(static_cast<char*>(p.contiguous_query) + target * p.element_bytes,
                static_cast<const char*>(p.query) + source * p.element_bytes,
                static_cast<size_t>(p.dim * p.element_bytes));
  }
}

}  // namespace

int32_t stage_pages(const StageParams& params, Threads& threads) {
  const KvCacheView& cache = params.cache;
  const int64_t bytes = cache.block_size * 2 * cache.dim * itemsize(params.output_dtype);
  std::atomic<int32_t> status{0};
  threads.parallel_for(params.staged, [&](int64_t i, int32_t) {
    const int64_t block = read_once(params.staged_blocks + i * params.stride_staged);
    if (block < 0 || block >= cache.blocks) {
      std::memset(static_cast<char*>(params.output) + i * bytes, 0, static_cast<size_t>(bytes));
      status.fetch_or(status_table, std::memory_order_relaxed);
    } else {
      stage_block(params, block, i);
    }
  });
  return status.load();
}

int32_t fill_pages(const FillParams& params, Threads& threads) {
  std::atomic<int32_t> status{0};
  const int64_t tasks = (params.rows + kTaskRows - 1) / kTaskRows;
  threads.parallel_for(tasks, [&](int64_t task, int32_t) {
    int32_t bits = 0;
    const int64_t end = std::min(params.rows, (task + 1) * kTaskRows);
    for (int64_t row = task * kTaskRows; row < end; ++row) {
      bits |= fill_row(params, row);
      if (params.query != nullptr) copy_query_row(params, row);
    }
    if (bits != 0) status.fetch_or(bits, std::memory_order_relaxed);
  });
  return status.load();
}

BadEntry check_selection(const BlockTableView& table, const PageGeometry& geometry, int64_t owner,
                         const int32_t* regions, int64_t stride_entry, int64_t count,
                         int64_t own_region, bool require_own) {
  if (count <= 0) return {};
  if (owner < 0 || owner >= table.requests) return {.fault = status_owner, .value = owner};
  bool own_found = false;
  BadEntry bad;
  std::vector<std::pair<int32_t, int64_t>> sorted;  // (region, entry) before the first bad one
  sorted.reserve(static_cast<size_t>(count));
  for (int64_t entry = 0; entry < count; ++entry) {
    const int32_t region = read_once(regions + entry * stride_entry);
    own_found |= region == own_region;
    const PageLookup page = host_page_of_region(table, geometry, owner, region, own_region);
    if (page.fault == 0) {
      sorted.emplace_back(region, entry);
      continue;
    }
    bad = {.fault = page.fault, .entry = entry, .value = region};
    if (page.fault != status_table) break;
    bad.table_column = region / geometry.regions_per_block;
    if (bad.table_column < table.max_blocks) {
      bad.table_value = read_once(table.data + owner * table.stride_request +
                                  bad.table_column * table.stride_block);
    }
    break;
  }
  // A repeated entry before it is the first; repetition shows in the sorted order.
  std::sort(sorted.begin(), sorted.end());
  BadEntry duplicate;
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].first != sorted[i - 1].first) continue;
    if (duplicate.fault == 0 || sorted[i].second < duplicate.entry) {
      duplicate = {.fault = kDuplicate, .entry = sorted[i].second, .value = sorted[i].first};
    }
  }
  if (duplicate.fault != 0) return duplicate;
  if (bad.fault != 0) return bad;
  if (require_own && !own_found) return {.fault = kOwnMissing, .value = own_region};
  return {};
}

}  // namespace octopage
