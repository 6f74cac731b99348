#ifndef OCTOPAGE_BACKENDS_HPP_
#define OCTOPAGE_BACKENDS_HPP_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "octopage/export.h"
#include "octopage/options.hpp"
#include "octopage/sparse_prefill.hpp"

namespace octopage {

/// What a backend of this build is and whether this machine runs it.
struct BackendInfo {
  std::string name;         ///< as given in Options::backend
  std::string description;  ///< one line, with the instruction set or device in use
  DeviceType device = DeviceType::cpu;
  int32_t priority = 0;  ///< the highest that supports a call serves it
  bool available = false;
  std::string reason;  ///< why it is not available; empty where it is
};

/// Yes, or no with the reason: what is required, what is supported, what was asked.
struct Support {
  bool ok = false;
  std::string reason;  ///< empty where ok
  explicit operator bool() const { return ok; }
};

/// All backends that octopage knows, highest priority first, those that this build lacks included.
OCTOPAGE_API std::vector<BackendInfo> backends();

/// Whether the named backend serves `sparse_prefill` with these arguments. Throws Error where the
/// arguments break a rule of their own or no backend has this name.
OCTOPAGE_API Support backend_supports(std::string_view backend, const SparsePrefillArgs& args,
                                      const Options& options = {});

/// The backend that `sparse_prefill` would use. Throws as `sparse_prefill` would.
OCTOPAGE_API std::string choose_backend(const SparsePrefillArgs& args, const Options& options = {});

}  // namespace octopage

#endif  // OCTOPAGE_BACKENDS_HPP_
