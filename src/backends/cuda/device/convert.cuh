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

/// A power of two that brings numbers into f16's range, and its inverse.
struct IntoF16 {
  float factor, back;

  /// `exponent`: of the largest magnitude, which becomes less than 2^15. Where that is 2^-112 and
  /// more, numbers below 2^-29 of it lose digits.
  __device__ __forceinline__ explicit IntoF16(int exponent) {
    const int up = min(max(14 - exponent, -113), 126);  // either power is a normal f32
    factor = __uint_as_float(static_cast<uint32_t>(127 + up) << 23);
    back = __uint_as_float(static_cast<uint32_t>(127 - up) << 23);
  }
};

/// Two e4m3 codes as a packed pair of f16; exact, and NaN stays NaN.
__device__ __forceinline__ uint32_t pair_from_f8(uint16_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return uint32_t{pair.x} | uint32_t{pair.y} << 16;
}

}  // namespace octopage::device

#endif  // OCTOPAGE_BACKENDS_CUDA_DEVICE_CONVERT_CUH_
