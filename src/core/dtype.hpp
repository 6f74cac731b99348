#ifndef OCTOPAGE_CORE_DTYPE_HPP_
#define OCTOPAGE_CORE_DTYPE_HPP_

// Exact scalar conversions between f32 and the 16- and 8-bit types. The SIMD versions are checked
// against these for every code.

#include <bit>
#include <cstdint>
#include <limits>

#include "octopage/tensor.hpp"

namespace octopage {

inline float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

/// Round to nearest even; overflow gives infinity; NaN stays NaN.
inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) + 0.5f;  // 0.5 has ulp 2^-24: rounds there
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(scaled) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

/// f8_e4m3fn: 4 exponent bits with bias 7, no infinity, 0x7f and 0xff are NaN.
inline float f8_e4m3fn_to_f32(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 0xfu;
  const uint32_t mantissa = code & 7u;
  float magnitude = 0.0f;
  if (exponent == 0xf && mantissa == 7) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  } else {
    magnitude = std::bit_cast<float>(((exponent + 120) << 23) | (mantissa << 20));
  }
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}

/// Round to nearest even, saturating at 448 (what inference engines do); NaN stays NaN.
uint8_t f32_to_f8_e4m3fn(float value);

/// One element of a bf16, f16, f32, f8_e4m3fn or u8 (as f8_e4m3fn) array as f32.
float load_f32(const void* data, DType dtype, int64_t index);
/// Stores to a bf16, f16 or f32 array with one rounding.
void store_f32(void* data, DType dtype, int64_t index, float value);

}  // namespace octopage

#endif  // OCTOPAGE_CORE_DTYPE_HPP_
