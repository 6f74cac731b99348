#ifndef OCTOPAGE_INSPECT_ROOFS_HPP_
#define OCTOPAGE_INSPECT_ROOFS_HPP_

// How fast a step can be at best on a card: the least time that memory, cache and matrix unit each
// need for it. The longest of the three binds. No kernel reaches its roof; see docs/inspect.md.

#include <span>
#include <string>
#include <vector>

#include "inspect/sharing.hpp"
#include "step/step_file.hpp"

namespace octopage {

struct Card {
  std::string name;
  double matrix_flops = 0;  ///< bf16 operations a second of the matrix unit
  double gather_bytes = 0;  ///< bytes a second of page gathers that the L2 cache serves
  double memory_bytes = 0;  ///< bytes a second of device memory
  std::string source;       ///< where the three figures are from
};

/// The cards whose figures are known, the default first.
std::span<const Card> known_cards();

enum class RoofKind { memory, gather, matrix };
const char* name(RoofKind kind);

/// One way to run a step: pages are loaded once for `load_rows` neighbouring rows, and every row is
/// multiplied with the union of `compute_rows` of them.
struct Roof {
  int64_t load_rows = 1;
  int64_t compute_rows = 1;
  double gather_bytes = 0;
  double matrix_flops = 0;
  double memory_seconds = 0;
  double gather_seconds = 0;
  double matrix_seconds = 0;
  double seconds() const;  ///< of the longest
  RoofKind binds() const;
};

struct Roofs {
  Card card;
  double useful_flops = 0;  ///< 4 * dim for each head and visible token
  double memory_bytes = 0;  ///< every selected page once, query and output once
  std::vector<Roof> ways;   ///< rows alone, in tiles of 2, 4, 8, 16; the last as `cuda-sm90a` runs:
                            ///< loaded for 8, multiplied for 4
};

Roofs predict_roofs(const Step& step, GroupRange groups, const Sharing& sharing, const Card& card);

}  // namespace octopage

#endif  // OCTOPAGE_INSPECT_ROOFS_HPP_
