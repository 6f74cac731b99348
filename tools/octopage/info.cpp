// octopage info: what a step file holds and how fast it can run.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "inspect/block_use.hpp"
#include "inspect/sharing.hpp"
#include "step/step_file.hpp"
#include "tools/octopage/output.hpp"
#include "tools/octopage/progress.hpp"
#include "tools/octopage/report.hpp"
#include "tools/octopage/verbs.hpp"

namespace octopage::cli {
namespace {

constexpr size_t kRequestsShown = 16;

std::vector<std::pair<const char*, const TensorView*>> tensors_of(const Step& step) {
  return {{"query", &step.query},
          {"kv_cache", &step.kv_cache},
          {"block_table", &step.block_table},
          {"owners", &step.owners},
          {"positions", &step.positions},
          {"regions", &step.regions},
          {"lengths", &step.lengths},
          {"expected_output", &step.expected_output},
          {"expected_lse", &step.expected_lse},
          {"expected_indptr", &step.expected_indptr},
          {"expected_last_page_len", &step.expected_last_page_len},
          {"expected_pages", &step.expected_pages},
          {"expected_staged_blocks", &step.expected_staged_blocks},
          {"expected_staged_table", &step.expected_staged_table}};
}

/// All that info tells, for both ways of printing it.
struct Info {
  int64_t token_bytes = 0;  ///< K and V of one token in one group
  Sharing sharing;
  BlockUse blocks;
};

Info measure(const Step& step) {
  const Progress progress("info");
  return {2 * step.dim() * itemsize(step.kv_cache.dtype), measure_sharing(step, {0, step.groups()}),
          measure_block_use(step, 1)};
}

int64_t invalid_entries(const EntryCount& entries) {
  return entries.invalid_region + entries.invalid_owner + entries.invalid_table;
}

/// Tiles of more than one row.
std::span<const TileSharing> tiles_of(const Info& info) {
  return std::span(info.sharing.tiles).subspan(1);
}

void print_info_json(const std::string& path, const Step& step, const Info& info) {
  Json json = {{"step", path},
               {"rows", step.rows()},
               {"heads", step.heads()},
               {"groups", step.groups()},
               {"heads_per_group", step.heads() / step.groups()},
               {"dim", step.dim()},
               {"region_count", step.region_count()},
               {"block_size", step.block_size()},
               {"blocks", step.kv_cache.shape[0]},
               {"scale", step.scale},
               {"k_scale", step.k_scale},
               {"v_scale", step.v_scale},
               {"token_bytes", info.token_bytes * step.groups()},
               {"tensors", Json::object()},
               {"requests", Json::array()}};
  for (const auto& [tensor_name, tensor] : tensors_of(step)) {
    if (!tensor->present()) continue;
    const std::vector<int64_t> shape(tensor->shape.begin(), tensor->shape.begin() + tensor->rank);
    json["tensors"][tensor_name] = {{"dtype", name(tensor->dtype)},
                                    {"shape", shape},
                                    {"bytes", tensor->size() * itemsize(tensor->dtype)}};
  }
  for (const RequestUse& request : info.blocks.requests) {
    json["requests"].push_back({{"length", request.length},
                                {"blocks", request.blocks},
                                {"rows", request.rows},
                                {"runs", request.runs}});
  }
  json["fragmentation"] = {{"neighbouring_blocks", info.blocks.pairs},
                           {"adjacent", info.blocks.adjacent},
                           {"adjacent_share", info.blocks.adjacent_share()},
                           {"runs", info.blocks.runs}};
  json["selections"] = {{"entries", info.sharing.entries.counted},
                        {"invalid", invalid_entries(info.sharing.entries)},
                        {"visible_tokens", info.sharing.entries.visible_tokens},
                        {"neighbour_overlap", info.sharing.overlap.share()},
                        {"union_factors", Json::array()}};
  for (const TileSharing& factor : tiles_of(info)) {
    json["selections"]["union_factors"].push_back(
        {{"rows", factor.height}, {"factor", factor.factor}, {"tiles", factor.tiles}});
  }
  json["notes"] = step.notes;
  print_json(json);
}

void print_info_text(const std::string& path, const Step& step, const Info& info) {
  print_out("{}\n", path);
  print_out(
      "{} rows, {} heads in {} groups, dim {}, {} regions, scale {}, k_scale {}, v_scale {}\n\n",
      step.rows(), step.heads(), step.groups(), step.dim(), step.region_count(), step.scale,
      step.k_scale, step.v_scale);
  print_out("{:<24} {:<10} {:<24} {:>12}\n", "tensor", "type", "shape", "size");
  for (const auto& [tensor_name, tensor] : tensors_of(step)) {
    if (!tensor->present()) continue;
    print_out("{:<24} {:<10} {:<24} {:>12}\n", tensor_name, name(tensor->dtype),
              shape_text(*tensor),
              bytes_text(static_cast<double>(tensor->size() * itemsize(tensor->dtype))));
  }
  print_out("\nK and V of a token: {} in each group, {} in all\n",
            bytes_text(static_cast<double>(info.token_bytes)),
            bytes_text(static_cast<double>(info.token_bytes * step.groups())));

  print_out("\n{:<10} {:>10} {:>10} {:>10} {:>10}\n", "request", "tokens", "rows", "blocks",
            "runs");
  for (size_t i = 0; i < std::min(info.blocks.requests.size(), kRequestsShown); ++i) {
    const RequestUse& request = info.blocks.requests[i];
    print_out("{:<10} {:>10} {:>10} {:>10} {:>10}\n", i, request.length, request.rows,
              request.blocks, request.runs);
  }
  if (info.blocks.requests.size() > kRequestsShown) {
    print_out("... and {} more (--json lists all)\n", info.blocks.requests.size() - kRequestsShown);
  }
  print_out("block table: {:.1f}% of neighbouring blocks are adjacent in the cache, {} runs\n",
            info.blocks.adjacent_share() * 100, info.blocks.runs);

  print_out("\nselections: {} entries, {} invalid, {} visible tokens\n",
            info.sharing.entries.counted, invalid_entries(info.sharing.entries),
            info.sharing.entries.visible_tokens);
  print_out("a row shares {:.1f}% of its regions with the row before it\n",
            info.sharing.overlap.share() * 100);
  print_out("union of neighbouring rows, in selections of one row:");
  for (const TileSharing& factor : tiles_of(info)) {
    print_out(" {} rows {:.2f}{}", factor.height, factor.factor,
              &factor == &tiles_of(info).back() ? "\n" : ",");
  }
  for (const std::string& note : step.notes) print_out("note: {}\n", note);
}

int run_info(const std::string& path, bool json) {
  const Step step = read_step(path);
  const Info info = measure(step);
  if (json) {
    print_info_json(path, step, info);
  } else {
    print_info_text(path, step, info);
  }
  return kOk;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  struct Args {
    std::string step;
    bool json = false;
  };
  auto args = std::make_shared<Args>();
  CLI::App* verb =
      app.add_subcommand("info", "Show what a step file holds and how much its rows share");
  verb->add_option("STEP", args->step, "Step file (.safetensors)")->required();
  verb->add_flag("--json", args->json, "Print one JSON object");
  verb->footer(
      "Examples:\n"
      "  octopage info examples/step.safetensors\n"
      "  octopage info step.safetensors --json\n\n"
      "The union of n neighbouring rows decides how fast a step can run: 1 means that they select\n"
      "the same regions, n that they share nothing.");
  verb->callback([args, &action] { action = [args] { return run_info(args->step, args->json); }; });
}

}  // namespace octopage::cli
