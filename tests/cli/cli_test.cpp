// Runs the octopage binary and looks at exit codes, stdout, stderr and files.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "command.hpp"
#include "core/dtype.hpp"
#include "octopage/sparse_prefill.hpp"
#include "octopage/version.h"
#include "step/safetensors_header.hpp"
#include "step/step_file.hpp"
#include "step/synthetic.hpp"

namespace octopage {
namespace {

using nlohmann::json;
using testing::CommandResult;
using testing::TemporaryDirectory;

const std::string kCases = OCTOPAGE_TEST_CASES "/";
const std::vector<std::string> kPaths = {"direct", "planned", "staged"};

std::vector<std::string> case_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kCases)) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Both messages of a failure: one line on stderr, and the error object on stdout with --json.
void expect_failure(const CommandResult& result, const std::string& message) {
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("octopage: "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

TensorView tensor_of(const std::string& bytes, const std::string& name, DType dtype) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  const SafetensorsHeader header = parse_safetensors_header(data, bytes.size(), "file");
  for (const SafetensorsEntry& entry : header.tensors) {
    if (entry.name != name) continue;
    TensorView view;
    view.data = const_cast<uint8_t*>(data + header.data_begin + entry.begin);
    view.dtype = dtype;
    view.rank = static_cast<int32_t>(entry.shape.size());
    std::copy(entry.shape.begin(), entry.shape.end(), view.shape.begin());
    return view;
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

class EveryCase : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryCase, PassesOnEveryBackendAndPath) {
  for (const std::string backend : {"reference", "cpu"}) {
    for (const std::string& path : kPaths) {
      SCOPED_TRACE(backend + ", " + path);
      const CommandResult result =
          testing::octopage({"attend", kCases + GetParam() + ".safetensors", "--backend", backend,
                             "--path", path, "--json"});
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
      const json object = json::parse(result.out);
      EXPECT_EQ(object.at("backend"), backend);
      EXPECT_EQ(object.at("path"), path);
      EXPECT_EQ(object.at("ok"), true);
      ASSERT_EQ(object.at("checks").size(), 1u);
      EXPECT_LE(object.at("checks").at(0).at("output").at("max_relative_error"),
                object.at("checks").at(0).at("output").at("bound"));
      const size_t lists = path == "direct" ? 0 : path == "planned" ? 3 : 5;
      EXPECT_EQ(object.at("lists").size(), lists);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, EveryCase, ::testing::ValuesIn(case_names()),
                         [](const auto& name) { return name.param; });

TEST(Attend, TextNamesErrorsAndPlaces) {
  const CommandResult result = testing::octopage(
      {"attend", kCases + "four_groups.safetensors", "--check", "--path", "staged"});
  EXPECT_EQ(result.exit_code, 0);
  for (const std::string part :
       {"staged path, backend cpu", "useful GFLOP/s",
        "expected   output ok: largest relative error", "reference  output ok", "reference  lse ok",
        "worst element [", "expected_pages: as expected", "expected_staged_table: as expected",
        "result     ok"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part << "\n" << result.out;
  }
  EXPECT_EQ(result.err, "");
}

TEST(Attend, OverToleranceIsExitCodeOne) {
  for (const std::string& path : kPaths) {
    const CommandResult result = testing::octopage(
        {"attend", kCases + "block_of_eight.safetensors", "--tolerance", "1e-9", "--path", path});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_NE(result.out.find("output OVER"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find("result     FAILED"), std::string::npos) << result.out;
  }
  EXPECT_EQ(testing::octopage({"attend", kCases + "block_of_eight.safetensors", "--tolerance",
                               "1e-5", "--output-type", "f32", "--check"})
                .exit_code,
            0);
}

/// Writes a copy of a case with one changed element of one tensor; returns its path.
template <typename T>
std::string corrupted(const TemporaryDirectory& directory, const std::string& name,
                      TensorView Step::*member, int64_t index, T value) {
  const Step step = read_step(kCases + name + ".safetensors");
  Step copy = step;
  std::vector<uint8_t> bytes(
      static_cast<size_t>((step.*member).size() * itemsize((step.*member).dtype)));
  std::memcpy(bytes.data(), (step.*member).data, bytes.size());
  std::memcpy(bytes.data() + static_cast<size_t>(index) * sizeof(T), &value, sizeof(T));
  (copy.*member).data = bytes.data();
  const std::string path = directory / "corrupted.safetensors";
  write_step(path, copy);
  return path;
}

TEST(Attend, NamesTheWorstCoordinateOfAWrongOutput) {
  const TemporaryDirectory directory;
  // four_groups: 64 heads of dim 192; row 3, head 17, element 5.
  const std::string file = corrupted(directory, "four_groups", &Step::expected_output,
                                     (int64_t{3} * 64 + 17) * 192 + 5, 100.0f);
  for (const std::string& path : kPaths) {
    const CommandResult result = testing::octopage({"attend", file, "--path", path, "--json"});
    EXPECT_EQ(result.exit_code, 1);
    const json output = json::parse(result.out).at("checks").at(0).at("output");
    EXPECT_EQ(output.at("ok"), false);
    EXPECT_EQ(output.at("row"), 3);
    EXPECT_EQ(output.at("head"), 17);
    EXPECT_EQ(output.at("over"), 1);
    EXPECT_EQ(output.at("worst").at("index"), json({3, 17, 5}));
    EXPECT_EQ(output.at("worst").at("expected"), 100.0);
  }
}

TEST(Attend, StagingOfAnF8CacheHidesNoWrongExpectation) {
  const TemporaryDirectory directory;
  const std::string output =
      corrupted(directory, "fp8_cache_scaled", &Step::expected_output, 777, 100.0f);
  EXPECT_EQ(testing::octopage({"attend", output, "--path", "staged"}).exit_code, 1);
  const std::string lse = corrupted(directory, "fp8_cache_scaled", &Step::expected_lse, 20, 9.0f);
  EXPECT_EQ(testing::octopage({"attend", lse, "--path", "staged"}).exit_code, 1);
}

TEST(Attend, NamesTheWorstLse) {
  const TemporaryDirectory directory;
  const std::string file =
      corrupted(directory, "four_groups", &Step::expected_lse, 2 * 64 + 9, 50.0f);
  const CommandResult result = testing::octopage({"attend", file, "--json"});
  EXPECT_EQ(result.exit_code, 1);
  const json check = json::parse(result.out).at("checks").at(0);
  EXPECT_EQ(check.at("output").at("ok"), true);
  EXPECT_EQ(check.at("lse").at("ok"), false);
  EXPECT_EQ(check.at("lse").at("worst").at("index"), json({2, 9}));
}

TEST(Attend, ReportsTheFirstDifferenceOfEachList) {
  struct List {
    const char* name;
    TensorView Step::*member;
    int64_t index;
    json place;
    std::vector<std::string> paths;
  };
  // four_groups: 11 rows, 4 groups of 35 pages each, 2 requests with 4 columns.
  const std::vector<List> lists = {
      {"expected_last_page_len", &Step::expected_last_page_len, 4, {4}, {"planned", "staged"}},
      {"expected_pages", &Step::expected_pages, 2 * 35 + 7, {2, 7}, {"planned", "staged"}},
      {"expected_staged_blocks", &Step::expected_staged_blocks, 3, {3}, {"staged"}},
      {"expected_staged_table", &Step::expected_staged_table, 6, {1, 2}, {"staged"}},
  };
  for (const List& list : lists) {
    const TemporaryDirectory directory;
    const std::string file =
        corrupted(directory, "four_groups", list.member, list.index, int32_t{77});
    for (const std::string& path : kPaths) {
      SCOPED_TRACE(list.name + (", " + path));
      const CommandResult result = testing::octopage({"attend", file, "--path", path, "--json"});
      const bool looks = std::count(list.paths.begin(), list.paths.end(), path) > 0;
      EXPECT_EQ(result.exit_code, looks ? 1 : 0);
      int wrong = 0;
      const json compared = json::parse(result.out).at("lists");
      for (const json& entry : compared) {
        if (entry.at("ok")) continue;
        ++wrong;
        EXPECT_EQ(entry.at("tensor"), list.name);
        EXPECT_EQ(entry.at("index"), list.place);
        EXPECT_EQ(entry.at("expected"), 77);
      }
      EXPECT_EQ(wrong, looks ? 1 : 0);
      const CommandResult text = testing::octopage({"attend", file, "--path", path});
      EXPECT_EQ(text.out.find(", expected 77") != std::string::npos, looks) << text.out;
    }
  }
}

TEST(Attend, WarnsOfInvalidEntriesAndStrictRefusesThem) {
  const std::string file = kCases + "invalid_ids_skipped.safetensors";
  for (const std::string& path : kPaths) {
    SCOPED_TRACE(path);
    const CommandResult lenient = testing::octopage({"attend", file, "--path", path, "--json"});
    EXPECT_EQ(lenient.exit_code, 0);
    EXPECT_NE(
        lenient.err.find("warning: skipped entries: 12 with an invalid region (of 81 entries)"),
        std::string::npos)
        << lenient.err;
    const json object = json::parse(lenient.out);
    EXPECT_EQ(object.at("invalid_entries").at("region"), 12);
    EXPECT_EQ(object.at("status"), 1);
    const CommandResult strict =
        testing::octopage({"attend", file, "--path", path, "--strict", "--json"});
    expect_failure(strict, "row 1");
    EXPECT_EQ(json::parse(strict.out).at("error").at("code"), "invalid_entry");
  }
}

TEST(Attend, CountsInvalidOwnersAndTableEntries) {
  const TemporaryDirectory directory;
  Step step = make_synthetic_step({.rows = 6,
                                   .context = 64,
                                   .groups = 2,
                                   .heads = 2,
                                   .dim = 64,
                                   .region_count = 8,
                                   .block_size = 16});
  static_cast<int32_t*>(step.owners.data)[1] = 9;
  static_cast<int32_t*>(step.block_table.data)[0] = 1 << 20;  // regions 0 and 1 of every row
  write_step(directory / "step", step);
  const CommandResult result =
      testing::octopage({"attend", directory / "step", "--check", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const json object = json::parse(result.out);
  EXPECT_EQ(object.at("invalid_entries").at("owner"), 16);
  EXPECT_EQ(object.at("invalid_entries").at("table"), 5 * 2 * 2);
  EXPECT_EQ(object.at("status"), 2 | 4);
  EXPECT_NE(result.err.find("16 with an invalid owner, 20 with an invalid table entry"),
            std::string::npos)
      << result.err;
}

TEST(Attend, WritesWhatTheLibraryComputes) {
  const TemporaryDirectory directory;
  const std::string out = directory / "out.safetensors";
  const Step step = read_step(kCases + "odd_head_groups.safetensors");
  for (const std::string type : {"query", "f32"}) {
    const DType dtype = type == "f32" ? DType::f32 : DType::bf16;
    const CommandResult result =
        testing::octopage({"attend", kCases + "odd_head_groups.safetensors", "-o", out, "--threads",
                           "1", "--output-type", type});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(directory.names(), std::vector<std::string>{"out.safetensors"});

    std::vector<float> output(6 * 10 * 64);
    std::vector<float> lse(6 * 10);
    SparsePrefillArgs args;
    args.query = step.query;
    args.kv_cache = step.kv_cache;
    args.block_table = step.block_table;
    args.owners = step.owners;
    args.positions = step.positions;
    args.regions = step.regions;
    args.scale = step.scale;
    args.output = TensorView::contiguous(output.data(), dtype, {6, 10, 64});
    args.lse = TensorView::contiguous(lse.data(), DType::f32, {6, 10});
    sparse_prefill(args);
    const std::string bytes = testing::read_file(out);
    const TensorView written = tensor_of(bytes, "output", dtype);
    const TensorView written_lse = tensor_of(bytes, "lse", DType::f32);
    ASSERT_EQ(written.shape, args.output.shape);
    ASSERT_EQ(written_lse.shape, args.lse.shape);
    for (int64_t i = 0; i < 6 * 10 * 64; ++i) {
      ASSERT_EQ(load_f32(written.data, dtype, i), load_f32(output.data(), dtype, i)) << i;
    }
    EXPECT_EQ(std::memcmp(written_lse.data, lse.data(), lse.size() * sizeof(float)), 0);
  }
}

TEST(Attend, AStepWithoutRows) {
  const TemporaryDirectory directory;
  write_step(directory / "step", make_synthetic_step({.rows = 0, .dim = 64}));
  for (const std::string& path : kPaths) {
    const CommandResult result = testing::octopage({"attend", directory / "step", "--path", path,
                                                    "--check", "-o", directory / "out", "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const std::string bytes = testing::read_file(directory / "out");
    EXPECT_EQ(tensor_of(bytes, "output", DType::bf16).shape[0], 0);
  }
  EXPECT_EQ(testing::octopage({"info", directory / "step"}).exit_code, 0);
}

TEST(Attend, WithoutLengthsStagesWhatTheRowsNeed) {
  const TemporaryDirectory directory;
  Step step =
      make_synthetic_step({.rows = 9, .requests = 2, .context = 90, .dim = 64, .region_count = 6});
  step.lengths = {};
  write_step(directory / "step", step);
  const CommandResult result =
      testing::octopage({"attend", directory / "step", "--path", "staged", "--check"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
}

TEST(Attend, NothingToCompareWithIsSaid) {
  const TemporaryDirectory directory;
  write_step(directory / "step", make_synthetic_step({.rows = 2, .context = 64, .dim = 64}));
  const CommandResult result = testing::octopage({"attend", directory / "step"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("result     not checked"), std::string::npos);
}

TEST(Attend, BadFilesAreExitCodeTwo) {
  const TemporaryDirectory directory;
  const std::string whole = testing::read_file(kCases + "block_of_eight.safetensors");
  testing::write_file(directory / "cut", whole.substr(0, whole.size() - 1));
  testing::write_file(directory / "text", "This is not a step file.");
  for (const std::string verb : {"attend", "info"}) {
    expect_failure(testing::octopage({verb, directory / "cut"}),
                   "expected_staged_table: data_offsets");
    expect_failure(testing::octopage({verb, directory / "text"}), "header: must have at most");
    expect_failure(testing::octopage({verb, directory / "none"}), "cannot be opened");
    expect_failure(testing::octopage({verb, directory.path()}), "is a directory");
    const CommandResult result = testing::octopage({verb, directory / "cut", "--json"});
    expect_failure(result, "expected_staged_table");
    EXPECT_EQ(json::parse(result.out).at("error").at("code"), "bad_file");
  }
}

TEST(Attend, BadUsageIsExitCodeTwo) {
  const std::string file = kCases + "block_of_eight.safetensors";
  expect_failure(testing::octopage({}), "subcommand is required");
  expect_failure(testing::octopage({"attend"}), "STEP is required");
  expect_failure(testing::octopage({"attend", file, "--path", "fast"}), "fast not in");
  expect_failure(testing::octopage({"attend", file, "--threads", "-1"}), "--threads");
  expect_failure(testing::octopage({"attend", file, "--tolerance", "nan"}),
                 "--tolerance: must be a number");
  expect_failure(testing::octopage({"attend", file, "--tolerance", "-1"}),
                 "--tolerance: must be a number");
  expect_failure(testing::octopage({"attend", file, "--backend", "abacus"}), "abacus");
  expect_failure(testing::octopage({"attend", file, "--no-such-flag"}), "--no-such-flag");
  expect_failure(testing::octopage({"atend", file}), "atend: is not a verb");
  const CommandResult result = testing::octopage({"attend", "--json"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(json::parse(result.out).at("error").at("code"), "usage");
}

TEST(Attend, LeavesNoTemporaryWhereItCannotWrite) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "out");
  expect_failure(
      testing::octopage({"attend", kCases + "block_of_eight.safetensors", "-o", directory / "out"}),
      "exists and is not a regular file");
  EXPECT_EQ(directory.names(), std::vector<std::string>{"out"});
}

TEST(MakeStep, WithExpectedPassesEveryPathAndBackend) {
  for (const std::string dtype : {"bf16", "f16", "f8_e4m3fn"}) {
    const TemporaryDirectory directory;
    const std::string file = directory / "step.safetensors";
    const CommandResult made = testing::octopage({"make-step",      file,
                                                  "--rows",         "21",
                                                  "--requests",     "2",
                                                  "--context",      "300",
                                                  "--groups",       "2",
                                                  "--heads",        "8",
                                                  "--dim",          "64",
                                                  "--regions",      "20",
                                                  "--block-size",   "24",
                                                  "--kv-dtype",     dtype,
                                                  "--query-dtype",  dtype == "f16" ? "f16" : "bf16",
                                                  "--keep",         "0.8",
                                                  "--seed",         "3",
                                                  "--with-expected"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    EXPECT_EQ(directory.names(), std::vector<std::string>{"step.safetensors"});
    for (const std::string backend : {"reference", "cpu"}) {
      for (const std::string& path : kPaths) {
        SCOPED_TRACE(dtype + ", " + backend + ", " + path);
        const CommandResult result = testing::octopage(
            {"attend", file, "--backend", backend, "--path", path, "--strict", "--check"});
        EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
        EXPECT_EQ(result.out.find("expected_pages: as expected") != std::string::npos,
                  path != "direct");
      }
    }
  }
}

TEST(MakeStep, TheSameArgumentsMakeTheSameFile) {
  const TemporaryDirectory directory;
  const std::vector<std::string> flags = {"--rows", "8",  "--context", "128",
                                          "--dim",  "64", "--seed"};
  const auto make = [&](const std::string& name, const std::string& seed) {
    std::vector<std::string> args = {"make-step", directory / name};
    args.insert(args.end(), flags.begin(), flags.end());
    args.push_back(seed);
    args.push_back("--json");
    const CommandResult result = testing::octopage(args);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(json::parse(result.out).at("rows"), 8);
    return testing::read_file(directory / name);
  };
  const std::string first = make("a", "1");
  EXPECT_EQ(first, make("b", "1"));
  EXPECT_NE(first, make("c", "2"));
}

TEST(MakeStep, RefusesWhatCannotBe) {
  const TemporaryDirectory directory;
  const std::string file = directory / "step";
  expect_failure(testing::octopage({"make-step", file, "--heads", "7", "--groups", "2"}),
                 "heads: must be a multiple");
  expect_failure(testing::octopage({"make-step", file, "--keep", "2"}), "--keep: must be 0 .. 1");
  expect_failure(testing::octopage({"make-step", file, "--rows", "many"}), "--rows");
  expect_failure(testing::octopage({"make-step", file, "--kv-dtype", "f32"}), "--kv-dtype");
  expect_failure(testing::octopage(
                     {"make-step", directory / "none" / "step", "--rows", "1", "--context", "8"}),
                 "cannot be written");
  EXPECT_TRUE(directory.names().empty());
}

TEST(MakeStep, EveryNumberIsChecked) {
  struct Bad {
    std::vector<std::string> flags;
    std::string message;
  };
  const std::string sizes = "must be a whole number 1 .. 2147483647, is ";
  const std::string counts = "must be a whole number 0 .. 2147483647, is ";
  std::vector<Bad> all;
  for (const std::string flag :
       {"--requests", "--context", "--groups", "--heads", "--dim", "--block-size"}) {
    all.push_back({{flag, "0"}, flag + ": " + sizes + "0"});
  }
  for (const std::string flag : {"--rows", "--regions", "--sink", "--local"}) {
    for (const std::string value :
         {"-1", "2147483648", "99999999999999999999", "010", "0x10", "1.5", "1e3", "", " 1"}) {
      all.push_back({{flag, value}, flag + ": " + counts + (value.empty() ? "empty" : value)});
    }
  }
  for (const std::string value : {"-1", "18446744073709551616", "x"}) {
    all.push_back({{"--seed", value},
                   "--seed: must be a whole number 0 .. 18446744073709551615, is " + value});
  }
  for (const std::string value : {"-0.1", "1.0001", "nan", "inf", "1e400", "half", ""}) {
    all.push_back(
        {{"--keep", value}, "--keep: must be 0 .. 1, is " + (value.empty() ? "empty" : value)});
  }
  all.push_back({{"--block-size", "12"}, "block_size: must be a multiple of 8, is 12"});
  all.push_back(
      {{"--heads", "7", "--groups", "2"}, "heads: must be a multiple of groups = 2, is 7"});
  all.push_back({{"--rows", "5000"}, "context: must hold the 5000 rows of a request, is 4096"});
  // Each number may be; together they are more than any machine or than 64 bits hold.
  all.push_back({{"--rows", "2147483647", "--heads", "2147483647", "--context", "2147483647"},
                 "--rows, --heads, --dim: the step must fit into this machine's memory"});
  all.push_back({{"--groups", "2147483647", "--heads", "2147483647", "--dim", "2147483647",
                  "--requests", "2147483647", "--context", "2147483647"},
                 "kv_cache alone has"});
  all.push_back({{"--rows", "2147483647", "--context", "2147483647", "--regions", "2147483647",
                  "--heads", "1", "--dim", "1"},
                 "--rows, --groups, --regions: the step must fit"});
  const TemporaryDirectory directory;
  for (const Bad& bad : all) {
    std::vector<std::string> args = {"make-step", directory / "step"};
    args.insert(args.end(), bad.flags.begin(), bad.flags.end());
    expect_failure(testing::octopage(args), bad.message);
    EXPECT_TRUE(directory.names().empty()) << bad.message;
  }
  EXPECT_EQ(
      testing::octopage({"make-step", directory / "step", "--rows", "0", "--regions", "0", "--dim",
                         "8", "--keep", "0", "--context", "1", "--seed", "18446744073709551615"})
          .exit_code,
      0);
}

TEST(Output, WhatCannotBeWrittenIsAnError) {
  const std::string file = kCases + "block_of_eight.safetensors";
  const std::vector<std::vector<std::string>> commands = {
      {"attend", file}, {"attend", file, "--json"}, {"info", file}, {"info", file, "--json"},
      {"backends"},     {"completion", "bash"},     {"--help"},     {"info", "--help"},
      {"--version"},
  };
  for (const std::vector<std::string>& command : commands) {
    for (const auto& [to, reason] : {std::pair{testing::Stdout::full, "No space left on device"},
                                     std::pair{testing::Stdout::closed, "Bad file descriptor"},
                                     std::pair{testing::Stdout::broken_pipe, "Broken pipe"}}) {
      SCOPED_TRACE(command.front() + ", " + reason);
      expect_failure(testing::octopage(command, to),
                     std::string("standard output: cannot be written, ") + reason);
    }
  }
  // A failure keeps its own message where its JSON object cannot be written.
  expect_failure(testing::octopage({"info", kCases + "none", "--json"}, testing::Stdout::full),
                 "cannot be opened");
}

TEST(Output, AClosedStdoutIsNotTheFileThatIsWritten) {
  const TemporaryDirectory directory;
  const std::string file = kCases + "block_of_eight.safetensors";
  ASSERT_EQ(testing::octopage({"attend", file, "-o", directory / "kept"}).exit_code, 0);
  EXPECT_EQ(testing::octopage({"attend", file, "-o", directory / "closed"}, testing::Stdout::closed)
                .exit_code,
            2);
  EXPECT_EQ(testing::read_file(directory / "kept"), testing::read_file(directory / "closed"));
}

TEST(Output, AFileSizeLimitLeavesNothingBehind) {
  const TemporaryDirectory directory;
  CommandResult made, attended;
  {
    const testing::FileSizeLimit limit(4096);
    made = testing::octopage({"make-step", directory / "step", "--rows", "4", "--context", "256"});
    attended =
        testing::octopage({"attend", kCases + "four_groups.safetensors", "-o", directory / "out"});
  }
  expect_failure(made, "cannot be written, File too large");
  expect_failure(attended, "cannot be written, File too large");
  EXPECT_TRUE(directory.names().empty());
}

TEST(Output, AnEmptyFileNameIsRefused) {
  expect_failure(testing::octopage({"attend", kCases + "block_of_eight.safetensors", "-o", ""}),
                 "-o: must be a file name, is empty");
  expect_failure(testing::octopage({"make-step", ""}), "OUT: must be a file name, is empty");
}

TEST(Info, TellsShapesSharingAndFragmentation) {
  const TemporaryDirectory directory;
  write_step(directory / "step", make_synthetic_step({.rows = 32,
                                                      .requests = 2,
                                                      .context = 4096,
                                                      .groups = 2,
                                                      .heads = 4,
                                                      .dim = 64,
                                                      .region_count = 64,
                                                      .block_size = 64,
                                                      .keep = 0.9}));
  const CommandResult result = testing::octopage({"info", directory / "step", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json object = json::parse(result.out);
  EXPECT_EQ(object.at("tensors").at("query").at("shape"), json({32, 4, 64}));
  EXPECT_EQ(object.at("tensors").at("kv_cache").at("dtype"), "bf16");
  EXPECT_EQ(object.at("token_bytes"), 2 * 64 * 2 * 2);
  EXPECT_EQ(object.at("requests").size(), 2u);
  EXPECT_EQ(object.at("requests").at(0).at("length"), 4096);
  EXPECT_EQ(object.at("requests").at(0).at("blocks"), 64);
  EXPECT_EQ(object.at("requests").at(1).at("rows"), 16);
  EXPECT_EQ(object.at("fragmentation").at("neighbouring_blocks"), 126);
  EXPECT_EQ(object.at("selections").at("entries"), 32 * 2 * 64);
  EXPECT_EQ(object.at("selections").at("invalid"), 0);
  // 54 of 64 regions are free to move, a tenth of them does.
  EXPECT_NEAR(object.at("selections").at("neighbour_overlap").get<double>(), 1 - 0.1 * 54 / 64,
              0.03);
  const json& unions = object.at("selections").at("union_factors");
  ASSERT_EQ(unions.size(), 4u);
  double before = 1;
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(unions.at(i).at("rows"), 2 << i);
    EXPECT_GT(unions.at(i).at("factor").get<double>(), before);
    before = unions.at(i).at("factor").get<double>();
  }
  const CommandResult text = testing::octopage({"info", directory / "step"});
  EXPECT_NE(text.out.find("union of neighbouring rows"), std::string::npos);
  EXPECT_NE(text.out.find("[32, 4, 64]"), std::string::npos);
}

TEST(Info, CountsRunsOfAdjacentBlocks) {
  const TemporaryDirectory directory;
  Step step = make_synthetic_step(
      {.rows = 1, .context = 48, .dim = 64, .region_count = 1, .block_size = 8});
  const std::vector<int32_t> blocks = {2, 3, 4, 0, 1, 5, -1};  // three runs
  std::copy(blocks.begin(), blocks.end(), static_cast<int32_t*>(step.block_table.data));
  write_step(directory / "step", step);
  const json object = json::parse(testing::octopage({"info", directory / "step", "--json"}).out);
  EXPECT_EQ(object.at("fragmentation").at("runs"), 3);
  EXPECT_EQ(object.at("fragmentation").at("adjacent"), 3);
  EXPECT_EQ(object.at("fragmentation").at("neighbouring_blocks"), 5);
}

TEST(Inspect, WritesPagePictureAndNumbers) {
  const TemporaryDirectory directory;
  const std::string file = kCases + "invalid_ids_skipped.safetensors";
  const CommandResult result =
      testing::octopage({"inspect", file, "-o", directory / "page", "--png", directory / "png",
                         "--json", directory / "json", "--memory-tbps", "3"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("warning: 12 of 81 entries"), std::string::npos) << result.err;
  EXPECT_EQ(testing::read_file(directory / "page").rfind("<!doctype html>", 0), 0u);
  EXPECT_EQ(testing::read_file(directory / "png").substr(1, 3), "PNG");
  const json object = json::parse(testing::read_file(directory / "json"));
  EXPECT_EQ(object.at("entries").at("invalid_region"), 12);
  EXPECT_EQ(object.at("roofs").at("memory_bytes_per_second"), 3e12);
  const json info = json::parse(testing::octopage({"info", file, "--json"}).out);
  EXPECT_EQ(object.at("sharing").at("neighbour_overlap").at("share"),
            info.at("selections").at("neighbour_overlap"));
}

TEST(Inspect, RefusesWhatCannotBe) {
  const TemporaryDirectory directory;
  const std::string file = kCases + "four_groups.safetensors";
  const std::string out = directory / "out";
  expect_failure(testing::octopage({"inspect", file}), "one of -o, --png and --json is required");
  expect_failure(testing::octopage({"inspect", file, "-o", ""}), "-o: must be a file name");
  expect_failure(testing::octopage({"inspect", file, "--png", ""}), "--png: must be a file name");
  expect_failure(testing::octopage({"inspect", file, "-o", out, "--png", out}),
                 "--png: must differ from -o");
  expect_failure(testing::octopage({"inspect", file, "-o", file}), "must not be the step file");
  expect_failure(testing::octopage({"inspect", file, "-o", out, "--group", "4"}),
                 "--group: must be below the step's 4 groups, is 4");
  expect_failure(testing::octopage({"inspect", file, "-o", out, "--group", "-1"}), "--group");
  expect_failure(testing::octopage({"inspect", file, "-o", out, "--card", "abacus"}),
                 "--card: must be nvidia-h200, is abacus");
  for (const std::string value : {"-1", "nan", "inf"}) {
    expect_failure(testing::octopage({"inspect", file, "-o", out, "--gather-tbps", value}),
                   "--gather-tbps: must be a positive number, 1e-6 to 1e9, is " + value);
  }
  expect_failure(testing::octopage({"inspect", directory / "none", "-o", out}), "cannot be opened");
  CommandResult limited;
  {
    const testing::FileSizeLimit limit(4096);
    limited = testing::octopage({"inspect", file, "-o", out});
  }
  expect_failure(limited, "cannot be written, File too large");
  EXPECT_TRUE(directory.names().empty());
}

TEST(Backends, ListsAllWithReasons) {
  const json object = json::parse(testing::octopage({"backends", "--json"}).out);
  std::vector<std::string> names;
  for (const json& backend : object.at("backends")) {
    names.push_back(backend.at("name"));
    EXPECT_EQ(backend.at("available").get<bool>(), backend.at("reason") == "");
  }
  EXPECT_EQ(std::count(names.begin(), names.end(), "cpu"), 1);
  EXPECT_EQ(std::count(names.begin(), names.end(), "reference"), 1);
  const CommandResult text = testing::octopage({"backends"});
  EXPECT_EQ(text.exit_code, 0);
  for (const std::string& name : names) EXPECT_NE(text.out.find(name), std::string::npos);
}

TEST(Help, EveryVerbHasExamples) {
  for (const std::string verb :
       {"attend", "make-step", "info", "inspect", "bench", "backends", "completion"}) {
    const CommandResult result = testing::octopage({verb, "--help"});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_NE(result.out.find("Examples:"), std::string::npos);
    EXPECT_NE(result.out.find("octopage " + verb), std::string::npos);
    EXPECT_NE(result.out.find("--json"), std::string::npos);
  }
  EXPECT_EQ(testing::octopage({"--help"}).exit_code, 0);
  const CommandResult version = testing::octopage({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out, "octopage " OCTOPAGE_VERSION_STRING "\n");
}

TEST(Completion, KnowsEveryFlag) {
  const CommandResult script = testing::octopage({"completion", "bash"});
  EXPECT_EQ(script.exit_code, 0);
  EXPECT_EQ(json::parse(testing::octopage({"completion", "bash", "--json"}).out).at("script"),
            script.out);
  for (const std::string verb : {"attend", "make-step", "info", "inspect", "bench", "backends"}) {
    EXPECT_NE(script.out.find(verb), std::string::npos);
    const std::string help = testing::octopage({verb, "--help"}).out;
    for (size_t place = help.find("\n  --"); place != std::string::npos;
         place = help.find("\n  --", place + 1)) {
      const size_t begin = place + 3;
      const std::string flag = help.substr(begin, help.find_first_of(" :\n", begin) - begin);
      EXPECT_NE(script.out.find(flag), std::string::npos) << verb << " " << flag;
    }
  }
  expect_failure(testing::octopage({"completion", "fish"}), "fish not in");
}

TEST(Example, ShippedStepPasses) {
  const std::string file = OCTOPAGE_TEST_EXAMPLES "/step.safetensors";
  for (const std::string& path : kPaths) {
    const CommandResult result =
        testing::octopage({"attend", file, "--check", "--strict", "--path", path});
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  }
  EXPECT_LT(std::filesystem::file_size(file), 600000u);
}

}  // namespace
}  // namespace octopage
