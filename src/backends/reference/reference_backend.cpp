// The definition: scalar float64, one row, head and token at a time, in the order of the contract.

#include <cmath>
#include <limits>
#include <vector>

#include "backends/backend.hpp"
#include "core/dtype.hpp"
#include "core/read_once.hpp"
#include "kv/host_lookup.hpp"

namespace octopage {
namespace {

/// Tokens that one row and group attends to.
struct VisiblePage {
  int64_t offset;  ///< elements from cache.data to token 0 of the page
  int64_t tokens;  ///< the first `tokens` of its eight are visible
};

/// One row and head: s_t = scale * q . K[t];  out = sum_t softmax(s)_t V[t];  lse = log sum_t
/// exp(s_t).
void attend_head(const Problem& problem, const AttentionTensors& t, int64_t row, int64_t head,
                 const std::vector<VisiblePage>& pages) {
  const int64_t dim = problem.dim;
  const int64_t query = row * t.stride_query_row + head * t.stride_query_head;
  std::vector<double> scores;
  double largest = -std::numeric_limits<double>::infinity();
  for (const VisiblePage& page : pages) {
    for (int64_t token = 0; token < page.tokens; ++token) {
      const int64_t k = page.offset + token * t.cache.stride_token;
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) {
        dot += static_cast<double>(load_f32(t.query, problem.query_dtype, query + d)) *
               static_cast<double>(load_f32(t.cache.data, t.cache.dtype, k + d));
      }
      scores.push_back(t.scale * dot);
      largest = std::fmax(largest, scores.back());
    }
  }
  double sum = 0;
  std::vector<double> output(static_cast<size_t>(dim), 0.0);
  size_t next = 0;
  for (const VisiblePage& page : pages) {
    for (int64_t token = 0; token < page.tokens; ++token) {
      const int64_t v = page.offset + token * t.cache.stride_token + dim;
      const double weight = std::exp(scores[next++] - largest);
      sum += weight;
      for (int64_t d = 0; d < dim; ++d) {
        output[static_cast<size_t>(d)] +=
            weight * static_cast<double>(load_f32(t.cache.data, t.cache.dtype, v + d));
      }
    }
  }
  const bool empty = scores.empty();
  for (int64_t d = 0; d < dim; ++d) {
    const double value = empty ? 0 : output[static_cast<size_t>(d)] / sum * t.v_scale;
    store_f32(t.output, problem.output_dtype,
              row * t.stride_output_row + head * t.stride_output_head + d,
              static_cast<float>(value));
  }
  if (t.lse != nullptr) {
    t.lse[row * t.stride_lse_row + head * t.stride_lse_head] =
        empty ? -std::numeric_limits<float>::infinity()
              : static_cast<float>(largest + std::log(sum));
  }
}

void attend_group(const Problem& problem, const AttentionTensors& tensors, int64_t row,
                  int64_t group, const std::vector<VisiblePage>& pages) {
  for (int64_t h = 0; h < problem.heads_per_group; ++h) {
    attend_head(problem, tensors, row, group * problem.heads_per_group + h, pages);
  }
}

class ReferenceBackend final : public Backend {
 public:
  BackendInfo info() const override {
    return {.name = "reference",
            .description = "scalar float64, the definition",
            .priority = 0,
            .available = true,
            .reason = ""};
  }
  Support supports(const Problem& problem) const override {
    return supports_on_cpu("reference", problem);
  }
  size_t workspace_bytes(const Problem&, int32_t) const override { return 0; }

  void attend_direct(const DirectParams& p, const RunContext& context) const override {
    context.threads->parallel_for(p.problem.rows, [&](int64_t row, int32_t) {
      const int64_t position = p.rows.position(row);
      const int64_t own = region_of_position(position);
      const int64_t owner = p.rows.owner(row);
      for (int64_t group = 0; group < p.problem.groups; ++group) {
        const int32_t* regions =
            p.regions + row * p.stride_regions_row + group * p.stride_regions_group;
        std::vector<VisiblePage> pages;
        for (int64_t i = 0; i < selection_count(position, p.problem.region_count); ++i) {
          const int64_t region = read_once(regions + i * p.stride_regions_entry);
          const PageLookup page =
              host_page_of_region(p.table, p.tensors.cache.geometry(), owner, region, own);
          raise_status(context.status, page.fault);
          if (page.fault != 0) continue;
          pages.push_back({page_offset(p.tensors.cache, group, page.page),
                           region == own ? last_page_len(position) : kPageTokens});
        }
        attend_group(p.problem, p.tensors, row, group, pages);
      }
    });
  }

  void attend_paged(const PagedParams& p, const RunContext& context) const override {
    context.threads->parallel_for(p.problem.rows, [&](int64_t row, int32_t) {
      std::vector<VisiblePage> pages;
      const PageRange range = page_range(p, row);
      for (int64_t i = range.begin; i < range.end; ++i) {
        const int64_t page = read_once(p.pages + i);
        if (page < 0 || page >= p.page_count) continue;
        const bool last = i + 1 == range.end;
        pages.push_back(
            {page_offset(p.tensors.cache, 0, page), last ? range.last_tokens : kPageTokens});
      }
      attend_group(p.problem, p.tensors, row, 0, pages);
    });
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace octopage
