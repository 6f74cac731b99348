#ifndef OCTOPAGE_TOOLS_BENCH_SPREAD_HPP_
#define OCTOPAGE_TOOLS_BENCH_SPREAD_HPP_

#include <cstdint>
#include <vector>

namespace octopage::cli {

/// Median and tenths of some times.
struct Spread {
  double median = 0;  ///< s
  double p10 = 0;     ///< s
  double p90 = 0;     ///< s
  int64_t calls = 0;
};
/// Of at least one time; the tenths are members, the median of an even number lies between two.
Spread spread_of(std::vector<double> seconds);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_BENCH_SPREAD_HPP_
