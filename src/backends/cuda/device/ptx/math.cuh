#ifndef OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_MATH_CUH_
#define OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_MATH_CUH_

namespace octopage::ptx {

/// 2^x, flushing subnormals.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace octopage::ptx

#endif  // OCTOPAGE_BACKENDS_CUDA_DEVICE_PTX_MATH_CUH_
