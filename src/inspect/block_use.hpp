#ifndef OCTOPAGE_INSPECT_BLOCK_USE_HPP_
#define OCTOPAGE_INSPECT_BLOCK_USE_HPP_

// Where the blocks of a step's requests lie in the cache.

#include <cstdint>
#include <vector>

#include "step/step_file.hpp"

namespace octopage {

struct RequestUse {
  int64_t length = 0;   ///< tokens
  int64_t blocks = 0;   ///< that hold them
  int64_t rows = 0;     ///< of the step
  int64_t runs = 0;     ///< of physically adjacent blocks
  int64_t outside = 0;  ///< table entries of its blocks that name no block of the cache
};

/// Runs of adjacent blocks whose length lies in `[begin, end)`.
struct RunBin {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t runs = 0;
  int64_t blocks = 0;  ///< in these runs
};

/// A stretch of the cache.
struct CacheBin {
  int64_t begin = 0;   ///< blocks
  int64_t end = 0;     ///< half-open
  int64_t used = 0;    ///< named by one request or more
  int64_t shared = 0;  ///< of them, named more than once
};

struct BlockUse {
  std::vector<RequestUse> requests;
  int64_t pairs = 0;     ///< neighbouring logical blocks
  int64_t adjacent = 0;  ///< of them, those that are neighbours in the cache too
  int64_t runs = 0;
  int64_t outside = 0;              ///< table entries that name no block of the cache
  int64_t used = 0;                 ///< blocks of the cache that somebody names
  int64_t shared = 0;               ///< of them, named more than once
  std::vector<RunBin> run_lengths;  ///< [1,2) [2,4) [4,8) ..., up to the longest
  std::vector<CacheBin> cache;      ///< the whole cache in stretches of equal length
  /// Share of neighbouring logical blocks that are neighbours in the cache; 1 where there are none.
  double adjacent_share() const {
    return pairs > 0 ? static_cast<double>(adjacent) / static_cast<double>(pairs) : 1.0;
  }
};

/// `most_cache_bins` is at least 1.
BlockUse measure_block_use(const Step& step, int64_t most_cache_bins);

}  // namespace octopage

#endif  // OCTOPAGE_INSPECT_BLOCK_USE_HPP_
