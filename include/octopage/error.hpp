#ifndef OCTOPAGE_ERROR_HPP_
#define OCTOPAGE_ERROR_HPP_

#include <cstdint>
#include <stdexcept>
#include <string>

#include "octopage/export.h"

namespace octopage {

/// Why a call failed. The values are those of `octopage_status` in the C API.
enum class ErrorCode : int32_t {
  invalid_argument = 1,  ///< an argument breaks a rule; the message has argument, rule and value
  unsupported = 2,  ///< the arguments are legal, but no backend (or not the forced one) serves them
  invalid_entry = 3,  ///< a strict call met an invalid region, owner or table entry
  wrong_state = 4,    ///< a call out of order, such as `finish` before `plan`
  out_of_memory = 5,  ///< the library could not allocate scratch memory
  device_error = 6,   ///< a device runtime call failed
  bad_file = 7,       ///< a step file breaks the format
  internal = 8,       ///< a broken invariant of the library: please report it
};

/// The one exception type of the library. `what()` reads "argument: rule, actual value".
class OCTOPAGE_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace octopage

#endif  // OCTOPAGE_ERROR_HPP_
