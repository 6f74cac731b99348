#ifndef OCTOPAGE_TOOLS_BENCH_COMPARE_HPP_
#define OCTOPAGE_TOOLS_BENCH_COMPARE_HPP_

#include <string>
#include <vector>

#include "tools/octopage/report.hpp"

namespace octopage::cli {

/// A scenario that both files timed.
struct ComparedScenario {
  std::string name;      ///< with the peer, in files of bench/gpu_peers.py
  double first_ms = 0;   ///< warm median
  double second_ms = 0;  ///< likewise
  double first_cold_ms = 0;
  double second_cold_ms = 0;
};

struct BenchComparison {
  std::vector<std::string> headers;  ///< of both files: device, revision, command
  std::vector<ComparedScenario> rows;
  std::vector<std::string> left_out;  ///< in one file only, not timed, or of another shape
};

/// Reads both files (formats octopage-bench-1 and octopage-peers-1). Throws Error(bad_file).
BenchComparison compare_bench_files(const std::string& first, const std::string& second);

Json json_of(const BenchComparison& comparison);
void print_text(const BenchComparison& comparison);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_BENCH_COMPARE_HPP_
