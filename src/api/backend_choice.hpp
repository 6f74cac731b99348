#ifndef OCTOPAGE_API_BACKEND_CHOICE_HPP_
#define OCTOPAGE_API_BACKEND_CHOICE_HPP_

#include <cstddef>
#include <functional>
#include <string_view>

#include "backends/backend.hpp"

namespace octopage {

/// The backend that runs a problem: the one forced by options or by OCTOPAGE_BACKEND, or the first
/// by priority that supports it and, on a device, finds the workspace it needs: with
/// Workspace::as_given one that needs any is passed over where the options have none. Throws
/// Error(unsupported) with every backend's reason.
enum class Workspace { as_given, any };
const Backend& pick_backend(const Problem& problem, const Options& options,
                            Workspace workspace = Workspace::as_given);

/// The backend of this name. Throws Error(invalid_argument) for an unknown name, unsupported for
/// one that this build or machine lacks.
const Backend& backend_by_name(std::string_view name, const char* source);

/// Scratch memory that `backend` uses for this problem with these options.
size_t workspace_bytes(const Backend& backend, const Problem& problem, const Options& options);

/// Calls `run` with the caller's stream, status and workspace; on the CPU with threads, and with
/// memory of its own where the caller gave no workspace.
void run_on(const Backend& backend, const Problem& problem, const Options& options,
            const std::function<void(const RunContext&)>& run);

}  // namespace octopage

#endif  // OCTOPAGE_API_BACKEND_CHOICE_HPP_
