#ifndef OCTOPAGE_INSPECT_INSPECTION_HPP_
#define OCTOPAGE_INSPECT_INSPECTION_HPP_

#include "inspect/block_use.hpp"
#include "inspect/roofs.hpp"
#include "inspect/selection_map.hpp"
#include "inspect/sharing.hpp"
#include "step/step_file.hpp"

namespace octopage {

/// Greatest extents of the pictures.
inline constexpr int64_t kMostRowBins = 512;
inline constexpr int64_t kMostRegionBins = 1024;
inline constexpr int64_t kMostCacheBins = 512;

/// Everything that a report on a step shows.
struct Inspection {
  GroupRange groups;
  Sharing sharing;
  SelectionMap map;
  BlockUse blocks;
  Roofs roofs;
};

/// Throws Error(invalid_argument) if `groups` is not a range of the step's groups.
Inspection inspect(const Step& step, GroupRange groups, const Card& card);

}  // namespace octopage

#endif  // OCTOPAGE_INSPECT_INSPECTION_HPP_
