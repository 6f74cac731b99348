#ifndef OCTOPAGE_TOOLS_BENCH_RUN_HPP_
#define OCTOPAGE_TOOLS_BENCH_RUN_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "octopage/options.hpp"
#include "tools/octopage/bench_scenarios.hpp"
#include "tools/octopage/bench_spread.hpp"
#include "tools/octopage/compare.hpp"
#include "tools/octopage/paths.hpp"
#include "tools/octopage/step_device.hpp"

namespace octopage::cli {

/// One scenario's figures.
struct BenchResult {
  std::string backend;
  OutputError verified;  ///< of the sampled rows
  int64_t verified_rows = 0;
  Spread warm;
  Spread cold;
  Spread plan;  ///< on the host, without calls on the direct path
  size_t workspace_bytes = 0;
  double flops = 0;           ///< useful operations
  double gathered_bytes = 0;  ///< K and V of every valid entry
};

/// Makes the step, verifies, then times. Throws Error where the backend refuses; a result over its
/// bound is returned untimed (`verified.over > 0`).
BenchResult run_scenario(const SyntheticSpec& spec, Path path, const Options& options,
                         int64_t calls, StepDevice& device);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_BENCH_RUN_HPP_
