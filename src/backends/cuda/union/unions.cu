// The page lists of the union path: which pages a tile of neighbouring rows selects, in an order
// that both of its halves can walk, with a mask per page. This is also the one place of the path
// where every owner, region id, table column and block id is checked.
//
// A CTA serves one span. For each of its tiles it
//   1. marks regions: a mark for each region of a window, one bit per row of the tile,
//   2. gathers the marked regions in ascending order, so that CTAs that run side by side read the
//      same part of the cache at the same time,
//   3. sorts them into three classes: selected by both halves, by the first only, by the second
//      only, each filled into batches of eight,
//   4. merges the batches by their first region. Batches of one half stand in pairs, first before
//      second, so that a half never waits for more than one batch it does not use; what one class
//      has more than the other comes last.
// Rows that select a region twice count it once.

#include <cuda_runtime.h>

#include <algorithm>

#include "backends/cuda/device/ptx/bulk.cuh"
#include "backends/cuda/runtime/runtime.hpp"
#include "backends/cuda/union/launch.hpp"
#include "backends/cuda/union/params.hpp"

namespace octopage::cuda {
namespace {

constexpr int kWarps = kUnionThreads / 32;
constexpr int kWindowBytes = 32768;  // of marks at a time
constexpr int kScanBytes = kWarps * 32 * 16;
constexpr int kUnroll = 16;  // region ids of a lane under way together
constexpr int kLookUps = 4;  // pages of a thread, likewise

/// A marked region, packed: ids are below 2^24 for tiles of up to eight rows.
template <typename Mark>
struct Entry;
template <>
struct Entry<uint8_t> {
  using Packed = uint32_t;
  static constexpr int kMarkBits = 8;
  static constexpr int kCtasOfMultiprocessor = 4;  // 512 regions of eight rows
};
template <>
struct Entry<uint32_t> {
  using Packed = uint64_t;
  static constexpr int kMarkBits = 32;
  static constexpr int kCtasOfMultiprocessor = 1;
};

/// Dynamic shared memory. The tables of step 4 lie where the marks of steps 1 and 2 were.
template <typename Mark>
struct SharedLayout {
  using Packed = typename Entry<Mark>::Packed;
  int32_t batches;  // of a tile at most
  int32_t entries;

  __host__ __device__ SharedLayout(int32_t tile_rows, int64_t region_count)
      : batches(static_cast<int32_t>((tile_rows * region_count + 7) / 8 + 3)),
        entries(static_cast<int32_t>(tile_rows * region_count)) {}
  // Marks, or four tables of 16-bit words.
  __host__ __device__ size_t list_at() const {
    const size_t tables = (size_t{8} * batches + 15) / 16 * 16;
    return tables > kWindowBytes ? tables : size_t{kWindowBytes};
  }
  __host__ __device__ size_t page_marks_at() const {
    return (list_at() + entries * sizeof(Packed) + 15) / 16 * 16;
  }
  __host__ __device__ size_t bytes() const {
    return page_marks_at() + size_t{kBatchPages} * batches * sizeof(Mark);
  }
};

/// A bit for each mark of the word: it is set.
__device__ __forceinline__ uint32_t marked(uint8_t, uint32_t word) {  // mark i: bit 8 i + 7
  return (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
}
__device__ __forceinline__ uint32_t marked(uint32_t, uint32_t word) {
  return word != 0 ? 1u : 0u;
}
/// The same side by side, mark i in bit i.
__device__ __forceinline__ uint32_t marked_bits(uint8_t tag, uint32_t word) {
  return (marked(tag, word) >> 7) * 0x01020408u >> 24 & 15;
}
__device__ __forceinline__ uint32_t marked_bits(uint32_t tag, uint32_t word) {
  return marked(tag, word);
}

/// The rows of a span, in shared memory.
struct SpanRows {
  int32_t owner[kMostTileRows];   // as given
  int32_t count[kMostTileRows];   // entries that count; 0 where the owner is invalid
  uint32_t limit[kMostTileRows];  // the largest region that is valid
  int64_t position[kMostTileRows];
};

/// Counts of the three classes, one after the other: both halves, first only, second only.
struct ClassCounts {
  int32_t both, first, second;
  __device__ __forceinline__ void add(int kind, int32_t n) {
    both += kind == 0 ? n : 0;
    first += kind == 1 ? n : 0;
    second += kind == 2 ? n : 0;
  }
};

/// Where the batches of each class stand, from 16-bit tables in shared memory.
struct BatchOrder {
  const uint16_t* pairs_before;  // [both batches] pairs that stand before each
  const uint16_t* both_before;   // [pairs] batches of both halves that stand before each
  int32_t both_batches, pairs;

  struct Place {
    int32_t batch, step;
  };
  __device__ __forceinline__ Place both(int32_t i) const {
    const int32_t before = pairs_before[i];
    return {i + 2 * before, i + before};
  }
  __device__ __forceinline__ Place single(int32_t j, bool second) const {
    if (j >= pairs) return {both_batches + 2 * pairs + (j - pairs), both_batches + j};
    const int32_t before = both_before[j];
    return {2 * j + before + (second ? 1 : 0), j + before};
  }
};

__device__ __forceinline__ int32_t batches_of(int32_t pages) {
  return (pages + kBatchPages - 1) / kBatchPages;
}

__device__ __forceinline__ int64_t position_at(const UnionsParams& p, int64_t row) {
  const int64_t at = row * p.stride_positions;
  return p.wide_positions != 0 ? static_cast<const int64_t*>(p.positions)[at]
                               : static_cast<const int32_t*>(p.positions)[at];
}

/// Bit `row` of eight marks as one byte.
__device__ __forceinline__ uint32_t gather_bits(const uint8_t* marks, int row) {
  const uint2 eight = *reinterpret_cast<const uint2*>(marks);
  // The multiplication brings bits 0, 8, 16, 24 side by side to bits 24 .. 27.
  const uint32_t low = (eight.x >> row & 0x01010101u) * 0x01020408u >> 24;
  const uint32_t high = (eight.y >> row & 0x01010101u) * 0x01020408u >> 24;
  return (low & 15) | (high & 15) << 4;
}
__device__ __forceinline__ uint32_t gather_bits(const uint32_t* marks, int row) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kBatchPages; ++j) bits |= (marks[j] >> row & 1) << j;
  return bits;
}

/// Inclusive sum over the CTA's threads, in thread order; `total` is that of all. Uses `scratch`
/// [kWarps].
__device__ __forceinline__ uint64_t scan(uint64_t value, uint64_t* scratch, uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  __syncthreads();  // scratch is free
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) value += scratch[w];
    total += scratch[w];
  }
  return value;
}

/// Steps whose batch is below `limit`; batches ascend.
__device__ __forceinline__ int32_t steps_before(const uint16_t* batch_of, int32_t steps,
                                                int32_t limit) {
  int32_t below = 0;
  while (below < steps) {
    const int32_t middle = (below + steps) / 2;
    if (batch_of[middle] < limit) {
      below = middle + 1;
    } else {
      steps = middle;
    }
  }
  return below;
}

template <typename Mark>
__global__ void __launch_bounds__(kUnionThreads, Entry<Mark>::kCtasOfMultiprocessor)
    unions(const __grid_constant__ UnionsParams p) {
  using Packed = typename Entry<Mark>::Packed;
  constexpr int kMarkBits = Entry<Mark>::kMarkBits;
  constexpr int kMarksPerWord = 4 / sizeof(Mark);
  constexpr int kWindow = kWindowBytes / sizeof(Mark);  // regions
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ SpanRows rows;
  __shared__ uint64_t scratch[kWarps];
  __shared__ uint32_t starts;  // bit r: row r of the span begins a tile
  __shared__ uint32_t live;
  __shared__ int32_t own[kMostTileRows], tail_page, all_faults;
  __shared__ SpanWork work;

  const SharedLayout<Mark> layout(p.lists.tile_rows, p.region_count);
  auto* marks = reinterpret_cast<uint32_t*>(shared);
  auto* list = reinterpret_cast<Packed*>(shared + layout.list_at());
  auto* page_marks = reinterpret_cast<Mark*>(shared + layout.page_marks_at());
  auto* pairs_before = reinterpret_cast<uint16_t*>(shared);
  uint16_t* both_before = pairs_before + layout.batches;
  uint16_t* step_batches[2] = {both_before + layout.batches, both_before + 2 * layout.batches};

  // CTAs of the attention take the multiprocessors that run out of spans, and wait there.
  ptx::let_next_grid_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t spans = static_cast<uint32_t>(p.lists.spans);
  const int64_t span = blockIdx.x % spans, selection = blockIdx.x / spans;
  const int64_t first_row = span * p.lists.tile_rows;
  const int span_rows = static_cast<int>(min(int64_t{p.lists.tile_rows}, p.rows - first_row));
  const int half_rows = p.lists.half_rows;  // a power of two
  const int half_shift = __ffs(half_rows) - 1;
  const int64_t lists_at = (selection * p.lists.spans + span) * p.lists.capacity;
  const int32_t* regions =
      p.regions + first_row * p.stride_regions_row + selection * p.stride_regions_selection;
  // Regions whose column the table has.
  const auto table_regions = static_cast<uint32_t>(
      min(p.table.max_blocks * p.geometry.regions_per_block, int64_t{INT32_MAX}));
  int32_t faults = 0;

  if (warp == 0) {
    int32_t owner = -1;
    int64_t count = 0;
    if (lane < span_rows) {
      const int64_t row = first_row + lane;
      owner = p.owners[row * p.stride_owners];
      const int64_t position = position_at(p, row);
      count = selection_count(position, p.region_count);
      if (count > 0 && (owner < 0 || owner >= p.table.requests)) {
        faults |= status_owner;
        count = 0;
      }
      rows.owner[lane] = owner;
      rows.position[lane] = position;
      rows.count[lane] = static_cast<int32_t>(count);
      rows.limit[lane] =
          static_cast<uint32_t>(min(region_of_position(position), int64_t{INT32_MAX}));
    }
    const int32_t before = __shfl_up_sync(~0u, owner, 1);
    const uint32_t begins = __ballot_sync(~0u, lane < span_rows && (lane == 0 || owner != before));
    const uint32_t entries = __reduce_add_sync(~0u, static_cast<uint32_t>(count));
    if (lane == 0) {
      starts = begins;
      all_faults = 0;
      work = {0, entries};
    }
  }
  __syncthreads();

  int32_t first_batch = 0;
  int tile = 0;
  for (int begin = 0; begin < span_rows; ++tile) {
    const uint32_t later = begin + 1 < 32 ? starts >> (begin + 1) : 0u;
    const int end = later != 0 ? begin + __ffs(static_cast<int>(later)) : span_rows;
    const int tile_rows = end - begin;
    int64_t newest = -1;
    for (int r = begin; r < end; ++r)
      newest = rows.count[r] > 0 ? max(newest, rows.position[r]) : newest;
    const int64_t used_regions =
        min(newest < 0 ? 0 : newest / kPageTokens + 1, int64_t{table_regions});
    if (threadIdx.x < kMostTileRows) own[threadIdx.x] = -1;
    if (threadIdx.x == 0) tail_page = -1, live = 0;

    // 1 and 2. The marked regions in ascending order.
    int32_t gathered = 0;
    for (int64_t window = 0; window == 0 || window < used_regions; window += kWindow) {
      const int64_t in_window = max(min(used_regions - window, int64_t{kWindow}), int64_t{0});
      const auto scan_bytes =
          static_cast<int>((in_window * sizeof(Mark) + kScanBytes - 1) / kScanBytes * kScanBytes);
      for (int at = static_cast<int>(threadIdx.x) * 16; at < scan_bytes; at += kUnionThreads * 16)
        *reinterpret_cast<uint4*>(shared + at) = make_uint4(0, 0, 0, 0);
      __syncthreads();
      for (int r = begin + warp; r < end; r += kWarps) {
        const int32_t count = rows.count[r];
        const uint32_t limit = rows.limit[r];
        const int32_t* from = regions + r * p.stride_regions_row;
        const uint32_t bit = 1u << (r - begin);
        for (int32_t i = lane; i < count; i += 32 * kUnroll) {
          uint32_t region[kUnroll];  // loaded together
#pragma unroll
          for (int k = 0; k < kUnroll; ++k) {
            if (i + 32 * k < count)
              region[k] = static_cast<uint32_t>(from[(i + 32 * k) * p.stride_regions_entry]);
          }
#pragma unroll
          for (int k = 0; k < kUnroll; ++k) {
            if (i + 32 * k >= count) break;
            // Negative ids are large here, and fail the first comparison.
            if (region[k] > limit) {
              faults |= status_region;
            } else if (region[k] >= table_regions) {
              faults |= status_table;
            } else if (region[k] - static_cast<uint32_t>(window) < kWindow) {
              const uint32_t at = region[k] - static_cast<uint32_t>(window);
              atomicOr(marks + at / kMarksPerWord, bit << (at % kMarksPerWord * 8 * sizeof(Mark)));
            }
          }
        }
      }
      __syncthreads();
      // Each warp takes a contiguous part; its lanes take 16 bytes in turn.
      const int part = scan_bytes / 16 / kWarps;
      const auto* from = reinterpret_cast<const uint4*>(shared) + warp * part;
      int32_t mine = 0;
      for (int i = lane; i < part; i += 32) {
        const uint4 words = from[i];
        mine += __popc(marked(Mark{}, words.x)) + __popc(marked(Mark{}, words.y)) +
                __popc(marked(Mark{}, words.z)) + __popc(marked(Mark{}, words.w));
      }
      mine = static_cast<int32_t>(__reduce_add_sync(~0u, static_cast<uint32_t>(mine)));
      if (lane == 0) scratch[warp] = static_cast<uint64_t>(mine);
      __syncthreads();
      int32_t base = gathered;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) base += static_cast<int32_t>(scratch[w]);
        gathered += static_cast<int32_t>(scratch[w]);
      }
      for (int i = lane; i < part; i += 32) {
        const uint4 words = from[i];
        uint32_t set = marked_bits(Mark{}, words.x) |
                       marked_bits(Mark{}, words.y) << kMarksPerWord |
                       marked_bits(Mark{}, words.z) << 2 * kMarksPerWord |
                       marked_bits(Mark{}, words.w) << 3 * kMarksPerWord;
        const int32_t count = __popc(set);
        int32_t up_to = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int32_t below = __shfl_up_sync(~0u, up_to, step);
          if (lane >= step) up_to += below;
        }
        int32_t to = base + up_to - count;
        base += __shfl_sync(~0u, up_to, 31);
        const int first_mark = (warp * part + i) * 4 * kMarksPerWord;
        for (; set != 0; set &= set - 1) {
          const int at = first_mark + __ffs(static_cast<int>(set)) - 1;
          list[to++] =
              static_cast<Packed>(static_cast<uint32_t>(window) + static_cast<uint32_t>(at))
                  << kMarkBits |
              static_cast<Packed>(reinterpret_cast<const Mark*>(shared)[at]);
        }
      }
      __syncthreads();
    }

    // 3. The class of each entry; a tile of one row is computed by both halves together.
    const bool one_row = p.lists.tile_rows == 1;
    const uint32_t first_half = (1u << half_rows) - 1;
    const auto mark_of = [](Packed entry) {
      return static_cast<uint32_t>(static_cast<Mark>(entry));
    };
    const auto kind_of = [&](Packed entry) {
      if (one_row) return 0;
      const uint32_t mark = mark_of(entry);
      return (mark & ~first_half) == 0 ? 1 : (mark & first_half) == 0 ? 2 : 0;
    };
    const int32_t chunk = (gathered + kUnionThreads - 1) / kUnionThreads;
    const int32_t from = min(static_cast<int32_t>(threadIdx.x) * chunk, gathered);
    const int32_t to = min(from + chunk, gathered);
    ClassCounts here = {};
    for (int32_t e = from; e < to; ++e) here.add(kind_of(list[e]), 1);
    uint64_t packed_total;
    const uint64_t packed = static_cast<uint64_t>(here.both) |
                            static_cast<uint64_t>(here.first) << 21 |
                            static_cast<uint64_t>(here.second) << 42;
    const uint64_t before = scan(packed, scratch, packed_total) - packed;
    const auto unpack = [](uint64_t counts) {
      return ClassCounts{static_cast<int32_t>(counts & 0x1fffff),
                         static_cast<int32_t>(counts >> 21 & 0x1fffff),
                         static_cast<int32_t>(counts >> 42)};
    };
    const ClassCounts given = unpack(packed_total);
    // What would fill a last batch of one half by a few pages goes where the last batch of both has
    // room.
    const int32_t room = (kBatchPages - given.both % kBatchPages) % kBatchPages;
    const auto moved = [](int32_t count, int32_t to) {
      return count % kBatchPages <= to ? count % kBatchPages : 0;
    };
    const int32_t moved_first = moved(given.first, room);
    const int32_t moved_second = moved(given.second, room - moved_first);
    const ClassCounts total = {given.both + moved_first + moved_second, given.first - moved_first,
                               given.second - moved_second};

    // 4. The order of the batches.
    const int32_t both_batches = batches_of(total.both), first_batches = batches_of(total.first),
                  second_batches = batches_of(total.second);
    const int32_t pairs = min(first_batches, second_batches);
    const int32_t batches = both_batches + first_batches + second_batches;
    const int32_t steps[2] = {both_batches + first_batches, both_batches + second_batches};
    ClassCounts at = unpack(before);
    for (int32_t e = from; e < to; ++e) {
      const int kind = kind_of(list[e]);
      if (kind == 0 && at.both % kBatchPages == 0) {
        pairs_before[at.both / kBatchPages] =
            static_cast<uint16_t>(min(pairs, batches_of(at.first)));
      } else if (kind == 1 && at.first % kBatchPages == 0 && at.first / kBatchPages < pairs) {
        both_before[at.first / kBatchPages] = static_cast<uint16_t>(batches_of(at.both));
      }
      at.add(kind, 1);
    }
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < batches * kBatchPages;
         i += kUnionThreads)
      page_marks[i] = 0;
    __syncthreads();
    const BatchOrder order = {pairs_before, both_before, both_batches, pairs};
    const auto place_of = [&](int kind, int32_t index) {
      return kind == 0 ? order.both(index / kBatchPages)
                       : order.single(index / kBatchPages, kind == 2);
    };
    int32_t* pages = p.lists.pages + (lists_at + first_batch) * kBatchPages;
    const int32_t owner = rows.owner[begin];
    // Own regions of the tile's rows lie between these two.
    uint32_t oldest_own = UINT32_MAX, newest_own = 0;
    for (int r = begin; r < end; ++r) {
      if (rows.count[r] == 0) continue;
      oldest_own = min(oldest_own, rows.limit[r]);
      newest_own = max(newest_own, rows.limit[r]);
    }
    uint32_t seen = 0;
    at = unpack(before);
    for (int32_t first = from; first < to; first += kLookUps) {
      int32_t page[kLookUps];  // looked up together
#pragma unroll
      for (int k = 0; k < kLookUps; ++k) {
        if (first + k >= to) continue;
        const auto region = static_cast<uint32_t>(list[first + k] >> kMarkBits);
        const PageLookup found = page_of_region(p.table, p.geometry, owner, region, region);
        faults |= found.fault;
        page[k] = static_cast<int32_t>(found.page);
      }
#pragma unroll
      for (int k = 0; k < kLookUps; ++k) {
        if (first + k >= to) continue;
        const Packed entry = list[first + k];
        const uint32_t mark = mark_of(entry);
        const auto region = static_cast<uint32_t>(entry >> kMarkBits);
        int kind = kind_of(entry);
        int32_t index = kind == 0 ? at.both : kind == 1 ? at.first : at.second;
        at.add(kind, 1);
        if (kind == 1 && index >= total.first) {
          kind = 0, index += given.both - total.first;
        } else if (kind == 2 && index >= total.second) {
          kind = 0, index += given.both + moved_first - total.second;
        }
        const int32_t place = place_of(kind, index).batch * kBatchPages + index % kBatchPages;
        pages[place] = page[k];
        if (page[k] < 0) continue;  // the place stays, nobody sees it
        page_marks[place] = static_cast<Mark>(mark);
        seen |= mark;
        if (region < oldest_own) continue;
        if (region == newest_own) tail_page = place;
        for (int r = begin; r < end; ++r) {
          if (rows.limit[r] == region && (mark >> (r - begin) & 1) != 0) {
            own[r - begin] = place * static_cast<int32_t>(kPageTokens) +
                             static_cast<int32_t>(rows.position[r] % kPageTokens);
          }
        }
      }
    }
    if (threadIdx.x < 3 * kBatchPages) {
      const int kind = static_cast<int>(threadIdx.x) / kBatchPages;
      const int slot = static_cast<int>(threadIdx.x) % kBatchPages;
      const int32_t count = kind == 0 ? total.both : kind == 1 ? total.first : total.second;
      if (count % kBatchPages != 0 && slot >= count % kBatchPages)
        pages[place_of(kind, count).batch * kBatchPages + slot] = -1;
    }
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < batches; i += kUnionThreads) {
      const int kind = i < both_batches ? 0 : i < both_batches + first_batches ? 1 : 2;
      const int32_t index = kind == 0   ? i
                            : kind == 1 ? i - both_batches
                                        : i - both_batches - first_batches;
      const BatchOrder::Place place = place_of(kind, index * kBatchPages);
      if (kind != 2) step_batches[0][place.step] = static_cast<uint16_t>(place.batch);
      if (kind != 1) step_batches[1][place.step] = static_cast<uint16_t>(place.batch);
    }
    seen = __reduce_or_sync(~0u, seen);
    if (lane == 0 && seen != 0) atomicOr(&live, seen);
    __syncthreads();

    // The steps of each half and their masks, eight pages to a byte.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t* to =
          p.lists.steps + (2 * lists_at + half * p.lists.capacity + first_batch) * half_rows;
      const int shift = one_row ? 0 : half * half_rows;
      for (int32_t i = static_cast<int32_t>(threadIdx.x); i < steps[half] * half_rows;
           i += kUnionThreads) {
        const int32_t step = i >> half_shift, row = i & (half_rows - 1);
        const uint32_t batch = step_batches[half][step];
        to[i] = step_word(batch, gather_bits(page_marks + batch * kBatchPages, shift + row));
      }
    }
    // A header for each split.
    const int32_t split_shift = p.lists.split_shift;
    TileHeader* headers =
        p.lists.headers +
        (((selection * p.lists.spans + span) * p.lists.tile_rows << split_shift) + tile);
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kMostTileRows << split_shift;
         i += kUnionThreads) {
      headers[i / kMostTileRows * p.lists.tile_rows].own[i % kMostTileRows] =
          own[i % kMostTileRows];
    }
    if (static_cast<int32_t>(threadIdx.x) < 2 << split_shift) {
      const int32_t split = static_cast<int32_t>(threadIdx.x) / 2;
      const int half = static_cast<int>(threadIdx.x) % 2;
      TileHeader& header = headers[split * p.lists.tile_rows];
      const uint16_t* batch_of = step_batches[0] + half * layout.batches;
      const int32_t of_half = both_batches + (half == 0 ? first_batches : second_batches);
      const int32_t begins = split_begin(batches, split, split_shift);
      const int32_t ends = split_begin(batches, split + 1, split_shift);
      const int32_t before = begins == 0 ? 0 : steps_before(batch_of, of_half, begins);
      const int32_t up_to = ends == batches ? of_half : steps_before(batch_of, of_half, ends);
      header.first_step[half] = first_batch + before;
      header.steps[half] = up_to - before;
      if (half == 0) {
        header.row = static_cast<int32_t>(first_row) + begin;
        header.rows = tile_rows;
        header.last = end == span_rows ? 1 : 0;
        header.first_batch = first_batch;
        header.begin = begins;
        header.end = ends;
        header.tail = tail_page < 0 ? -1
                                    : tail_page * static_cast<int32_t>(kPageTokens) +
                                          static_cast<int32_t>(newest % kPageTokens);
        header.live = live;
        if (split == 0) work.steps += static_cast<uint32_t>(steps[0] + steps[1]);
      }
    }
    first_batch += batches;
    begin = end;
    __syncthreads();  // the tables and `own` are free
  }
  if (threadIdx.x == 0) p.lists.work[selection * p.lists.spans + span] = work;
  if (p.status != nullptr) {
    faults = static_cast<int32_t>(__reduce_or_sync(~0u, static_cast<uint32_t>(faults)));
    if (lane == 0 && faults != 0) atomicOr(&all_faults, faults);
    __syncthreads();
    if (threadIdx.x == 0 && all_faults != 0) atomicOr(p.status, all_faults);
  }
}

// Of every launch alike: the attribute belongs to the kernel, and threads may launch side by side.
constexpr int kStaticBytes = 2048;  // and a little room
constexpr int kMostDynamicBytes = kSharedBytesOfCta - kStaticBytes;

template <typename Mark>
void launch(const UnionsParams& params, int64_t selections, cudaStream_t stream) {
  const size_t bytes = SharedLayout<Mark>(params.lists.tile_rows, params.region_count).bytes();
  check(cudaFuncSetAttribute(unions<Mark>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMostDynamicBytes),
        "unions: shared memory");
  unions<Mark>
      <<<grid_size(params.lists.spans * selections, 1, "unions"), kUnionThreads, bytes, stream>>>(
          params);
  check_launch("unions");
}

}  // namespace

bool unions_fit(int64_t heads_per_group, int64_t region_count) {
  const int32_t rows = tile_rows(heads_per_group);
  if (region_count > (int64_t{1} << 16)) return false;
  const size_t bytes = rows <= 8 ? SharedLayout<uint8_t>(rows, region_count).bytes()
                                 : SharedLayout<uint32_t>(rows, region_count).bytes();
  return bytes <= kMostDynamicBytes;
}

void launch_unions(const UnionsParams& params, int64_t selections, void* stream) {
  if (params.lists.tile_rows <= 8) {
    launch<uint8_t>(params, selections, static_cast<cudaStream_t>(stream));
  } else {
    launch<uint32_t>(params, selections, static_cast<cudaStream_t>(stream));
  }
}

}  // namespace octopage::cuda
