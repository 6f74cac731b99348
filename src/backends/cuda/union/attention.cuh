#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_ATTENTION_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_ATTENTION_CUH_

// Attention over the unions of neighbouring rows' selections, for Hopper (sm_90a).
//
// A CTA is persistent. Two producer warps copy the pages of its tiles, one batch after the other,
// into a ring of slots; two consumer warpgroups compute a half of the tile each: scores of a batch
// while the values of the batch before are multiplied, softmax beside both. A page is copied once
// for all rows of the tile; who selected it is one bit per row.
//
// What keeps strangers out: pads and invalid entries are copied from outside the tensor, which
// brings zeros; scores of pages that a row did not select, and of tokens behind its position, are
// never exponentiated; V of tokens that nobody has written is zeroed before it is multiplied.
// docs/kernels/sm90-prefill.md tells the history and the schedule.

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/device/ptx/bulk.cuh"
#include "backends/cuda/device/ptx/wgmma.cuh"
#include "backends/cuda/union/params.hpp"
#include "backends/cuda/union/traits.cuh"

namespace octopage::cuda {

/// Walks the tiles of a CTA: of units blockIdx.x, blockIdx.x + gridDim.x, ... every tile.
struct TileCursor {
  uint32_t unit;  // group * spans + span
  int32_t tile;   // of the span

  __device__ __forceinline__ bool valid(const UnionAttentionParams& p) const {
    return unit < static_cast<uint32_t>(p.lists.spans) * static_cast<uint32_t>(p.groups);
  }
  __device__ __forceinline__ uint32_t group(const UnionAttentionParams& p) const {
    return unit / static_cast<uint32_t>(p.lists.spans);
  }
  /// Index of the span's lists.
  __device__ __forceinline__ uint32_t list(const UnionAttentionParams& p) const {
    return p.shared_selection != 0 ? unit % static_cast<uint32_t>(p.lists.spans) : unit;
  }
  __device__ __forceinline__ const TileHeader* header(const UnionAttentionParams& p) const {
    return p.lists.headers + (list(p) * static_cast<uint32_t>(p.lists.tile_rows) + tile);
  }
  /// First row of the span.
  __device__ __forceinline__ int32_t row(const UnionAttentionParams& p) const {
    return static_cast<int32_t>(unit % static_cast<uint32_t>(p.lists.spans)) * p.lists.tile_rows;
  }
  __device__ __forceinline__ void advance(bool last) {
    tile = last ? 0 : tile + 1;
    unit += last ? gridDim.x : 0;
  }
};

// --- producer ---------------------------------------------------------------------------------

/// Copies its half of every batch: lane i page 4 * warp + i.
template <typename Traits>
__device__ __forceinline__ void produce(const UnionAttentionParams& p, const CUtensorMap* map,
                                        const UnionShared<Traits>& shared, int warp) {
  constexpr int kPagesOfWarp = kBatchPages / kProducerWarps;
  const int lane = threadIdx.x % 32;
  const int slot_page = warp * kPagesOfWarp + min(lane, kPagesOfWarp - 1);
  uint32_t position = 0;
  for (TileCursor cursor = {blockIdx.x, 0}; cursor.valid(p);) {
    const TileHeader* header = cursor.header(p);
    const int32_t batches = __shfl_sync(~0u, header->batches, 0);
    const auto group = static_cast<int32_t>(cursor.group(p));
    const int32_t* pages =
        p.lists.pages +
        (cursor.list(p) * static_cast<uint32_t>(p.lists.capacity) + header->first_batch) *
            kBatchPages +
        slot_page;
    int32_t page = batches > 0 ? pages[0] : -1;
    for (int32_t batch = 0; batch < batches; ++batch) {
      const int32_t next = batch + 1 < batches ? pages[(batch + 1) * kBatchPages] : -1;
#pragma unroll
      for (int part = 0; part < 2; ++part, ++position) {  // K, V
        const Position<Traits> at(position);
        ptx::barrier_wait(shared.empty + 8 * at.slot, at.parity ^ 1);
        if (lane == 0) {
          ptx::barrier_arrive_expecting(shared.full + 8 * at.slot,
                                        kPagesOfWarp * Traits::kPageBytes);
        }
        __syncwarp();
        if (lane < kPagesOfWarp) {
          // Page -1 lies outside the tensor: zeros.
          ptx::tensor_copy(
              shared.slots + at.slot * Traits::kSlotBytes + slot_page * Traits::kPageBytes, map, 0,
              page * static_cast<int32_t>(kPageTokens), part * Traits::kChunks, group,
              shared.full + 8 * at.slot);
        }
      }
      page = next;
    }
    cursor.advance(header->last != 0);
  }
}

// --- consumer ---------------------------------------------------------------------------------

/// What a lane owns of its warp's 16 matrix rows: rows lane / 4 and 8 further, h = 0 and 1.
struct LaneRows {
  int lane;
  int matrix_row;  // of h = 0, in the tile

  __device__ __forceinline__ LaneRows(int half, int warp, int lane_)
      : lane(lane_), matrix_row(half * 64 + warp * 16 + lane_ / 4) {}
  /// The same, computed anew: what is derived from it takes no registers in the loops before.
  __device__ static __forceinline__ LaneRows anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return LaneRows((thread - 128) / 128, thread / 32 % 4, thread % 32);
  }
  /// Row of the tile.
  __device__ __forceinline__ int row(const UnionAttentionParams& p, int h) const {
    return (matrix_row + 8 * h) >> p.head_shift;
  }
  /// Head of the group; padding where it is not below heads_per_group.
  __device__ __forceinline__ int head(const UnionAttentionParams& p, int h) const {
    return (matrix_row + 8 * h) & ((1 << p.head_shift) - 1);
  }
};

/// A barrier of this consumer warpgroup.
__device__ __forceinline__ void warpgroup_barrier() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  ptx::named_barrier(thread / 128, 128);  // 0 is __syncthreads'
}

/// A step as it comes: which batch, and which of its pages the lane's rows selected.
template <int kRows>
struct Step {
  int32_t batch;
  uint32_t mask[kRows];
};

/// What a warp must know of a tile before it starts, loaded while the tile before is written.
template <int kRows>
struct TileInput {
  int32_t header;      // lane l holds word l
  int32_t own[kRows];  // of the lane's rows
  Step<kRows> step;    // the first
};

/// Step `at` of all. `mask_row` is the lane's first row in the half.
template <int kRows>
__device__ __forceinline__ Step<kRows> load_step(const UnionAttentionParams& p, uint32_t at,
                                                 int mask_row) {
  Step<kRows> step;
  step.batch = p.lists.steps[at];
  const uint8_t* masks = p.lists.masks + (at * static_cast<uint32_t>(p.lists.half_rows) + mask_row);
  step.mask[0] = masks[0];
  if constexpr (kRows == 2) step.mask[1] = masks[8 >> p.head_shift];
  return step;
}

/// Where the steps of a half begin in a tile's lists.
__device__ __forceinline__ uint32_t steps_at(const UnionAttentionParams& p,
                                             const TileCursor& cursor, int half,
                                             int32_t first_batch) {
  return (cursor.list(p) * 2 + half) * static_cast<uint32_t>(p.lists.capacity) + first_batch;
}

template <int kRows>
__device__ __forceinline__ TileInput<kRows> load_tile(const UnionAttentionParams& p,
                                                      const TileCursor& cursor, int half,
                                                      int32_t first_batch, int mask_row,
                                                      const LaneRows& lane_rows) {
  const TileHeader* header = cursor.header(p);
  TileInput<kRows> input;
  input.header = reinterpret_cast<const int32_t*>(header)[min(lane_rows.lane, kHeaderWords - 1)];
#pragma unroll
  for (int r = 0; r < kRows; ++r) input.own[r] = header->own[lane_rows.row(p, r)];
  input.step = load_step<kRows>(p, steps_at(p, cursor, half, first_batch), mask_row);
  return input;
}

/// Where the lane's elements of Q begin. Rows and heads that do not exist take the last that does;
/// nobody reads their results.
__device__ __forceinline__ const uint32_t* query_of_lane(const UnionAttentionParams& p,
                                                         int64_t first_row, int64_t first_head,
                                                         const LaneRows& lane_rows, int h) {
  const int64_t row = min(first_row + lane_rows.row(p, h), p.rows - 1);
  const int64_t head = first_head + min(lane_rows.head(p, h), p.heads_per_group - 1);
  return reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.query) +
                                           row * p.stride_query_row + head * p.stride_query_head +
                                           lane_rows.lane % 4 * 2);
}

/// Q of the lane's rows as A fragments, 16 dims to a fragment.
template <typename Traits, int kCount>
__device__ __forceinline__ void load_query(const uint32_t* const (&from)[2],
                                           uint32_t (&query)[kCount]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < Traits::kDim / 16; ++i) {
      query[4 * i + h] = __ldg(from[h] + 8 * i);
      query[4 * i + h + 2] = __ldg(from[h] + 8 * i + 4);
    }
  }
}

/// Q of a half into shared memory, [dim / 64, 64 rows] of 128 bytes, swizzled. All threads of the
/// warpgroup.
template <typename Traits>
__device__ __forceinline__ void share_query(const uint32_t* const (&from)[2], uint32_t shared,
                                            const LaneRows& lane_rows) {
  warpgroup_barrier();  // nobody reads the tile before
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane_rows.matrix_row % 64 + h * 8;
#pragma unroll 4
    for (int i = 0; i < Traits::kDim / 8; ++i) {  // eight columns at a time
      const uint32_t at =
          shared + i / 8 * 8192 + row * 128 + ((i % 8 ^ row % 8) << 4) + lane_rows.lane % 4 * 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(__ldg(from[h] + 4 * i)) : "memory");
    }
  }
  ptx::async_proxy_fence();
  warpgroup_barrier();
}

/// Running state of the softmax of the lane's two rows, scores in units of log2.
struct SoftmaxState {
  float largest[2];     // maximum that the probabilities so far are relative to; may be stale
  float normaliser[2];  // this lane's part of the sum
};

/// Probabilities of a batch, packed as A fragments. They are taken against the running maximum as
/// it is; only if a row's sum shows that its scores have outgrown it (or are not finite) a new
/// maximum is found, and `correction` tells by how much the older sums shrink. True where the batch
/// was looked at again. What a row did not select never decides over it.
template <typename Traits>
__device__ __forceinline__ bool softmax(const float (&scores)[32],
                                        const uint32_t (&mask)[Traits::kRows], float scale,
                                        SoftmaxState& state, float (&correction)[2],
                                        uint32_t (&probabilities)[16]) {
  const typename Traits::Element tag = {};
  const auto selected = [&](int h, int j) { return (mask[h % Traits::kRows] >> j & 1) != 0; };
  float sum[2] = {0.0f, 0.0f}, odd[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kBatchPages; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A page that the row did not select adds -inf: 0, or NaN where the score is not finite.
      const float shift = selected(h, j) ? -state.largest[h] : -INFINITY;
      const float low = ptx::exp2_approx(fmaf(scores[4 * j + 2 * h], scale, shift));
      const float high = ptx::exp2_approx(fmaf(scores[4 * j + 2 * h + 1], scale, shift));
      sum[h] += low;
      odd[h] += high;
      probabilities[2 * j + h] = device::pack(tag, low, high);
    }
  }
  sum[0] += odd[0];
  sum[1] += odd[1];
  const bool redo =
      __any_sync(~0u, !(sum[0] <= Traits::kLargestSum) || !(sum[1] <= Traits::kLargestSum));
  if (__builtin_expect(redo, 0)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // The same sum in the same order, of selected pages alone.
      const auto exponentiate = [&](float shift) {
        float even_sum = 0.0f, odd_sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kBatchPages; ++j) {
          float low = ptx::exp2_approx(fmaf(scores[4 * j + 2 * h], scale, shift));
          float high = ptx::exp2_approx(fmaf(scores[4 * j + 2 * h + 1], scale, shift));
          low = selected(h, j) ? low : 0.0f;
          high = selected(h, j) ? high : 0.0f;
          even_sum += low;
          odd_sum += high;
          probabilities[2 * j + h] = device::pack(tag, low, high);
        }
        return even_sum + odd_sum;
      };
      sum[h] = exponentiate(-state.largest[h]);
      float largest = state.largest[h];
#pragma unroll
      for (int j = 0; j < kBatchPages; ++j) {
        if (selected(h, j)) {
          largest = fmaxf(largest,
                          fmaxf(scores[4 * j + 2 * h] * scale, scores[4 * j + 2 * h + 1] * scale));
        }
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      int outgrown = sum[h] <= Traits::kLargestSum ? 0 : 1;  // by any lane of the row
      outgrown |= __shfl_xor_sync(~0u, outgrown, 1);
      outgrown |= __shfl_xor_sync(~0u, outgrown, 2);
      correction[h] = 1.0f;
      if (outgrown != 0) {
        if (largest != -INFINITY) correction[h] = exp2f(state.largest[h] - largest);
        state.largest[h] = largest;
        state.normaliser[h] *= correction[h];
        sum[h] = exponentiate(largest == -INFINITY ? 0.0f : -largest);
      }
    }
  }
  state.normaliser[0] += sum[0];
  state.normaliser[1] += sum[1];
  return redo;
}

/// Scores of tokens behind a row's position become -inf, in the row's own page.
template <int kRows>
__device__ __forceinline__ void hide_future(float (&scores)[32], int32_t batch,
                                            const int32_t (&own)[kRows], int lane) {
  const int token = lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t mine = own[h % kRows];
    const int last = mine & 7;
    const int slot = mine >> 6 == batch ? mine >> 3 & 7 : -1;
#pragma unroll
    for (int j = 0; j < kBatchPages; ++j) {
      float& low = scores[4 * j + 2 * h];
      float& high = scores[4 * j + 2 * h + 1];
      low = slot == j && token > last ? -INFINITY : low;
      high = slot == j && token + 1 > last ? -INFINITY : high;
    }
  }
}

/// Zeroes V of the tokens of a page that come after the first `tokens`. All threads of the
/// warpgroup; both warpgroups may do it to the same page.
template <typename Traits>
__device__ __forceinline__ void zero_tail(uint32_t page, int tokens) {
  const int words = (static_cast<int>(kPageTokens) - tokens) * Traits::kChunks * 8;
  for (int i = static_cast<int>(threadIdx.x) % 128; i < words; i += 128) {
    const uint32_t at = page + i / 8 % Traits::kChunks * 1024 +
                        (tokens + i / 8 / Traits::kChunks) * 128 + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  ptx::async_proxy_fence();
  warpgroup_barrier();
}

/// Turns four packed pairs of eight-column tiles of a quad of lanes around: lane i gets the eight
/// columns of tile i.
__device__ __forceinline__ void transpose_quad(uint32_t (&pairs)[4], int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, odd ? pairs[j] : pairs[j + 1], 1);
    (odd ? pairs[j] : pairs[j + 1]) = got;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t got = __shfl_xor_sync(~0u, upper ? pairs[j] : pairs[j + 2], 2);
    (upper ? pairs[j] : pairs[j + 2]) = got;
  }
}

/// Writes the lane's part of one row: sums times `factor`.
template <typename Traits>
__device__ __forceinline__ void store_row(const UnionAttentionParams& p,
                                          const float (&sums)[Traits::kDim / 2], int h,
                                          float factor, int64_t to, bool exists, int lane) {
  const typename Traits::Element tag = {};
  if (p.output_is_f32 != 0) {
    float* out = static_cast<float*>(p.output) + to + lane % 4 * 2;
    if (!exists) return;
#pragma unroll
    for (int j = 0; j < Traits::kDim / 8; ++j) {
      *reinterpret_cast<float2*>(out + 8 * j) =
          make_float2(sums[4 * j + 2 * h] * factor, sums[4 * j + 2 * h + 1] * factor);
    }
    return;
  }
  auto* out = static_cast<uint16_t*>(p.output) + to;
#pragma unroll
  for (int i = 0; i < Traits::kDim / 32; ++i) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[j] = device::pack(tag, sums[16 * i + 4 * j + 2 * h] * factor,
                              sums[16 * i + 4 * j + 2 * h + 1] * factor);
    }
    if (p.aligned_output != 0) {
      transpose_quad(pairs, lane);
      if (exists) {
        *reinterpret_cast<uint4*>(out + 32 * i + lane % 4 * 8) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    } else if (exists) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint32_t*>(out + 32 * i + 8 * j + lane % 4 * 2) = pairs[j];
    }
  }
}

/// The matrix products of one half of a tile. Slots are given by address.
template <typename Traits>
struct Products {
  static constexpr uint64_t kKeys = ptx::wgmma_layout(16, Traits::kPageBytes);
  static constexpr uint64_t kValues = ptx::wgmma_layout(1024, Traits::kPageBytes);
  static constexpr uint64_t kQuery = ptx::wgmma_layout(16, 1024);
  static constexpr int kQueryRegisters = Traits::kQueryInShared ? 1 : Traits::kDim / 4;

  /// scores [64 rows, 64 tokens] = Q K^T.
  __device__ static __forceinline__ void issue_scores(float (&scores)[32],
                                                      const uint32_t (&query)[kQueryRegisters],
                                                      uint32_t shared_query, uint32_t keys) {
    const typename Traits::Element tag = {};
    const uint64_t b = ptx::wgmma_operand(kKeys, keys);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kDim / 16; ++i) {
      const uint64_t at = b + ((i / 4 * 1024 + i % 4 * 32) >> 4);
      if constexpr (Traits::kQueryInShared) {
        const uint64_t a =
            ptx::wgmma_operand(kQuery, shared_query) + ((i / 4 * 8192 + i % 4 * 32) >> 4);
        ptx::wgmma_keys(tag, scores, a, at, i > 0 ? 1 : 0);
      } else {
        ptx::wgmma_keys(tag, scores, query + 4 * i, at, i > 0 ? 1 : 0);
      }
    }
    ptx::wgmma_commit();
  }

  /// sums [64 rows, dim] += P V.
  __device__ static __forceinline__ void issue_values(float (&sums)[Traits::kDim / 2],
                                                      const uint32_t (&probabilities)[16],
                                                      uint32_t values) {
    const typename Traits::Element tag = {};
    const uint64_t b = ptx::wgmma_operand(kValues, values);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatchTokens / 16; ++i)
      ptx::wgmma_values(tag, sums, probabilities + 4 * i, b + ((i * 2 * Traits::kPageBytes) >> 4));
    ptx::wgmma_commit();
  }
};

template <typename Traits>
__device__ __forceinline__ void consume(const UnionAttentionParams& p,
                                        const UnionShared<Traits>& shared, int half) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const LaneRows first_lane_rows(half, warp, lane);
  // The lane's first row in its half; with one row to a tile both halves compute it.
  const auto mask_row_of = [&](const LaneRows& lane_rows) {
    return p.lists.tile_rows > 1
               ? lane_rows.row(p, 0) - lane_rows.matrix_row / 64 * p.lists.half_rows
               : 0;
  };
  const int kept_mask_row = mask_row_of(first_lane_rows);
  // Where registers are short it is computed anew each time.
  const auto half_now = [&] {
    return Traits::kOneProbabilitySet ? LaneRows::anew().matrix_row / 64 : half;
  };
  const auto mask_row = [&] {
    return Traits::kOneProbabilitySet ? mask_row_of(LaneRows::anew()) : kept_mask_row;
  };
  const float scale = p.scale_log2;
  const uint32_t shared_query = shared.query + half * (Traits::kQueryBytes / 2);

  float sums[Traits::kDim / 2], scores[32];
  uint32_t probabilities[16];
  uint32_t query[Products<Traits>::kQueryRegisters];

  uint32_t first = 0;  // batches of the tiles before
  const auto position_of = [&](int32_t batch, int part) {
    return Position<Traits>(2 * (first + static_cast<uint32_t>(batch)) + part);
  };
  const auto wait_full = [&](const Position<Traits>& at) {
    ptx::barrier_wait(shared.full + 8 * at.slot, at.parity);
  };
  const auto release = [&](const Position<Traits>& at) {
    if (lane == 0) ptx::barrier_arrive(shared.empty + 8 * at.slot);
  };
  const auto address = [&](const Position<Traits>& at) {
    return shared.slots + at.slot * Traits::kSlotBytes;
  };
  // Batches from `batch` to `end` that only the other half uses.
  const auto walk = [&](int32_t batch, int32_t end) {
#pragma unroll 1
    for (; __builtin_expect(batch < end, 0); ++batch) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const auto at = position_of(batch, part);
        wait_full(at);
        release(at);
      }
    }
  };
  const auto uniform = [](int32_t value) { return __shfl_sync(~0u, value, 0); };
  const auto fetch_query = [&](const TileCursor& cursor, int32_t row, const LaneRows& lane_rows) {
    const int64_t first_head = int64_t{cursor.group(p)} * p.heads_per_group;
    const uint32_t* const from[2] = {query_of_lane(p, row, first_head, lane_rows, 0),
                                     query_of_lane(p, row, first_head, lane_rows, 1)};
    if constexpr (Traits::kQueryInShared) {
      share_query<Traits>(
          from, shared.query + lane_rows.matrix_row / 64 * (Traits::kQueryBytes / 2), lane_rows);
    } else {
      load_query<Traits>(from, query);
    }
  };

  TileCursor cursor = {blockIdx.x, 0};
  if (!cursor.valid(p)) return;
  TileInput<Traits::kRows> input =
      load_tile<Traits::kRows>(p, cursor, half, 0, mask_row(), first_lane_rows);
  fetch_query(cursor, cursor.row(p), first_lane_rows);
  while (true) {
    const auto word = [&](int i) { return __shfl_sync(~0u, input.header, i); };
    const int32_t steps = word(5 + half_now());
    SoftmaxState state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < Traits::kDim / 2; ++i) sums[i] = 0.0f;

    int32_t batch = -1;  // the last one whose scores were issued
    if (steps > 0) {
      // Steps are known two ahead: one is loaded while the place of the one after this is computed.
      uint32_t next_step = steps_at(p, cursor, half_now(), word(3)) + 1;
      const uint32_t end = next_step - 1 + static_cast<uint32_t>(steps);
      int32_t coming = uniform(input.step.batch);
      uint32_t mask[Traits::kRows], coming_mask[Traits::kRows];
#pragma unroll
      for (int r = 0; r < Traits::kRows; ++r) coming_mask[r] = input.step.mask[r];
      Step<Traits::kRows> next = {};
      if (next_step < end) next = load_step<Traits::kRows>(p, next_step, mask_row());
      Position<Traits> keys = position_of(coming, 0), values = keys;
      const int32_t tail = word(7);  // -1 is no batch's

      // What can be done while the products of a step are under way: V of its batch is there, and
      // finite where nobody has written; the step after it is known.
      const auto look_ahead = [&] {
        batch = coming;
        values = position_of(batch, 1);
        wait_full(values);
        if (__builtin_expect(tail >> 6 == batch, 0)) {
          zero_tail<Traits>(address(values) + (tail >> 3 & 7) * Traits::kPageBytes, (tail & 7) + 1);
        }
        coming = uniform(next.batch);
#pragma unroll
        for (int r = 0; r < Traits::kRows; ++r) {
          mask[r] = coming_mask[r];
          coming_mask[r] = next.mask[r];
        }
        if (++next_step < end) next = load_step<Traits::kRows>(p, next_step, mask_row());
        keys = position_of(coming, 0);
      };
      const auto hide = [&] {
        bool here = false;
#pragma unroll
        for (int r = 0; r < Traits::kRows; ++r) here |= input.own[r] >> 6 == batch;
        if (__builtin_expect(here, 0)) hide_future(scores, batch, input.own, lane);
      };
      {
        walk(0, coming);
        wait_full(keys);
        Products<Traits>::issue_scores(scores, query, shared_query, address(keys));
        const Position<Traits> read = keys;
        look_ahead();
        ptx::wgmma_wait<0>();
        ptx::pin(scores);
        release(read);
        hide();
        float correction[2];
        softmax<Traits>(scores, mask, scale, state, correction, probabilities);
      }
      // Scores of a step beside the values of the step before.
      const auto step = [&](uint32_t(&ready)[16], uint32_t(&made)[16]) {
        walk(batch + 1, coming);
        wait_full(keys);
        ptx::pin(ready);
        Products<Traits>::issue_scores(scores, query, shared_query, address(keys));
        Products<Traits>::issue_values(sums, ready, address(values));
        const Position<Traits> read_keys = keys, read_values = values;
        look_ahead();
        if constexpr (Traits::kOneProbabilitySet) {
          ptx::wgmma_wait<0>();
          ptx::pin(sums);
          release(read_values);
        } else {
          ptx::wgmma_wait<1>();
        }
        ptx::pin(scores);
        release(read_keys);
        hide();
        float correction[2];
        const bool redone = softmax<Traits>(scores, mask, scale, state, correction, made);
        ptx::pin(made);
        if constexpr (!Traits::kOneProbabilitySet) {
          ptx::wgmma_wait<0>();
          ptx::pin(sums);
          ptx::pin(ready);
          release(read_values);
        }
        if (__builtin_expect(redone, 0)) {
#pragma unroll
          for (int i = 0; i < Traits::kDim / 2; ++i) sums[i] *= correction[i / 2 % 2];
          ptx::pin(sums);
        }
      };
      int32_t left = steps - 1;
      if constexpr (Traits::kOneProbabilitySet) {
        for (; left > 0; --left) step(probabilities, probabilities);
      } else {
        uint32_t more[16];
        for (; left >= 2; left -= 2) {
          step(probabilities, more);
          step(more, probabilities);
        }
        if (left != 0) {
          step(probabilities, more);
#pragma unroll
          for (int i = 0; i < 16; ++i) probabilities[i] = more[i];
          ptx::pin(probabilities);
        }
      }
      ptx::pin(probabilities);
      Products<Traits>::issue_values(sums, probabilities, address(values));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.normaliser[h] += __shfl_xor_sync(~0u, state.normaliser[h], 1);
        state.normaliser[h] += __shfl_xor_sync(~0u, state.normaliser[h], 2);
      }
      ptx::wgmma_wait<0>();
      ptx::pin(sums);
      release(values);
    }
    const int32_t row = word(0), rows = word(1), batches = word(4);
    const bool last = word(2) != 0;
    const int32_t next_first_batch = last ? 0 : word(3) + batches;
    const auto live = static_cast<uint32_t>(word(9));
    walk(batch + 1, batches);
    first += static_cast<uint32_t>(batches);

    const LaneRows lane_rows = LaneRows::anew();
    const int64_t first_head = int64_t{cursor.group(p)} * p.heads_per_group;
    cursor.advance(last);
    const bool more = cursor.valid(p);
    const int32_t next_row = last ? cursor.row(p) : row + rows;
    // Where registers allow it, the next tile's loads are under way while this one is written.
    const auto fetch_tile = [&] {
      input =
          load_tile<Traits::kRows>(p, cursor, half_now(), next_first_batch, mask_row(), lane_rows);
    };
    if constexpr (!Traits::kOneProbabilitySet) {
      if (more) fetch_tile();
    }
    if constexpr (!Traits::kQueryInShared) {
      if (more) fetch_query(cursor, next_row, lane_rows);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row_of_tile = lane_rows.row(p, h), head = lane_rows.head(p, h);
      const bool exists = row_of_tile < rows && head < p.heads_per_group;
      // A row without a token gives 0; one whose scores are all -inf gives NaN, as the formula
      // does.
      const bool sees = (live >> row_of_tile & 1) != 0;
      const int64_t to_row = int64_t{row} + row_of_tile;
      const int64_t to_head = first_head + head;
      store_row<Traits>(p, sums, h, sees ? 1.0f / state.normaliser[h] : 0.0f,
                        to_row * p.stride_output_row + to_head * p.stride_output_head, exists,
                        lane_rows.lane);
      if (p.lse != nullptr && exists && lane_rows.lane % 4 == 0) {
        constexpr float kNaturalOfLog2 = 0.693147180559945309f;
        p.lse[to_row * p.stride_lse_row + to_head * p.stride_lse_head] =
            !sees ? -INFINITY
            : state.normaliser[h] == 0.0f
                ? NAN
                : (state.largest[h] + log2f(state.normaliser[h])) * kNaturalOfLog2;
      }
    }
    if (!more) return;
    if constexpr (Traits::kOneProbabilitySet) fetch_tile();
    if constexpr (Traits::kQueryInShared) fetch_query(cursor, next_row, lane_rows);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    union_attention(const __grid_constant__ CUtensorMap map,
                    const __grid_constant__ UnionAttentionParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const UnionShared<Traits> shared(ptx::shared_address(memory));
  // Through a shuffle, so that the compiler knows that a warp agrees on it.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kSlots; ++i) {
      ptx::barrier_init(shared.full + 8 * i, kProducerWarps);
      ptx::barrier_init(shared.empty + 8 * i, 4 * kConsumerWarpgroups);
    }
    ptx::barrier_init_fence();
    ptx::async_proxy_fence();
  }
  __syncthreads();
  ptx::wait_for_previous_grid();
  if (warpgroup == 0) {
    ptx::registers_shrink<kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp < kProducerWarps) produce<Traits>(p, &map, shared, warp);
  } else {
    ptx::registers_grow<kConsumerRegisters>();
    consume<Traits>(p, shared, warpgroup - 1);
  }
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_ATTENTION_CUH_
