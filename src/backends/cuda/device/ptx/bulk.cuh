#ifndef OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_BULK_CUH_
#define OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_BULK_CUH_

// Barriers in shared memory and the tensor copies that signal them (sm_90), one function per
// instruction. Barriers and copies are named by their shared-memory address.

#include <cuda.h>

#include <cstdint>

namespace octopage::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A phase of the barrier ends after `arrivals` arrivals and all bytes that were announced.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to copies.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives and announces `bytes` that copies will bring.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Waits for the end of the phase of that parity. A fresh barrier counts as past parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done_%=;\n"
      "bra again_%=;\n"
      "done_%=:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Waits for two barriers, asking both before it waits for either.
__device__ __forceinline__ void barrier_wait(uint32_t a, uint32_t parity_a, uint32_t b,
                                             uint32_t parity_b) {
  int both;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 q, [%3], %4;\n"
      "and.pred p, p, q;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(both)
      : "r"(a), "r"(parity_a), "r"(b), "r"(parity_b)
      : "memory");
  if (__builtin_expect(both == 0, 0)) {
    barrier_wait(a, parity_a);
    barrier_wait(b, parity_b);
  }
}

/// Orders this thread's writes to shared memory before later reads by copies and matrix products.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Copies the box of `map` at (x, y, z, w) to shared memory; what lies outside the tensor is zero.
__device__ __forceinline__ void tensor_copy(uint32_t shared, const CUtensorMap* map, int32_t x,
                                            int32_t y, int32_t z, int32_t w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

/// Registers of each thread of the warpgroup from here on.
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// A barrier of `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/// The grid before this one in the stream has finished, where the launch allowed an early start.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// The next grid of the stream may start, where its launch allows it.
__device__ __forceinline__ void let_next_grid_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Asks L2 for the line of a global address; a hint.
__device__ __forceinline__ void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

}  // namespace octopage::ptx

#endif  // OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_BULK_CUH_
