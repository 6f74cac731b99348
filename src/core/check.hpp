#ifndef OCTOPAGE_CORE_CHECK_HPP_
#define OCTOPAGE_CORE_CHECK_HPP_

#include <fmt/format.h>

#include <cstdint>

#include "octopage/error.hpp"

namespace octopage {

/// Throws Error(code) with a formatted message: argument, rule, actual value.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

/// The common case of `fail`: an argument breaks a rule.
template <typename... Args>
[[noreturn]] void fail_argument(fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::invalid_argument, format, std::forward<Args>(args)...);
}

/// a * b or Error: `what` names the product.
inline int64_t checked_mul(int64_t a, int64_t b, const char* what) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product))
    fail_argument("{}: {} * {} overflows 64 bits", what, a, b);
  return product;
}

inline int64_t checked_add(int64_t a, int64_t b, const char* what) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum))
    fail_argument("{}: {} + {} overflows 64 bits", what, a, b);
  return sum;
}

}  // namespace octopage

#endif  // OCTOPAGE_CORE_CHECK_HPP_
