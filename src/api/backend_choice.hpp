#ifndef OCTOPAGE_API_BACKEND_CHOICE_HPP_
#define OCTOPAGE_API_BACKEND_CHOICE_HPP_

#include <cstddef>
#include <memory>
#include <span>

#include "backends/backend.hpp"

namespace octopage {

/// The backend that runs a problem: the one forced by options or by OCTOPAGE_BACKEND, or the first
/// by priority that supports it. Throws Error(unsupported) with every backend's reason.
const Backend& pick_backend(const Problem& problem, const Options& options);

/// The backend of this name. Throws Error(invalid_argument) for an unknown name, unsupported for
/// one that this build or machine lacks.
const Backend& backend_by_name(std::string_view name, const char* source);

/// The caller's workspace, or memory of its own where the caller gave none (CPU).
class Workspace {
 public:
  Workspace(const Options& options, size_t bytes);
  std::span<std::byte> span() const { return span_; }

 private:
  std::unique_ptr<std::byte[]> own_;
  std::span<std::byte> span_;
};

}  // namespace octopage

#endif  // OCTOPAGE_API_BACKEND_CHOICE_HPP_
