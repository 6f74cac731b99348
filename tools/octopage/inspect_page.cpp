#include "tools/octopage/inspect_page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "inspect/map_png.hpp"

namespace octopage::cli {
namespace {

Json json_of(const Overlap& overlap) {
  return {{"shared", overlap.shared}, {"compared", overlap.compared}, {"share", overlap.share()}};
}

Json sharing_json(const Sharing& sharing) {
  Json json = {{"neighbour_overlap", json_of(sharing.overlap)},
               {"union_factors", Json::array()},
               {"ages", Json::array()}};
  for (const TileSharing& tile : sharing.tiles) {
    json["union_factors"].push_back({{"rows", tile.height},
                                     {"factor", tile.factor},
                                     {"tiles", tile.tiles},
                                     {"loaded_regions", tile.loaded},
                                     {"multiplied_regions", tile.multiplied}});
  }
  for (const AgeBin& bin : sharing.ages) {
    json["ages"].push_back({{"begin", bin.begin}, {"end", bin.end}, {"entries", bin.entries}});
  }
  return json;
}

Json entries_json(const EntryCount& entries) {
  return {{"counted", entries.counted},
          {"valid", entries.valid},
          {"skipped", entries.skipped()},
          {"duplicate", entries.duplicate},
          {"invalid_region", entries.invalid_region},
          {"invalid_owner", entries.invalid_owner},
          {"invalid_table", entries.invalid_table},
          {"visible_tokens", entries.visible_tokens}};
}

Json blocks_json(const BlockUse& blocks) {
  Json json = {{"neighbouring_blocks", blocks.pairs},
               {"adjacent", blocks.adjacent},
               {"adjacent_share", blocks.adjacent_share()},
               {"runs", blocks.runs},
               {"outside", blocks.outside},
               {"used", blocks.used},
               {"shared", blocks.shared},
               {"run_lengths", Json::array()},
               {"cache", Json::array()}};
  for (const RunBin& bin : blocks.run_lengths) {
    json["run_lengths"].push_back(
        {{"begin", bin.begin}, {"end", bin.end}, {"runs", bin.runs}, {"blocks", bin.blocks}});
  }
  for (const CacheBin& bin : blocks.cache) {
    json["cache"].push_back(
        {{"begin", bin.begin}, {"end", bin.end}, {"used", bin.used}, {"shared", bin.shared}});
  }
  return json;
}

Json roofs_json(const Roofs& roofs) {
  Json json = {{"card", roofs.card.name},
               {"source", roofs.card.source},
               {"matrix_flops_per_second", roofs.card.matrix_flops},
               {"gather_bytes_per_second", roofs.card.gather_bytes},
               {"memory_bytes_per_second", roofs.card.memory_bytes},
               {"useful_flops", roofs.useful_flops},
               {"memory_bytes", roofs.memory_bytes},
               {"ways", Json::array()}};
  for (const Roof& roof : roofs.ways) {
    json["ways"].push_back({{"load_rows", roof.load_rows},
                            {"compute_rows", roof.compute_rows},
                            {"gather_bytes", roof.gather_bytes},
                            {"matrix_flops", roof.matrix_flops},
                            {"memory_seconds", roof.memory_seconds},
                            {"gather_seconds", roof.gather_seconds},
                            {"matrix_seconds", roof.matrix_seconds},
                            {"seconds", roof.seconds()},
                            {"binds", name(roof.binds())}});
  }
  return json;
}

Json requests_json(const Inspection& inspection) {
  Json json = Json::array();
  const Sharing& sharing = inspection.sharing;
  for (size_t i = 0; i < inspection.blocks.requests.size(); ++i) {
    const RequestUse& request = inspection.blocks.requests[i];
    json.push_back({{"request", i},
                    {"length", request.length},
                    {"rows", request.rows},
                    {"blocks", request.blocks},
                    {"runs", request.runs},
                    {"outside", request.outside},
                    {"entries", sharing.request_entries[i]},
                    {"skipped", sharing.request_skipped[i]},
                    {"overlap", json_of(sharing.request_overlap[i])}});
  }
  return json;
}

Json bins_json(const SelectionMap& map) {
  Json json = Json::array();
  for (const RowBin& bin : map.bins) {
    json.push_back({{"begin", bin.begin},
                    {"end", bin.end},
                    {"first_owner", bin.first_owner},
                    {"last_owner", bin.last_owner},
                    {"least_position", bin.least_position},
                    {"greatest_position", bin.greatest_position},
                    {"overlap", json_of(bin.overlap)}});
  }
  return json;
}

std::string base64(const std::vector<uint8_t>& bytes) {
  constexpr const char* kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    for (size_t k = 0; k < 3; ++k) word = word << 8 | (i + k < bytes.size() ? bytes[i + k] : 0u);
    for (size_t k = 0; k < 4; ++k) {
      text += i + k > bytes.size() ? '=' : kDigits[word >> (18 - 6 * k) & 63];
    }
  }
  return text;
}

/// Counts as little-endian numbers of 2, 4 or 8 bytes, whichever holds the greatest.
Json counts_json(const std::vector<int64_t>& counts) {
  const int64_t most = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  const size_t width = most <= std::numeric_limits<uint16_t>::max()   ? 2
                       : most <= std::numeric_limits<uint32_t>::max() ? 4
                                                                      : 8;
  std::vector<uint8_t> bytes;
  bytes.reserve(counts.size() * width);
  for (const int64_t count : counts) {
    for (size_t k = 0; k < width; ++k) bytes.push_back(static_cast<uint8_t>(count >> (8 * k)));
  }
  return {{"bytes", width}, {"base64", base64(bytes)}};
}

Json colours_json(const MapColours& colours) {
  return {{"stops", colours.stops}, {"beyond", colours.beyond}};
}

/// JSON that may stand inside a script element: no text in it can end the element or begin a
/// comment.
std::string script_json(const Json& json) {
  std::string text;
  for (const char c : json.dump(-1, ' ', false, Json::error_handler_t::replace)) {
    if (c == '<' || c == '>' || c == '&') {
      text += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

Json inspection_json(const std::string& path, const Step& step, const Inspection& inspection) {
  const SelectionMap& map = inspection.map;
  Json json = {{"step", path},
               {"rows", step.rows()},
               {"requests", step.requests()},
               {"heads", step.heads()},
               {"groups", step.groups()},
               {"groups_shown", {inspection.groups.begin, inspection.groups.end}},
               {"dim", step.dim()},
               {"region_count", step.region_count()},
               {"block_size", step.block_size()},
               {"blocks", step.kv_cache.shape[0]},
               {"query_type", name(step.query.dtype)},
               {"cache_type", name(step.kv_cache.dtype)},
               {"padding_rows", inspection.sharing.padding_rows},
               {"empty_rows", inspection.sharing.empty_rows},
               {"entries", entries_json(inspection.sharing.entries)},
               {"sharing", sharing_json(inspection.sharing)},
               {"distinct_pages", inspection.sharing.distinct_pages},
               {"block_table", blocks_json(inspection.blocks)},
               {"roofs", roofs_json(inspection.roofs)},
               {"request_table", requests_json(inspection)},
               {"map",
                {{"rows", map.rows},
                 {"regions", map.regions},
                 {"rows_per_bin", map.rows_per_bin},
                 {"regions_per_bin", map.regions_per_bin},
                 {"row_bins", map.row_bins},
                 {"region_bins", map.region_bins},
                 {"densest_share", densest_share(map)},
                 {"lines", bins_json(map)}}},
               {"notes", step.notes}};
  return json;
}

std::string inspection_page(const Json& numbers, const Inspection& inspection) {
  // The page lists so many requests; --json lists all.
  constexpr size_t kRequestsShown = 1000;
  Json data = numbers;
  auto& table = data["request_table"];
  if (table.size() > kRequestsShown) {
    table.erase(table.begin() + kRequestsShown, table.end());
  }
  data["map"]["counts"] = counts_json(inspection.map.counts);
  data["colours"] = {{"light", colours_json(kLightMap)}, {"dark", colours_json(kDarkMap)}};
  // Cut the template first and fill it then, so that no filled-in text is taken for a placeholder.
  std::string page;
  std::string_view rest = kPageHTML;
  const auto fill = [&](std::string_view placeholder, std::string_view text) {
    const size_t place = rest.find(placeholder);
    page += rest.substr(0, place);
    page += text;
    rest.remove_prefix(place + placeholder.size());
  };
  fill("@STYLE@", kPageCSS);
  fill("@DATA@", script_json(data));
  fill("@SCRIPT@", kPageJS);
  page += rest;
  return page;
}

}  // namespace octopage::cli
