#ifndef OCTOPAGE_BACKENDS_CUDA_UNION_PRODUCER_CUH_
#define OCTOPAGE_BACKENDS_CUDA_UNION_PRODUCER_CUH_

// The warps that bring pages into slots.

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/convert.cuh"
#include "backends/cuda/device/ptx/bulk.cuh"
#include "backends/cuda/union/tiles.cuh"
#include "backends/cuda/union/traits.cuh"

namespace octopage::cuda {

/// Behind so many batches of a tile the next one's lists are prefetched: the ring is full by then.
inline constexpr int32_t kPrefetchBatch = 8;

/// Asks L2 for the lists of a tile: they were written before all pages of the call were read. All
/// lanes of a warp.
__device__ __forceinline__ void prefetch_lists(const UnionAttentionParams& p,
                                               const TileCursor& cursor, int lane) {
  const TileHeader* header = cursor.header(p);
  const uint32_t list = cursor.list(p), capacity = static_cast<uint32_t>(p.lists.capacity);
  constexpr int kLine = 128 / sizeof(int32_t);
  const int32_t* pages =
      p.lists.pages + (list * capacity + header->first_batch + header->begin) * kBatchPages;
  for (int32_t i = lane * kLine; i < (header->end - header->begin) * kBatchPages; i += 32 * kLine)
    ptx::prefetch_l2(pages + i);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const uint32_t* steps =
        p.lists.steps + ((list * 2 + half) * capacity + header->first_step[half]) *
                            static_cast<uint32_t>(p.lists.half_rows);
    for (int32_t i = lane * kLine; i < header->steps[half] * p.lists.half_rows; i += 32 * kLine)
      ptx::prefetch_l2(steps + i);
  }
}

/// Calls `copy(page, group, tail)` on every lane for every batch of the CTA: the page of lane
/// `slot_page` of each batch, known one batch ahead, and the tile's tail where it lies in this
/// batch, else -1. A warp that is `scout` prefetches the next tile's lists.
template <typename Copy>
__device__ __forceinline__ void for_each_batch(const UnionAttentionParams& p, int slot_page,
                                               bool scout, const Copy& copy) {
  for (TileCursor cursor = {blockIdx.x, 0}; cursor.valid(p);) {
    const TileHeader* header = cursor.header(p);
    const int32_t begin = __shfl_sync(~0u, header->begin, 0);
    const int32_t end = __shfl_sync(~0u, header->end, 0);
    const auto group = static_cast<int32_t>(cursor.group(p));
    const int32_t tail = header->tail;
    const int32_t* pages =
        p.lists.pages +
        (cursor.list(p) * static_cast<uint32_t>(p.lists.capacity) + header->first_batch) *
            kBatchPages +
        slot_page;
    int32_t page = begin < end ? pages[begin * kBatchPages] : -1;
    for (int32_t batch = begin; batch < end; ++batch) {
      const int32_t next = batch + 1 < end ? pages[(batch + 1) * kBatchPages] : -1;
      copy(page, group, tail >> 6 == batch ? tail : -1);
      page = next;
      if (scout && batch == begin + kPrefetchBatch) {
        TileCursor coming = cursor;
        coming.advance(header->last != 0);
        if (coming.valid(p)) prefetch_lists(p, coming, static_cast<int>(threadIdx.x) % 32);
      }
    }
    cursor.advance(header->last != 0);
  }
}

/// Copies its half of every batch: lane i page 4 * warp + i. Page -1 lies outside the tensor:
/// zeros.
template <typename Traits>
__device__ __forceinline__ void produce(const UnionAttentionParams& p, const CUtensorMap* map,
                                        const UnionShared<Traits>& shared, int warp) {
  constexpr int kPagesOfWarp = kBatchPages / Traits::kProducerWarps;
  const int lane = threadIdx.x % 32;
  const int slot_page = warp * kPagesOfWarp + min(lane, kPagesOfWarp - 1);
  uint32_t position = 0;
  for_each_batch(p, slot_page, Traits::kPrefetchesLists && warp == 0,
                 [&](int32_t page, int32_t group, int32_t) {
#pragma unroll
                   for (int part = 0; part < 2; ++part, ++position) {  // K, V
                     const Position<Traits> at(position);
                     ptx::barrier_wait(shared.empty + 8 * at.slot(), at.parity() ^ 1);
                     if (lane == 0) {
                       ptx::barrier_arrive_expecting(shared.full + 8 * at.slot(),
                                                     kPagesOfWarp * Traits::kPageBytes);
                     }
                     __syncwarp();
                     if (lane < kPagesOfWarp) {
                       ptx::tensor_copy(shared.slots + at.slot() * Traits::kSlotBytes +
                                            slot_page * Traits::kPageBytes,
                                        map, 0, page * static_cast<int32_t>(kPageTokens),
                                        part * Traits::kChunks, group, shared.full + 8 * at.slot());
                     }
                   }
                 });
}

/// Copies every batch of an f8 cache to its raw slots: lane i page i.
template <typename Traits>
__device__ __forceinline__ void produce_raw(const UnionAttentionParams& p, const CUtensorMap* map,
                                            const UnionShared<Traits>& shared) {
  constexpr int kChunksOfSlot = Traits::kRawPageBytes / 1024;
  const int lane = threadIdx.x % 32;
  const int slot_page = min(lane, kBatchPages - 1);
  uint32_t position = 0;
  for_each_batch(p, slot_page, true, [&](int32_t page, int32_t group, int32_t) {
#pragma unroll
    for (int part = 0; part < Traits::kRawSlotsOfBatch; ++part) {
      const RingPosition<Traits::kRawSlots> at(position++);
      ptx::barrier_wait(shared.empty_raw + 8 * at.slot(), at.parity() ^ 1);
      if (lane == 0)
        ptx::barrier_arrive_expecting(shared.full_raw + 8 * at.slot(), Traits::kRawSlotBytes);
      __syncwarp();
      if (lane < kBatchPages) {
        ptx::tensor_copy(
            shared.raw + at.slot() * Traits::kRawSlotBytes + slot_page * Traits::kRawPageBytes, map,
            0, page * static_cast<int32_t>(kPageTokens), part * kChunksOfSlot, group,
            shared.full_raw + 8 * at.slot());
      }
    }
  });
}

/// Converts K or V of raw pages to a slot. A warp takes four tokens of a chunk of 64 elements at a
/// time, eight elements to a lane, so that neither its reads nor its writes meet in a bank: lanes
/// 8 q .. 8 q + 7 one token, those of q and q + 1 four tokens apart.
///
///   element 64 m + 8 u + i of token t (m counts the slot's chunks, of K and V those of both)
///   raw:   chunk m / 2, 16-byte unit (4 (m % 2) + u / 2) ^ t, bytes 8 (u % 2) + i
///   slot:  chunk m, unit u ^ t
template <typename Traits>
struct Converter {
  /// A warp has one chunk of each of so many pages, where warps and chunks permit it.
  static constexpr bool kOneChunk = Traits::kConverterWarps % Traits::kChunks == 0 &&
                                    kBatchPages * Traits::kChunks % Traits::kConverterWarps == 0;
  static constexpr int kPagesOfWarp =
      kOneChunk ? kBatchPages * Traits::kChunks / Traits::kConverterWarps : 0;

  uint32_t from, to;  // the lane's place in a chunk, first of its two tokens
  int warp;

  __device__ __forceinline__ Converter(int warp_, int lane) : warp(warp_) {
    const int token = (lane >> 4) | (lane & 8) >> 1, u = lane & 7;  // 0, 4, 1, 5; then 2 more
    from = token * 128 + ((u / 2 ^ token) << 4) + u % 2 * 8;
    to = token * 128 + ((u ^ token) << 4);
  }

  /// kUnits times four tokens: `unit(i)` gives the byte offsets of the source and of the target
  /// chunk, and the second four tokens stand for odd i.
  template <int kUnits, typename Unit>
  __device__ __forceinline__ void run(uint32_t raw, uint32_t slot, const Unit& unit) const {
    constexpr int kTogether = kUnits < 4 ? kUnits : 4;  // reads of a lane under way
    static_assert(kUnits % kTogether == 0);
#pragma unroll
    for (int first = 0; first < kUnits; first += kTogether) {
      uint32_t codes[kTogether][2];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        // Two tokens further: row + 2, and its unit is another by ^ 2.
        const uint32_t at = raw + ((from ^ ((first + k) % 2 * 288)) + unit(first + k).from);
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(codes[k][0]), "=r"(codes[k][1])
                     : "r"(at ^ unit(first + k).odd)
                     : "memory");
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const auto pair = [&](int i) {
          return device::pair_from_f8(static_cast<uint16_t>(codes[k][i / 2] >> (i % 2 * 16)));
        };
        const uint32_t at = slot + ((to ^ ((first + k) % 2 * 288)) + unit(first + k).to);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(pair(0)),
                     "r"(pair(1)), "r"(pair(2)), "r"(pair(3))
                     : "memory");
      }
    }
  }

  struct Unit {
    uint32_t from, odd, to;
  };

  /// Zeroes what this warp wrote of V's tokens behind the tile's tail, see TileHeader.
  __device__ __forceinline__ void zero_behind(uint32_t slot, int32_t tail, int lane) const {
    const int page = tail >> 3 & 7;
    if (kOneChunk ? page / kPagesOfWarp != warp / Traits::kChunks
                  : page % Traits::kConverterWarps != warp) {
      return;
    }
    const int first = kOneChunk ? warp % Traits::kChunks : 0;
    __syncwarp();
#pragma unroll 1
    for (int m = first; m < (kOneChunk ? first + 1 : Traits::kChunks); ++m) {
      for (int i = ((tail & 7) + 1) * 8 + lane; i < 64; i += 32) {
        const uint32_t at = slot + page * Traits::kPageBytes + m * 1024 + i * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
    }
  }

  /// Part 0 is K, 1 is V.
  template <int kPart>
  __device__ __forceinline__ void convert(uint32_t raw, uint32_t slot) const {
    constexpr int kFirst = Traits::kRawSlotsOfBatch == 1 ? kPart * Traits::kChunks : 0;
    if constexpr (kOneChunk) {
      const uint32_t chunk = warp % Traits::kChunks, m = kFirst + chunk;
      const uint32_t page = warp / Traits::kChunks * kPagesOfWarp;
      const uint32_t source = raw + page * Traits::kRawPageBytes + m / 2 * 1024, odd = m % 2 * 64;
      const uint32_t target = slot + page * Traits::kPageBytes + chunk * 1024;
      run<2 * kPagesOfWarp>(source, target, [&](int i) {
        return Unit{static_cast<uint32_t>(i / 2 * Traits::kRawPageBytes), odd,
                    static_cast<uint32_t>(i / 2 * Traits::kPageBytes)};
      });
    } else {  // every third page to a warp
      for (uint32_t page = warp; page < kBatchPages; page += Traits::kConverterWarps) {
        run<2 * Traits::kChunks>(
            raw + page * Traits::kRawPageBytes, slot + page * Traits::kPageBytes, [&](int i) {
              const uint32_t m = kFirst + i / 2;
              return Unit{m / 2 * 1024, m % 2 * 64, static_cast<uint32_t>(i / 2) * 1024};
            });
      }
    }
  }
};

/// Converts every batch of the CTA. V of tokens behind the tile's tail becomes 0.
template <typename Traits>
__device__ __forceinline__ void convert(const UnionAttentionParams& p,
                                        const UnionShared<Traits>& shared, int warp) {
  const int lane = threadIdx.x % 32;
  const Converter<Traits> converter(warp, lane);
  uint32_t batch = 0;
  for_each_batch(p, 0, false, [&](int32_t, int32_t, int32_t tail) {
    const auto part = [&](auto which) {
      constexpr int kPart = decltype(which)::value, kRawSlots = Traits::kRawSlotsOfBatch;
      const RingPosition<Traits::kRawSlots> raw(kRawSlots * batch + kPart % kRawSlots);
      if (kPart == 0 || kRawSlots == 2)
        ptx::barrier_wait(shared.full_raw + 8 * raw.slot(), raw.parity());
      const Position<Traits> at(2 * batch + kPart);
      ptx::barrier_wait(shared.empty + 8 * at.slot(), at.parity() ^ 1);
      converter.template convert<kPart>(shared.raw + raw.slot() * Traits::kRawSlotBytes,
                                        shared.slots + at.slot() * Traits::kSlotBytes);
      if (kPart == 1 && tail >= 0)
        converter.zero_behind(shared.slots + at.slot() * Traits::kSlotBytes, tail, lane);
      ptx::async_proxy_fence();
      __syncwarp();
      if (lane < kArrivingLanes) {
        ptx::barrier_arrive(shared.full + 8 * at.slot());
        if (kPart == 1 || kRawSlots == 2) ptx::barrier_arrive(shared.empty_raw + 8 * raw.slot());
      }
    };
    part(std::integral_constant<int, 0>());
    part(std::integral_constant<int, 1>());
    ++batch;
  });
}

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_UNION_PRODUCER_CUH_
