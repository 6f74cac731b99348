#ifndef OCTOPAGE_INSPECT_MAP_PNG_HPP_
#define OCTOPAGE_INSPECT_MAP_PNG_HPP_

// The selection map as a PNG picture, and its colours, which the HTML report uses too.

#include <array>
#include <cstdint>
#include <string>

#include "inspect/selection_map.hpp"

namespace octopage {

using Rgb = std::array<uint8_t, 3>;

/// Colours from nothing selected to the densest bin.
struct MapColours {
  std::array<Rgb, 5> stops;
  Rgb beyond;  ///< regions past every row of the line: they cannot be selected
};
inline constexpr MapColours kLightMap = {
    {{{255, 255, 255}, {190, 214, 245}, {104, 163, 224}, {38, 104, 184}, {10, 44, 102}}},
    {236, 236, 232}};
inline constexpr MapColours kDarkMap = {
    {{{22, 24, 28}, {24, 62, 110}, {44, 116, 194}, {118, 184, 245}, {230, 244, 255}}},
    {38, 40, 44}};

/// How far along the colours a bin lies: 0 where nothing is selected, 1 at the densest; the square
/// root of the share between, so that thin selections show.
double map_shade(int64_t count, int64_t cells, double densest);

/// Greatest share of its cells that any bin of the map has, per group.
double densest_share(const SelectionMap& map);

/// The bytes of a PNG file, in the light colours; each bin is a square of one pixel or more. A map
/// without bins is one pixel. Throws Error(internal) where libpng fails.
std::string map_png(const SelectionMap& map);

}  // namespace octopage

#endif  // OCTOPAGE_INSPECT_MAP_PNG_HPP_
