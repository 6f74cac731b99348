#ifndef OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_COPY_CUH_
#define OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_COPY_CUH_

// Asynchronous copies of 16 bytes from global to shared memory (sm_80), one function per
// instruction.

#include <cstdint>

namespace octopage::ptx {

/// Copies the first `bytes` (0 or 16) and writes zeros for the rest; with 0 the source is not read.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `kPending` of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace octopage::ptx

#endif  // OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_COPY_CUH_
