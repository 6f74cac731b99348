#include "inspect/map_png.hpp"

#include <png.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.hpp"
#include "octopage/page_arithmetic.hpp"

namespace octopage {
namespace {

constexpr int64_t kSmallestSide = 512;  ///< pixels that the longer side is enlarged to

Rgb colour_at(const MapColours& colours, double shade) {
  const double place = std::clamp(shade, 0.0, 1.0) * static_cast<double>(colours.stops.size() - 1);
  const auto below = std::min(static_cast<size_t>(place), colours.stops.size() - 2);
  const double part = place - static_cast<double>(below);
  Rgb result = {};
  for (size_t c = 0; c < result.size(); ++c) {
    const double from = colours.stops[below][c];
    const double to = colours.stops[below + 1][c];
    result[c] = static_cast<uint8_t>(std::lround(from + (to - from) * part));
  }
  return result;
}

/// Pixels of the picture, [height, width, 3].
struct Picture {
  int64_t width = 1;
  int64_t height = 1;
  std::vector<uint8_t> pixels = {255, 255, 255};
};

Picture draw(const SelectionMap& map) {
  if (map.row_bins == 0 || map.region_bins == 0) return {};
  const int64_t zoom =
      std::max<int64_t>(1, kSmallestSide / std::max(map.row_bins, map.region_bins));
  const double densest = densest_share(map);
  Picture picture = {map.region_bins * zoom, map.row_bins * zoom, {}};
  picture.pixels.reserve(static_cast<size_t>(picture.width * picture.height * 3));
  for (int64_t y = 0; y < picture.height; ++y) {
    const int64_t row_bin = y / zoom;
    const int64_t last =
        region_of_position(map.bins[static_cast<size_t>(row_bin)].greatest_position);
    for (int64_t x = 0; x < picture.width; ++x) {
      const int64_t region_bin = x / zoom;
      const int64_t count = map.counts[static_cast<size_t>(row_bin * map.region_bins + region_bin)];
      const Rgb colour =
          region_bin * map.regions_per_bin > last
              ? kLightMap.beyond
              : colour_at(kLightMap, map_shade(count, map.cells(row_bin, region_bin), densest));
      picture.pixels.insert(picture.pixels.end(), colour.begin(), colour.end());
    }
  }
  return picture;
}

}  // namespace

double densest_share(const SelectionMap& map) {
  double densest = 0;
  for (int64_t row_bin = 0; row_bin < map.row_bins; ++row_bin) {
    for (int64_t region_bin = 0; region_bin < map.region_bins; ++region_bin) {
      const auto count = static_cast<double>(
          map.counts[static_cast<size_t>(row_bin * map.region_bins + region_bin)]);
      densest = std::max(densest, count / static_cast<double>(map.cells(row_bin, region_bin)));
    }
  }
  return densest;
}

double map_shade(int64_t count, int64_t cells, double densest) {
  if (count == 0 || densest <= 0) return 0;
  return std::sqrt(static_cast<double>(count) / static_cast<double>(cells) / densest);
}

std::string map_png(const SelectionMap& map) {
  const Picture picture = draw(map);
  png_image image = {};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(picture.width);
  image.height = static_cast<png_uint_32>(picture.height);
  image.format = PNG_FORMAT_RGB;
  png_alloc_size_t bytes = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::string file(bytes, '\0');
  if (png_image_write_to_memory(&image, file.data(), &bytes, 0, picture.pixels.data(), 0,
                                nullptr) == 0) {
    fail(ErrorCode::internal, "PNG: {}", image.message);
  }
  file.resize(bytes);
  return file;
}

}  // namespace octopage
