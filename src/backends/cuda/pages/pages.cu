// The page kernels of the planned path: fill, staging copy, exact positions, staging plan.

#include <cub/block/block_scan.cuh>

#include <algorithm>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/pages/launch.hpp"
#include "backends/cuda/runtime/runtime.hpp"

namespace octopage::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpsOfCta = kThreads / 32;
constexpr int kUnroll = 4;  // independent look-ups of a lane

cudaStream_t stream_of(StreamHandle stream) {
  return static_cast<cudaStream_t>(stream);
}

// --- fill -------------------------------------------------------------------------------------

// The own region where positions are not at hand: the largest id that is valid otherwise.
__device__ int64_t largest_valid_region(const FillParams& p, int64_t owner, const int32_t* regions,
                                        int32_t count, int lane) {
  int32_t largest = -1;
  for (int32_t entry = lane; entry < count; entry += 32) {
    const int32_t region = regions[entry * p.stride_regions_entry];
    if (region > largest && page_of_region(p.table, p.geometry, owner, region, region).fault == 0)
      largest = region;
  }
  for (int step = 16; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  }
  return largest;
}

// A row of the query, in 16-byte words where its address and size allow.
__device__ void copy_query(const FillParams& p, int64_t row, int lane) {
  const char* from = static_cast<const char*>(p.query) + row * p.stride_query_row * p.element_bytes;
  const int64_t stride_head_bytes = p.stride_query_head * p.element_bytes;
  const int64_t head_bytes = p.dim * p.element_bytes;
  char* to = static_cast<char*>(p.contiguous_query) + row * p.heads * head_bytes;
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | head_bytes |
       stride_head_bytes) %
          16 ==
      0) {
    const auto words = static_cast<uint32_t>(head_bytes / 16);
    const auto total = static_cast<uint32_t>(p.heads) * words;
#pragma unroll 8
    for (uint32_t at = static_cast<uint32_t>(lane); at < total; at += 32) {
      const uint32_t head = at / words;
      reinterpret_cast<uint4*>(to)[at] = *reinterpret_cast<const uint4*>(
          from + head * stride_head_bytes + (at - head * words) * 16);
    }
    return;
  }
  for (int64_t head = 0; head < p.heads; ++head) {
    for (int64_t at = lane; at < p.dim; at += 32) {
      reinterpret_cast<uint16_t*>(to)[head * p.dim + at] =
          reinterpret_cast<const uint16_t*>(from + head * stride_head_bytes)[at];
    }
  }
}

// Where the own region of a row was found.
struct OwnPlace {
  int32_t entry = INT32_MAX;
  int32_t page = -1;
};

// What the entries of a row have in common.
struct RowFill {
  RequestLookup lookup;
  const int32_t* regions;
  int32_t* pages;
  int32_t count;
  uint32_t limit;  // the largest region that is valid
  uint32_t own;    // no region where the own one is beyond i32
  int lane;
};

// Pages of entries [base, base + 32 * kUnroll) of a row whose owner is valid; true if every entry
// of this lane is. Step by step over all entries, so that the loads of a step are under way
// together. kDense: a full chunk, regions and table without gaps.
template <bool kDense>
__device__ __forceinline__ bool fill_entries(const RowFill& row, int64_t stride_entry, int32_t base,
                                             OwnPlace& place) {
  const RequestLookup& lookup = row.lookup;
  uint32_t region[kUnroll], column[kUnroll];
  int32_t block[kUnroll];
  const auto counts = [&](int k) { return kDense || base + 32 * k + row.lane < row.count; };
  const int64_t stride = kDense ? 1 : stride_entry;
  const int32_t* from = row.regions + (base + row.lane) * stride;
#pragma unroll
  for (int k = 0; k < kUnroll; ++k)
    region[k] = counts(k) ? static_cast<uint32_t>(from[32 * k * stride]) : 0u;
  if ((lookup.regions_per_block & (lookup.regions_per_block - 1)) == 0) {
    const int shift = 31 - __clz(static_cast<int>(lookup.regions_per_block));
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) column[k] = region[k] >> shift;
  } else {
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) column[k] = region[k] / lookup.regions_per_block;
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    // Negative ids are large here, and fail the first comparison.
    const bool inside = region[k] <= row.limit && column[k] < lookup.columns;
    block[k] = inside ? lookup.blocks[column[k] * (kDense ? 1 : lookup.stride_block)] : -1;
  }
  bool all_valid = true, has_own = false;
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t page = page_of_block(lookup, block[k], region[k], column[k]);
    const bool valid = static_cast<uint32_t>(block[k]) < lookup.block_count && page <= INT32_MAX;
    all_valid &= valid || !counts(k);
    has_own |= valid && counts(k) && region[k] == row.own;
    block[k] = valid ? static_cast<int32_t>(page) : -1;
  }
  if (place.entry == INT32_MAX && __any_sync(~0u, has_own)) {
#pragma unroll
    for (int k = kUnroll - 1; k >= 0; --k) {  // the first of several wins
      const uint32_t owners =
          __ballot_sync(~0u, block[k] >= 0 && counts(k) && region[k] == row.own);
      if (owners != 0) {
        const int source = __ffs(static_cast<int>(owners)) - 1;
        place.entry = base + 32 * k + source;
        place.page = __shfl_sync(~0u, block[k], source);
      }
    }
  }
  if (kDense && (place.entry < base || place.entry >= base + 32 * kUnroll)) {
    int32_t* to = row.pages + base + row.lane - (place.entry < base ? 1 : 0);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) to[32 * k] = block[k];
  } else {
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int32_t entry = base + 32 * k + row.lane;
      if (counts(k) && entry != place.entry)
        row.pages[entry - (entry > place.entry ? 1 : 0)] = block[k];
    }
  }
  return all_valid;
}

// The bits of a row that has invalid entries, one by one.
__device__ __forceinline__ int32_t faults_of_row(const FillParams& p, int64_t owner,
                                                 const int32_t* regions, int32_t count,
                                                 int64_t limit, int lane) {
  int32_t status = 0;
  for (int32_t entry = lane; entry < count; entry += 32) {
    const PageLookup page =
        page_of_region(p.table, p.geometry, owner, regions[entry * p.stride_regions_entry], limit);
    status |=
        page.page > INT32_MAX ? int32_t{status_table} : page.fault;  // refused rather than wrapped
  }
  return status;
}

// One row by one warp: pages in the order of the regions, the own one last.
__device__ int32_t fill_row(const FillParams& p, int64_t row, int lane) {
  const int32_t begin = p.indptr[row];
  const auto end =
      static_cast<int32_t>(min(static_cast<int64_t>(p.indptr[row + 1]), p.pages_capacity));
  if (begin < 0 || begin >= end) return 0;
  const auto count = static_cast<int32_t>(min(static_cast<int64_t>(end - begin), p.region_count));
  const int32_t* regions = p.regions + row * p.stride_regions_row;
  const int64_t owner = p.owners[row * p.stride_owners];
  int32_t* pages = p.pages + begin;
  const bool owner_valid = owner >= 0 && owner < p.table.requests;
  const int64_t own = p.positions != nullptr ? region_of_position(p.positions[row])
                                             : largest_valid_region(p, owner, regions, count, lane);
  // A row with entries has a position of its own, so the limit is not negative.
  const int64_t limit =
      p.positions != nullptr && own < INT32_MAX ? max(own, int64_t{0}) : int64_t{INT32_MAX};
  OwnPlace place;
  bool all_valid = owner_valid;
  if (owner_valid) {
    RowFill fill = {.lookup = request_lookup(p.table, p.geometry, owner),
                    .regions = regions,
                    .pages = pages,
                    .count = count,
                    .limit = static_cast<uint32_t>(limit),
                    .own = own >= 0 && own <= INT32_MAX ? static_cast<uint32_t>(own) : UINT32_MAX,
                    .lane = lane};
    // NOTE: without this the compiler computes the addresses from the parameters at every use.
    asm volatile("" : "+l"(fill.lookup.blocks), "+l"(fill.regions), "+l"(fill.pages));
    const bool dense = p.stride_regions_entry == 1 && p.table.stride_block == 1;
    for (int32_t base = 0; base < count; base += 32 * kUnroll) {
      all_valid &= dense && base + 32 * kUnroll <= count
                       ? fill_entries<true>(fill, 1, base, place)
                       : fill_entries<false>(fill, p.stride_regions_entry, base, place);
    }
  }
  int32_t status = 0;
  if (!__all_sync(~0u, all_valid)) status = faults_of_row(p, owner, regions, count, limit, lane);
  if (place.entry != INT32_MAX) {
    if (lane == 0) pages[count - 1] = place.page;
  } else {
    bool own_listed = p.positions == nullptr;  // without positions no region can be missing
    __syncwarp();
    for (int32_t at = lane; at < count; at += 32) {
      own_listed |= regions[at * p.stride_regions_entry] == own;
      pages[at] = -1;
    }
    if (!__any_sync(~0u, own_listed)) status |= status_region;
  }
  for (int32_t at = count + lane; at < end - begin; at += 32) pages[at] = -1;
  return status;
}

__global__ void __launch_bounds__(kThreads, 5)
    fill_kernel(const __grid_constant__ FillParams p, int32_t* status) {
  const int lane = threadIdx.x % 32;
  // The first half of the grid fills, the second copies the query, if there is one to copy.
  const int64_t half = (p.rows + kWarpsOfCta - 1) / kWarpsOfCta;
  const bool copies = blockIdx.x >= half;
  const int64_t row = (blockIdx.x - (copies ? half : 0)) * kWarpsOfCta + threadIdx.x / 32;
  if (row >= p.rows) return;
  if (copies) {
    copy_query(p, row, lane);
    return;
  }
  const int32_t bits = fill_row(p, row, lane);
  if (bits != 0 && status != nullptr) atomicOr(status, bits);
}

// --- staging copy -----------------------------------------------------------------------------

struct StageKernelParams {
  StageParams stage;
  int32_t units;   // pieces of eight elements in a token's row
  int32_t slices;  // CTAs of a block
  int32_t units_of_slice;
};

template <typename Output>
__device__ void store_eight(Output tag, void* to, const float (&values)[8]) {
  uint4 words;
  words.x = device::pack(tag, values[0], values[1]);
  words.y = device::pack(tag, values[2], values[3]);
  words.z = device::pack(tag, values[4], values[5]);
  words.w = device::pack(tag, values[6], values[7]);
  *static_cast<uint4*>(to) = words;
}

template <typename Source>
__device__ void load_eight(Source tag, const char* from, float (&values)[8]) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = device::unpack(tag, pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ void load_eight_f8(const char* from, float scale, float (&values)[8]) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  const uint32_t codes[4] = {words.x & 0xffffu, words.x >> 16, words.y & 0xffffu, words.y >> 16};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair =
        device::unpack(__half(), device::pair_from_f8(static_cast<uint16_t>(codes[i])));
    values[2 * i] = pair.x * scale;
    values[2 * i + 1] = pair.y * scale;
  }
}

template <typename Output>
__global__ void __launch_bounds__(kThreads)
    stage_kernel(const __grid_constant__ StageKernelParams p, int32_t* status) {
  const StageParams& s = p.stage;
  const int64_t staged = blockIdx.x / p.slices;
  const int first = static_cast<int>(blockIdx.x % p.slices) * p.units_of_slice;
  const int last = min(first + p.units_of_slice, static_cast<int>(s.cache.block_size) * p.units);
  const int64_t block = s.staged_blocks[staged * s.stride_staged];
  const bool valid = block >= 0 && block < s.cache.blocks;
  if (!valid && threadIdx.x == 0 && status != nullptr) atomicOr(status, status_table);
  const float k_scale = s.k_scale_pointer != nullptr ? *s.k_scale_pointer : s.k_scale;
  const float v_scale = s.v_scale_pointer != nullptr ? *s.v_scale_pointer : s.v_scale;
  const bool f8 = s.cache.dtype == DType::f8_e4m3fn;
  const bool same = s.cache.dtype == s.output_dtype;
  const int64_t element_bytes = f8 ? 1 : 2;
  const auto* cache = static_cast<const char*>(s.cache.data);
  auto* output = static_cast<char*>(s.output) + staged * s.cache.block_size * p.units * 16;
#pragma unroll 4
  for (int at = first + static_cast<int>(threadIdx.x); at < last; at += kThreads) {
    const int token = at / p.units, unit = at - token * p.units;
    char* to = output + int64_t{at} * 16;
    if (!valid) {
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      continue;
    }
    const char* from =
        cache +
        (block * s.cache.stride_block + token * s.cache.stride_token + unit * 8) * element_bytes;
    if (same) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      continue;
    }
    float values[8];
    if (f8) {
      load_eight_f8(from, unit * 2 < p.units ? k_scale : v_scale, values);
    } else if (s.cache.dtype == DType::bf16) {
      load_eight(__nv_bfloat16(), from, values);
    } else {
      load_eight(__half(), from, values);
    }
    store_eight(Output(), to, values);
  }
}

// --- exact positions --------------------------------------------------------------------------

constexpr int kFixupThreads = 1024;
constexpr int kFixupRows = 4;  // of a thread at a time

// One CTA: the running sum is short beside everything else, and needs no second launch.
__global__ void __launch_bounds__(kFixupThreads)
    fixup_kernel(const __grid_constant__ FixupParams p, int32_t* status) {
  using Scan = cub::BlockScan<int32_t, kFixupThreads>;
  __shared__ typename Scan::TempStorage temporary;
  int32_t before = 0;
  bool cut = false;
  if (threadIdx.x == 0) p.indptr[0] = 0;
  for (int64_t base = 0; base < p.rows; base += kFixupThreads * kFixupRows) {
    int32_t counts[kFixupRows];
#pragma unroll
    for (int i = 0; i < kFixupRows; ++i) {
      const int64_t row = base + threadIdx.x * kFixupRows + i;
      counts[i] = 0;
      if (row < p.rows) {
        const int64_t at = row * p.stride_positions;
        const int64_t position = p.wide_positions ? static_cast<const int64_t*>(p.positions)[at]
                                                  : static_cast<const int32_t*>(p.positions)[at];
        const int64_t exact = selection_count(position, p.region_count);
        const int64_t planned = p.planned_indptr[row + 1] - p.planned_indptr[row];
        cut |= exact > planned;
        counts[i] = static_cast<int32_t>(min(exact, planned));
        p.exact_positions[row] = position;
        p.last_page_len[row] = last_page_len(position);
      }
    }
    int32_t total = 0;
    Scan(temporary).InclusiveSum(counts, counts, total);
#pragma unroll
    for (int i = 0; i < kFixupRows; ++i) {
      const int64_t row = base + threadIdx.x * kFixupRows + i;
      if (row < p.rows) p.indptr[row + 1] = before + counts[i];
    }
    before += total;
    __syncthreads();
  }
  if (cut && status != nullptr) atomicOr(status, status_range_cut);
}

// --- staging plan -----------------------------------------------------------------------------

constexpr int kRequestsOfLaunch = 256;

struct StagingPlanParams {
  BlockTableView table;
  int64_t first_request;
  int32_t* staged_blocks;
  int32_t* staged_table;
  int64_t staged_stride_request;
  int64_t staged_stride_block;
  int32_t begin[kRequestsOfLaunch];  // number of each request's first staged block
  int32_t live[kRequestsOfLaunch];   // blocks of each request
};
static_assert(sizeof(StagingPlanParams) < 4096, "kernel parameters");

__global__ void __launch_bounds__(kThreads)
    staging_plan_kernel(const __grid_constant__ StagingPlanParams p) {
  const int64_t request = p.first_request + blockIdx.x;
  const int32_t begin = p.begin[blockIdx.x], live = p.live[blockIdx.x];
  for (int64_t column = threadIdx.x; column < p.table.max_blocks; column += kThreads) {
    const bool is_live = column < live;
    p.staged_table[request * p.staged_stride_request + column * p.staged_stride_block] =
        is_live ? begin + static_cast<int32_t>(column) : 0;
    if (is_live) {
      p.staged_blocks[begin + column] =
          p.table.data[request * p.table.stride_request + column * p.table.stride_block];
    }
  }
}

}  // namespace

void launch_fill(const FillParams& params, int32_t* status, StreamHandle stream) {
  if (params.rows == 0) return;
  const int64_t half = (params.rows + kWarpsOfCta - 1) / kWarpsOfCta;
  const int grid = grid_size(params.query != nullptr ? 2 * half : half, 1, "fill");
  fill_kernel<<<grid, kThreads, 0, stream_of(stream)>>>(params, status);
  check_launch("fill");
}

void launch_stage(const StageParams& params, int32_t* status, StreamHandle stream) {
  const int64_t units = 2 * params.cache.dim / 8;
  const int64_t units_of_block = units * params.cache.block_size;
  if (params.staged == 0) return;
  StageKernelParams p = {};
  p.stage = params;
  p.units = static_cast<int32_t>(units);
  p.units_of_slice = kThreads * 4;
  p.slices = static_cast<int32_t>((units_of_block + p.units_of_slice - 1) / p.units_of_slice);
  const int grid = grid_size(params.staged * p.slices, 1, "stage");
  if (params.output_dtype == DType::bf16) {
    stage_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream_of(stream)>>>(p, status);
  } else {
    stage_kernel<__half><<<grid, kThreads, 0, stream_of(stream)>>>(p, status);
  }
  check_launch("stage");
}

void launch_fixup(const FixupParams& params, int32_t* status, StreamHandle stream) {
  fixup_kernel<<<1, kFixupThreads, 0, stream_of(stream)>>>(params, status);
  check_launch("fixup_positions");
}

void launch_staging_plan(const BlockTableView& table, std::span<const int64_t> lengths,
                         int64_t block_size, int32_t* staged_blocks, int32_t* staged_table,
                         int64_t staged_stride_request, int64_t staged_stride_block,
                         StreamHandle stream) {
  StagingPlanParams p = {};
  p.table = table;
  p.staged_blocks = staged_blocks;
  p.staged_table = staged_table;
  p.staged_stride_request = staged_stride_request;
  p.staged_stride_block = staged_stride_block;
  int32_t staged = 0;
  for (int64_t first = 0; first < table.requests; first += kRequestsOfLaunch) {
    const int64_t count = std::min<int64_t>(kRequestsOfLaunch, table.requests - first);
    p.first_request = first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t length = lengths[static_cast<size_t>(first + i)];
      p.begin[i] = staged;
      p.live[i] = static_cast<int32_t>(length / block_size + (length % block_size != 0 ? 1 : 0));
      staged += p.live[i];
    }
    staging_plan_kernel<<<static_cast<int>(count), kThreads, 0, stream_of(stream)>>>(p);
    check_launch("plan_staged_prefill_pages");
  }
}

}  // namespace octopage::cuda
