#include "octopage/sparse_prefill.hpp"

#include "api/backend_choice.hpp"
#include "api/validate.hpp"

namespace octopage {

void sparse_prefill(const SparsePrefillArgs& args, const Options& options) {
  const DirectParams params = check_sparse_prefill(args, options);
  const Backend& backend = pick_backend(params.problem, options);
  if (options.strict) check_entries(params);
  if (params.problem.rows == 0) return;
  Threads threads(options);
  const Workspace workspace(options, backend.workspace_bytes(params.problem, threads.concurrency()));
  backend.attend_direct(params, {.threads = &threads,
                                 .stream = options.stream,
                                 .workspace = workspace.span(),
                                 .status = options.status});
}

size_t sparse_prefill_workspace_size(const SparsePrefillArgs& args, const Options& options) {
  const DirectParams params = check_sparse_prefill(args, options, Pointers::ignored);
  const Backend& backend = pick_backend(params.problem, options);
  const Threads threads(options);
  return backend.workspace_bytes(params.problem, threads.concurrency());
}

}  // namespace octopage
