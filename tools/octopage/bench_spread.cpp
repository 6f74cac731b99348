#include "tools/octopage/bench_spread.hpp"

#include <algorithm>
#include <cmath>

namespace octopage::cli {

Spread spread_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const size_t last = seconds.size() - 1;
  const auto at = [&](double part) {
    return seconds[static_cast<size_t>(std::lround(part * static_cast<double>(last)))];
  };
  return {.median = (seconds[last / 2] + seconds[(last + 1) / 2]) / 2,
          .p10 = std::min(at(0.1), seconds[last / 2]),
          .p90 = std::max(at(0.9), seconds[(last + 1) / 2]),
          .calls = static_cast<int64_t>(seconds.size())};
}

}  // namespace octopage::cli
