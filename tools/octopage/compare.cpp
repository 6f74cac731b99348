#include "tools/octopage/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtype.hpp"
#include "tools/octopage/output.hpp"

namespace octopage::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLseAbsolute = 2e-3;
constexpr double kLseRelative = 1e-5;

/// Difference of two values; infinite where only one of them is finite, 0 where none is.
double distance(double value, double expected) {
  const bool finite = std::isfinite(value);
  if (finite != std::isfinite(expected)) return kInfinity;
  return finite ? std::fabs(value - expected) : 0.0;
}

}  // namespace

double default_tolerance(DType query, DType cache, DType output) {
  return query == DType::bf16 || cache == DType::bf16 || output == DType::bf16 ? 4e-3 : 1e-3;
}

OutputError compare_output(const TensorView& output, const TensorView& expected, double bound,
                           const std::vector<double>& allowance) {
  OutputError result;
  const int64_t heads = output.shape[1];
  const int64_t dim = output.shape[2];
  for (int64_t place = 0; place < output.shape[0] * heads; ++place) {
    double error = 0;
    double norm = 0;
    double furthest = -1;
    int64_t element = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double value = load_f32(output.data, output.dtype, place * dim + d);
      const double wanted = load_f32(expected.data, expected.dtype, place * dim + d);
      const double difference = distance(value, wanted);
      error += difference * difference;
      if (std::isfinite(wanted)) norm += wanted * wanted;
      if (difference > furthest) {
        furthest = difference;
        element = d;
      }
    }
    // Nothing is expected but zeros: any other value is infinitely wrong.
    const double relative = error == 0 ? 0 : norm == 0 ? kInfinity : std::sqrt(error / norm);
    const double allowed = bound + (allowance.empty() ? 0 : allowance[static_cast<size_t>(place)]);
    const bool over = !(relative <= allowed);
    // Rows over their bound go first, then the larger error.
    if (place == 0 || (over && result.over == 0) ||
        (over == (result.over > 0) && relative > result.largest)) {
      result.largest = relative;
      result.bound = allowed;
      result.worst = {place / heads, place % heads, element};
      result.value = load_f32(output.data, output.dtype, place * dim + element);
      result.expected = load_f32(expected.data, expected.dtype, place * dim + element);
    }
    result.over += over;
  }
  return result;
}

LseError compare_lse(const TensorView& lse, const TensorView& expected,
                     const std::vector<double>& allowance) {
  LseError result;
  const int64_t heads = lse.shape[1];
  for (int64_t place = 0; place < lse.shape[0] * heads; ++place) {
    const double value = static_cast<const float*>(lse.data)[place];
    const double wanted = static_cast<const float*>(expected.data)[place];
    double error = distance(value, wanted);
    if (std::isinf(wanted) && value != wanted) error = kInfinity;
    double allowed = allowance.empty() ? 0 : allowance[static_cast<size_t>(place)];
    allowed += std::isfinite(wanted) ? std::max(kLseAbsolute, kLseRelative * std::fabs(wanted))
                                     : kLseAbsolute;
    const bool over = !(error <= allowed);
    if (place == 0 || (over && result.over == 0) ||
        (over == (result.over > 0) && error > result.largest)) {
      result.largest = error;
      result.bound = allowed;
      result.worst = {place / heads, place % heads};
      result.value = value;
      result.expected = wanted;
    }
    result.over += over;
  }
  return result;
}

std::string ListComparison::text() const {
  if (ok) return fmt::format("{}: as expected", name);
  return fmt::format("{}[{}] = {}, expected {}", name, fmt::join(index, ", "), value, expected);
}

ListComparison compare_list(const std::string& name, const TensorView& expected,
                            const std::vector<int32_t>& actual) {
  ListComparison result;
  result.name = name;
  const auto* wanted = static_cast<const int32_t*>(expected.data);
  const auto size = static_cast<int64_t>(actual.size());
  const int64_t common = std::min(size, expected.size());
  for (int64_t i = 0; i < common; ++i) {
    if (actual[static_cast<size_t>(i)] == wanted[i]) continue;
    result.ok = false;
    result.value = actual[static_cast<size_t>(i)];
    result.expected = wanted[i];
    int64_t rest = i;
    for (int32_t d = expected.rank; d-- > 0;) {
      const int64_t extent = expected.shape[static_cast<size_t>(d)];
      result.index.insert(result.index.begin(), rest % extent);
      rest /= extent;
    }
    return result;
  }
  if (size != expected.size()) {
    result.ok = false;
    result.name += ".size";
    result.value = size;
    result.expected = expected.size();
  }
  return result;
}

Json json_of(const Comparison& comparison) {
  Json json = {{"against", comparison.against}, {"ok", comparison.ok()}};
  if (comparison.output) {
    const OutputError& e = *comparison.output;
    json["output"] = {{"ok", e.over == 0},
                      {"max_relative_error", json_number(e.largest)},
                      {"bound", e.bound},
                      {"over", e.over},
                      {"row", e.worst[0]},
                      {"head", e.worst[1]},
                      {"worst",
                       {{"index", e.worst},
                        {"value", json_number(e.value)},
                        {"expected", json_number(e.expected)}}}};
  }
  if (comparison.lse) {
    const LseError& e = *comparison.lse;
    json["lse"] = {{"ok", e.over == 0},
                   {"max_absolute_error", json_number(e.largest)},
                   {"bound", e.bound},
                   {"over", e.over},
                   {"row", e.worst[0]},
                   {"head", e.worst[1]},
                   {"worst",
                    {{"index", e.worst},
                     {"value", json_number(e.value)},
                     {"expected", json_number(e.expected)}}}};
  }
  return json;
}

Json json_of(const ListComparison& list) {
  Json json = {{"tensor", list.name}, {"ok", list.ok}};
  if (!list.ok) {
    json["index"] = list.index;
    json["value"] = list.value;
    json["expected"] = list.expected;
  }
  return json;
}

void print_text(const Comparison& comparison) {
  const char* label = comparison.against.c_str();
  if (comparison.output) {
    const OutputError& e = *comparison.output;
    print_out("{:<10} output {}: largest relative error {:.2e} at row {} head {}, bound {:.2e}",
              label, e.over == 0 ? "ok" : "OVER", e.largest, e.worst[0], e.worst[1], e.bound);
    if (e.over > 0) print_out(", over at {} rows and heads", e.over);
    print_out("\n{:<10} worst element [{}] = {:.6g}, expected {:.6g}\n", "",
              fmt::join(e.worst, ", "), e.value, e.expected);
  }
  if (comparison.lse) {
    const LseError& e = *comparison.lse;
    print_out("{:<10} lse {}: largest error {:.2e} at row {} head {}, bound {:.2e}", label,
              e.over == 0 ? "ok" : "OVER", e.largest, e.worst[0], e.worst[1], e.bound);
    if (e.over > 0) print_out(", over at {} rows and heads", e.over);
    print_out("\n{:<10} worst lse [{}] = {:.6g}, expected {:.6g}\n", "", fmt::join(e.worst, ", "),
              e.value, e.expected);
  }
}

}  // namespace octopage::cli
