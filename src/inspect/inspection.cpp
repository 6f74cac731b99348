#include "inspect/inspection.hpp"

#include "core/check.hpp"

namespace octopage {

Inspection inspect(const Step& step, GroupRange groups, const Card& card) {
  if (groups.begin < 0 || groups.end <= groups.begin || groups.end > step.groups()) {
    fail_argument("groups: must be a range inside 0 .. {}, is [{}, {})", step.groups(),
                  groups.begin, groups.end);
  }
  Inspection result;
  result.groups = groups;
  result.sharing = measure_sharing(step, groups);
  result.map = make_selection_map(step, groups, result.sharing, kMostRowBins, kMostRegionBins);
  result.blocks = measure_block_use(step, kMostCacheBins);
  result.roofs = predict_roofs(step, groups, result.sharing, card);
  return result;
}

}  // namespace octopage
