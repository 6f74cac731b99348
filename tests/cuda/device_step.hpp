#ifndef OCTOPAGE_TESTS_CUDA_DEVICE_STEP_HPP_
#define OCTOPAGE_TESTS_CUDA_DEVICE_STEP_HPP_

// A step on the device, the three paths over it, and comparison with the contract's bounds.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "backends/cuda/runtime/device_arena.hpp"
#include "core/dtype.hpp"
#include "octopage/octopage.hpp"
#include "step/step_file.hpp"
#include "step/synthetic.hpp"

namespace octopage::test {

/// The backend under test, from the command line. Calls that it does not serve go to cuda-sm80.
extern std::string test_backend;
/// Calls that the backend under test has served.
extern int64_t calls_under_test;

inline int64_t position_of(const TensorView& positions, int64_t row) {
  const int64_t at = row * positions.strides[0];
  return positions.dtype == DType::i64 ? static_cast<const int64_t*>(positions.data)[at]
                                       : static_cast<const int32_t*>(positions.data)[at];
}

struct Result {
  std::vector<float> output;  // [rows, heads, dim]
  std::vector<float> lse;     // [rows, heads]
  std::vector<uint8_t> bits;  // the output as stored
  int32_t status = 0;
};

inline bool is_f8(const Step& step) {
  return step.kv_cache.dtype == DType::f8_e4m3fn;
}

inline SparsePrefillArgs host_args(const Step& step, const TensorView& output,
                                   const TensorView& lse) {
  SparsePrefillArgs args;
  args.query = step.query;
  args.kv_cache = step.kv_cache;
  args.block_table = step.block_table;
  args.owners = step.owners;
  args.positions = step.positions;
  args.regions = step.regions;
  args.output = output;
  args.lse = lse;
  args.scale = step.scale;
  if (is_f8(step)) {
    args.k_scale = Scale::of(step.k_scale);
    args.v_scale = Scale::of(step.v_scale);
  }
  return args;
}

/// float64 on the host, as f32.
inline Result reference(const Step& step) {
  Result result;
  result.output.assign(static_cast<size_t>(step.query.size()), NAN);
  result.lse.assign(static_cast<size_t>(step.rows() * step.heads()), NAN);
  const auto output = TensorView::contiguous(result.output.data(), DType::f32,
                                             {step.rows(), step.heads(), step.dim()});
  const auto lse =
      TensorView::contiguous(result.lse.data(), DType::f32, {step.rows(), step.heads()});
  Options options;
  options.backend = "reference";
  options.status = &result.status;
  sparse_prefill(host_args(step, output, lse), options);
  return result;
}

/// A step's tensors on the device, each an allocation of its exact size.
struct DeviceStep {
  DeviceArena arena;
  const Step& host;
  SparsePrefillArgs args;
  TensorView status, scales, workspace;

  explicit DeviceStep(const Step& step, DType output_dtype = DType::f32) : host(step) {
    args.query = arena.upload(step.query);
    args.kv_cache = arena.upload(step.kv_cache);
    args.block_table = arena.upload(step.block_table);
    args.owners = arena.upload(step.owners);
    args.positions = arena.upload(step.positions);
    args.regions = arena.upload(step.regions);
    args.output = arena.allocate(output_dtype, {step.rows(), step.heads(), step.dim()});
    args.lse = arena.allocate(DType::f32, {step.rows(), step.heads()});
    args.scale = step.scale;
    status = arena.allocate(DType::i32, {1}, 0);
    if (is_f8(step)) {
      const float values[2] = {step.k_scale, step.v_scale};
      scales = arena.upload(TensorView::contiguous(values, DType::f32, {2}));
      args.k_scale = Scale::at(static_cast<const float*>(scales.data));
      args.v_scale = Scale::at(static_cast<const float*>(scales.data) + 1);
    }
  }

  /// For a direct call with `args`: backend, status word and a poisoned workspace.
  Options options_for(const SparsePrefillArgs& call) {
    Options o;
    o.backend = "cuda-sm80";
    o.status = static_cast<int32_t*>(status.data);
    if (test_backend != "cuda-sm80" && backend_supports(test_backend, call).ok) {
      o.backend = test_backend;
      ++calls_under_test;
    }
    const auto bytes = static_cast<int64_t>(sparse_prefill_workspace_size(call, o));
    if (bytes > workspace.size()) workspace = arena.allocate(DType::u8, {bytes});
    if (bytes > 0) {
      o.workspace = workspace.data;
      o.workspace_bytes = static_cast<size_t>(workspace.size());
    }
    return o;
  }
  Options options() { return options_for(args); }

  Result fetch() const {
    Result result;
    result.bits.resize(static_cast<size_t>(args.output.size() * itemsize(args.output.dtype)));
    arena.download(args.output, result.bits.data());
    result.output.resize(static_cast<size_t>(args.output.size()));
    for (size_t i = 0; i < result.output.size(); ++i) {
      result.output[i] = load_f32(result.bits.data(), args.output.dtype, static_cast<int64_t>(i));
    }
    result.lse.resize(static_cast<size_t>(args.lse.size()));
    arena.download(args.lse, result.lse.data());
    arena.download(status, &result.status);
    return result;
  }

  /// Heads [begin, end) of the result alone.
  Result fetch_heads(int64_t begin, int64_t end) const {
    const Result all = fetch();
    Result part;
    for (int64_t row = 0; row < host.rows(); ++row) {
      for (int64_t head = begin; head < end; ++head) {
        const auto line = static_cast<size_t>(row * host.heads() + head);
        const auto first = all.output.begin() + static_cast<int64_t>(line) * host.dim();
        part.output.insert(part.output.end(), first, first + host.dim());
        part.lse.push_back(all.lse[line]);
      }
    }
    return part;
  }

  Result direct() {
    sparse_prefill(args, options());
    return fetch();
  }

  std::vector<int64_t> host_positions() const {
    std::vector<int64_t> positions;
    for (int64_t row = 0; row < host.rows(); ++row)
      positions.push_back(position_of(host.positions, row));
    return positions;
  }

  /// Plans `plan` for one group of heads.
  void make_plan(CompactPagedPrefill& plan, int64_t heads, int64_t block_size) const {
    const auto positions = host_positions();
    plan.plan({.query_shape = {host.rows(), heads, host.dim()},
               .dtype = host.query.dtype,
               .device = arena.device(),
               .positions = positions,
               .region_count = host.region_count(),
               .scale = host.scale,
               .block_size = block_size,
               .contiguous_query = false});
  }

  /// [rows, region_count] of group `g`.
  TensorView regions_of_group(int64_t g) const {
    TensorView regions = args.regions;
    if (regions.rank == 3) {
      regions = regions.slice(1, g, g + 1);
      regions.rank = 2;
      regions.shape = {host.rows(), host.region_count()};
      regions.strides = {args.regions.strides[0], args.regions.strides[2]};
    }
    return regions;
  }

  /// plan, then fill and finish for each group. `pages` receives the page list of each group.
  Result planned(const TensorView& cache, const TensorView& table,
                 std::vector<std::vector<int32_t>>* pages = nullptr) {
    if (host.rows() == 0) return fetch();
    const int64_t groups = cache.shape[1], heads = host.heads() / groups;
    CompactPagedPrefill plan;
    make_plan(plan, heads, cache.shape[2]);
    for (int64_t g = 0; g < groups; ++g) {
      const TensorView group_cache = cache.slice(1, g, g + 1);
      const auto slice = [&](const TensorView& t) {
        return t.slice(1, g * heads, (g + 1) * heads);
      };
      plan.prepare_chunk(0, slice(args.query), group_cache, regions_of_group(g), table, args.owners,
                         options());
      if (pages != nullptr) {
        pages->emplace_back(static_cast<size_t>(plan.pages().size()));
        arena.download(plan.pages(), pages->back().data());
      }
      plan.finish({}, group_cache, slice(args.output), slice(args.lse), args.k_scale, args.v_scale,
                  options());
    }
    return fetch();
  }
};

/// Output and lse within the contract's bounds; the worst coordinate and both values otherwise.
inline void expect_close(const Result& actual, const Result& expected, const Step& step,
                         const std::string& what, DType output_dtype = DType::f32) {
  const bool bf16 = step.query.dtype == DType::bf16 || step.kv_cache.dtype == DType::bf16 ||
                    output_dtype == DType::bf16;
  const double bound = bf16 ? 4e-3 : 1e-3;
  const int64_t dim = step.dim();
  double worst = 0;
  int64_t where = 0;
  for (int64_t line = 0; line < step.rows() * step.heads(); ++line) {
    double difference = 0, norm = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double a = actual.output[static_cast<size_t>(line * dim + d)];
      const double e = expected.output[static_cast<size_t>(line * dim + d)];
      difference += (a - e) * (a - e);
      norm += e * e;
    }
    double error = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
    if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
    if (error > worst) worst = error, where = line;
    const double a = actual.lse[static_cast<size_t>(line)],
                 e = expected.lse[static_cast<size_t>(line)];
    if (std::isinf(e) && e < 0) {
      ASSERT_EQ(a, e) << what << ": lse of row " << line / step.heads() << ", head "
                      << line % step.heads();
    } else {
      ASSERT_LE(std::fabs(a - e), std::max(2e-3, 1e-5 * std::fabs(e)))
          << what << ": lse of row " << line / step.heads() << ", head " << line % step.heads()
          << ": " << a << ", expected " << e;
    }
  }
  ASSERT_LE(worst, bound) << what << ": row " << where / step.heads() << ", head "
                          << where % step.heads() << ": first element "
                          << actual.output[static_cast<size_t>(where * dim)] << ", expected "
                          << expected.output[static_cast<size_t>(where * dim)];
}

}  // namespace octopage::test

#endif  // OCTOPAGE_TESTS_CUDA_DEVICE_STEP_HPP_
