#ifndef OCTOPAGE_STEP_PRINTABLE_HPP_
#define OCTOPAGE_STEP_PRINTABLE_HPP_

#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace octopage {

inline constexpr size_t kMaxPrintedText = 64;    ///< bytes of a file's own text in a message
inline constexpr size_t kMaxPrintedPath = 4096;  ///< bytes of a path in a message

/// Text from outside as it may stand in a one-line message: control bytes escaped, cut at `limit`.
inline std::string printable(std::string_view text, size_t limit = kMaxPrintedText) {
  size_t end = text.size();
  if (end > limit) {
    end = limit;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) --end;
  }
  std::string result;
  for (const char c : text.substr(0, end)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += c;
    }
  }
  if (end < text.size()) result += "...";
  return result;
}

}  // namespace octopage

#endif  // OCTOPAGE_STEP_PRINTABLE_HPP_
