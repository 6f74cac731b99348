#include "tools/octopage/bench_scenarios.hpp"

#include <fmt/format.h>

namespace octopage::cli {

std::vector<BenchScenario> bench_scenarios(bool large) {
  SyntheticSpec base;
  base.rows = large ? 4096 : 128;
  base.context = large ? 131072 : 32768;
  std::vector<BenchScenario> scenarios;
  const auto add = [&](std::string name, std::string purpose, auto&& change) {
    SyntheticSpec spec = base;
    change(spec);
    scenarios.push_back({std::move(name), std::move(purpose), spec});
  };
  add("base", "The Step-5 shape (16 heads, dim 192, 512 regions) at the overlap that models show.",
      [](SyntheticSpec&) {});
  for (const double keep : {1.0, 0.97, 0.87, 0.8, 0.5, 0.0}) {
    add(fmt::format("keep-{:.2f}", keep),
        "Overlap of neighbouring rows: what sharing pages is worth.",
        [keep](SyntheticSpec& spec) { spec.keep = keep; });
  }
  add("f16", "Query and cache of f16.",
      [](SyntheticSpec& spec) { spec.query_dtype = spec.kv_dtype = DType::f16; });
  add("f8", "An f8 cache: half the bytes, and conversions.",
      [](SyntheticSpec& spec) { spec.kv_dtype = DType::f8_e4m3fn; });
  for (const int64_t rows : {base.rows / 16, base.rows / 4, base.rows * 4}) {
    add(fmt::format("rows-{}", rows), "Scaling with the rows of a chunk.",
        [rows](SyntheticSpec& spec) { spec.rows = rows; });
  }
  for (const int64_t context : {base.context / 8, base.context * 8}) {
    add(fmt::format("context-{}", context), "Scaling with the context.",
        [context](SyntheticSpec& spec) { spec.context = context; });
  }
  add("groups-4", "Four groups, each with selections of its own.", [](SyntheticSpec& spec) {
    spec.groups = 4;
    spec.heads = 64;
  });
  add("dim-128", "A common shape: 8 heads, dim 128, 256 regions.", [](SyntheticSpec& spec) {
    spec.heads = 8;
    spec.dim = 128;
    spec.region_count = 256;
  });
  add("short-requests", "Chunked prefill of many short requests: 8192 tokens each.",
      [large](SyntheticSpec& spec) {
        spec.requests = large ? 64 : 8;
        spec.context = 8192;
      });
  return scenarios;
}

const std::vector<std::string>& bench_rules() {
  static const std::vector<std::string> rules = {
      "The result is verified before anything is timed: sampled rows against the reference "
      "backend, "
      "by the bounds of `octopage attend`.",
      "warm: the same call ran just before; cold: it ran before, then 256 MiB were overwritten.",
      "Times are of one call with everything that it launches, on a GPU between events; on the "
      "planned path of one layer (fill and attention of every group), the plan apart.",
      "Only valid entries and tokens that a row attends to count: 4 * dim operations for each of "
      "its heads; gathered bytes are K and V of every selected region, once per row."};
  return rules;
}

}  // namespace octopage::cli
