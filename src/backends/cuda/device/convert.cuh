#ifndef OCTOPAGE_BACKENDS_CUDA_DEVICE_CONVERT_CUH_
#define OCTOPAGE_BACKENDS_CUDA_DEVICE_CONVERT_CUH_

// Conversions between the element types in registers. `T` tags are __nv_bfloat16 and __half.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

namespace octopage::device {

template <typename To, typename From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

/// Two f32 rounded to nearest even, packed low half first.
__device__ __forceinline__ uint32_t pack(__nv_bfloat16, float low, float high) {
  return bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
}
__device__ __forceinline__ uint32_t pack(__half, float low, float high) {
  return bits_as<uint32_t>(__floats2half2_rn(low, high));
}

/// The packed pair as f32.
__device__ __forceinline__ float2 unpack(__nv_bfloat16, uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(__half, uint32_t pair) {
  return __half22float2(bits_as<__half2>(pair));
}

/// Two e4m3 codes as a packed pair; exact, and NaN stays NaN.
__device__ __forceinline__ uint32_t pair_from_f8(__half, uint16_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return uint32_t{pair.x} | uint32_t{pair.y} << 16;
}
__device__ __forceinline__ uint32_t pair_from_f8(__nv_bfloat16, uint16_t codes) {
  const float2 pair = unpack(__half(), pair_from_f8(__half(), codes));
  return pack(__nv_bfloat16(), pair.x, pair.y);
}

}  // namespace octopage::device

#endif  // OCTOPAGE_BACKENDS_CUDA_DEVICE_CONVERT_CUH_
