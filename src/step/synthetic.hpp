#ifndef OCTOPAGE_STEP_SYNTHETIC_HPP_
#define OCTOPAGE_STEP_SYNTHETIC_HPP_

#include <cstdint>

#include "octopage/tensor.hpp"
#include "step/step_file.hpp"

namespace octopage {

/// What `make_synthetic_step` makes. The rows are the last tokens of one or more requests.
struct SyntheticSpec {
  int64_t rows = 64;
  int64_t requests = 1;    ///< rows are shared out evenly, in order
  int64_t context = 4096;  ///< tokens of each request, the rows' own included
  int64_t groups = 1;
  int64_t heads = 16;  ///< query heads in all: a multiple of groups
  int64_t dim = 192;
  int64_t region_count = 512;
  int64_t block_size = 64;
  DType query_dtype = DType::bf16;
  DType kv_dtype = DType::bf16;  ///< bf16, f16 or f8_e4m3fn
  double keep = 0.95;        ///< fraction of a row's other regions carried over from the row before
  int64_t sink_regions = 1;  ///< the first regions of the context, selected as far as there is room
  int64_t local_regions = 8;  ///< the regions just before the own one, likewise, after the sink
  bool poison = true;         ///< NaN and Inf in slots that no request has written
  uint64_t seed = 1;
};

/// A step with a realistic selection: the own region forced, a sink, a local window, and of the
/// other regions of each row a fraction `keep` carried over from the row before; the rest is drawn
/// evenly from the regions that the row before did not select (from all where those do not
/// suffice). Selections are ascending. The blocks of each request are scattered over the cache, a
/// few belong to nobody, and the block table is one column wider than needed. Query, K and V are
/// near-normal with standard deviation 1; f8 caches get k_scale 0.37 and v_scale 2.25. `lengths` is
/// filled in. Deterministic in the spec, the same on every machine. Throws Error(invalid_argument)
/// for a spec that cannot be met.
Step make_synthetic_step(const SyntheticSpec& spec);

}  // namespace octopage

#endif  // OCTOPAGE_STEP_SYNTHETIC_HPP_
