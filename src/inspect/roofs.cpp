#include "inspect/roofs.hpp"

#include <algorithm>
#include <array>

#include "octopage/page_arithmetic.hpp"

namespace octopage {
namespace {

double as_double(int64_t value) {
  return static_cast<double>(value);
}

const TileSharing& tiles_of(const Sharing& sharing, int64_t height) {
  return *std::find_if(sharing.tiles.begin(), sharing.tiles.end(),
                       [height](const TileSharing& tile) { return tile.height == height; });
}

}  // namespace

std::span<const Card> known_cards() {
  static const std::array<Card, 1> kCards = {{
      {"nvidia-h200", 810e12, 10.1e12, 4.3e12,
       "measured on one H200, medians: bf16 product 8192^3; gather of 6,144-byte pages that lie in "
       "the L2 cache; device copy, read plus write"},
  }};
  return kCards;
}

const char* name(RoofKind kind) {
  switch (kind) {
    case RoofKind::memory:
      return "memory";
    case RoofKind::gather:
      return "L2 gather";
    case RoofKind::matrix:
      return "tensor core";
  }
  return "";
}

double Roof::seconds() const {
  return std::max({memory_seconds, gather_seconds, matrix_seconds});
}

RoofKind Roof::binds() const {
  if (seconds() == matrix_seconds) return RoofKind::matrix;
  return seconds() == gather_seconds ? RoofKind::gather : RoofKind::memory;
}

Roofs predict_roofs(const Step& step, GroupRange groups, const Sharing& sharing, const Card& card) {
  const double heads_per_group = as_double(step.heads() / step.groups());
  const double dim = as_double(step.dim());
  const double page_bytes =
      as_double(kPageTokens) * 2 * dim * as_double(itemsize(step.kv_cache.dtype));
  const double query_bytes = as_double(step.rows()) * as_double(groups.end - groups.begin) *
                             heads_per_group * dim * as_double(itemsize(step.query.dtype));
  Roofs roofs;
  roofs.card = card;
  roofs.useful_flops = 4 * dim * heads_per_group * as_double(sharing.entries.visible_tokens);
  roofs.memory_bytes = as_double(sharing.distinct_pages) * page_bytes + 2 * query_bytes;
  const auto add = [&](int64_t load_rows, int64_t compute_rows) {
    Roof roof;
    roof.load_rows = load_rows;
    roof.compute_rows = compute_rows;
    roof.gather_bytes = as_double(tiles_of(sharing, load_rows).loaded) * page_bytes;
    roof.matrix_flops = 4 * dim * heads_per_group * as_double(kPageTokens) *
                        as_double(tiles_of(sharing, compute_rows).multiplied);
    roof.memory_seconds = roofs.memory_bytes / card.memory_bytes;
    roof.gather_seconds = roof.gather_bytes / card.gather_bytes;
    roof.matrix_seconds = roof.matrix_flops / card.matrix_flops;
    roofs.ways.push_back(roof);
  };
  for (const int64_t height : kTileHeights) add(height, height);
  add(8, 4);
  return roofs;
}

}  // namespace octopage
