#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_ATTENTION_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_ATTENTION_CUH_

// Attention over the unions of neighbouring rows' selections, for Hopper (sm_90a).
//
// A CTA is persistent. The warps of producer.cuh bring the pages of its tiles, one batch after the
// other, into a ring of slots; two consumer warpgroups compute a half of the tile each: scores of a
// batch while the values of the batch before are multiplied, softmax beside both. A page is copied
// once for all rows of the tile; who selected it is one bit per row.
//
// What keeps strangers out: pads and invalid entries are copied from outside the tensor, which
// brings zeros; a page that a row did not select, and tokens behind its position, have probability
// 0 and no say in its maximum; V of tokens that nobody has written is zeroed before it is
// multiplied. docs/kernels/sm90-prefill.md tells the history and the schedule.

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "backends/cuda/device/ptx/bulk.cuh"
#include "backends/cuda/device/ptx/mma.cuh"
#include "backends/cuda/device/ptx/wgmma.cuh"
#include "backends/cuda/union/epilogue.cuh"
#include "backends/cuda/union/params.hpp"
#include "backends/cuda/union/producer.cuh"
#include "backends/cuda/union/query.cuh"
#include "backends/cuda/union/softmax.cuh"
#include "backends/cuda/union/tiles.cuh"
#include "backends/cuda/union/traits.cuh"

namespace octopage::cuda {

/// Zeroes V of the tokens of a page that come after the first `tokens`. All threads of the
/// warpgroup; both warpgroups may do it to the same page.
template <typename Traits>
__device__ __forceinline__ void zero_tail(uint32_t page, int tokens) {
  const int words = (static_cast<int>(kPageTokens) - tokens) * Traits::kChunks * 8;
  int thread;  // computed here and now: hoisted, the addresses would take registers everywhere
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#pragma unroll 1
  for (int i = thread % 128; i < words; i += 128) {
    const uint32_t at = page + i / 8 % Traits::kChunks * 1024 +
                        (tokens + i / 8 / Traits::kChunks) * 128 + i % 8 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  ptx::async_proxy_fence();
  warpgroup_barrier();
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

  /// The same scores once more, by one warp for its 16 rows alone.
  __device__ static __forceinline__ void scores_of_warp(float (&scores)[32],
                                                        const uint32_t (&query)[kQueryRegisters],
                                                        uint32_t shared_query, uint32_t keys) {
    const typename Traits::Element tag = {};
    int thread;  // here and now, see zero_tail
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int warp = thread / 32 % 4, g = thread % 32 / 4, c = thread % 4;
    // The word of columns 2 c of a 16-byte unit in a row of a swizzled chunk.
    const auto word = [&](uint32_t row, int unit) {
      uint32_t pair;
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(pair)
                   : "r"(row + ((unit ^ g) << 4) + 4 * c)
                   : "memory");
      return pair;
    };
#pragma unroll
    for (int i = 0; i < 32; ++i) scores[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kDim / 16; ++i) {
      const int unit = i % 4 * 2;
      uint32_t a[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t row = shared_query + i / 4 * 8192 + (warp * 16 + k % 2 * 8 + g) * 128;
        a[k] = Traits::kQueryInShared ? word(row, unit + k / 2) : query[4 * i + k];
      }
#pragma unroll
      for (int j = 0; j < kBatchPages; ++j) {
        const uint32_t row = keys + j * Traits::kPageBytes + i / 4 * 1024 + g * 128;
        float(&page)[4] = *reinterpret_cast<float(*)[4]>(scores + 4 * j);
        ptx::mma_m16n8k16(tag, page, a, word(row, unit), word(row, unit + 1));
      }
    }
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
    return Traits::kDim >= 192 ? mask_row_of(LaneRows::anew()) : kept_mask_row;
  };
  float scale[Traits::kScales] = {p.scale_log2};
  const uint32_t shared_query = shared.query + half * (Traits::kQueryBytes / 2);

  float sums[Traits::kDim / 2], scores[32];
  uint32_t probabilities[16];
  uint32_t query[Products<Traits>::kQueryRegisters];

  uint32_t first = 0;  // batches of the tiles before, less the tile's first one
  const auto position_of = [&](int32_t batch, int part) {
    return Position<Traits>(2 * (first + static_cast<uint32_t>(batch)) + part);
  };
  const auto wait_full = [&](const Position<Traits>& at) {
    ptx::barrier_wait(shared.full + 8 * at.slot(), at.parity());
  };
  const auto release = [&](const Position<Traits>& at) {
    if ((Traits::kScoresAgain ? LaneRows::anew().lane : lane) < kArrivingLanes)
      ptx::barrier_arrive(shared.empty + 8 * at.slot());
  };
  const auto address = [&](const Position<Traits>& at) {
    return shared.slots + at.slot() * Traits::kSlotBytes;
  };
  // V of a batch is there, and finite where nobody has written.
  const auto wait_values = [&](const Position<Traits>& values, int32_t batch, int32_t tail) {
    wait_full(values);
    if constexpr (!Traits::kF8) {                     // converters have done it
      if (__builtin_expect(tail >> 6 == batch, 0)) {  // -1 is no batch's
        zero_tail<Traits>(address(values) + (tail >> 3 & 7) * Traits::kPageBytes, (tail & 7) + 1);
      }
    }
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
  const auto fetch_query = [&](const TileCursor& cursor, int32_t row, const LaneRows& lane_rows) {
    const int64_t first_head = int64_t{cursor.group(p)} * p.heads_per_group;
    const uint32_t* const from[2] = {query_of_lane(p, row, first_head, lane_rows, 0),
                                     query_of_lane(p, row, first_head, lane_rows, 1)};
    if constexpr (Traits::kQueryInShared) {
      share_query<Traits>(from,
                          shared.query + lane_rows.matrix_row / 64 * (Traits::kQueryBytes / 2),
                          lane_rows, p.query_is_f16 != 0, scale);
    } else {
      load_query<Traits>(from, p.aligned_query != 0, lane_rows.lane, query);
    }
  };
  // Before the query of a tile is fetched.
  const auto reset_scale = [&] {
    if constexpr (Traits::kF8) {
#pragma unroll
      for (float& each : scale) each = p.scale_log2 * (p.k_scale != nullptr ? *p.k_scale : 1.0f);
    }
  };

  const TileCursor first_tile = {blockIdx.x, 0};
  if (!first_tile.valid(p)) return;
  TileInput<Traits::kRows> input;
  input.load_header(p, first_tile, first_lane_rows);
  input.load_steps(p, first_tile, half, mask_row(), first_lane_rows);
  reset_scale();
  fetch_query(first_tile, first_tile.row(p), first_lane_rows);
  while (true) {
    if constexpr (Traits::kF8 && !Traits::kQueryInShared)
      convert_query<Traits>(p.query_is_f16 != 0, query, scale);
    if constexpr (!Traits::kQueryInShared) arrange_query<Traits>(query, lane);
    const auto word = [&](int i) { return __shfl_sync(~0u, input.header, i); };
    const auto cursor_now = [&] {
      return TileCursor{static_cast<uint32_t>(word(kCursorWord)), word(kCursorWord + 1)};
    };
    const int32_t steps = word(kStepsWord + half_now());
    first -= static_cast<uint32_t>(word(kBeginWord));
    SoftmaxState state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < Traits::kDim / 2; ++i) sums[i] = 0.0f;

    int32_t done = word(kBeginWord) - 1;  // the last batch that this half has computed
    if (steps > 0) {
      const auto first_step = [&] { return static_cast<uint32_t>(word(kFirstStepWord)); };
      const auto steps_now = [&] { return word(kStepsWord + half_now()); };
      // The last step whose scores were issued, and where V of its batch will lie; the step after
      // it, and where K of its batch will lie.
      Step<Traits::kRows> now = {}, next = input.steps.coming();
      Position<Traits> keys = position_of(next.batch(), 0), values = keys;
      bool uncommon = true;  // something is to be done before the next products
      bool own = true;       // the next step may have a row's own page

      const auto has_own = [&](int32_t batch) {
        bool has = false;
#pragma unroll
        for (int r = 0; r < Traits::kRows; ++r)
          has |= (Traits::kRows == 1 ? word(kOwnWord) : input.own[r]) >> 6 == batch;
        // The warp as a whole goes one way: hide() shuffles.
        return Traits::kRows == 1 ? has : __any_sync(~0u, has) != 0;
      };
      // What must be known of the step after `now`. Nothing here waits or branches, so that it
      // mingles with the exponentials of `now`.
      const auto look_ahead = [&] {
        input.steps.take(p, first_step, steps_now(), mask_row);
        next = input.steps.coming();
        const int32_t batch = next.batch();
        if constexpr (!Traits::kScoresAgain) keys = position_of(batch, 0);
        own = input.steps.must_fetch() | has_own(batch);
        uncommon = input.steps.must_fetch();
        if constexpr (!Traits::kF8) uncommon |= word(kTailWord) >> 6 == now.batch();
      };
      const auto hide = [&] {
        int32_t own_pages[Traits::kRows];
#pragma unroll
        for (int r = 0; r < Traits::kRows; ++r)
          own_pages[r] = Traits::kRows == 1 ? word(kOwnWord) : input.own[r];
        hide_future(scores, now.batch(), own_pages, lane);
      };
      {
        walk(done + 1, next.batch());
        wait_full(keys);
        Products<Traits>::issue_scores(scores, query, shared_query, address(keys));
        now = next;
        values = position_of(now.batch(), 1);
        ptx::wgmma_wait<0>();
        ptx::pin(scores);
        release(keys);
        hide();
        look_ahead();
        state = first_softmax<Traits>(scores, now, scale, probabilities);
      }
      // Scores of a step beside the values of the step before.
      const auto step = [&](uint32_t(&ready)[16], uint32_t(&made)[16]) {
        if (__builtin_expect(uncommon, 0)) {
          if (input.steps.must_fetch()) {
            input.steps.fetch(p, first_step, steps_now(), mask_row);
            next = input.steps.coming();
            keys = position_of(next.batch(), 0);
          }
          values = position_of(now.batch(), 1);
          wait_values(values, now.batch(), word(kTailWord));
        }
        walk(now.batch() + 1, next.batch());
        if constexpr (Traits::kScoresAgain) {  // no register for them until now
          values = position_of(now.batch(), 1);
          keys = position_of(next.batch(), 0);
        }
        ptx::barrier_wait(shared.full + 8 * values.slot(), values.parity(),
                          shared.full + 8 * keys.slot(), keys.parity());
        ptx::pin(ready);
        Products<Traits>::issue_scores(scores, query, shared_query, address(keys));
        Products<Traits>::issue_values(sums, ready, address(values));
        const Position<Traits> read_keys = keys, read_values = values;
        now = next;
        if constexpr (Traits::kOneProbabilitySet) {
          ptx::wgmma_wait<0>();
          ptx::pin(sums);
          release(read_values);
        } else {
          ptx::wgmma_wait<1>();
        }
        ptx::pin(scores);
        const auto keys_of_now = [&] { return position_of(now.batch(), 0); };
        if constexpr (!Traits::kScoresAgain) release(read_keys);
        if constexpr (Traits::kScoresAgain) own = has_own(now.batch());
        if (__builtin_expect(own, 0)) hide();
        if constexpr (!Traits::kScoresAgain) values = position_of(now.batch(), 1);
        look_ahead();
        float correction[2];
        bool redone;
        if constexpr (Traits::kScoresAgain) {
          redone = softmax<Traits>(scores, now, scale, state, correction, made, [&] {
            Products<Traits>::scores_of_warp(scores, query, shared_query, address(keys_of_now()));
            __syncwarp();  // all have read; lane 0 reports
            hide();
          });
          release(keys_of_now());
        } else {
          redone = softmax<Traits>(scores, now, scale, state, correction, made, ScoresKept());
        }
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
      // Steps whose scores were not issued yet.
      const auto left = [&] { return steps_now() - input.steps.taken(); };
      if constexpr (Traits::kOneProbabilitySet) {
        while (left() > 0) step(probabilities, probabilities);
      } else {
        uint32_t made[16];
        const auto step_and_move = [&] {
          step(probabilities, made);
#pragma unroll
          for (int i = 0; i < 16; ++i) probabilities[i] = made[i];
          ptx::pin(probabilities);
        };
        if constexpr (Traits::kScoresAgain) {
          while (left() > 0) step_and_move();
        } else {
          while (left() >= 2) {
            step(probabilities, made);
            step(made, probabilities);
          }
          if (left() != 0) step_and_move();
        }
      }
      done = now.batch();
    }

    // The next tile's loads are under way while this one is finished.
    const int32_t row = word(kRowWord), rows = word(kRowsWord), end = word(kEndWord);
    const int32_t tail = word(kTailWord);
    const bool last = word(kLastWord) != 0;
    const auto live = static_cast<uint32_t>(word(kLiveWord));
    const LaneRows lane_rows = LaneRows::anew();
    TileCursor cursor = cursor_now();
    const int64_t first_head = int64_t{cursor.group(p)} * p.heads_per_group;
    const int32_t split = cursor.split(p);
    cursor.advance(last);
    const bool more = cursor.valid(p);
    const int32_t next_row = last ? cursor.row(p) : row + rows;
    const auto fetch_steps = [&] {
      input.load_steps(p, cursor, half_now(), mask_row(), lane_rows);
    };
    if (more) {
      if constexpr (!Traits::kOneProbabilitySet) input.load_header(p, cursor, lane_rows);
      if constexpr (!Traits::kQueryInShared) fetch_query(cursor, next_row, lane_rows);
    }
    if (steps > 0) {
      const Position<Traits> values = position_of(done, 1);
      wait_values(values, done, tail);
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
    walk(done + 1, end);
    first += static_cast<uint32_t>(end);
    if constexpr (!Traits::kOneProbabilitySet) {  // elsewhere there is no register for them
      if (more) fetch_steps();
    }
    const float output_scale =
        Traits::kF8 ? p.output_scale * (p.v_scale != nullptr ? *p.v_scale : 1.0f) : 1.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row_of_tile = lane_rows.row(p, h), head = lane_rows.head(p, h);
      const ResultPlace place = {int64_t{row} + row_of_tile, first_head + head,
                                 row_of_tile < rows && head < p.heads_per_group,
                                 (live >> row_of_tile & 1) != 0};
      if (!place.sees) {  // 0 times the V of others may be NaN
#pragma unroll
        for (int j = 0; j < Traits::kDim / 8; ++j)
          sums[4 * j + 2 * h] = sums[4 * j + 2 * h + 1] = 0.0f;
      }
      if (p.lists.split_shift == 0) {
        store_result<Traits>(p, sums, h, state, output_scale, place, lane_rows.lane);
      } else {
        store_partial<Traits>(p, split, sums, h, state, place, lane_rows.lane);
      }
    }
    reset_scale();
    if (!more) return;
    if constexpr (Traits::kOneProbabilitySet) {
      input.load_header(p, cursor, lane_rows);
      fetch_steps();
    }
    if constexpr (Traits::kQueryInShared) fetch_query(cursor, next_row, lane_rows);
  }
}

/// True where the call's selections have so little in common that a row by row kernel is faster.
/// All threads of the CTA; `work` is shared memory and 0.
__device__ __forceinline__ bool row_by_row_is_faster(const UnionAttentionParams& p,
                                                     SpanWork& work) {
  const auto lists = static_cast<int32_t>(p.selections * p.lists.spans);
  SpanWork mine = {};
  for (auto i = static_cast<int32_t>(threadIdx.x); i < lists;
       i += static_cast<int32_t>(blockDim.x)) {
    mine.steps += p.lists.work[i].steps;
    mine.entries += p.lists.work[i].entries;
  }
  mine.steps = __reduce_add_sync(~0u, mine.steps);
  mine.entries = __reduce_add_sync(~0u, mine.entries);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&work.steps, mine.steps);
    atomicAdd(&work.entries, mine.entries);
  }
  __syncthreads();
  const bool faster = uint64_t{work.steps} * kBatchPages * 256 >
                      uint64_t{work.entries} * static_cast<uint32_t>(p.most_steps);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.lists.row_by_row = faster ? 1 : 0;
  return faster;
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    union_attention(const __grid_constant__ CUtensorMap map,
                    const __grid_constant__ UnionAttentionParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const UnionShared<Traits> shared(ptx::shared_address(memory));
  // Through a shuffle, so that the compiler knows that a warp agrees on it.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  __shared__ SpanWork work;
  if (threadIdx.x == 0) {
    work = {};
    for (int i = 0; i < Traits::kSlots; ++i) {
      ptx::barrier_init(shared.full + 8 * i, Traits::kFullArrivals);
      ptx::barrier_init(shared.empty + 8 * i, 4 * kConsumerWarpgroups * kArrivingLanes);
    }
    for (int i = 0; i < Traits::kRawSlots; ++i) {
      ptx::barrier_init(shared.full_raw + 8 * i, 1);
      ptx::barrier_init(shared.empty_raw + 8 * i, Traits::kConverterWarps * kArrivingLanes);
    }
    ptx::barrier_init_fence();
    ptx::async_proxy_fence();
  }
  __syncthreads();
  ptx::wait_for_previous_grid();
  if (p.most_steps != 0 && row_by_row_is_faster(p, work)) return;
  if (warpgroup < kConsumerWarpgroups) {
    ptx::registers_grow<Traits::kConsumerRegisters>();
    consume<Traits>(p, shared, warpgroup);
  } else {
    ptx::registers_shrink<Traits::kFillerRegisters>();
    const int warp =
        __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 - 4 * kConsumerWarpgroups, 0);
    if constexpr (Traits::kF8) {
      if (warp == 0) {
        produce_raw<Traits>(p, &map, shared);
      } else if (warp <= Traits::kConverterWarps) {
        convert<Traits>(p, shared, warp - 1);
      }
    } else {
      if (warp < Traits::kProducerWarps) produce<Traits>(p, &map, shared, warp);
    }
  }
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_ATTENTION_CUH_
