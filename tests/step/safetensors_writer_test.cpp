#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>
#include <string>
#include <vector>

#include "octopage/error.hpp"
#include "small_step.hpp"
#include "step/step_file.hpp"
#include "temporary_directory.hpp"

namespace octopage {
namespace {

using testing::SmallStep;
using testing::TemporaryDirectory;

Step small_step() {
  const std::string bytes = SmallStep().bytes();
  return parse_step(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), "f");
}

void expect_same(const char* name, const TensorView& a, const TensorView& b) {
  SCOPED_TRACE(name);
  ASSERT_EQ(a.rank, b.rank);
  if (!a.present()) return;
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.shape, b.shape);
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.size() * itemsize(a.dtype))), 0);
}

void expect_same(const Step& a, const Step& b) {
  expect_same("query", a.query, b.query);
  expect_same("kv_cache", a.kv_cache, b.kv_cache);
  expect_same("block_table", a.block_table, b.block_table);
  expect_same("owners", a.owners, b.owners);
  expect_same("positions", a.positions, b.positions);
  expect_same("regions", a.regions, b.regions);
  expect_same("lengths", a.lengths, b.lengths);
  expect_same("expected_output", a.expected_output, b.expected_output);
  expect_same("expected_lse", a.expected_lse, b.expected_lse);
  expect_same("expected_indptr", a.expected_indptr, b.expected_indptr);
  expect_same("expected_last_page_len", a.expected_last_page_len, b.expected_last_page_len);
  expect_same("expected_pages", a.expected_pages, b.expected_pages);
  expect_same("expected_staged_blocks", a.expected_staged_blocks, b.expected_staged_blocks);
  expect_same("expected_staged_table", a.expected_staged_table, b.expected_staged_table);
  EXPECT_EQ(a.scale, b.scale);
  EXPECT_EQ(a.k_scale, b.k_scale);
  EXPECT_EQ(a.v_scale, b.v_scale);
}

/// The message of the error that writing ends in.
std::string write_refusal(const std::filesystem::path& path, const Step& step) {
  try {
    write_step(path, step);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_file);
    return error.what();
  }
  ADD_FAILURE() << "the file was written";
  return "";
}

TEST(SafetensorsWriter, RoundTripOfEveryCase) {
  const TemporaryDirectory directory;
  for (const auto& entry : std::filesystem::directory_iterator(OCTOPAGE_TEST_CASES)) {
    if (entry.path().extension() != ".safetensors") continue;
    SCOPED_TRACE(entry.path().string());
    const Step step = read_step(entry.path());
    write_step(directory / "copy", step);
    const Step copy = read_step(directory / "copy");
    expect_same(step, copy);
    EXPECT_TRUE(copy.notes.empty());
  }
  EXPECT_EQ(directory.names(), std::vector<std::string>{"copy"});
}

TEST(SafetensorsWriter, DataBeginsAlignedWithTheCache) {
  const TemporaryDirectory directory;
  write_step(directory / "step", small_step());
  const std::string bytes = testing::read_file(directory / "step");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ((8 + length) % 16, 0u);
  EXPECT_NE(bytes.find(R"("kv_cache":{"dtype":"BF16","shape":[2,1,8,16],"data_offsets":[0,512]})"),
            std::string::npos);
}

TEST(SafetensorsWriter, ScalesKeepTheirBits) {
  const TemporaryDirectory directory;
  Step step = small_step();
  for (const float scale :
       {0.1f, 1.0f / 3.0f, 0.07216878364870323f, 1e-38f, 3.4028235e38f, -7.0f}) {
    step.scale = scale;
    step.k_scale = scale / 2;
    write_step(directory / "step", step);
    EXPECT_EQ(read_step(directory / "step").scale, scale);
    EXPECT_EQ(read_step(directory / "step").k_scale, scale / 2);
  }
}

TEST(SafetensorsWriter, AStepWithoutRows) {
  SmallStep file;
  file.header = file.header.substr(0, file.header.find(R"("query")")) +
                R"("query":{"dtype":"F16","shape":[0,2,8],"data_offsets":[0,0]},)"
                R"("kv_cache":{"dtype":"F16","shape":[0,1,8,16],"data_offsets":[0,0]},)"
                R"("block_table":{"dtype":"I32","shape":[0,0],"data_offsets":[0,0]},)"
                R"("owners":{"dtype":"I32","shape":[0],"data_offsets":[0,0]},)"
                R"("positions":{"dtype":"I64","shape":[0],"data_offsets":[0,0]},)"
                R"("regions":{"dtype":"I32","shape":[0,0],"data_offsets":[0,0]}})";
  file.data.clear();
  const std::string bytes = file.bytes();
  const Step step = parse_step(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), "f");
  EXPECT_EQ(step.rows(), 0);
  EXPECT_EQ(step.region_count(), 0);
  const TemporaryDirectory directory;
  write_step(directory / "step", step);
  expect_same(step, read_step(directory / "step"));
}

TEST(SafetensorsWriter, ReplacesAFileAndKeepsItsOldMappingIntact) {
  const TemporaryDirectory directory;
  const auto path = directory / "step";
  Step step = small_step();
  write_step(path, step);
  const Step old = read_step(path);
  step.scale = 8.0f;
  write_step(path, step);
  EXPECT_EQ(read_step(path).scale, 8.0f);
  expect_same("kv_cache", old.kv_cache, step.kv_cache);
  EXPECT_EQ(directory.names(), std::vector<std::string>{"step"});
}

TEST(SafetensorsWriter, LeavesNothingBehindWhenTheTargetCannotBe) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "target");
  EXPECT_EQ(write_refusal(directory / "target", small_step()),
            (directory / "target").string() +
                ": file: cannot be written, exists and is not a regular file");
  EXPECT_EQ(write_refusal(directory / "none" / "step", small_step()),
            (directory / "none" / "step").string() +
                ": file: cannot be written, No such file or directory");
  EXPECT_EQ(directory.names(), std::vector<std::string>{"target"});
}

TEST(SafetensorsWriter, LeavesTheOldFileWhenWritingBreaksOff) {
  const TemporaryDirectory directory;
  const auto path = directory / "step";
  write_step(path, small_step());
  const std::string before = testing::read_file(path);

  // Writing past the limit fails as a full disk does.
  rlimit old_limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit limit = {1500, old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string message = write_refusal(path, small_step());
  setrlimit(RLIMIT_FSIZE, &old_limit);
  signal(SIGXFSZ, old_handler);

  EXPECT_EQ(message, path.string() + ": file: cannot be written, File too large");
  EXPECT_EQ(testing::read_file(path), before);
  EXPECT_EQ(directory.names(), std::vector<std::string>{"step"});
}

TEST(SafetensorsWriter, RefusesWhatItCannotWrite) {
  const TemporaryDirectory directory;
  const float values[4] = {};
  const TensorView tensor = TensorView::contiguous(values, DType::f32, {2, 2});
  TensorView strided = tensor;
  strided.strides = {1, 2};
  const auto code_of = [&](const std::vector<std::pair<std::string, TensorView>>& tensors) {
    try {
      write_safetensors(directory / "file", tensors, {});
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{};
  };
  EXPECT_EQ(code_of({{"a", tensor}, {"a", tensor}}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of({{"", tensor}}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of({{"__metadata__", tensor}}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of({{"a\xff", tensor}}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of({{"a", strided}}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of({{"a", TensorView{}}}), ErrorCode::invalid_argument);
  EXPECT_TRUE(directory.names().empty());
}

}  // namespace
}  // namespace octopage
