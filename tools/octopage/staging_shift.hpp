#ifndef OCTOPAGE_TOOLS_STAGING_SHIFT_HPP_
#define OCTOPAGE_TOOLS_STAGING_SHIFT_HPP_

#include <vector>

#include "step/step_file.hpp"

namespace octopage::cli {

/// The step as the staged path stores it: its f8 cache times the scales, rounded once to the
/// query's type. Made without the library's staging, so that a fault there shows. f8 caches only.
Step rounded_step(const Step& step);

/// How far that rounding alone moves the float64 result of each row and head: [rows * heads] each.
struct StagingShift {
  std::vector<double> output;  ///< relative to the unrounded result
  std::vector<double> lse;     ///< absolute
};
StagingShift measure_staging_shift(const Step& step, const Step& rounded);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_STAGING_SHIFT_HPP_
