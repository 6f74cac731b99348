#include "core/dtype.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace octopage {
namespace {

/// The value of a floating-point code, from its fields.
double value_of(uint32_t code, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
  const auto exponent = static_cast<int>((code >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = (code >> (exponent_bits + mantissa_bits)) & 1u ? -1.0 : 1.0;
  const int top = (1 << exponent_bits) - 1;
  if (has_infinity && exponent == top) return mantissa != 0 ? NAN : sign * INFINITY;
  if (!has_infinity && exponent == top && mantissa == (1u << mantissa_bits) - 1) return NAN;
  if (exponent == 0)
    return sign * std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits);
  return sign * std::ldexp(static_cast<double>(mantissa + (1u << mantissa_bits)),
                           exponent - bias - mantissa_bits);
}

void expect_same(float actual, double expected, uint32_t code) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << std::hex << code;
  } else {
    EXPECT_EQ(static_cast<double>(actual), expected) << std::hex << code;
    EXPECT_EQ(std::signbit(actual), std::signbit(expected)) << std::hex << code;
  }
}

TEST(Dtype, EveryCodeDecodes) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    expect_same(bf16_to_f32(bits), value_of(code, 8, 7, true), code);
    expect_same(f16_to_f32(bits), value_of(code, 5, 10, true), code);
  }
  for (uint32_t code = 0; code < 0x100; ++code) {
    expect_same(f8_e4m3fn_to_f32(static_cast<uint8_t>(code)), value_of(code, 4, 3, false), code);
  }
}

TEST(Dtype, EveryCodeRoundTrips) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    if (!std::isnan(bf16_to_f32(bits))) {
      EXPECT_EQ(f32_to_bf16(bf16_to_f32(bits)), bits);
    }
    if (!std::isnan(f16_to_f32(bits))) {
      EXPECT_EQ(f32_to_f16(f16_to_f32(bits)), bits);
    }
  }
  for (uint32_t code = 0; code < 0x100; ++code) {
    const auto bits = static_cast<uint8_t>(code);
    if (!std::isnan(f8_e4m3fn_to_f32(bits))) {
      EXPECT_EQ(f32_to_f8_e4m3fn(f8_e4m3fn_to_f32(bits)), bits);
    }
  }
}

/// Nearest non-negative code, ties to the even one; codes 0 .. last are the finite values in order.
template <typename Decode>
uint32_t nearest(double magnitude, uint32_t last, Decode&& decode) {
  uint32_t low = 0, high = last;
  while (low < high) {  // the largest code not above the magnitude
    const uint32_t middle = (low + high + 1) / 2;
    if (static_cast<double>(decode(middle)) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == last) return last;
  const double below = magnitude - static_cast<double>(decode(low));
  const double above = static_cast<double>(decode(low + 1)) - magnitude;
  if (below == above) return low % 2 == 0 ? low : low + 1;
  return below < above ? low : low + 1;
}

std::vector<float> interesting_values() {
  std::vector<float> values = {0.0f,     1.0f,     448.0f,     449.0f,   464.0f,   65504.0f,
                               0x1p-24f, 0x1p-25f, 0x1.8p-25f, 0x1p-14f, 0x1p-10f, 0x1.8p-10f,
                               0x1p-9f,  240.0f,   3e38f,      1e-40f};
  std::mt19937 random(1);
  for (int i = 0; i < 40000; ++i)
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random()) & 0x7fffffffu));
  for (uint32_t code = 0; code < 0x7bff;
       code += 7) {  // ties between neighbours of f16, and just beside them
    const float low = f16_to_f32(static_cast<uint16_t>(code)),
                high = f16_to_f32(static_cast<uint16_t>(code + 1));
    const float tie = low + (high - low) / 2;
    values.insert(values.end(), {tie, std::nextafterf(tie, 0.0f), std::nextafterf(tie, INFINITY)});
  }
  for (uint32_t code = 0; code < 0x7e; ++code) {
    const float low = f8_e4m3fn_to_f32(static_cast<uint8_t>(code)),
                high = f8_e4m3fn_to_f32(static_cast<uint8_t>(code + 1));
    const float tie = low + (high - low) / 2;
    values.insert(values.end(), {tie, std::nextafterf(tie, 0.0f), std::nextafterf(tie, INFINITY)});
  }
  return values;
}

TEST(Dtype, RoundsToNearestEven) {
  const auto f16 = [](uint32_t code) { return f16_to_f32(static_cast<uint16_t>(code)); };
  const auto bf16 = [](uint32_t code) { return bf16_to_f32(static_cast<uint16_t>(code)); };
  const auto f8 = [](uint32_t code) { return f8_e4m3fn_to_f32(static_cast<uint8_t>(code)); };
  for (const float value : interesting_values()) {
    if (std::isnan(value) || std::isinf(value)) continue;
    const double exact = value;
    EXPECT_EQ(f32_to_f16(value), exact >= 65520.0 ? 0x7c00u : nearest(exact, 0x7bff, f16)) << value;
    EXPECT_EQ(f32_to_f16(-value), 0x8000u | f32_to_f16(value)) << value;
    const uint32_t expected = nearest(exact, 0x7f7f, bf16);
    const double half_step =
        (static_cast<double>(bf16(0x7f7f)) - static_cast<double>(bf16(0x7f7e))) / 2;
    EXPECT_EQ(f32_to_bf16(value),
              exact >= static_cast<double>(bf16(0x7f7f)) + half_step ? 0x7f80u : expected)
        << value;
    EXPECT_EQ(f32_to_bf16(-value), 0x8000u | f32_to_bf16(value)) << value;
    EXPECT_EQ(f32_to_f8_e4m3fn(value), nearest(exact, 0x7e, f8)) << value;  // saturates at 448
    EXPECT_EQ(f32_to_f8_e4m3fn(-value), 0x80u | f32_to_f8_e4m3fn(value)) << value;
  }
}

TEST(Dtype, NonFiniteValuesStayNonFinite) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(kNan))));
  EXPECT_TRUE(std::isnan(
      bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));  // a NaN that truncates to Inf
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(-kNan))));
  EXPECT_TRUE(std::isnan(f8_e4m3fn_to_f32(f32_to_f8_e4m3fn(kNan))));
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(-INFINITY)), -INFINITY);
  EXPECT_EQ(f16_to_f32(f32_to_f16(INFINITY)), INFINITY);
  EXPECT_EQ(f8_e4m3fn_to_f32(f32_to_f8_e4m3fn(INFINITY)), 448.0f);
}

}  // namespace
}  // namespace octopage
