// Any bytes are either a step, whose tensors lie in memory as their shapes say, or a bad_file error
// of one line.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "octopage/error.hpp"
#include "step/step_file.hpp"

namespace octopage {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

/// Reads every byte of a tensor, for the address sanitizer to watch.
void read_all(const TensorView& tensor) {
  if (!tensor.present()) return;
  require(tensor.is_contiguous());
  const auto* bytes = static_cast<const volatile uint8_t*>(tensor.data);
  for (int64_t i = 0; i < tensor.size() * itemsize(tensor.dtype); ++i) static_cast<void>(bytes[i]);
}

void check(const Step& step) {
  for (const TensorView* tensor :
       {&step.query, &step.kv_cache, &step.block_table, &step.owners, &step.positions,
        &step.regions, &step.lengths, &step.expected_output, &step.expected_lse,
        &step.expected_indptr, &step.expected_last_page_len, &step.expected_pages,
        &step.expected_staged_blocks, &step.expected_staged_table}) {
    read_all(*tensor);
  }
  require(step.owners.shape[0] == step.rows() && step.positions.shape[0] == step.rows());
  require(step.regions.shape[0] == step.rows());
  require(step.heads() % step.groups() == 0 && step.block_size() % 8 == 0);
  require(step.kv_cache.shape[3] == 2 * step.dim());
  require(reinterpret_cast<uintptr_t>(step.kv_cache.data) % 16 == 0);
}

}  // namespace
}  // namespace octopage

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    octopage::check(octopage::parse_step(data, size, "input"));
  } catch (const octopage::Error& error) {
    octopage::require(error.code() == octopage::ErrorCode::bad_file);
    octopage::require(std::strchr(error.what(), '\n') == nullptr);
  }
  return 0;
}
