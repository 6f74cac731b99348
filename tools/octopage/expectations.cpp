#include "tools/octopage/expectations.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "inspect/selections.hpp"
#include "octopage/kv_cache.hpp"
#include "octopage/page_arithmetic.hpp"
#include "tools/octopage/paths.hpp"

namespace octopage::cli {
namespace {

TensorView copy_to(TensorStorage& storage, const std::vector<int32_t>& values,
                   std::initializer_list<int64_t> shape) {
  const TensorView tensor = storage.allocate_tensor(DType::i32, shape);
  std::copy(values.begin(), values.end(), static_cast<int32_t*>(tensor.data));
  return tensor;
}

/// Pages of one row, its own region last; -1 for what is invalid.
void append_pages(const Selection& selection, const BlockTableView& table,
                  const PageGeometry& geometry, int64_t owner, std::vector<int32_t>& pages) {
  const bool has_own = selection.has_own();
  const auto page_of = [&](int64_t region) {
    return static_cast<int32_t>(page_of_region(table, geometry, owner, region, selection.own).page);
  };
  for (int64_t entry = 0; entry < selection.count; ++entry) {
    if (!has_own) {
      pages.push_back(-1);
    } else if (selection[entry] != selection.own) {
      pages.push_back(page_of(selection[entry]));
    }
  }
  if (has_own) pages.push_back(page_of(selection.own));
}

void add_page_lists(Step& step, TensorStorage& storage) {
  const std::vector<int64_t> positions = positions_of(step);
  const auto* owners = static_cast<const int32_t*>(step.owners.data);
  std::vector<int32_t> indptr = {0};
  std::vector<int32_t> last;
  int64_t entries = 0;
  for (const int64_t position : positions) {
    entries += selection_count(position, step.region_count());
    if (entries > std::numeric_limits<int32_t>::max()) {
      fail_argument("regions: a page list holds at most 2^31 - 1 entries, these rows have more");
    }
    indptr.push_back(static_cast<int32_t>(entries));
    last.push_back(last_page_len(position));
  }
  std::vector<int32_t> pages;
  for (int64_t group = 0; group < step.groups(); ++group) {
    const PageGeometry geometry =
        kv_cache_view(step.kv_cache.slice(1, group, group + 1)).geometry();
    const TensorView regions = regions_of_group(step, group);
    for (int64_t row = 0; row < step.rows(); ++row) {
      append_pages(selection_of(regions, row, positions[static_cast<size_t>(row)]), table_of(step),
                   geometry, owners[row], pages);
    }
  }
  step.expected_indptr = copy_to(storage, indptr, {step.rows() + 1});
  step.expected_last_page_len = copy_to(storage, last, {step.rows()});
  step.expected_pages = copy_to(storage, pages, {step.groups(), entries});
}

void add_staging_plan(Step& step, TensorStorage& storage) {
  const BlockTableView table = table_of(step);
  const std::vector<int64_t> lengths = lengths_of(step);
  std::vector<int32_t> blocks;
  std::vector<int32_t> staged(static_cast<size_t>(table.requests * table.max_blocks), 0);
  for (int64_t request = 0; request < table.requests; ++request) {
    const int64_t length = lengths[static_cast<size_t>(request)];
    for (int64_t column = 0; column * step.block_size() < length; ++column) {
      staged[static_cast<size_t>(request * table.max_blocks + column)] =
          static_cast<int32_t>(blocks.size());
      blocks.push_back(table.data[request * table.stride_request + column * table.stride_block]);
    }
  }
  step.expected_staged_blocks = copy_to(storage, blocks, {static_cast<int64_t>(blocks.size())});
  step.expected_staged_table = copy_to(storage, staged, {table.requests, table.max_blocks});
}

}  // namespace

void add_expectations(Step& step) {
  Options options;
  options.backend = "reference";
  PathResult reference = run_path(step, Path::direct, DType::f32, options);
  step.expected_output = reference.output;
  step.expected_lse = reference.lse;
  add_page_lists(step, *reference.storage);
  add_staging_plan(step, *reference.storage);
  using Both = std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>;
  step.storage = std::make_shared<Both>(std::move(step.storage), std::move(reference.storage));
}

}  // namespace octopage::cli
