#include "inspect/block_use.hpp"

#include <algorithm>
#include <bit>

#include "inspect/selections.hpp"

namespace octopage {
namespace {

void add_run(BlockUse& use, int64_t length) {
  const auto bin = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(length))) - 1;
  while (use.run_lengths.size() <= bin) {
    const size_t next = use.run_lengths.size();
    use.run_lengths.push_back({int64_t{1} << next, int64_t{2} << next, 0, 0});
  }
  ++use.run_lengths[bin].runs;
  use.run_lengths[bin].blocks += length;
}

/// Follows one request's blocks; counts into `named` [blocks] how often each is named, up to 2.
void follow(const Step& step, int64_t request, std::vector<uint8_t>& named, BlockUse& use) {
  const BlockTableView table = table_of(step);
  const int32_t* blocks = table.data + request * table.stride_request;
  RequestUse& of_request = use.requests[static_cast<size_t>(request)];
  int64_t run = 0;
  for (int64_t column = 0; column < of_request.blocks; ++column) {
    const int64_t block = blocks[column * table.stride_block];
    const bool adjacent =
        column > 0 && block == int64_t{blocks[(column - 1) * table.stride_block]} + 1;
    if (!adjacent) {
      if (run > 0) add_run(use, run);
      run = 0;
      ++of_request.runs;
    }
    ++run;
    if (block < 0 || block >= step.kv_cache.shape[0]) {
      ++of_request.outside;
      continue;
    }
    uint8_t& count = named[static_cast<size_t>(block)];
    count = static_cast<uint8_t>(std::min(count + 1, 2));
  }
  if (run > 0) add_run(use, run);
}

void count_cache(const std::vector<uint8_t>& named, int64_t most_bins, BlockUse& use) {
  const auto blocks = static_cast<int64_t>(named.size());
  const int64_t per_bin = std::max<int64_t>((blocks + most_bins - 1) / most_bins, 1);
  for (int64_t begin = 0; begin < blocks; begin += per_bin) {
    CacheBin bin = {begin, std::min(begin + per_bin, blocks), 0, 0};
    for (int64_t block = bin.begin; block < bin.end; ++block) {
      bin.used += named[static_cast<size_t>(block)] > 0 ? 1 : 0;
      bin.shared += named[static_cast<size_t>(block)] > 1 ? 1 : 0;
    }
    use.used += bin.used;
    use.shared += bin.shared;
    use.cache.push_back(bin);
  }
}

}  // namespace

BlockUse measure_block_use(const Step& step, int64_t most_cache_bins) {
  BlockUse use;
  const std::vector<int64_t> lengths = lengths_of(step);
  use.requests.resize(lengths.size());
  std::vector<uint8_t> named(static_cast<size_t>(step.kv_cache.shape[0]));
  for (size_t i = 0; i < use.requests.size(); ++i) {
    RequestUse& request = use.requests[i];
    request.length = lengths[i];
    request.blocks = (lengths[i] + step.block_size() - 1) / step.block_size();
    follow(step, static_cast<int64_t>(i), named, use);
    use.runs += request.runs;
    use.outside += request.outside;
    use.pairs += std::max<int64_t>(request.blocks - 1, 0);
    use.adjacent += request.blocks - request.runs;
  }
  count_cache(named, most_cache_bins, use);
  const auto* owners = static_cast<const int32_t*>(step.owners.data);
  for (int64_t row = 0; row < step.rows(); ++row) {
    if (owners[row] >= 0 && owners[row] < step.requests()) {
      ++use.requests[static_cast<size_t>(owners[row])].rows;
    }
  }
  return use;
}

}  // namespace octopage
