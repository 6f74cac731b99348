#include "tools/octopage/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.hpp"
#include "tools/octopage/output.hpp"

namespace octopage::cli {

void print_json(const Json& object) {
  print_out("{}\n", object.dump(2, ' ', false, Json::error_handler_t::replace));
}

Json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

int report_failure(std::string_view code, std::string_view message, bool json) {
  std::string line(message);
  std::replace(line.begin(), line.end(), '\n', ' ');
  while (!line.empty() && line.back() == ' ') line.pop_back();
  try {
    if (json) print_json({{"error", {{"code", std::string(code)}, {"message", line}}}});
    flush_out();
  } catch (const Error&) {
    // stdout takes nothing: the message below and the exit code are what is left.
  }
  print_err("octopage: {}\n", line);
  return kFailure;
}

const char* name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::invalid_entry:
      return "invalid_entry";
    case ErrorCode::wrong_state:
      return "wrong_state";
    case ErrorCode::out_of_memory:
      return "out_of_memory";
    case ErrorCode::device_error:
      return "device_error";
    case ErrorCode::bad_file:
      return "bad_file";
    case ErrorCode::internal:
      return "internal";
  }
  return "internal";
}

std::string shape_text(const TensorView& tensor) {
  return fmt::format("[{}]",
                     fmt::join(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, ", "));
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string time_text(double seconds) {
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.1f} us", seconds * 1e6);
}

DType dtype_of(const std::string& text) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f8_e4m3fn, DType::f32}) {
    if (text == name(dtype)) return dtype;
  }
  fail_argument("dtype: must be bf16, f16, f8_e4m3fn or f32, is {}", text);
}

}  // namespace octopage::cli
