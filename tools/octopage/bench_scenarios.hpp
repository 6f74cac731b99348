#ifndef OCTOPAGE_TOOLS_BENCH_SCENARIOS_HPP_
#define OCTOPAGE_TOOLS_BENCH_SCENARIOS_HPP_

#include <string>
#include <vector>

#include "step/synthetic.hpp"

namespace octopage::cli {

/// A step that `octopage bench` times, and why.
struct BenchScenario {
  std::string name;
  std::string purpose;
  SyntheticSpec spec;
};

/// All scenarios, as changes of one base. `large`: as a GPU runs them (4096 rows, 131,072 tokens);
/// else as a CPU can (128 rows, 32,768 tokens).
std::vector<BenchScenario> bench_scenarios(bool large);

/// What holds for every scenario, a sentence each.
const std::vector<std::string>& bench_rules();

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_BENCH_SCENARIOS_HPP_
