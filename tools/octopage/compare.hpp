#ifndef OCTOPAGE_TOOLS_COMPARE_HPP_
#define OCTOPAGE_TOOLS_COMPARE_HPP_

// Results against expectations, by the bounds of the contract.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "octopage/tensor.hpp"
#include "tools/octopage/report.hpp"

namespace octopage::cli {

/// Output of each row and head: ||out - expected|| / ||expected||. Where rows are over their
/// bound the largest error is that of them.
struct OutputError {
  double largest = 0;  ///< infinite where a finite value is expected and none came, or the reverse
  double bound = 0;    ///< of that row and head
  int64_t over = 0;    ///< rows and heads over their bound
  std::array<int64_t, 3> worst = {};  ///< row, head, and the element that is furthest off
  double value = 0;                   ///< there
  double expected = 0;                ///< there
};

/// lse: |lse - expected| against max(2e-3, 1e-5 * |expected|).
struct LseError {
  double largest = 0;                 ///< absolute
  double bound = 0;                   ///< of that row and head
  int64_t over = 0;                   ///< rows and heads over their bound
  std::array<int64_t, 2> worst = {};  ///< row, head
  double value = 0;                   ///< there
  double expected = 0;                ///< there
};

struct Comparison {
  std::string against;  ///< "expected" (of the file) or "reference"
  std::optional<OutputError> output;
  std::optional<LseError> lse;
  bool ok() const { return (!output || output->over == 0) && (!lse || lse->over == 0); }
};

/// 4e-3 where query, cache or output is bf16, else 1e-3.
double default_tolerance(DType query, DType cache, DType output);

/// Compares contiguous [rows, heads, dim] tensors of bf16, f16 or f32. Where the expected value is
/// not finite the result must not be finite either; which of NaN and Inf does not matter.
/// `allowance` [rows * heads] is added to the bounds; may be empty.
OutputError compare_output(const TensorView& output, const TensorView& expected, double bound,
                           const std::vector<double>& allowance = {});

/// Compares contiguous [rows, heads] f32 tensors. Infinities must be the same. `allowance` as
/// above.
LseError compare_lse(const TensorView& lse, const TensorView& expected,
                     const std::vector<double>& allowance = {});

/// A list of the planned path against what the file expects.
struct ListComparison {
  std::string name;  ///< the file's tensor
  bool ok = true;
  std::vector<int64_t> index;  ///< of the first difference
  int64_t value = 0;           ///< there
  int64_t expected = 0;        ///< there
  std::string text() const;
};

/// Compares `actual`, row-major in the shape of `expected` (contiguous i32). Another number of
/// elements is a difference at the end of the shorter.
ListComparison compare_list(const std::string& name, const TensorView& expected,
                            const std::vector<int32_t>& actual);

Json json_of(const Comparison& comparison);
Json json_of(const ListComparison& list);
void print_text(const Comparison& comparison);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_COMPARE_HPP_
