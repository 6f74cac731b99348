#include "api/backend_choice.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <span>

#include "api/validate.hpp"
#include "core/check.hpp"

namespace octopage {
namespace {

constexpr const char* kEnvironment = "OCTOPAGE_BACKEND";

/// Backends that octopage knows and this build does not have.
struct Missing {
  const char* name;
  const char* description;
  int32_t priority;
  const char* reason;
};
constexpr Missing kMissing[] = {
#if !OCTOPAGE_HAS_CUDA
    {"cuda-sm90a", "unions of neighbouring rows, TMA and WGMMA, compute capability 9.0", 300,
     "this build was made without CUDA"},
    {"cuda-sm80", "mma.sync row by row, compute capability 8.0 and newer", 200,
     "this build was made without CUDA"},
#endif
};

std::string known_names() {
  std::string names;
  for (const BackendInfo& info : backends()) {
    if (!names.empty()) names += ", ";
    names += info.name;
  }
  return names;
}

}  // namespace

const Backend& backend_by_name(std::string_view name, const char* source) {
  for (const Backend* backend : compiled_backends()) {
    const BackendInfo info = backend->info();
    if (info.name != name) continue;
    if (!info.available) {
      fail(ErrorCode::unsupported, "{} = '{}': not available: {}", source, name, info.reason);
    }
    return *backend;
  }
  for (const Missing& missing : kMissing) {
    if (name == missing.name) {
      fail(ErrorCode::unsupported, "{} = '{}': not available: {}", source, name, missing.reason);
    }
  }
  fail_argument("{} = '{}': no backend has this name; known are {}", source, name, known_names());
}

const Backend& pick_backend(const Problem& problem, const Options& options, Workspace workspace) {
  std::string_view forced = options.backend;
  const char* source = "options.backend";
  if (forced.empty()) {
    const char* value = std::getenv(kEnvironment);
    if (value != nullptr) forced = value;
    source = kEnvironment;
  }
  if (!forced.empty()) {
    const Backend& backend = backend_by_name(forced, source);
    const Support support = backend.supports(problem);
    if (!support) fail(ErrorCode::unsupported, "{} = '{}': {}", source, forced, support.reason);
    return backend;
  }
  std::string reasons;
  for (const Backend* backend : compiled_backends()) {
    const BackendInfo info = backend->info();
    Support support = info.available ? backend->supports(problem)
                                     : Support{false, info.name + ": " + info.reason};
    // On a device nothing is allocated for a call: without a workspace the kernels that need none
    // serve it.
    if (support && workspace == Workspace::as_given && problem.device.type != DeviceType::cpu &&
        options.workspace == nullptr) {
      const size_t bytes = backend->workspace_bytes(problem, 1);
      if (bytes > 0) {
        support = {false, fmt::format("{}: needs a workspace of {} bytes", info.name, bytes)};
      }
    }
    if (support) return *backend;
    if (!reasons.empty()) reasons += "; ";
    reasons += support.reason;
  }
  fail(ErrorCode::unsupported, "no backend serves this call: {}", reasons);
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> all;
  for (const Backend* backend : compiled_backends()) all.push_back(backend->info());
  for (const Missing& missing : kMissing) {
    all.push_back({.name = missing.name,
                   .description = missing.description,
                   .device = DeviceType::cuda,
                   .priority = missing.priority,
                   .available = false,
                   .reason = missing.reason});
  }
  std::stable_sort(all.begin(), all.end(), [](const BackendInfo& a, const BackendInfo& b) {
    return a.priority > b.priority;
  });
  return all;
}

Support backend_supports(std::string_view backend, const SparsePrefillArgs& args,
                         const Options& options) {
  const DirectParams params = check_sparse_prefill(args, options, Pointers::ignored);
  for (const BackendInfo& info : backends()) {
    if (info.name != backend) continue;
    if (!info.available) return {false, fmt::format("{}: {}", backend, info.reason)};
    return backend_by_name(backend, "backend").supports(params.problem);
  }
  fail_argument("backend = '{}': no backend has this name; known are {}", backend, known_names());
}

std::string choose_backend(const SparsePrefillArgs& args, const Options& options) {
  return pick_backend(check_sparse_prefill(args, options, Pointers::ignored).problem, options)
      .info()
      .name;
}

size_t workspace_bytes(const Backend& backend, const Problem& problem, const Options& options) {
  if (problem.device.type != DeviceType::cpu) return backend.workspace_bytes(problem, 1);
  const Threads threads(options);
  return backend.workspace_bytes(problem, threads.concurrency());
}

void run_on(const Backend& backend, const Problem& problem, const Options& options,
            const std::function<void(const RunContext&)>& run) {
  const bool on_cpu = problem.device.type == DeviceType::cpu;
  std::optional<Threads> threads;
  if (on_cpu) threads.emplace(options);
  const size_t bytes = backend.workspace_bytes(problem, on_cpu ? threads->concurrency() : 1);
  std::unique_ptr<std::byte[]> own;
  std::span<std::byte> workspace;
  if (options.workspace != nullptr || (!on_cpu && bytes > 0)) {
    if (options.workspace == nullptr || options.workspace_bytes < bytes) {
      fail_argument("options.workspace = {} bytes: this call needs {}",
                    options.workspace == nullptr ? 0 : options.workspace_bytes, bytes);
    }
    workspace = {static_cast<std::byte*>(options.workspace), bytes};
  } else if (bytes > 0) {
    try {
      own = std::make_unique_for_overwrite<std::byte[]>(bytes);
    } catch (const std::bad_alloc&) {
      fail(ErrorCode::out_of_memory, "could not allocate {} bytes of workspace", bytes);
    }
    workspace = {own.get(), bytes};
  }
  run({.threads = on_cpu ? &*threads : nullptr,
       .stream = options.stream,
       .workspace = workspace,
       .status = options.status});
}

}  // namespace octopage
