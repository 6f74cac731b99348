#ifndef OCTOPAGE_TESTS_CUDA_HOST_CTA_HPP_
#define OCTOPAGE_TESTS_CUDA_HOST_CTA_HPP_

// Enough of CUDA to run a kernel on the host: one CTA at a time, a thread per CUDA thread, barriers
// where the warp or the CTA meets. Slow; for kernels whose logic is worth a test without a GPU.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct int4 {
  int32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}

namespace host_cta {

struct Index {
  unsigned x = 0;
};

/// Where the threads of a warp leave values for each other.
struct Warp {
  std::barrier<> meeting{32};
  uint64_t values[32] = {};
};

struct Cta {
  explicit Cta(int threads) : meeting(threads), warps(static_cast<size_t>(threads / 32)) {
    for (auto& warp : warps) warp = std::make_unique<Warp>();
  }
  std::barrier<> meeting;
  std::vector<std::unique_ptr<Warp>> warps;
};

inline thread_local Cta* cta = nullptr;

}  // namespace host_cta

inline thread_local host_cta::Index threadIdx, blockIdx;

namespace host_cta {

/// Every thread of the warp offers a value and sees all of them.
template <typename Use>
auto exchange(uint64_t value, Use&& use) {
  Warp& warp = *cta->warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = value;
  warp.meeting.arrive_and_wait();
  const auto result = use(warp.values);
  warp.meeting.arrive_and_wait();
  return result;
}

/// Runs `kernel` for every CTA of the grid.
template <typename Kernel>
void run(unsigned blocks, int threads, Kernel&& kernel) {
  for (unsigned block = 0; block < blocks; ++block) {
    Cta shared(threads);
    std::vector<std::jthread> all;
    for (int t = 0; t < threads; ++t) {
      all.emplace_back([&, t] {
        cta = &shared;
        threadIdx.x = static_cast<unsigned>(t);
        blockIdx.x = block;
        kernel();
      });
    }
  }
}

}  // namespace host_cta

inline void __syncthreads() {
  host_cta::cta->meeting.arrive_and_wait();
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return host_cta::exchange(static_cast<uint64_t>(value),
                            [&](const uint64_t* all) { return static_cast<T>(all[lane & 31]); });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int from = static_cast<int>(threadIdx.x % 32) - step;
  return host_cta::exchange(static_cast<uint64_t>(value), [&](const uint64_t* all) {
    return from < 0 ? value : static_cast<T>(all[from]);
  });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  const int from = static_cast<int>(threadIdx.x % 32) ^ distance;
  return host_cta::exchange(static_cast<uint64_t>(value),
                            [&](const uint64_t* all) { return static_cast<T>(all[from]); });
}
inline uint32_t __ballot_sync(unsigned, bool bit) {
  return host_cta::exchange(bit, [](const uint64_t* all) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(all[i]) << i;
    return bits;
  });
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  return host_cta::exchange(value, [](const uint64_t* all) {
    uint32_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += static_cast<uint32_t>(all[i]);
    return sum;
  });
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  return host_cta::exchange(value, [](const uint64_t* all) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(all[i]);
    return bits;
  });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return host_cta::exchange(value, [](const uint64_t* all) {
    return static_cast<uint32_t>(*std::min_element(all, all + 32));
  });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return host_cta::exchange(value, [](const uint64_t* all) {
    return static_cast<uint32_t>(*std::max_element(all, all + 32));
  });
}
template <typename T>
T atomicOr(T* word, T bits) {
  return std::atomic_ref<T>(*word).fetch_or(bits);
}
inline int __popc(uint32_t value) {
  return std::popcount(value);
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
/// Byte i of the result is the byte that nibble i of the selector names, of eight.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
inline int __ffs(int value) {
  return value == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(value)) + 1;
}

namespace octopage::ptx {
inline void let_next_grid_start() {}
}  // namespace octopage::ptx

#endif  // OCTOPAGE_TESTS_CUDA_HOST_CTA_HPP_
