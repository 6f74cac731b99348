#include "step/step_file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "octopage/error.hpp"
#include "small_step.hpp"
#include "temporary_directory.hpp"

namespace octopage {
namespace {

using testing::SmallStep;
using testing::TemporaryDirectory;

Step parse(const std::string& bytes) {
  return parse_step(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), "f");
}

/// The message of the bad_file error that parsing ends in; fails the test if there is none.
std::string refusal(const std::string& bytes) {
  try {
    parse(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_file);
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos);
    return message;
  }
  ADD_FAILURE() << "the file was taken";
  return "";
}

TEST(StepFile, ReadsAValidFile) {
  const Step step = parse(SmallStep().bytes());
  EXPECT_EQ(step.rows(), 2);
  EXPECT_EQ(step.heads(), 2);
  EXPECT_EQ(step.dim(), 8);
  EXPECT_EQ(step.groups(), 1);
  EXPECT_EQ(step.block_size(), 8);
  EXPECT_EQ(step.requests(), 1);
  EXPECT_EQ(step.region_count(), 2);
  EXPECT_EQ(step.scale, 0.25f);
  EXPECT_EQ(step.k_scale, 0.5f);
  EXPECT_EQ(step.v_scale, 2.0f);
  EXPECT_EQ(step.query.dtype, DType::bf16);
  EXPECT_EQ(static_cast<const int32_t*>(step.positions.data)[1], 9);
  EXPECT_EQ(static_cast<const int32_t*>(step.expected_indptr.data)[2], 3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(step.kv_cache.data) % 16, 0u);
  EXPECT_TRUE(step.notes.empty());
}

TEST(StepFile, TensorsOutliveTheBytes) {
  Step step;
  {
    std::string bytes = SmallStep().bytes();
    step = parse(bytes);
    bytes.assign(bytes.size(), 'x');
  }
  EXPECT_EQ(static_cast<const int32_t*>(step.positions.data)[0], 3);
}

struct HeaderMutation {
  std::string from;
  std::string to;
  std::string message;
};

/// Breaks the small file's header in one place at a time and compares the whole message.
void expect_refusals(const std::vector<HeaderMutation>& mutations) {
  for (const HeaderMutation& mutation : mutations) {
    SCOPED_TRACE(mutation.from + " -> " + mutation.to);
    SmallStep file;
    file.replace(mutation.from, mutation.to);
    EXPECT_EQ(refusal(file.bytes()), "f: " + mutation.message);
  }
}

const std::string kQuery = R"("query":{"dtype":"BF16","shape":[2,2,8],"data_offsets":[0,64]})";
const std::string kCache =
    R"("kv_cache":{"dtype":"BF16","shape":[2,1,8,16],"data_offsets":[64,576]})";

TEST(StepFile, RefusesWhatIsNotTheJsonOfAHeader) {
  const auto length = static_cast<int>(SmallStep().header.size());
  const auto breaks_at = [](int byte) {
    return "header: must be JSON, breaks at byte " + std::to_string(byte);
  };
  expect_refusals({
      {"[804,812]}}", "[804,812]}", breaks_at(length)},
      {"[804,812]}}", "[804,812]}}x", breaks_at(length + 1)},
      {"[804,812]}}", "[804,812]}}{}", breaks_at(length + 1)},
      {"[804,812]}}", "[804,812]]}", breaks_at(length - 1)},
      {R"({"__meta)", R"( {"__meta)", "header: must begin with '{', begins with byte 32"},
      {R"({"__meta)", R"([{"__meta)", "header: must begin with '{', begins with byte 91"},
      {R"("owners":)", R"("positions":)",
       "positions: must appear once in the header, appears again"},
      {R"("format":"octopage-step-1",)", R"("k_scale":"1",)",
       "__metadata__: k_scale must appear once, appears again"},
      {kQuery, R"("query":{"dtype":"BF16","dtype":"BF16"})",
       "query: dtype must appear once, appears again"},
      {kQuery, R"("query":{"shape":[1],"shape":[1]})",
       "query: shape must appear once, appears again"},
      {kQuery, R"("query":{"shape":[2,2,8],"data_offsets":[0,64]})",
       "query: dtype is required, is missing"},
      {kQuery, R"("query":{"dtype":"BF16","data_offsets":[0,64]})",
       "query: shape is required, is missing"},
      {kQuery, R"("query":{"dtype":"BF16","shape":[2,2,8]})",
       "query: data_offsets is required, is missing"},
      {kQuery, R"("query":{"dtype":"BF16","strides":[1]})",
       "query: keys must be dtype, shape and data_offsets, has strides"},
      {kQuery, R"("query":{"dtype":7})", "query: dtype must be a string, is 7"},
      {kQuery, R"("query":[])", "query: must be an object, is an array"},
      {kQuery, R"("query":"here")", "query: must be an object, is \"here\""},
      {"[2,1,8,16]", "[2,1,8,-16]", "kv_cache: shape must hold whole numbers from 0, has -16"},
      {"[2,1,8,16]", "[2,1,8,16.0]", "kv_cache: shape must hold whole numbers from 0, has 16.0"},
      {"[2,1,8,16]", "[2,1,8,\"16\"]",
       "kv_cache: shape must hold whole numbers from 0, has \"16\""},
      {"[2,1,8,16]", "[2,1,8,[16]]",
       "kv_cache: shape must hold whole numbers from 0, has an array"},
      {"[2,1,8,16]", "[2,1,8,{}]", "kv_cache: shape must hold whole numbers from 0, has an object"},
      {"[2,1,8,16]", "[2,1,8,null]", "kv_cache: shape must hold whole numbers from 0, has null"},
      {"[2,1,8,16]", "{}", "kv_cache: shape must be an array, is an object"},
      {"[2,1,8,16]", "true", "kv_cache: shape must be an array, is a boolean"},
      {"[2,1,8,16]", "[1,1,1,1,1,1,1,1,1]",
       "kv_cache: shape must have at most 8 dimensions, has more"},
      {"[2,1,8,16]", "[9223372036854775808]",
       "kv_cache: shape must fit 63 bits, has 9223372036854775808"},
      {"[2,1,8,16]", "[99999999999999999999]",
       "kv_cache: shape must hold whole numbers from 0, has 99999999999999999999"},
      {"[64,576]", "[64]", "kv_cache: data_offsets must be two numbers, are 1"},
      {"[64,576]", "[64,576,576]", "kv_cache: data_offsets must be two numbers, are more"},
      {"[64,576]", "[-64,576]", "kv_cache: data_offsets must hold whole numbers from 0, has -64"},
      {"[64,576]", "64", "kv_cache: data_offsets must be an array, is 64"},
      {R"("scale":"0.25")", R"("scale":0.25)", "__metadata__: scale must be a string, is 0.25"},
      {R"("scale":"0.25")", R"("scale":{})", "__metadata__: scale must be a string, is an object"},
      {R"("scale":"0.25")", R"("scale":[)" + std::string(100000, '['),
       "__metadata__: scale must be a string, is an array"},
      {R"("owners":{"dtype":"I32")", R"("own\u0007\ners":{"dtype":"X")",
       "own\\x07\\x0aers: dtype must be one of the format, is X"},
      {R"("owners":)", "\"" + std::string(257, 'o') + "\":",
       std::string(64, 'o') + "...: name must have at most 256 bytes, has 257"},
  });
}

TEST(StepFile, RefusesAZeroByteInTheHeader) {
  SmallStep file;
  const size_t length = file.header.size();
  file.header += std::string("\0{}", 3);
  EXPECT_EQ(refusal(file.bytes()),
            "f: header: must hold no zero byte, has one at byte " + std::to_string(length));
}

TEST(StepFile, RefusesInvalidUtf8) {
  SmallStep file;
  file.replace("\"owners\":", "\"own\xff\":");
  EXPECT_NE(refusal(file.bytes()).find("f: header: must be JSON"), std::string::npos);
}

TEST(StepFile, RefusesTooManyTensors) {
  SmallStep file;
  std::string more;
  for (int i = 0; i < 4096; ++i) {
    more += "\"t" + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
  }
  file.replace("\"query\":", more + "\"query\":");
  EXPECT_EQ(refusal(file.bytes()), "f: header: must name at most 4096 tensors, names more");
}

TEST(StepFile, RefusesAWrongHeaderLength) {
  const auto with_length = [](uint64_t length) {
    return SmallStep::length_prefix(length) + SmallStep().bytes().substr(8);
  };
  const std::string size = std::to_string(SmallStep().bytes().size());
  EXPECT_EQ(refusal(""), "f: header: must begin with 8 bytes of length, the file has 0 bytes");
  EXPECT_EQ(refusal("1234567"),
            "f: header: must begin with 8 bytes of length, the file has 7 bytes");
  EXPECT_EQ(refusal(with_length(0)), "f: header: must begin with '{', is empty");
  EXPECT_EQ(refusal(with_length(1 << 20)),
            "f: header: must end inside the file of " + size + " bytes, says 1048576 bytes");
  EXPECT_EQ(refusal(with_length((uint64_t{64} << 20) + 1)),
            "f: header: must have at most 67108864 bytes, says 67108865");
  EXPECT_EQ(refusal(with_length(~uint64_t{0})),
            "f: header: must have at most 67108864 bytes, says 18446744073709551615");
}

TEST(StepFile, RefusesAWrongLayout) {
  expect_refusals({
      {kQuery, R"("query":{"dtype":"BF17","shape":[2,2,8],"data_offsets":[0,64]})",
       "query: dtype must be one of the format, is BF17"},
      {"[64,576]", "[576,64]", "kv_cache: data_offsets must not fall, are [576, 64]"},
      {"[64,576]", "[64,575]",
       "kv_cache: [2, 1, 8, 16] of BF16 must take 512 bytes, data_offsets hold 511"},
      {"[2,1,8,16]", "[2,1,8,15]",
       "kv_cache: [2, 1, 8, 15] of BF16 must take 480 bytes, data_offsets hold 512"},
      {"[804,812]", "[804,813]",
       "expected_staged_table: data_offsets must end inside the data of 812 bytes, end at 813"},
      {"[804,812]", "[804,18446744073709551615]",
       "expected_staged_table: data_offsets must end inside the data of 812 bytes, end at "
       "18446744073709551615"},
      {"[2,1,8,16]", "[4294967296,4294967296,8,16]",
       "kv_cache: bytes of the shape must fit 63 bits, [4294967296, 4294967296, 8, 16] of BF16 do "
       "not"},
      {"[2,1,8,16]", "[4294967296,4294967296,0,16]",
       "kv_cache: bytes of the shape must fit 63 bits, [4294967296, 4294967296, 0, 16] of BF16 do "
       "not"},
      {"[796,804]", "[788,796]",
       "expected_staged_blocks: must begin where the tensor before it ends, at 796, overlaps it at "
       "788"},
      {"[0,64]", "[64,128]",
       "query: must begin where the tensor before it ends, at 0, leaves a hole at 64"},
      {R"("lengths":{"dtype":"I32","shape":[1],"data_offsets":[616,620]},)", "",
       "expected_output: must begin where the tensor before it ends, at 616, leaves a hole at 620"},
  });
  SmallStep file;
  file.data += "x";
  EXPECT_EQ(refusal(file.bytes()),
            "f: header: tensors must cover the data of 813 bytes, cover 812");
}

TEST(StepFile, RefusesWrongMetadata) {
  const std::string not_a_scale = "scale must be a finite decimal number of 32 bits, is ";
  expect_refusals({
      {R"("format":"octopage-step-1",)", "",
       "__metadata__: format must be octopage-step-1, is missing"},
      {"octopage-step-1", "octopage-step-2",
       "__metadata__: format must be octopage-step-1, is octopage-step-2"},
      {R"("scale":"0.25",)", "", "__metadata__: scale is required, is missing"},
      {"\"0.25\"", "\"0.25 \"", "__metadata__: " + not_a_scale + "\"0.25 \""},
      {"\"0.25\"", "\" 0.25\"", "__metadata__: " + not_a_scale + "\" 0.25\""},
      {"\"0.25\"", "\"+0.25\"", "__metadata__: " + not_a_scale + "\"+0.25\""},
      {"\"0.25\"", "\"0,25\"", "__metadata__: " + not_a_scale + "\"0,25\""},
      {"\"0.25\"", "\"0x1p-2\"", "__metadata__: " + not_a_scale + "\"0x1p-2\""},
      {"\"0.25\"", "\"\"", "__metadata__: " + not_a_scale + "\"\""},
      {"\"0.25\"", "\"nan\"", "__metadata__: " + not_a_scale + "\"nan\""},
      {"\"0.25\"", "\"-inf\"", "__metadata__: " + not_a_scale + "\"-inf\""},
      {"\"0.25\"", "\"1e39\"", "__metadata__: " + not_a_scale + "\"1e39\""},
      {"\"0.5\"", "\"half\"", "__metadata__: k_" + not_a_scale + "\"half\""},
      {R"("v_scale":"2")", R"("v_scale":"2..")", "__metadata__: v_" + not_a_scale + "\"2..\""},
  });
}

TEST(StepFile, AnF8CacheNeedsItsScales) {
  const std::string f8 =
      R"("kv_cache":{"dtype":"F8_E4M3","shape":[4,1,8,16],"data_offsets":[64,576]})";
  for (const std::string scale : {"k_scale", "v_scale"}) {
    SmallStep file;
    file.replace("\"" + scale + "\"", "\"x\"");
    EXPECT_NO_THROW(parse(file.bytes()));
    file.replace(kCache, f8);
    EXPECT_EQ(refusal(file.bytes()), "f: __metadata__: " + scale + " is required, is missing");
  }
}

TEST(StepFile, RefusesWrongTypesAndShapes) {
  const auto tensor = [](const std::string& name, const std::string& dtype,
                         const std::string& shape, const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape +
           R"(,"data_offsets":)" + offsets + "}";
  };
  const auto query = [&](const std::string& dtype, const std::string& shape) {
    return tensor("query", dtype, shape, "[0,64]");
  };
  const auto cache = [&](const std::string& dtype, const std::string& shape) {
    return tensor("kv_cache", dtype, shape, "[64,576]");
  };
  expect_refusals({
      {"\"query\"", "\"queries\"", "query: is required, is missing"},
      {"\"kv_cache\"", "\"cache\"", "kv_cache: is required, is missing"},
      {"\"block_table\"", "\"table\"", "block_table: is required, is missing"},
      {"\"owners\"", "\"owner\"", "owners: is required, is missing"},
      {"\"positions\"", "\"position\"", "positions: is required, is missing"},
      {"\"regions\"", "\"region\"", "regions: is required, is missing"},
      {kQuery, query("I16", "[2,2,8]"), "query: dtype must be BF16 or F16, is I16"},
      {kQuery, query("F32", "[2,2,4]"), "query: dtype must be BF16 or F16, is F32"},
      {kQuery, query("BF16", "[4,8]"), "query: must have shape [rows, heads, dim], has [4, 8]"},
      {kQuery, query("BF16", "[1,2,2,1,8]"), "query: must have 1 to 4 dimensions, has 5"},
      {kCache, cache("F32", "[2,1,8,8]"), "kv_cache: dtype must be BF16 or F16 or F8_E4M3, is F32"},
      {kCache, cache("U8", "[2,1,8,32]"), "kv_cache: dtype must be BF16 or F16 or F8_E4M3, is U8"},
      {kCache, cache("BF16", "[2,8,16]"),
       "kv_cache: must have shape [blocks, groups, block_size, 2*dim], has [2, 8, 16]"},
      {kCache, cache("BF16", "[1,4,4,16]"),
       "kv_cache: groups must divide the 2 heads of query, are 4"},
      {kCache, cache("BF16", "[4,1,4,16]"),
       "kv_cache: block_size must be a positive multiple of 8, is 4"},
      {kCache, cache("BF16", "[1,1,12,16]"),
       "kv_cache: [1, 1, 12, 16] of BF16 must take 384 bytes, data_offsets hold 512"},
      {kCache, cache("BF16", "[1,1,8,32]"), "kv_cache: last dimension must be 2 * dim = 16, is 32"},
      {R"("block_table":{"dtype":"I32","shape":[1,2])",
       R"("block_table":{"dtype":"F32","shape":[1,2])", "block_table: dtype must be I32, is F32"},
      {R"("block_table":{"dtype":"I32","shape":[1,2])",
       R"("block_table":{"dtype":"I32","shape":[2])",
       "block_table: must have shape [requests, max_blocks], has [2]"},
      {R"("owners":{"dtype":"I32","shape":[2])", R"("owners":{"dtype":"I32","shape":[1,2])",
       "owners: must have shape [rows] = [2], has [1, 2]"},
      {R"("owners":{"dtype":"I32","shape":[2])", R"("owners":{"dtype":"I64","shape":[1])",
       "owners: dtype must be I32, is I64"},
      {R"("positions":{"dtype":"I32","shape":[2])", R"("positions":{"dtype":"I64","shape":[1])",
       "positions: must have shape [rows] = [2], has [1]"},
      {R"("positions":{"dtype":"I32","shape":[2])", R"("positions":{"dtype":"F32","shape":[2])",
       "positions: dtype must be I32 or I64, is F32"},
      {"[2,1,2]", "[1,1,4]",
       "regions: must have shape [rows, groups, region_count] = [2, 1, 4], has [1, 1, 4]"},
      {"[2,1,2]", "[2,2,1]",
       "regions: must have shape [rows, groups, region_count] = [2, 1, 1], has [2, 2, 1]"},
      {"[2,1,2]", "[1,4]", "regions: must have shape [rows, region_count] = [2, 4], has [1, 4]"},
      {"[2,1,2]", "[4]", "regions: must have shape [rows, groups, region_count], has [4]"},
      {R"("lengths":{"dtype":"I32","shape":[1])", R"("lengths":{"dtype":"I32","shape":[1,1])",
       "lengths: must have shape [requests] = [1], has [1, 1]"},
      {R"("expected_output":{"dtype":"F32","shape":[2,2,8])",
       R"("expected_output":{"dtype":"F32","shape":[2,4,4])",
       "expected_output: must have shape [rows, heads, dim] = [2, 2, 8], has [2, 4, 4]"},
      {R"("expected_output":{"dtype":"F32","shape":[2,2,8])",
       R"("expected_output":{"dtype":"F64","shape":[2,2,4])",
       "expected_output: dtype must be F32, is F64"},
      {R"("expected_lse":{"dtype":"F32","shape":[2,2])",
       R"("expected_lse":{"dtype":"F32","shape":[4])",
       "expected_lse: must have shape [rows, heads] = [2, 2], has [4]"},
      {R"("expected_indptr":{"dtype":"I32","shape":[3])",
       R"("expected_indptr":{"dtype":"I32","shape":[3,1])",
       "expected_indptr: must have shape [rows+1] = [3], has [3, 1]"},
      {R"("expected_last_page_len":{"dtype":"I32","shape":[2])",
       R"("expected_last_page_len":{"dtype":"I32","shape":[1,2])",
       "expected_last_page_len: must have shape [rows] = [2], has [1, 2]"},
      {R"("expected_pages":{"dtype":"I32","shape":[1,3])",
       R"("expected_pages":{"dtype":"I32","shape":[3,1])",
       "expected_pages: must have shape [groups, expected_indptr[rows]] = [1, 3], has [3, 1]"},
      {"\"expected_indptr\"", "\"indptr\"", "expected_pages: needs expected_indptr, is alone"},
      {R"("expected_staged_blocks":{"dtype":"I32","shape":[2])",
       R"("expected_staged_blocks":{"dtype":"I32","shape":[2,1])",
       "expected_staged_blocks: must have shape [staged], has [2, 1]"},
      {R"("expected_staged_table":{"dtype":"I32","shape":[1,2])",
       R"("expected_staged_table":{"dtype":"I32","shape":[2,1])",
       "expected_staged_table: must have shape [requests, max_blocks] = [1, 2], has [2, 1]"},
      {"\"lengths\"", "\"length\"",
       "lengths: is required by the expected staging plan, is missing"},
  });
}

TEST(StepFile, RefusesExtentsThatCostNoBytes) {
  SmallStep file;
  file.replace(R"("lengths":{"dtype":"I32","shape":[1],"data_offsets":[616,620]},)",
               R"("length":{"dtype":"I32","shape":[1],"data_offsets":[616,620]},)");
  file.replace(R"("block_table":{"dtype":"I32","shape":[1,2],"data_offsets":[576,584]})",
               R"("gap":{"dtype":"I32","shape":[1,2],"data_offsets":[576,584]},)"
               R"("block_table":{"dtype":"I32","shape":[16777217,0],"data_offsets":[584,584]})");
  EXPECT_EQ(refusal(file.bytes()),
            "f: block_table: requests must be at most 16777216, are 16777217");
  file.replace("16777217", "2147483648");
  EXPECT_EQ(refusal(file.bytes()),
            "f: block_table: extents must be at most 2147483647, one is 2147483648");
}

struct DataMutation {
  size_t offset;
  std::vector<int32_t> values;
  std::string message;
};

TEST(StepFile, RefusesWrongValues) {
  const std::vector<DataMutation> mutations = {
      {616, {-1}, "lengths: must be 0 .. 16 (max_blocks * block_size), request 0 has -1"},
      {616, {17}, "lengths: must be 0 .. 16 (max_blocks * block_size), request 0 has 17"},
      {616, {9}, "positions: must be below the length 9 of request 0, row 1 has 9"},
      {764, {1, 1, 3}, "expected_indptr: must begin with 0, begins with 1"},
      {764, {0, 4, 3}, "expected_indptr: must not fall, entry 2 is 3 after 4"},
      {764, {0, -1, 3}, "expected_indptr: must not fall, entry 1 is -1 after 0"},
      {764,
       {0, 1, 4},
       "expected_pages: must have shape [groups, expected_indptr[rows]] = [1, 4], has [1, 3]"},
  };
  for (const DataMutation& mutation : mutations) {
    SCOPED_TRACE(mutation.message);
    SmallStep file;
    file.set_i32(mutation.offset, mutation.values);
    EXPECT_EQ(refusal(file.bytes()), "f: " + mutation.message);
  }
}

TEST(StepFile, InvalidEntriesAreNoFaultOfTheFile) {
  SmallStep file;
  file.set_i32(576, {-5, 1 << 30});                  // block_table
  file.set_i32(584, {-1, 7});                        // owners
  file.set_i32(592, {-3, INT32_MAX});                // positions of rows that nobody owns
  file.set_i32(600, {INT32_MAX, INT32_MIN, -1, 5});  // regions
  EXPECT_NO_THROW(parse(file.bytes()));
}

TEST(StepFile, NotesWhatItIgnores) {
  SmallStep file;
  file.replace("\"scale\":", "\"made\\u000aby\":\"me\",\"scale\":");
  file.replace("\"lengths\"", "\"length\"");
  file.replace("\"expected_staged_blocks\"", "\"a\"");
  file.replace("\"expected_staged_table\"", "\"b\"");
  const Step step = parse(file.bytes());
  EXPECT_FALSE(step.lengths.present());
  const std::vector<std::string> notes = {
      "__metadata__: made\\x0aby: not metadata of a step, ignored",
      "length: not a tensor of a step, ignored", "a: not a tensor of a step, ignored",
      "b: not a tensor of a step, ignored"};
  EXPECT_EQ(step.notes, notes);
}

TEST(StepFile, EveryTruncationIsRefused) {
  const std::string bytes = SmallStep().bytes();
  for (size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE(size);
    refusal(bytes.substr(0, size));
  }
}

TEST(StepFile, NoChangedHeaderByteDoesHarm) {
  const std::string bytes = SmallStep().bytes();
  const size_t header_end = 8 + SmallStep().header.size();
  int refused = 0;
  for (size_t place = 0; place < header_end; ++place) {
    for (const int flip : {0x01, 0x02, 0x10, 0x20, 0x80, 0xff}) {
      std::string changed = bytes;
      changed[place] = static_cast<char>(changed[place] ^ flip);
      try {
        parse(changed);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::bad_file) << error.what();
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 5000);
}

TEST(StepFile, ReadsTheGivenCasesWithoutNotes) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(OCTOPAGE_TEST_CASES)) {
    if (entry.path().extension() != ".safetensors") continue;
    SCOPED_TRACE(entry.path().string());
    const Step step = read_step(entry.path());
    EXPECT_TRUE(step.notes.empty());
    EXPECT_TRUE(step.expected_output.present());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(step.kv_cache.data) % 16, 0u);
    ++count;
  }
  EXPECT_GE(count, 20);
}

/// The message of the bad_file error that reading a path ends in.
std::string read_refusal(const std::filesystem::path& path) {
  try {
    read_step(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_file);
    return error.what();
  }
  ADD_FAILURE() << "the file was taken";
  return "";
}

TEST(StepFile, RefusesWhatIsNoFile) {
  const TemporaryDirectory directory;
  const auto path = directory / "step";
  EXPECT_EQ(read_refusal(path),
            path.string() + ": file: cannot be opened, No such file or directory");
  EXPECT_EQ(read_refusal(directory.path()),
            directory.path().string() + ": file: must be a regular file, is a directory");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(read_refusal(path),
            path.string() + ": file: must be a regular file, is a device, pipe or socket");
  testing::write_file(directory / "empty", "");
  EXPECT_EQ(read_refusal(directory / "empty"),
            (directory / "empty").string() +
                ": header: must begin with 8 bytes of length, the file has 0 bytes");
}

TEST(StepFile, NamesAFileWithOddCharactersInOneLine) {
  const TemporaryDirectory directory;
  testing::write_file(directory / "a\nb", "");
  EXPECT_EQ(read_refusal(directory / "a\nb").find('\n'), std::string::npos);
}

}  // namespace
}  // namespace octopage
