#ifndef OCTOPAGE_TOOLS_REPORT_HPP_
#define OCTOPAGE_TOOLS_REPORT_HPP_

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "octopage/error.hpp"
#include "octopage/tensor.hpp"

namespace octopage::cli {

using Json = nlohmann::ordered_json;

/// Exit codes.
inline constexpr int kOk = 0;
inline constexpr int kMismatch = 1;  ///< over tolerance, or not what the file expects
inline constexpr int kFailure = 2;   ///< bad file, bad usage, or an error of a strict call

/// One JSON object on stdout, the only thing that a verb prints there with --json.
void print_json(const Json& object);

/// A number, or "nan", "inf", "-inf", which JSON has no numbers for.
Json json_number(double value);

/// Every failure: "octopage: <message>" on stderr, one line, and with --json {"error": ...} on
/// stdout. Returns the exit code.
int report_failure(std::string_view code, std::string_view message, bool json);

/// "invalid_argument", "bad_file", ...
const char* name_of(ErrorCode code);

/// "[16, 2, 192]".
std::string shape_text(const TensorView& tensor);
/// "1.5 MiB".
std::string bytes_text(double bytes);
/// "1.25 ms".
std::string time_text(double seconds);
/// bf16, f16, f8_e4m3fn or f32 by name; Error(invalid_argument) for others.
DType dtype_of(const std::string& text);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_REPORT_HPP_
