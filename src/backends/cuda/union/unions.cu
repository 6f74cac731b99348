// The page lists of the union path: which pages a tile of neighbouring rows selects, in an order
// that both of its halves can walk, with a mask per page. This is also the one place of the path
// where every owner, region id, table column and block id is checked.
//
// A CTA serves one span. For each of its tiles it
//   1. marks regions: a bit for each region of a window and each row of the tile,
//   2. sorts the marked regions into three classes: selected by both halves, by the first only, by
//      the second only. Each ascends, so that CTAs that run side by side read the same part of the
//      cache at the same time, and fills batches of eight,
//   3. merges the batches by their first region. Batches of one half stand in pairs, first before
//      second, so that a half never waits for more than one batch it does not use; what one class
//      has more than the other comes last,
//   4. looks pages up, a thread to a slot of a batch, and writes them and the steps.
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
constexpr uint32_t kSmallestWindowBytes = 32768;  // of marks, cleared before the rows are known
constexpr int kUnroll = 16;                       // region ids of a lane under way together
constexpr int kChunk = 32;                        // regions whose marks a thread reads together

/// A marked region, packed: ids are below 2^24 for tiles of up to eight rows.
template <typename Mark>
struct Entry;
template <>
struct Entry<uint8_t> {
  using Packed = uint32_t;
  static constexpr int kMarkBits = 8;
  static constexpr int kCtasOfMultiprocessor = 4;  // 512 regions of eight rows
  static constexpr int kChunks = 2;                // of a thread at a time
};
template <>
struct Entry<uint32_t> {
  using Packed = uint64_t;
  static constexpr int kMarkBits = 32;
  static constexpr int kCtasOfMultiprocessor = 2;
  static constexpr int kChunks = 1;
};

/// Dynamic shared memory: marks, the three classes, and what their order needs.
template <typename Mark>
struct SharedLayout {
  using Packed = typename Entry<Mark>::Packed;
  uint32_t entries;       // of a tile at most
  uint32_t half_entries;  // of one half
  uint32_t marks_bytes;

  /// In 32 bits: `unions_fit` bounds region_count.
  __host__ __device__ SharedLayout(int32_t tile_rows, int64_t region_count, uint32_t window)
      : entries(static_cast<uint32_t>(tile_rows) * static_cast<uint32_t>(region_count)),
        half_entries(tile_rows > 1 ? entries / 2 : entries),
        marks_bytes(window / 8 * Entry<Mark>::kMarkBits) {}
  __host__ __device__ uint32_t batches() const { return (entries + 7) / 8 + 3; }  // at most
  __host__ __device__ uint32_t half_batches() const { return (half_entries + 7) / 8; }
  __host__ __device__ uint32_t list_at() const { return marks_bytes; }
  __host__ __device__ uint32_t steps_before_at() const {
    return list_at() + entries * static_cast<uint32_t>(sizeof(Packed));
  }
  __host__ __device__ uint32_t pairs_before_at() const { return steps_before_at() + 4 * batches(); }
  __host__ __device__ uint32_t both_before_at() const {
    return pairs_before_at() + 2 * half_batches();
  }
  __host__ __device__ uint32_t bytes() const { return both_before_at() + 2 * half_batches(); }
};

// clang-format off
//   bits of word w of plane p | 0 .. 7 | 8 .. 15 | 16 .. 23 | 24 .. 31     bit b of a byte: region
//   row's place in the tile      4 p     4 p + 1   4 p + 2     4 p + 3      8 w + b is selected
// clang-format on

/// The marks of a window. A row's place is its number in its half, in the second half behind
/// `kHalfPlaces`.
template <typename Mark>
struct Marks {
  static constexpr int kPlaces = Entry<Mark>::kMarkBits;
  static constexpr int kHalfPlaces = kPlaces / 2;
  static constexpr int kHalfPlanes = kPlaces / 8;
  static constexpr uint32_t kSmallestWindow = kSmallestWindowBytes / kPlaces * 8;  // regions

  uint32_t* first;         // half
  const uint32_t* second;  // half. A tile of one row is both halves
  uint32_t plane_words;

  /// Of regions `from`, a multiple of kChunk, up to `to`.
  __device__ __forceinline__ void clear(uint32_t from, uint32_t to) const {
    const uint32_t chunks = (to + kChunk - 1) / kChunk;
#pragma unroll 1
    for (uint32_t chunk = from / kChunk + threadIdx.x; chunk < chunks; chunk += kUnionThreads) {
#pragma unroll
      for (int plane = 0; plane < 2 * kHalfPlanes; ++plane)
        reinterpret_cast<uint4*>(first + plane * plane_words)[chunk] = make_uint4(0, 0, 0, 0);
    }
  }
  /// Bit i: a row of the half selects region kChunk * chunk + i.
  __device__ __forceinline__ uint32_t chunk_of_half(const uint32_t* half, int chunk) const {
    uint4 any = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kHalfPlanes; ++i) {
      const uint4 some = reinterpret_cast<const uint4*>(half + i * plane_words)[chunk];
      any = {any.x | some.x, any.y | some.y, any.z | some.z, any.w | some.w};
    }
    // The four bytes of each word, one onto the other.
    const uint32_t low = __byte_perm(any.x, any.y, 0x5410) | __byte_perm(any.x, any.y, 0x7632);
    const uint32_t high = __byte_perm(any.z, any.w, 0x5410) | __byte_perm(any.z, any.w, 0x7632);
    return __byte_perm(low, high, 0x6420) | __byte_perm(low, high, 0x7531);
  }
  /// Bit i: the row of place i selects the region.
  __device__ __forceinline__ Mark places(uint32_t region) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2 * kHalfPlanes; ++i) {
      const uint32_t* plane =
          i < kHalfPlanes ? first + i * plane_words : second + (i - kHalfPlanes) * plane_words;
      const uint32_t rows = plane[region / 8] >> region % 8 & 0x01010101u;
      // The multiplication brings bits 0, 8, 16, 24 side by side to bits 24 .. 27, and no other
      // above them.
      bits |= (rows * 0x01020408u >> 24) << 4 * i;
    }
    return static_cast<Mark>(bits);
  }
};

/// Bit s of byte j: bit 8 j + l of the mark that lane s of these eight lanes has; l is the lane's
/// own number among them.
__device__ __forceinline__ uint32_t transpose(uint32_t mark) {
  const uint32_t kept[3] = {0x0f0f0f0fu, 0x33333333u, 0x55555555u};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int distance = 4 >> i;
    const bool upper = (threadIdx.x & distance) != 0;
    const uint32_t keep = upper ? ~kept[i] : kept[i];
    const uint32_t other = __shfl_xor_sync(~0u, mark, distance);
    mark = (mark & keep) | ((upper ? other >> distance : other << distance) & ~keep);
  }
  return mark;
}

/// The rows of a span, in shared memory.
struct SpanRows {
  int32_t owner[kMostTileRows];   // as given
  int32_t count[kMostTileRows];   // entries that count; 0 where the owner is invalid
  uint32_t limit[kMostTileRows];  // the own region, the largest that is valid
  int32_t token[kMostTileRows];   // position % 8
};

/// What a tile's rows have in common, of those whose entries count.
struct TileRows {
  uint32_t oldest_own, newest_own;  // their own regions lie between these two
  uint32_t regions;                 // that they may select: 0 .. regions - 1
  int32_t newest_token;             // of the newest position

  __device__ __forceinline__ TileRows(const SpanRows& rows, int begin, int end) {
    const int lane = threadIdx.x % 32;
    const bool counts = lane >= begin && lane < end && rows.count[lane] > 0;
    const uint32_t limit = counts ? rows.limit[lane] : 0;
    regions = __reduce_max_sync(~0u, counts ? limit + 1 : 0);
    newest_own = regions - 1;
    oldest_own = __reduce_min_sync(~0u, counts ? limit : UINT32_MAX);
    newest_token = static_cast<int32_t>(__reduce_max_sync(
        ~0u, counts && limit == newest_own ? static_cast<uint32_t>(rows.token[lane]) : 0u));
  }
};

/// Counts of the three classes, one after the other: both halves, first only, second only.
struct ClassCounts {
  int32_t both, first, second;
};

/// Where the batches of each class stand, from 16-bit tables in shared memory.
struct BatchOrder {
  const uint16_t* pairs_before;  // [both batches] first batches that begin before each
  const uint16_t* both_before;   // [first batches] batches of both halves that begin before each
  int32_t both_batches, pairs;

  struct Place {
    int32_t batch, step;
  };
  __device__ __forceinline__ Place both(int32_t i) const {
    const int32_t before = min(pairs, static_cast<int32_t>(pairs_before[i]));
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

/// Loads region ids of a lane, each 32 entries behind the one before; `entries` are left.
__device__ __forceinline__ void load_regions(uint32_t (&region)[kUnroll], const int32_t* from,
                                             int64_t stride, int32_t entries) {
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    if (32 * k < entries) region[k] = static_cast<uint32_t>(*from);
    from += 32 * stride;
  }
}

/// Sum of the values of the threads before this one; `total` is that of all. Uses `scratch`
/// [kWarps], and the CTA meets once.
__device__ __forceinline__ uint64_t sum_before(uint64_t value, uint64_t* scratch, uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t up_to = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t below = __shfl_up_sync(~0u, up_to, step);
    if (lane >= step) up_to += below;
  }
  if (lane == 31) scratch[warp] = up_to;
  __syncthreads();
  uint64_t warps = scratch[lane % kWarps];
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    const uint64_t below = __shfl_up_sync(~0u, warps, step);
    if (lane >= step) warps += below;
  }
  total = __shfl_sync(~0u, warps, kWarps - 1);
  const uint64_t before = __shfl_sync(~0u, warps, warp == 0 ? 0 : warp - 1);
  return up_to - value + (warp == 0 ? 0 : before);
}

template <typename Mark>
__global__ void __launch_bounds__(kUnionThreads, Entry<Mark>::kCtasOfMultiprocessor)
    unions(const __grid_constant__ UnionsParams p) {
  using Packed = typename Entry<Mark>::Packed;
  constexpr int kMarkBits = Entry<Mark>::kMarkBits;
  constexpr int kMostChunks = Entry<Mark>::kChunks;
  constexpr int kHalfPlaces = Marks<Mark>::kHalfPlaces;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ SpanRows rows;
  __shared__ uint64_t scratch[kWarps];
  __shared__ uint32_t starts;  // bit r: row r of the span begins a tile
  __shared__ SpanWork work;
  __shared__ int32_t tile_batch;  // first batch of the tile
  __shared__ uint32_t live;       // by place
  __shared__ int32_t tail_page;
  __align__(16) __shared__ int32_t own[kMostTileRows];

  const SharedLayout<Mark> layout(p.lists.tile_rows, p.region_count, p.window);
  const bool one_row = p.lists.tile_rows == 1;
  const uint32_t plane_words = p.window / 8;
  const uint32_t half_words = Marks<Mark>::kHalfPlanes * plane_words;
  const Marks<Mark> marks = {reinterpret_cast<uint32_t*>(shared),
                             reinterpret_cast<uint32_t*>(shared) + (one_row ? 0 : half_words),
                             plane_words};
  // A region of both halves is an entry of each. So the first class, from the start upwards, and
  // the second, from the middle downwards, never meet; the third goes upwards from the middle.
  auto* list = reinterpret_cast<Packed*>(shared + layout.list_at());
  const auto middle = static_cast<int32_t>(layout.half_entries);
  auto* steps_before = reinterpret_cast<uint32_t*>(shared + layout.steps_before_at());
  auto* pairs_before = reinterpret_cast<uint16_t*>(shared + layout.pairs_before_at());
  auto* both_before = reinterpret_cast<uint16_t*>(shared + layout.both_before_at());

  // CTAs of the attention take the multiprocessors that run out of spans, and wait there.
  ptx::let_next_grid_start();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const uint32_t spans = static_cast<uint32_t>(p.lists.spans);
  const int64_t span = blockIdx.x % spans, selection = blockIdx.x / spans;
  const int64_t first_row = span * p.lists.tile_rows;
  const int span_rows = static_cast<int>(min(int64_t{p.lists.tile_rows}, p.rows - first_row));
  const int half_rows = p.lists.half_rows;
  // What a call's lists hold can be counted in 32 bits.
  const auto lists_at = static_cast<uint32_t>(blockIdx.x * p.lists.capacity);
  const int32_t* regions = p.regions + first_row * p.stride_regions_row +
                           selection * p.stride_regions_selection + lane * p.stride_regions_entry;
  // Behind the regions whose column the table has.
  const auto columns_end = static_cast<uint32_t>(table_regions(p.table, p.geometry));
  int32_t faults = 0;

  // What comes from far is asked for first, as it lies there; what waits for none of it is done
  // meanwhile.
  int32_t owner = -1, position_low = 0, position_high = 0;
  if (warp == 0 && lane < span_rows) {
    owner = p.owners[(first_row + lane) * p.stride_owners];
    const int64_t at = (first_row + lane) * p.stride_positions;
    const auto* words = static_cast<const int32_t*>(p.positions);
    if (p.wide_positions != 0) {
      position_low = words[2 * at], position_high = words[2 * at + 1];
    } else {
      position_low = words[at];
    }
  }
  uint32_t region[kUnroll];
  bool loaded = warp < span_rows;  // row `warp` of the span
  if (loaded) {
    load_regions(region, regions + warp * p.stride_regions_row, p.stride_regions_entry,
                 static_cast<int32_t>(p.region_count) - lane);
  }
  uint32_t cleared = Marks<Mark>::kSmallestWindow;  // regions
  marks.clear(0, min(columns_end, cleared));
  if (warp == 0) {
    int64_t count = 0;
    if (lane < span_rows) {
      const int64_t position = p.wide_positions != 0 ? static_cast<int64_t>(position_high) << 32 |
                                                           static_cast<uint32_t>(position_low)
                                                     : int64_t{position_low};
      count = selection_count(position, p.region_count);
      if (count > 0 && (owner < 0 || owner >= p.table.requests)) {
        faults |= status_owner;
        count = 0;
      }
      rows.owner[lane] = owner;
      rows.count[lane] = static_cast<int32_t>(count);
      rows.limit[lane] =
          static_cast<uint32_t>(min(region_of_position(position), int64_t{INT32_MAX}));
      rows.token[lane] = static_cast<int32_t>(position & (kPageTokens - 1));
    }
    const int32_t before = __shfl_up_sync(~0u, owner, 1);
    const uint32_t begins = __ballot_sync(~0u, lane < span_rows && (lane == 0 || owner != before));
    const uint32_t sum = __reduce_add_sync(~0u, static_cast<uint32_t>(count));
    if (lane == 0) starts = begins, work = {0, sum}, tile_batch = 0;
  }

  // A quotient by multiplication: rounded down twice, so at most one too small.
  const auto regions_per_block = static_cast<uint32_t>(p.geometry.regions_per_block);
  const uint32_t reciprocal = UINT32_MAX / regions_per_block;
  const auto column_of = [&](uint32_t id) {
    const uint32_t column = __umulhi(id, reciprocal);
    return column + (id - column * regions_per_block >= regions_per_block ? 1 : 0);
  };

  int tile = 0;
  for (int begin = 0; begin < span_rows; ++tile) {
    if (thread < kMostTileRows) own[thread] = -1;
    if (thread == 0) tail_page = -1, live = 0;
    __syncthreads();
    const uint32_t later = begin + 1 < 32 ? starts >> (begin + 1) : 0u;
    const int end = later != 0 ? begin + __ffs(static_cast<int>(later)) : span_rows;
    const TileRows of_tile(rows, begin, end);
    const uint32_t used_regions = min(of_tile.regions, columns_end);
    const bool one_window = used_regions <= p.window;

    ClassCounts given = {};
    for (uint32_t window = 0; window == 0 || window < used_regions; window += p.window) {
      const uint32_t in_window = min(used_regions - window, p.window);
      // 1. The marks.
      if (cleared < in_window) {
        marks.clear(cleared, in_window);
        __syncthreads();
      }
      cleared = 0;
      for (int r = begin + warp; r < end; r += kWarps) {
        const int32_t count = rows.count[r];
        const uint32_t limit = rows.limit[r];
        const uint32_t valid = min(limit + 1, columns_end);
        const uint32_t here = window < valid ? min(valid - window, p.window) : 0;
        const int row = r - begin;
        const int place = row < half_rows ? row : kHalfPlaces + row - half_rows;
        uint32_t* const plane = marks.first + place / 4 * plane_words;
        const uint32_t first_bit = 1u << place % 4 * 8;
        for (int32_t first = 0; first < count; first += 32 * kUnroll) {
          if (!(loaded && r == warp && first == 0)) {
            load_regions(region,
                         regions + r * p.stride_regions_row + first * p.stride_regions_entry,
                         p.stride_regions_entry, count - first - lane);
          }
          loaded = false;
          const int32_t left = count - first - lane;
          bool invalid = false;
#pragma unroll
          for (int k = 0; k < kUnroll; ++k) {
            const bool counts = 32 * k < left;
            const uint32_t at = region[k] - window;
            invalid |= counts && region[k] >= valid;  // negative ids are large here
            if (counts && at < here) atomicOr(plane + at / 8, first_bit << at % 8);
          }
          if (invalid) {  // then look again
#pragma unroll 1
            for (int32_t i = first; i < min(first + 32 * kUnroll, count - lane); i += 32) {
              const auto id = static_cast<uint32_t>(
                  regions[r * p.stride_regions_row + i * p.stride_regions_entry]);
              if (id >= valid) faults |= id > limit ? status_region : status_table;
            }
          }
        }
      }
      __syncthreads();

      // 2. The classes. Each thread takes up to kMostChunks neighbouring chunks at a time.
      const int all_chunks = static_cast<int>((in_window + kChunk - 1) / kChunk);
      const int chunks = min((all_chunks + kUnionThreads - 1) / kUnionThreads, kMostChunks);
      for (int section = 0; section < all_chunks; section += chunks * kUnionThreads) {
        const int first_chunk = section + thread * chunks;
        // Every other four lanes read their two chunks the other way round: no bank conflicts.
        const bool swap = chunks == 2 && (lane & 4) != 0;
        uint32_t first[kMostChunks], second[kMostChunks];
#pragma unroll
        for (int j = 0; j < kMostChunks; ++j) {
          const int chunk = first_chunk + (swap ? 1 - j : j);
          const bool there = j < chunks && chunk < all_chunks;
          first[j] = there ? marks.chunk_of_half(marks.first, chunk) : 0;
          second[j] = there ? marks.chunk_of_half(marks.second, chunk) : 0;
        }
        if (kMostChunks == 2 && swap) {
          const uint32_t first_0 = first[0], second_0 = second[0];
          first[0] = first[kMostChunks - 1], first[kMostChunks - 1] = first_0;
          second[0] = second[kMostChunks - 1], second[kMostChunks - 1] = second_0;
        }
        uint64_t packed = 0;
#pragma unroll
        for (int j = 0; j < kMostChunks; ++j) {
          packed += static_cast<uint64_t>(__popc(first[j] & second[j])) |
                    static_cast<uint64_t>(__popc(first[j] & ~second[j])) << 21 |
                    static_cast<uint64_t>(__popc(second[j] & ~first[j])) << 42;
        }
        uint64_t total;
        const uint64_t before = sum_before(packed, scratch, total);
        int32_t both_at = given.both + static_cast<int32_t>(before & 0x1fffff);
        int32_t first_at = given.first + static_cast<int32_t>(before >> 21 & 0x1fffff);
        int32_t second_at = given.second + static_cast<int32_t>(before >> 42);
        given.both += static_cast<int32_t>(total & 0x1fffff);
        given.first += static_cast<int32_t>(total >> 21 & 0x1fffff);
        given.second += static_cast<int32_t>(total >> 42);
        const auto list_out = [&](uint32_t set, uint32_t base, Packed* to, int step) {
#pragma unroll 1
          for (; set != 0; set &= set - 1, to += step) {
            const auto i = static_cast<uint32_t>(__ffs(static_cast<int>(set)) - 1);
            *to = static_cast<Packed>(base + i) << kMarkBits;
          }
        };
        // For each batch that begins among `count` entries of a class, the first of them number
        // `at`: how many batches of the other class begin before it.
        const auto order_out = [&](uint16_t* table, const Packed* from, int step, int32_t at,
                                   int32_t count, uint32_t base, uint32_t other, int32_t before) {
#pragma unroll 1
          for (int32_t i = -at & (kBatchPages - 1); i < count; i += kBatchPages) {
            const uint32_t bit = static_cast<uint32_t>(from[i * step] >> kMarkBits) - base;
            table[static_cast<uint32_t>(at + i) / kBatchPages] =
                static_cast<uint16_t>(batches_of(before + __popc(other & ((1u << bit) - 1))));
          }
        };
        // With one window the marks are still there when the entries are used.
        const auto add_marks = [&](Packed* to, int step, int32_t count) {
#pragma unroll 1
          for (int32_t i = 0; i < count; ++i) {
            Packed& entry = to[i * step];
            entry |= marks.places(static_cast<uint32_t>(entry >> kMarkBits) - window);
          }
        };
#pragma unroll 1
        for (int j = 0; j < chunks; ++j) {
          const uint32_t base = window + static_cast<uint32_t>(first_chunk + j) * kChunk;
          const uint32_t both = first[0] & second[0], single = first[0] & ~second[0],
                         other = second[0] & ~first[0];
          const int32_t both_count = __popc(both), single_count = __popc(single);
          Packed* const to_both = list + both_at;
          Packed* const to_single = list + (middle - 1 - first_at);
          Packed* const to_other = list + (middle + second_at);
          list_out(both, base, to_both, 1);
          list_out(single, base, to_single, -1);
          list_out(other, base, to_other, 1);
          order_out(pairs_before, to_both, 1, both_at, both_count, base, single, first_at);
          order_out(both_before, to_single, -1, first_at, single_count, base, both, both_at);
          if (!one_window) {
            add_marks(to_both, 1, both_count);
            add_marks(to_single, -1, single_count);
            add_marks(to_other, 1, __popc(other));
          }
          both_at += both_count, first_at += single_count, second_at += __popc(other);
          first[0] = first[kMostChunks - 1], second[0] = second[kMostChunks - 1];
        }
        __syncthreads();  // the lists are there, `scratch` is free
      }
    }

    // 3. What would fill a last batch of one half by a few pages goes where the last batch of both
    // has room.
    const int32_t room = (kBatchPages - given.both % kBatchPages) % kBatchPages;
    const auto moved = [](int32_t count, int32_t to) {
      return count % kBatchPages <= to ? count % kBatchPages : 0;
    };
    const int32_t moved_first = moved(given.first, room);
    const int32_t moved_second = moved(given.second, room - moved_first);
    const ClassCounts total = {given.both + moved_first + moved_second, given.first - moved_first,
                               given.second - moved_second};
    const int32_t both_batches = batches_of(total.both), first_batches = batches_of(total.first),
                  second_batches = batches_of(total.second);
    const BatchOrder order = {pairs_before, both_before, both_batches,
                              min(first_batches, second_batches)};
    const int32_t batches = both_batches + first_batches + second_batches;
    const int32_t steps[2] = {both_batches + first_batches, both_batches + second_batches};

    // 4. Pages and steps, a thread to a slot. Slots are numbered class by class.
    const int32_t slots = batches * kBatchPages;
    const auto slot_in_batch = static_cast<int32_t>(threadIdx.x % kBatchPages);
    const int32_t* const blocks = p.table.data + rows.owner[begin] * p.table.stride_request;
    constexpr uint32_t kPad = UINT32_MAX;  // a column
    struct Found {
      int32_t kind, index;  // class, and batch of it
      Packed entry;
      uint32_t column;
      int32_t block;
    };
    const auto look_up = [&](int32_t slot) {
      Found found = {0, static_cast<int32_t>(static_cast<uint32_t>(slot) / kBatchPages), 0, kPad,
                     -1};
      int32_t count = given.both, base = 0;
      if (found.index >= both_batches) {
        found.kind = 1, found.index -= both_batches, count = total.first, base = middle;
        if (found.index >= first_batches)
          found.kind = 2, found.index -= first_batches, count = total.second;
      }
      int32_t at = found.index * kBatchPages + slot_in_batch;
      bool down = found.kind == 1;
      if (found.kind == 0 && at >= count && at < total.both) {  // moved here
        at -= given.both;
        down = at < moved_first;
        at += down ? total.first : total.second - moved_first;
        count = INT32_MAX, base = middle;
      }
      if (at < count) {
        found.entry = list[base + (down ? ~at : at)];
        // The table has this column: the region was compared when it was marked.
        const auto id = static_cast<uint32_t>(found.entry >> kMarkBits);
        found.column = column_of(id);
        found.block = blocks[found.column * p.table.stride_block];
      }
      return found;
    };
    const int32_t first_batch = tile_batch;
    const uint32_t pages_at = (lists_at + first_batch) * kBatchPages;
    const uint32_t steps_at = (2 * lists_at + first_batch) * half_rows;
    const RequestLookup lookup = request_lookup(p.table, p.geometry, 0);
    uint32_t seen = 0;
#pragma unroll 1
    for (int32_t slot = thread; slot - lane < slots; slot += kUnionThreads) {
      const Found found = look_up(slot);
      const int32_t kind = found.kind, index = found.index;
      BatchOrder::Place place = {};
      if (slot < slots) place = kind == 0 ? order.both(index) : order.single(index, kind == 2);
      const auto id = static_cast<uint32_t>(found.entry >> kMarkBits);
      int32_t page = -1;
      uint32_t mark = 0;  // nobody sees a pad or a page that is not valid
      if (found.column != kPad) {
        // One unsigned comparison refuses negative ids as well.
        if (static_cast<uint32_t>(found.block) >= lookup.block_count) {
          faults |= status_table;
        } else {
          page = static_cast<int32_t>(page_of_block(lookup, found.block, id, found.column));
          mark = one_window ? marks.places(id) : static_cast<Mark>(found.entry);
        }
      }
      const int32_t at = place.batch * kBatchPages + slot_in_batch;
      if (slot < slots) p.lists.pages[pages_at + at] = page;
      seen |= mark;
      if (mark != 0 && id >= of_tile.oldest_own) {
        if (id == of_tile.newest_own) tail_page = at;
#pragma unroll 1
        for (int r = begin; r < end; ++r) {
          const int row = r - begin;
          const int row_place = row < half_rows ? row : kHalfPlaces + row - half_rows;
          if (rows.limit[r] == id && (mark >> row_place & 1) != 0)
            own[row] = at * static_cast<int32_t>(kPageTokens) + rows.token[r];
        }
      }
      // Every eight lanes have a batch: from the marks of its pages to the pages of its rows.
      const uint32_t masks = transpose(mark);
#pragma unroll
      for (int j = 0; j < kMarkBits / 8; ++j) {
        const uint32_t row_place = 8 * j + threadIdx.x % kBatchPages;
        const auto half = static_cast<int>(row_place / kHalfPlaces);
        const auto row = static_cast<int>(row_place % kHalfPlaces);
        if (slot < slots && row < half_rows && (kind == 0 || kind == half + 1)) {
          p.lists.steps[steps_at + (half * p.lists.capacity + place.step) * half_rows + row] =
              step_word(static_cast<uint32_t>(place.batch), masks >> 8 * j & 255);
        }
      }
      if (p.lists.split_shift > 0 && slot_in_batch == 0 && slot < slots) {
        const bool surplus = kind != 0 && index >= order.pairs;
        const int32_t of_other = surplus ? both_batches + order.pairs : place.step;
        const int32_t of_first = kind != 2 ? place.step : surplus ? of_other : place.step + 1;
        const int32_t of_second = kind != 1 ? place.step : of_other;
        steps_before[place.batch] = static_cast<uint32_t>(of_first | of_second << 16);
      }
    }
    seen = __reduce_or_sync(~0u, seen);
    if (lane == 0 && seen != 0) atomicOr(&live, seen);
    __syncthreads();

    // A header for each split.
    const int32_t split_shift = p.lists.split_shift;
    TileHeader* headers =
        p.lists.headers + ((int64_t{blockIdx.x} * p.lists.tile_rows << split_shift) + tile);
    constexpr int kQuads = kMostTileRows / 4;
    const uint32_t quad = kUnionThreads - 1 - threadIdx.x;  // other warps than the headers' own
    if (quad < static_cast<uint32_t>(kQuads) << split_shift) {
      auto* to = reinterpret_cast<int4*>(headers[quad / kQuads * p.lists.tile_rows].own);
      to[quad % kQuads] = reinterpret_cast<const int4*>(own)[quad % kQuads];
    }
    if (thread < 1 << split_shift) {
      const int32_t begins = split_begin(batches, thread, split_shift);
      const int32_t ends = split_begin(batches, thread + 1, split_shift);
      const uint32_t before = begins == 0 ? 0 : steps_before[begins];
      const uint32_t up_to =
          ends == batches ? static_cast<uint32_t>(steps[0] | steps[1] << 16) : steps_before[ends];
      const int32_t before_first = before & 0xffff, before_second = before >> 16;
      const uint32_t low = live & ((1u << kHalfPlaces) - 1), high = live >> kHalfPlaces;
      auto* to = reinterpret_cast<int4*>(headers + thread * p.lists.tile_rows);
      to[0] = {static_cast<int32_t>(first_row) + begin, end - begin, end == span_rows ? 1 : 0,
               first_batch};
      to[1] = {begins, ends, first_batch + before_first, first_batch + before_second};
      to[2] = {
          static_cast<int32_t>(up_to & 0xffff) - before_first,
          static_cast<int32_t>(up_to >> 16) - before_second,
          tail_page < 0 ? -1 : tail_page * static_cast<int32_t>(kPageTokens) + of_tile.newest_token,
          static_cast<int32_t>(one_row ? low : low | high << half_rows)};
    }
    begin = end;
    if (begin < span_rows) __syncthreads();  // the lists, the tables and `own` are free
    if (thread == 0) {
      work.steps += static_cast<uint32_t>(steps[0] + steps[1]);
      tile_batch += batches;
    }
  }
  if (thread == 0) p.lists.work[blockIdx.x] = work;
  if (p.status != nullptr) {
    faults = static_cast<int32_t>(__reduce_or_sync(~0u, static_cast<uint32_t>(faults)));
    if (lane == 0 && faults != 0) atomicOr(p.status, faults);
  }
}

// Of every launch alike: the attribute belongs to the kernel, and threads may launch side by side.
constexpr uint32_t kStaticBytes = 2048;  // and a little room
constexpr uint32_t kMostDynamicBytes = kSharedBytesOfCta - kStaticBytes;

/// The window of a launch of so many CTAs: a larger one spares sweeps over the region ids of long
/// contexts, as long as its shared memory costs no further wave of CTAs.
template <typename Mark>
uint32_t window_of(const UnionsParams& params, int64_t ctas, int64_t multiprocessors) {
  constexpr uint32_t kReservedBytes = 1024;  // of each CTA, beside its own
  const auto bytes = [&](uint32_t window) {
    return SharedLayout<Mark>(params.lists.tile_rows, params.region_count, window).bytes();
  };
  const auto waves = [&](uint32_t window) {
    const int64_t side_by_side =
        std::min<int64_t>(Entry<Mark>::kCtasOfMultiprocessor,
                          (kSharedBytesOfCta + kReservedBytes) /
                              (bytes(window) + kStaticBytes + kReservedBytes)) *
        multiprocessors;
    return (ctas + side_by_side - 1) / side_by_side;
  };
  const int64_t regions = table_regions(params.table, params.geometry);
  uint32_t window = Marks<Mark>::kSmallestWindow;
  const int64_t fewest = waves(window);
  while (window < regions && bytes(2 * window) <= kMostDynamicBytes &&
         waves(2 * window) <= fewest) {
    window *= 2;
  }
  return window;
}

template <typename Mark>
void launch(UnionsParams params, int64_t selections, int64_t multiprocessors, cudaStream_t stream) {
  const int64_t ctas = params.lists.spans * selections;
  params.window = window_of<Mark>(params, ctas, multiprocessors);
  const size_t bytes =
      SharedLayout<Mark>(params.lists.tile_rows, params.region_count, params.window).bytes();
  check(cudaFuncSetAttribute(unions<Mark>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kMostDynamicBytes),
        "unions: shared memory");
  unions<Mark><<<grid_size(ctas, 1, "unions"), kUnionThreads, bytes, stream>>>(params);
  check_launch("unions");
}

}  // namespace

bool unions_fit(int64_t heads_per_group, int64_t region_count) {
  const int32_t rows = tile_rows(heads_per_group);
  if (region_count > (int64_t{1} << 16)) return false;
  const auto bytes = [&]<typename Mark>(Mark) {
    return SharedLayout<Mark>(rows, region_count, Marks<Mark>::kSmallestWindow).bytes();
  };
  return (rows <= 8 ? bytes(uint8_t{}) : bytes(uint32_t{})) <= kMostDynamicBytes;
}

void launch_unions(const UnionsParams& params, int64_t selections, int multiprocessors,
                   void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  if (params.lists.tile_rows <= 8) {
    launch<uint8_t>(params, selections, multiprocessors, on);
  } else {
    launch<uint32_t>(params, selections, multiprocessors, on);
  }
}

}  // namespace octopage::cuda
