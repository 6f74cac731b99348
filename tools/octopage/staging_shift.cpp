#include "tools/octopage/staging_shift.hpp"

#include <array>
#include <cmath>
#include <memory>
#include <utility>

#include "core/dtype.hpp"
#include "tools/octopage/paths.hpp"

namespace octopage::cli {

Step rounded_step(const Step& step) {
  auto storage = std::make_shared<TensorStorage>();
  const auto& shape = step.kv_cache.shape;
  Step rounded = step;
  rounded.kv_cache =
      storage->allocate_tensor(step.query.dtype, {shape[0], shape[1], shape[2], shape[3]});
  // Code by code: [K or V][code]
  std::array<std::array<float, 256>, 2> values;
  for (size_t code = 0; code < 256; ++code) {
    const float value = f8_e4m3fn_to_f32(static_cast<uint8_t>(code));
    values[0][code] = value * step.k_scale;
    values[1][code] = value * step.v_scale;
  }
  const auto* codes = static_cast<const uint8_t*>(step.kv_cache.data);
  for (int64_t i = 0; i < step.kv_cache.size(); ++i) {
    const bool is_v = i % (2 * step.dim()) >= step.dim();
    store_f32(rounded.kv_cache.data, rounded.kv_cache.dtype, i, values[is_v ? 1 : 0][codes[i]]);
  }
  using Both = std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>;
  rounded.storage = std::make_shared<Both>(step.storage, std::move(storage));
  return rounded;
}

StagingShift measure_staging_shift(const Step& step, const Step& rounded) {
  Options options;
  options.backend = "reference";
  const PathResult before = run_path(step, Path::direct, DType::f32, options);
  const PathResult after = run_path(rounded, Path::direct, DType::f32, options);
  const auto* output_before = static_cast<const float*>(before.output.data);
  const auto* output_after = static_cast<const float*>(after.output.data);
  const auto* lse_before = static_cast<const float*>(before.lse.data);
  const auto* lse_after = static_cast<const float*>(after.lse.data);
  StagingShift shift;
  for (int64_t place = 0; place < step.rows() * step.heads(); ++place) {
    double moved = 0;
    double norm = 0;
    for (int64_t d = place * step.dim(); d < (place + 1) * step.dim(); ++d) {
      const double from = output_before[d];
      moved += (output_after[d] - from) * (output_after[d] - from);
      norm += from * from;
    }
    const double relative = norm > 0 ? std::sqrt(moved / norm) : 0;
    const double absolute = std::fabs(double{lse_after[place]} - double{lse_before[place]});
    // Not finite before or after: no number to allow.
    shift.output.push_back(std::isfinite(relative) ? relative : 0);
    shift.lse.push_back(std::isfinite(absolute) ? absolute : 0);
  }
  return shift;
}

}  // namespace octopage::cli
