#include "octopage/sparse_prefill.hpp"

#include "api/backend_choice.hpp"
#include "api/validate.hpp"

namespace octopage {

void sparse_prefill(const SparsePrefillArgs& args, const Options& options) {
  const DirectParams params = check_sparse_prefill(args, options);
  const Backend& backend = pick_backend(params.problem, options);
  if (options.strict) check_entries(args, options);
  if (params.problem.rows == 0) return;
  run_on(backend, params.problem, options,
         [&](const RunContext& context) { backend.attend_direct(params, context); });
}

size_t sparse_prefill_workspace_size(const SparsePrefillArgs& args, const Options& options) {
  const Problem problem = check_sparse_prefill(args, options, Pointers::ignored).problem;
  return workspace_bytes(pick_backend(problem, options, Workspace::any), problem, options);
}

}  // namespace octopage
