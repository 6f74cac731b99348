#ifndef OCTOPAGE_TESTS_BACKENDS_HOSTILE_CALL_HPP_
#define OCTOPAGE_TESTS_BACKENDS_HOSTILE_CALL_HPP_

// Calls whose every output is poisoned and fenced, and an oracle of one (row, head) that shares no
// address arithmetic with the library.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.hpp"
#include "octopage/octopage.hpp"
#include "step/step_file.hpp"
#include "step/synthetic.hpp"
#include "step/tensor_storage.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OCTOPAGE_TEST_SANITIZED 1
#else
#define OCTOPAGE_TEST_SANITIZED 0
#endif

namespace octopage::test {

inline constexpr bool kSanitized = OCTOPAGE_TEST_SANITIZED != 0;
inline constexpr const char* kBackends[] = {"reference", "cpu"};
inline constexpr uint8_t kPoison = 0xcb;  // what outputs and workspaces hold before a call
inline constexpr uint8_t kFence = 0xa7;   // what lies around them
inline constexpr size_t kFenceBytes = 128;

/// Poisoned bytes between two fences. `skew` moves them off their natural alignment.
class Fenced {
 public:
  explicit Fenced(size_t bytes, size_t skew = 0)
      : bytes_(bytes), skew_(skew), memory_(bytes + 2 * kFenceBytes + 64 + skew, kFence) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data()) + kFenceBytes;
    begin_ = kFenceBytes + (64 - address % 64) % 64 + skew_;
    if (bytes_ > 0) std::memset(data(), kPoison, bytes_);
  }
  uint8_t* data() { return memory_.data() + begin_; }
  const uint8_t* data() const { return memory_.data() + begin_; }
  size_t size() const { return bytes_; }

  /// The fences are as they were.
  bool fences_intact() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && memory_[i] != kFence) return false;
    }
    return true;
  }
  /// Nothing was written at all.
  bool untouched() const {
    for (size_t i = 0; i < bytes_; ++i) {
      if (data()[i] != kPoison) return false;
    }
    return fences_intact();
  }

 private:
  size_t bytes_;
  size_t skew_;
  std::vector<uint8_t> memory_;
  size_t begin_ = 0;
};

/// What a call wrote.
struct Outcome {
  std::vector<uint8_t> output = {};  // [rows, heads, dim] as stored
  std::vector<float> lse = {};       // [rows, heads]
  DType dtype = DType::f32;
  int64_t heads = 0;
  int64_t dim = 0;
  int32_t status = 0;

  float at(int64_t row, int64_t head, int64_t d) const {
    return load_f32(output.data(), dtype, (row * heads + head) * dim + d);
  }
  float lse_at(int64_t row, int64_t head) const {
    return lse[static_cast<size_t>(row * heads + head)];
  }
  int64_t rows() const { return static_cast<int64_t>(lse.size()) / heads; }
};

/// Whether output and lse of a row hold the same bits in both.
inline bool same_row(const Outcome& a, const Outcome& b, int64_t row) {
  const auto bytes = static_cast<size_t>(a.heads * a.dim * itemsize(a.dtype));
  const auto lines = static_cast<size_t>(a.heads);
  const auto r = static_cast<size_t>(row);
  return std::memcmp(a.output.data() + r * bytes, b.output.data() + r * bytes, bytes) == 0 &&
         std::memcmp(a.lse.data() + r * lines, b.lse.data() + r * lines, lines * sizeof(float)) ==
             0;
}

inline void expect_same_bits(const Outcome& a, const Outcome& b, const std::string& what) {
  ASSERT_EQ(a.output.size(), b.output.size()) << what;
  for (int64_t row = 0; row < a.rows(); ++row) {
    ASSERT_TRUE(same_row(a, b, row))
        << what << ": row " << row << " differs: first element " << a.at(row, 0, 0) << " and "
        << b.at(row, 0, 0) << ", lse " << a.lse_at(row, 0) << " and " << b.lse_at(row, 0);
  }
}

/// The row gives zeros and -inf, as one that sees no token does.
inline void expect_empty_row(const Outcome& outcome, int64_t row, const std::string& what) {
  for (int64_t head = 0; head < outcome.heads; ++head) {
    ASSERT_EQ(outcome.lse_at(row, head), -std::numeric_limits<float>::infinity())
        << what << ": row " << row << ", head " << head;
    for (int64_t d = 0; d < outcome.dim; ++d) {
      ASSERT_EQ(outcome.at(row, head, d), 0.0f)
          << what << ": row " << row << ", head " << head << ", element " << d;
    }
  }
}

/// A step with its own memory, all of it writable.
inline Step clone(const Step& from) {
  auto storage = std::make_shared<TensorStorage>();
  Step step = from;
  for (TensorView* tensor : {&step.query, &step.kv_cache, &step.block_table, &step.owners,
                             &step.positions, &step.regions, &step.lengths}) {
    if (!tensor->present()) continue;
    const auto bytes = static_cast<size_t>(tensor->size() * itemsize(tensor->dtype));
    void* copy = storage->allocate(static_cast<int64_t>(bytes));
    if (bytes > 0) std::memcpy(copy, tensor->data, bytes);
    tensor->data = copy;
  }
  step.storage = std::move(storage);
  return step;
}

/// Elements of a step, to be changed in place.
inline int32_t& owner_of(Step& step, int64_t row) {
  return static_cast<int32_t*>(step.owners.data)[row];
}
inline int32_t& position_of(Step& step, int64_t row) {
  return static_cast<int32_t*>(step.positions.data)[row];
}
inline int32_t& region_of(Step& step, int64_t row, int64_t group, int64_t entry) {
  return static_cast<int32_t*>(
      step.regions.data)[(row * step.groups() + group) * step.region_count() + entry];
}
inline int32_t& table_of(Step& step, int64_t request, int64_t column) {
  return static_cast<int32_t*>(step.block_table.data)[request * step.block_table.shape[1] + column];
}
/// Elements from the start of a contiguous cache to K of a request's token; V lies `dim` further.
inline int64_t token_offset(Step& step, int64_t request, int64_t group, int64_t token) {
  const int64_t block = table_of(step, request, token / step.block_size());
  return ((block * step.groups() + group) * step.block_size() + token % step.block_size()) * 2 *
         step.dim();
}
/// The entries of a row that count.
inline int64_t entries_of(Step& step, int64_t row) {
  const int64_t position = position_of(step, row);
  return position < 0 ? 0 : std::min<int64_t>(position / 8 + 1, step.region_count());
}

inline uint16_t code_of(DType dtype, float value) {
  switch (dtype) {
    case DType::bf16:
      return f32_to_bf16(value);
    case DType::f16:
      return f32_to_f16(value);
    default:
      return f32_to_f8_e4m3fn(value);
  }
}

/// Stores one element of a 16- or 8-bit tensor.
inline void put(const TensorView& tensor, int64_t index, float value) {
  const uint16_t code = code_of(tensor.dtype, value);
  if (itemsize(tensor.dtype) == 2) {
    static_cast<uint16_t*>(tensor.data)[index] = code;
  } else {
    static_cast<uint8_t*>(tensor.data)[index] = static_cast<uint8_t>(code);
  }
}

inline SparsePrefillArgs args_of(const Step& step) {
  SparsePrefillArgs args;
  args.query = step.query;
  args.kv_cache = step.kv_cache;
  args.block_table = step.block_table;
  args.owners = step.owners;
  args.positions = step.positions;
  args.regions = step.regions;
  args.scale = step.scale;
  if (step.kv_cache.dtype == DType::f8_e4m3fn) {
    args.k_scale = Scale::of(step.k_scale);
    args.v_scale = Scale::of(step.v_scale);
  }
  return args;
}

/// Runs a call into poisoned, fenced outputs with a poisoned, fenced workspace of exactly the size
/// that the library asks for, at an odd address. Output and lse of `args` are replaced.
inline Outcome run(SparsePrefillArgs args, Options options, DType dtype = DType::f32) {
  const auto& shape = args.query.shape;
  Outcome outcome{.dtype = dtype, .heads = shape[1], .dim = shape[2]};
  const auto lines = static_cast<size_t>(shape[0] * shape[1]);
  Fenced output(lines * static_cast<size_t>(shape[2] * itemsize(dtype)));
  Fenced lse(lines * sizeof(float));
  args.output = TensorView::contiguous(output.data(), dtype, {shape[0], shape[1], shape[2]});
  args.lse = TensorView::contiguous(lse.data(), DType::f32, {shape[0], shape[1]});
  if (options.status == nullptr) options.status = &outcome.status;
  Fenced workspace(sparse_prefill_workspace_size(args, options), 3);
  if (options.workspace == nullptr) {
    options.workspace = workspace.data();
    options.workspace_bytes = workspace.size();
  }
  sparse_prefill(args, options);
  EXPECT_TRUE(output.fences_intact()) << "written beside the output";
  EXPECT_TRUE(lse.fences_intact()) << "written beside lse";
  EXPECT_TRUE(workspace.fences_intact()) << "written beside the workspace";
  outcome.output.assign(output.data(), output.data() + output.size());
  outcome.lse.resize(lines);
  if (lines > 0) std::memcpy(outcome.lse.data(), lse.data(), lse.size());
  outcome.status = *options.status;
  return outcome;
}

inline Options on(const char* backend) {
  Options options;
  options.backend = backend;
  options.threads = 2;
  return options;
}

inline Outcome run(const Step& step, const char* backend, DType dtype = DType::f32) {
  return run(args_of(step), on(backend), dtype);
}

inline std::vector<int64_t> positions_of(const Step& step) {
  std::vector<int64_t> positions;
  for (int64_t row = 0; row < step.rows(); ++row)
    positions.push_back(position_of(const_cast<Step&>(step), row));
  return positions;
}

/// One group's selections as [rows, region_count].
inline TensorView regions_of_group(const Step& step, int64_t group) {
  TensorView regions = step.regions.slice(1, group, group + 1);
  regions.rank = 2;
  regions.shape = {step.rows(), step.region_count()};
  regions.strides = {step.regions.strides[0], step.regions.strides[2]};
  return regions;
}

/// A plan with a query copy, for one of the step's groups.
inline PrefillPlanArgs plan_args(const Step& step, std::span<const int64_t> positions) {
  return {.query_shape = {step.rows(), step.heads() / step.groups(), step.dim()},
          .dtype = step.query.dtype,
          .device = {},
          .positions = positions,
          .region_count = step.region_count(),
          .scale = step.scale,
          .block_size = step.block_size(),
          .contiguous_query = false};
}

/// The planned path: plan, then fill and finish group by group, into poisoned, fenced memory.
inline Outcome run_planned(const Step& step, const char* backend, DType dtype = DType::f32) {
  const int64_t rows = step.rows(), groups = step.groups(), heads = step.heads() / groups;
  Outcome outcome{.dtype = dtype, .heads = step.heads(), .dim = step.dim()};
  const auto lines = static_cast<size_t>(rows * step.heads());
  Fenced output(lines * static_cast<size_t>(step.dim() * itemsize(dtype)));
  Fenced lse(lines * sizeof(float));
  const auto all_output =
      TensorView::contiguous(output.data(), dtype, {rows, step.heads(), step.dim()});
  const auto all_lse = TensorView::contiguous(lse.data(), DType::f32, {rows, step.heads()});
  const std::vector<int64_t> positions = positions_of(step);
  Options options = on(backend);
  options.status = &outcome.status;
  CompactPagedPrefill plan;
  plan.plan(plan_args(step, positions), options);
  const SparsePrefillArgs args = args_of(step);
  for (int64_t g = 0; g < groups; ++g) {
    const TensorView cache = step.kv_cache.slice(1, g, g + 1);
    const auto slice = [&](const TensorView& t) { return t.slice(1, g * heads, (g + 1) * heads); };
    plan.prepare_chunk(0, slice(step.query), cache, regions_of_group(step, g), step.block_table,
                       step.owners, options);
    Fenced workspace(plan.finish_workspace_size(step.kv_cache.dtype, options), 5);
    Options with_workspace = options;
    with_workspace.workspace = workspace.data();
    with_workspace.workspace_bytes = workspace.size();
    plan.finish({}, cache, slice(all_output), slice(all_lse), args.k_scale, args.v_scale,
                with_workspace);
    EXPECT_TRUE(workspace.fences_intact()) << "written beside the workspace";
  }
  EXPECT_TRUE(output.fences_intact()) << "written beside the output";
  EXPECT_TRUE(lse.fences_intact()) << "written beside lse";
  outcome.output.assign(output.data(), output.data() + output.size());
  outcome.lse.resize(lines);
  std::memcpy(outcome.lse.data(), lse.data(), lse.size());
  return outcome;
}

/// One (row, head) straight from the contract's formula, in float64 and from the call's tensors.
struct OracleLine {
  std::vector<double> output;  // [dim]
  double lse = -std::numeric_limits<double>::infinity();
};

inline OracleLine oracle(const SparsePrefillArgs& args, int64_t row, int64_t head) {
  const auto at = [](const TensorView& t, std::initializer_list<int64_t> index) {
    int64_t offset = 0;
    size_t d = 0;
    for (const int64_t i : index) offset += i * (t.shape[d] == 1 ? 0 : t.strides[d]), ++d;
    return offset;
  };
  const auto integer = [&](const TensorView& t, std::initializer_list<int64_t> index) -> int64_t {
    return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[at(t, index)]
                                 : static_cast<const int32_t*>(t.data)[at(t, index)];
  };
  const TensorView& cache = args.kv_cache;
  const int64_t dim = args.query.shape[2];
  const int64_t group = head / (args.query.shape[1] / cache.shape[1]);
  const bool scaled = cache.dtype == DType::f8_e4m3fn || cache.dtype == DType::u8;
  const auto value_of = [&](const Scale& scale) {
    if (!scaled) return 1.0;
    return static_cast<double>(scale.kind == Scale::Kind::pointer ? *scale.pointer : scale.value);
  };
  OracleLine line{.output = std::vector<double>(static_cast<size_t>(dim), 0.0)};
  const int64_t position = integer(args.positions, {row});
  const int64_t owner = integer(args.owners, {row});
  if (position < 0 || owner < 0 || owner >= args.block_table.shape[0]) return line;
  const bool shared = args.regions.rank == 2;
  const int64_t count = std::min(position / 8 + 1, args.regions.shape[shared ? 1 : 2]);
  std::vector<double> scores;
  std::vector<int64_t> values;
  double most = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t region =
        shared ? integer(args.regions, {row, i}) : integer(args.regions, {row, group, i});
    if (region < 0 || region > position / 8) continue;
    for (int64_t token = 8 * region; token < 8 * region + 8 && token <= position; ++token) {
      const int64_t column = token / cache.shape[2];
      if (column >= args.block_table.shape[1]) continue;
      const int64_t block = integer(args.block_table, {owner, column});
      if (block < 0 || block >= cache.shape[0]) continue;
      const int64_t k = at(cache, {block, group, token % cache.shape[2], 0});
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) {
        dot += static_cast<double>(
                   load_f32(args.query.data, args.query.dtype, at(args.query, {row, head, d}))) *
               static_cast<double>(load_f32(cache.data, cache.dtype, k + d));
      }
      scores.push_back(dot * static_cast<double>(args.scale) * value_of(args.k_scale));
      values.push_back(k + dim);
      most = std::max(most, scores.back());
    }
  }
  if (scores.empty()) return line;
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - most);
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - most) / sum * value_of(args.v_scale);
    for (int64_t d = 0; d < dim; ++d) {
      line.output[static_cast<size_t>(d)] +=
          weight * static_cast<double>(load_f32(cache.data, cache.dtype, values[i] + d));
    }
  }
  line.lse = most + std::log(sum);
  return line;
}

/// The contract's bounds for these types, times `slack` where the scores go beyond 64.
struct Bounds {
  double output;  ///< ||out - ref|| / ||ref|| over one head of one row
  double lse_absolute = 2e-3;
  double lse_relative = 1e-5;

  static Bounds of(const SparsePrefillArgs& args, DType output) {
    const bool bf16 = args.query.dtype == DType::bf16 || args.kv_cache.dtype == DType::bf16 ||
                      output == DType::bf16;
    return {.output = bf16 ? 4e-3 : 1e-3};
  }
  /// Both CPU backends with f32 output.
  static Bounds exact() { return {.output = 1e-5}; }
};

/// Compares one row and head with the oracle and prints the worst element on failure.
inline void expect_line(const Outcome& actual, int64_t actual_row, const SparsePrefillArgs& args,
                        int64_t row, int64_t head, const Bounds& bounds, const std::string& what) {
  const OracleLine expected = oracle(args, row, head);
  const double lse = actual.lse_at(actual_row, head);
  if (std::isinf(expected.lse)) {
    ASSERT_EQ(lse, expected.lse) << what << ": lse of row " << row << ", head " << head;
  } else {
    ASSERT_LE(std::fabs(lse - expected.lse),
              std::max(bounds.lse_absolute, bounds.lse_relative * std::fabs(expected.lse)))
        << what << ": lse of row " << row << ", head " << head << " is " << lse << ", expected "
        << expected.lse;
  }
  double difference = 0, norm = 0, worst = -1;
  int64_t where = 0;
  for (int64_t d = 0; d < actual.dim; ++d) {
    const double e = expected.output[static_cast<size_t>(d)];
    const double error = actual.at(actual_row, head, d) - e;
    difference += error * error;
    norm += e * e;
    if (!(std::fabs(error) <= worst)) worst = std::fabs(error), where = d;
  }
  const double error = std::sqrt(norm > 0 ? difference / norm : difference);
  ASSERT_TRUE(error <= bounds.output)
      << what << ": row " << row << ", head " << head << ": relative error " << error << " over "
      << bounds.output << "; worst element " << where << " is "
      << actual.at(actual_row, head, where) << ", expected "
      << expected.output[static_cast<size_t>(where)];
}

/// Every row and head of a call within the bounds.
inline void expect_call(const Outcome& actual, const SparsePrefillArgs& args, const Bounds& bounds,
                        const std::string& what) {
  for (int64_t row = 0; row < args.query.shape[0]; ++row) {
    for (int64_t head = 0; head < args.query.shape[1]; ++head) {
      ASSERT_NO_FATAL_FAILURE(expect_line(actual, row, args, row, head, bounds, what));
    }
  }
}

/// A call that must fail: the code, and what the message must hold.
template <typename Body>
void expect_error(Body&& body, ErrorCode code, const std::vector<std::string>& pieces,
                  const std::string& what) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << what << ": " << error.what();
    for (const std::string& piece : pieces) {
      EXPECT_NE(std::string(error.what()).find(piece), std::string::npos)
          << what << ": '" << piece << "' is missing in: " << error.what();
    }
    return;
  }
  ADD_FAILURE() << what << ": no error";
}

}  // namespace octopage::test

#endif  // OCTOPAGE_TESTS_BACKENDS_HOSTILE_CALL_HPP_
