#include "core/dtype.hpp"

#include <cmath>

#include "core/check.hpp"

namespace octopage {

int64_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f8_e4m3fn:
    case DType::u8:
      return 1;
    case DType::i64:
      return 8;
  }
  fail_argument("dtype = {} is not an octopage type", static_cast<int32_t>(dtype));
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f32:
      return "f32";
    case DType::f8_e4m3fn:
      return "f8_e4m3fn";
    case DType::u8:
      return "u8";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
  }
  return "unknown dtype";
}

uint8_t f32_to_f8_e4m3fn(float value) {
  const auto sign = static_cast<uint8_t>(std::signbit(value) ? 0x80 : 0);
  if (std::isnan(value)) return sign | 0x7f;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude == 0.0f) return sign;
  // The spacing of codes is 2^-9 below 2^-6 and an eighth of the power of two above.
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude in [2^(exponent-1), 2^exponent)
  const int lowest = -5;             // 2^-6 = the smallest normal number
  const int spacing = (exponent < lowest ? lowest : exponent) - 4;
  const float steps = std::nearbyint(std::ldexp(magnitude, -spacing));
  // steps counts eighths from 2^(spacing+3); a carry into the next binade is a plain increment.
  const int biased = spacing + 3 + 7;  // exponent field of the binade, 1 for subnormals
  return static_cast<uint8_t>(sign + (biased - 1) * 8 + static_cast<int>(steps));
}

float load_f32(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::bf16:
      return bf16_to_f32(static_cast<const uint16_t*>(data)[index]);
    case DType::f16:
      return f16_to_f32(static_cast<const uint16_t*>(data)[index]);
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f8_e4m3fn:
    case DType::u8:
      return f8_e4m3fn_to_f32(static_cast<const uint8_t*>(data)[index]);
    default:
      fail(ErrorCode::internal, "load_f32: dtype {} is not a floating-point type", name(dtype));
  }
}

void store_f32(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::bf16:
      static_cast<uint16_t*>(data)[index] = f32_to_bf16(value);
      return;
    case DType::f16:
      static_cast<uint16_t*>(data)[index] = f32_to_f16(value);
      return;
    case DType::f32:
      static_cast<float*>(data)[index] = value;
      return;
    default:
      fail(ErrorCode::internal, "store_f32: dtype {} is not an output type", name(dtype));
  }
}

}  // namespace octopage
