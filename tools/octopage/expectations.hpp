#ifndef OCTOPAGE_TOOLS_EXPECTATIONS_HPP_
#define OCTOPAGE_TOOLS_EXPECTATIONS_HPP_

#include "step/step_file.hpp"

namespace octopage::cli {

/// Fills in every expected tensor of a step that has `lengths`: output and lse by the reference
/// backend in f32, page lists and staging plan by a plain loop over the contract's formulas.
void add_expectations(Step& step);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_EXPECTATIONS_HPP_
