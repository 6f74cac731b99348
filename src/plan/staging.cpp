#include <algorithm>

#include "core/check.hpp"
#include "core/read_once.hpp"
#include "octopage/page_arithmetic.hpp"
#include "octopage/page_plan.hpp"
#include "plan/page_functions.hpp"

namespace octopage {

void check_block_size(int64_t block_size) {
  if (block_size <= 0 || block_size % kPageTokens != 0 || block_size > INT32_MAX) {
    fail_argument("block_size = {}: must be a positive multiple of 8, below 2^31", block_size);
  }
}

int64_t staged_block_count(std::span<const int64_t> lengths, int64_t block_size) {
  check_block_size(block_size);
  int64_t count = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0) fail_argument("lengths[{}] = {} is negative", i, lengths[i]);
    const int64_t blocks = lengths[i] / block_size + (lengths[i] % block_size != 0 ? 1 : 0);
    count = checked_add(count, blocks, "lengths: staged blocks");
  }
  if (count > INT32_MAX) fail_argument("lengths: {} staged blocks are more than 2^31 - 1", count);
  return count;
}

void write_staging_plan(const BlockTableView& table, std::span<const int64_t> lengths,
                        int64_t block_size, int32_t* staged_blocks, int32_t* staged_table,
                        int64_t staged_stride_request, int64_t staged_stride_block) {
  int32_t staged = 0;
  for (int64_t request = 0; request < table.requests; ++request) {
    const int64_t length = lengths[static_cast<size_t>(request)];
    const int64_t live = length / block_size + (length % block_size != 0 ? 1 : 0);
    for (int64_t column = 0; column < table.max_blocks; ++column) {
      int32_t& entry = staged_table[request * staged_stride_request + column * staged_stride_block];
      entry = column < live ? staged : 0;
      if (column < live) {
        staged_blocks[staged++] =
            read_once(table.data + request * table.stride_request + column * table.stride_block);
      }
    }
  }
}

}  // namespace octopage
