// The C boundary: codes and messages, struct sizes, threads, hostile pointers, and the same bits as
// the C++ API.

#include "octopage/octopage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "octopage/octopage.hpp"

namespace octopage::test {
namespace {

::testing::AssertionResult mentions(const std::vector<std::string>& pieces) {
  const std::string message = octopage_last_error();
  for (const std::string& piece : pieces) {
    if (message.find(piece) == std::string::npos) {
      return ::testing::AssertionFailure() << "'" << piece << "' is not in '" << message << "'";
    }
  }
  return ::testing::AssertionSuccess();
}

octopage_tensor tensor(const void* data, int32_t dtype, std::vector<int64_t> shape) {
  octopage_tensor made;
  EXPECT_EQ(octopage_tensor_init_contiguous(&made, sizeof made, data, dtype,
                                            static_cast<int32_t>(shape.size()), shape.data()),
            OCTOPAGE_OK);
  return made;
}

octopage_options default_options() {
  octopage_options options;
  EXPECT_EQ(octopage_options_init(&options, sizeof options), OCTOPAGE_OK);
  return options;
}

/// Two requests, two groups, f8 cache; every tensor as the C API takes it. Not copyable: the
/// arguments point into it.
struct Call {
  static constexpr int64_t kRows = 5, kHeads = 4, kGroups = 2, kDim = 64, kBlocks = 6,
                           kBlockSize = 8, kRegions = 3;

  std::vector<uint16_t> query_data;
  std::vector<uint8_t> cache_data;
  std::vector<int32_t> table_data = {4, 1, 5, 0, 3, 2};
  std::vector<int32_t> owner_data = {1, 0, 1, 0, 0};
  std::vector<int64_t> position_data = {20, 3, 7, 17, -1};
  std::vector<int32_t> region_data;
  std::vector<float> output_data, lse_data;
  octopage_tensor query, kv_cache, block_table, owners, positions, regions, output, lse;
  octopage_scale k_scale, v_scale;
  octopage_sparse_prefill_args args;

  Call() {
    uint32_t state = 7;
    const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };
    for (int64_t i = 0; i < kRows * kHeads * kDim; ++i) {
      query_data.push_back(static_cast<uint16_t>((next() & 0x807f) | 0x3f00));  // 0.5 .. 1
    }
    for (int64_t i = 0; i < kBlocks * kGroups * kBlockSize * 2 * kDim; ++i) {
      cache_data.push_back(static_cast<uint8_t>((next() & 0x87) | 0x30));  // 0.5 .. 1
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int32_t i : {0, 1, 2, 2, 0, 1}) {
        const int64_t own = position_data[row] < 0 ? 0 : position_data[row] / 8;
        region_data.push_back(own == 2 ? i : own == 0 ? 0 : (i + 1) % 2);
      }
    }
    output_data.assign(kRows * kHeads * kDim, NAN);
    lse_data.assign(kRows * kHeads, NAN);
    query = tensor(query_data.data(), OCTOPAGE_BF16, {kRows, kHeads, kDim});
    kv_cache = tensor(cache_data.data(), OCTOPAGE_U8, {kBlocks, kGroups, kBlockSize, 2 * kDim});
    block_table = tensor(table_data.data(), OCTOPAGE_I32, {2, 3});
    owners = tensor(owner_data.data(), OCTOPAGE_I32, {kRows});
    positions = tensor(position_data.data(), OCTOPAGE_I64, {kRows});
    regions = tensor(region_data.data(), OCTOPAGE_I32, {kRows, kGroups, kRegions});
    output = tensor(output_data.data(), OCTOPAGE_F32, {kRows, kHeads, kDim});
    lse = tensor(lse_data.data(), OCTOPAGE_F32, {kRows, kHeads});
    for (octopage_scale* scale : {&k_scale, &v_scale}) {
      EXPECT_EQ(octopage_scale_init(scale, sizeof *scale), OCTOPAGE_OK);
      scale->kind = OCTOPAGE_SCALE_VALUE;
    }
    k_scale.value = 0.5f;
    v_scale.value = 2.0f;
    EXPECT_EQ(octopage_sparse_prefill_args_init(&args, sizeof args), OCTOPAGE_OK);
    args.query = &query;
    args.kv_cache = &kv_cache;
    args.block_table = &block_table;
    args.owners = &owners;
    args.positions = &positions;
    args.regions = &regions;
    args.output = &output;
    args.lse = &lse;
    args.k_scale = &k_scale;
    args.v_scale = &v_scale;
    args.scale = 0.125f;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  SparsePrefillArgs cpp(std::vector<float>* out, std::vector<float>* out_lse) const {
    SparsePrefillArgs a;
    a.query = TensorView::contiguous(query_data.data(), DType::bf16, {kRows, kHeads, kDim});
    a.kv_cache = TensorView::contiguous(cache_data.data(), DType::u8,
                                        {kBlocks, kGroups, kBlockSize, 2 * kDim});
    a.block_table = TensorView::contiguous(table_data.data(), DType::i32, {2, 3});
    a.owners = TensorView::contiguous(owner_data.data(), DType::i32, {kRows});
    a.positions = TensorView::contiguous(position_data.data(), DType::i64, {kRows});
    a.regions = TensorView::contiguous(region_data.data(), DType::i32, {kRows, kGroups, kRegions});
    a.output = TensorView::contiguous(out->data(), DType::f32, {kRows, kHeads, kDim});
    a.lse = TensorView::contiguous(out_lse->data(), DType::f32, {kRows, kHeads});
    a.k_scale = Scale::of(0.5f);
    a.v_scale = Scale::of(2.0f);
    a.scale = 0.125f;
    return a;
  }

  bool outputs_untouched() const {
    for (const float value : output_data) {
      if (!std::isnan(value)) return false;
    }
    for (const float value : lse_data) {
      if (!std::isnan(value)) return false;
    }
    return true;
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// --- The same as the C++ API

TEST(CApi, SparsePrefillGivesTheBitsOfTheCppApi) {
  for (const char* backend : {"reference", "cpu"}) {
    for (const int32_t invariant : {0, 1}) {
      Call call;
      octopage_options options = default_options();
      options.backend = backend;
      options.batch_invariant = invariant;
      options.threads = 2;
      ASSERT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_OK)
          << octopage_last_error();
      std::vector<float> output(call.output_data.size(), NAN), lse(call.lse_data.size(), NAN);
      Options cpp_options;
      cpp_options.backend = backend;
      cpp_options.batch_invariant = invariant != 0;
      cpp_options.threads = 2;
      sparse_prefill(call.cpp(&output, &lse), cpp_options);
      EXPECT_TRUE(same_bits(call.output_data, output)) << backend;
      EXPECT_TRUE(same_bits(call.lse_data, lse)) << backend;
      EXPECT_NE(output[0], 0.0f);  // row 0 sees tokens: the comparison is not of zeros
      EXPECT_EQ(lse.back(), -std::numeric_limits<float>::infinity());  // the padding row
    }
  }
}

TEST(CApi, StridesReachTheLibrary) {
  Call dense;
  ASSERT_EQ(octopage_sparse_prefill(&dense.args, nullptr), OCTOPAGE_OK);
  // Heads of a row 80 elements apart, and an output with heads in front of rows.
  Call call;
  std::vector<uint16_t> wide(Call::kRows * Call::kHeads * 80, 0x7fc0);
  for (int64_t i = 0; i < Call::kRows * Call::kHeads; ++i) {
    std::copy_n(&call.query_data[i * Call::kDim], Call::kDim, &wide[i * 80]);
  }
  call.query.data = wide.data();
  call.query.strides[0] = Call::kHeads * 80;
  call.query.strides[1] = 80;
  call.output.strides[0] = Call::kDim;
  call.output.strides[1] = Call::kRows * Call::kDim;
  ASSERT_EQ(octopage_sparse_prefill(&call.args, nullptr), OCTOPAGE_OK) << octopage_last_error();
  for (int64_t row = 0; row < Call::kRows; ++row) {
    for (int64_t head = 0; head < Call::kHeads; ++head) {
      EXPECT_EQ(0, std::memcmp(&dense.output_data[(row * Call::kHeads + head) * Call::kDim],
                               &call.output_data[(head * Call::kRows + row) * Call::kDim],
                               Call::kDim * sizeof(float)))
          << "row " << row << ", head " << head;
    }
  }
}

TEST(CApi, WorkspaceSizeAndBackendChoiceAreThoseOfTheCppApi) {
  Call call;
  std::vector<float> output(call.output_data.size()), lse(call.lse_data.size());
  const SparsePrefillArgs cpp = call.cpp(&output, &lse);
  octopage_options options = default_options();
  options.threads = 2;
  Options cpp_options;
  cpp_options.threads = 2;
  size_t bytes = 0;
  ASSERT_EQ(octopage_sparse_prefill_workspace_size(&call.args, &options, &bytes), OCTOPAGE_OK);
  EXPECT_EQ(bytes, sparse_prefill_workspace_size(cpp, cpp_options));
  char name[32];
  ASSERT_EQ(octopage_choose_backend(&call.args, &options, name, sizeof name), OCTOPAGE_OK);
  EXPECT_EQ(std::string(name), choose_backend(cpp, cpp_options));
  const std::vector<BackendInfo> all = backends();
  int32_t count = 0;
  ASSERT_EQ(octopage_backend_count(&count), OCTOPAGE_OK);
  ASSERT_EQ(static_cast<size_t>(count), all.size());
  for (int32_t i = 0; i < count; ++i) {
    const BackendInfo& expected = all[static_cast<size_t>(i)];
    octopage_backend_info info;
    ASSERT_EQ(octopage_backend_info_init(&info, sizeof info), OCTOPAGE_OK);
    ASSERT_EQ(octopage_backend_describe(i, &info), OCTOPAGE_OK);
    EXPECT_EQ(info.name, expected.name);
    EXPECT_EQ(info.description, expected.description);
    EXPECT_EQ(info.reason, expected.reason);
    EXPECT_EQ(info.device_type, static_cast<int32_t>(expected.device));
    EXPECT_EQ(info.priority, expected.priority);
    EXPECT_EQ(info.available != 0, expected.available);
    const Support support = backend_supports(expected.name, cpp, cpp_options);
    int32_t supported = -1;
    char reason[1024] = "?";
    ASSERT_EQ(octopage_backend_supports(info.name, &call.args, &options, &supported, reason,
                                        sizeof reason),
              OCTOPAGE_OK);
    EXPECT_EQ(supported, support.ok ? 1 : 0);
    EXPECT_EQ(reason, support.reason);
  }
}

TEST(CApi, OptionsReachTheLibrary) {
  Call call;
  std::vector<float> output(call.output_data.size()), lse(call.lse_data.size());
  // On the CPU tiles of one row and fewer threads need less scratch: sizes tell the options apart.
  std::vector<size_t> sizes;
  for (const int32_t threads : {1, 3}) {
    for (const int32_t invariant : {0, 1}) {
      octopage_options options = default_options();
      options.backend = "cpu";
      options.threads = threads;
      options.batch_invariant = invariant;
      size_t bytes = 0;
      ASSERT_EQ(octopage_sparse_prefill_workspace_size(&call.args, &options, &bytes), OCTOPAGE_OK);
      Options cpp_options;
      cpp_options.backend = "cpu";
      cpp_options.threads = threads;
      cpp_options.batch_invariant = invariant != 0;
      EXPECT_EQ(bytes, sparse_prefill_workspace_size(call.cpp(&output, &lse), cpp_options));
      for (const size_t other : sizes) EXPECT_NE(bytes, other);
      sizes.push_back(bytes);
    }
  }
  std::vector<unsigned char> workspace(sizes[0]);
  octopage_options options = default_options();
  options.backend = "cpu";
  options.threads = 1;
  options.workspace = workspace.data();
  options.workspace_bytes = workspace.size() - 1;
  EXPECT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"workspace", std::to_string(sizes[0]), std::to_string(sizes[0] - 1)}));
  EXPECT_TRUE(call.outputs_untouched());
  options.workspace_bytes = workspace.size();
  EXPECT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_OK) << octopage_last_error();
}

// --- Codes and messages

TEST(CApiErrors, EachCodeWithItsMessage) {
  Call call;
  octopage_options options = default_options();

  call.args.scale = NAN;
  EXPECT_EQ(octopage_sparse_prefill(&call.args, nullptr), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"scale", "nan", "finite"}));
  call.args.scale = 1.0f;

  options.backend = "no-such";
  EXPECT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"no-such", "reference"}));
  options.backend = "cuda-sm80";
  EXPECT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_UNSUPPORTED);
  EXPECT_TRUE(mentions({"options.backend", "cuda-sm80"}));
  options.backend = nullptr;

  options.strict = 1;
  call.region_data[1] = 77;
  EXPECT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_INVALID_ENTRY);
  EXPECT_TRUE(mentions({"row 0", "77"}));

  octopage_prefill* prefill = nullptr;
  ASSERT_EQ(octopage_prefill_create(nullptr, &prefill), OCTOPAGE_OK);
  EXPECT_EQ(octopage_prefill_fixup_positions(prefill, &call.positions, nullptr),
            OCTOPAGE_WRONG_STATE);
  EXPECT_TRUE(mentions({"fixup_positions", "plan"}));
  octopage_prefill_destroy(prefill);
  EXPECT_TRUE(call.outputs_untouched());
}

struct ThrowingUser {
  int kind;
};

void throwing_for(void* user, int64_t, octopage_body, void*) {
  switch (static_cast<ThrowingUser*>(user)->kind) {
    case 0:
      throw std::bad_alloc();
    case 1:
      throw std::runtime_error("thrown by the caller's executor");
    case 2:
      throw Error(ErrorCode::device_error, "a device failed");
    default:
      throw 42;
  }
}

int32_t two(void*) {
  return 2;
}

TEST(CApiErrors, WhateverIsThrownBecomesACode) {
  const octopage_status expected[] = {OCTOPAGE_OUT_OF_MEMORY, OCTOPAGE_INTERNAL,
                                      OCTOPAGE_DEVICE_ERROR, OCTOPAGE_INTERNAL};
  const char* pieces[] = {"memory", "thrown by the caller's executor", "a device failed",
                          "unknown"};
  for (int kind = 0; kind < 4; ++kind) {
    Call call;
    ThrowingUser user{kind};
    octopage_executor executor;
    ASSERT_EQ(octopage_executor_init(&executor, sizeof executor), OCTOPAGE_OK);
    executor.user = &user;
    executor.concurrency = two;
    executor.parallel_for = throwing_for;
    octopage_options options = default_options();
    options.executor = &executor;
    octopage_status status = OCTOPAGE_OK;
    EXPECT_NO_THROW(status = octopage_sparse_prefill(&call.args, &options));
    EXPECT_EQ(status, expected[kind]);
    EXPECT_TRUE(mentions({pieces[kind]}));
  }
}

TEST(CApiErrors, ACallThatSucceedsLeavesTheMessageAlone) {
  int64_t stride = 0;
  EXPECT_EQ(octopage_kv_page_stride(nullptr, &stride), OCTOPAGE_INVALID_ARGUMENT);
  const std::string before = octopage_last_error();
  Call call;
  EXPECT_EQ(octopage_kv_page_stride(&call.kv_cache, &stride), OCTOPAGE_OK);
  EXPECT_EQ(octopage_last_error(), before);
}

TEST(CApiErrors, MessagesBelongToTheirThread) {
  int64_t stride = 0;
  ASSERT_EQ(octopage_kv_page_stride(nullptr, &stride), OCTOPAGE_INVALID_ARGUMENT);
  const char* here = octopage_last_error();
  const std::string before = here;
  std::string fresh = "?", there;
  std::thread other([&] {
    fresh = octopage_last_error();
    size_t bytes = 0;
    octopage_sparse_prefill_workspace_size(nullptr, nullptr, &bytes);
    there = octopage_last_error();
  });
  other.join();
  EXPECT_EQ(fresh, "");
  EXPECT_EQ(there, "args: must not be null");
  EXPECT_EQ(octopage_last_error(), here);
  EXPECT_EQ(before, "kv_cache: must not be null");
  EXPECT_EQ(here, before);
}

// --- struct_size

TEST(CApiStructSize, TooSmallIsNamed) {
  for (const size_t size : {size_t{0}, size_t{8}, sizeof(octopage_tensor) - 1}) {
    Call call;
    call.regions.struct_size = size;
    EXPECT_EQ(octopage_sparse_prefill(&call.args, nullptr), OCTOPAGE_INVALID_ARGUMENT);
    EXPECT_TRUE(mentions({"regions.struct_size", std::to_string(size),
                          std::to_string(sizeof(octopage_tensor)), "octopage_tensor"}));
    EXPECT_TRUE(call.outputs_untouched());
  }
  for (size_t i = 0; i < 12; ++i) {
    Call call;
    octopage_executor executor;
    ASSERT_EQ(octopage_executor_init(&executor, sizeof executor), OCTOPAGE_OK);
    executor.concurrency = two;
    executor.parallel_for = throwing_for;
    octopage_options options = default_options();
    options.executor = &executor;
    const std::pair<std::string, size_t*> sizes[12] = {
        {"args", &call.args.struct_size},         {"query", &call.query.struct_size},
        {"kv_cache", &call.kv_cache.struct_size}, {"block_table", &call.block_table.struct_size},
        {"owners", &call.owners.struct_size},     {"positions", &call.positions.struct_size},
        {"output", &call.output.struct_size},     {"lse", &call.lse.struct_size},
        {"k_scale", &call.k_scale.struct_size},   {"v_scale", &call.v_scale.struct_size},
        {"options", &options.struct_size},        {"options.executor", &executor.struct_size}};
    const auto& [name, size] = sizes[i];
    *size -= 1;
    EXPECT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_INVALID_ARGUMENT) << name;
    EXPECT_TRUE(mentions({name + ".struct_size", "is " + std::to_string(*size)}));
    EXPECT_TRUE(call.outputs_untouched()) << name;
  }
}

/// A struct as a newer header might have it.
template <typename T>
struct Newer {
  T known;
  unsigned char unknown[24];
};

TEST(CApiStructSize, LargerIsTakenAndTheRestIgnored) {
  Call call, plain;
  ASSERT_EQ(octopage_sparse_prefill(&plain.args, nullptr), OCTOPAGE_OK);
  Newer<octopage_tensor> query;
  std::memset(&query, 0xee, sizeof query);
  const int64_t shape[] = {Call::kRows, Call::kHeads, Call::kDim};
  ASSERT_EQ(octopage_tensor_init_contiguous(&query.known, sizeof query, call.query_data.data(),
                                            OCTOPAGE_BF16, 3, shape),
            OCTOPAGE_OK);
  EXPECT_EQ(query.known.struct_size, sizeof query);
  for (const unsigned char byte : query.unknown) EXPECT_EQ(byte, 0);  // defaults of newer fields
  Newer<octopage_sparse_prefill_args> args;
  std::memset(&args, 0xee, sizeof args);
  args.known = call.args;
  args.known.struct_size = sizeof args;
  args.known.query = &query.known;
  Newer<octopage_options> options;
  std::memset(&options, 0xee, sizeof options);
  ASSERT_EQ(octopage_options_init(&options.known, sizeof options), OCTOPAGE_OK);
  ASSERT_EQ(octopage_sparse_prefill(&args.known, &options.known), OCTOPAGE_OK)
      << octopage_last_error();
  EXPECT_TRUE(same_bits(call.output_data, plain.output_data));
}

TEST(CApiStructSize, OutputTensorsKeepTheirSize) {
  Call call;
  octopage_tensor cache = tensor(call.cache_data.data(), OCTOPAGE_U8, {12, 1, 8, 2 * Call::kDim});
  Newer<octopage_tensor> k;
  octopage_tensor v;
  ASSERT_EQ(octopage_tensor_init(&k.known, sizeof k), OCTOPAGE_OK);
  ASSERT_EQ(octopage_tensor_init(&v, sizeof v), OCTOPAGE_OK);
  std::memset(k.unknown, 0xee, sizeof k.unknown);
  ASSERT_EQ(octopage_view_sparse_kv_pages(&cache, &k.known, &v), OCTOPAGE_OK);
  EXPECT_EQ(k.known.struct_size, sizeof k);
  EXPECT_EQ(k.known.shape[0], 12);
  for (const unsigned char byte : k.unknown) EXPECT_EQ(byte, 0xee);
  v.struct_size = 0;
  k.known.rank = 3;
  EXPECT_EQ(octopage_view_sparse_kv_pages(&cache, &k.known, &v), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"v.struct_size", "is 0"}));
  EXPECT_EQ(k.known.rank, 3);
}

TEST(CApiStructSize, InitRefusesSmallStructsAndLeavesThem) {
  const auto refuses = [](auto init, auto zero, const char* name) {
    using T = decltype(zero);
    T value;
    std::memset(&value, 0xee, sizeof value);
    EXPECT_EQ(init(&value, sizeof(T) - 1), OCTOPAGE_INVALID_ARGUMENT);
    EXPECT_TRUE(mentions({"struct_size", std::to_string(sizeof(T) - 1), name}));
    unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &value, sizeof bytes);
    for (const unsigned char byte : bytes) EXPECT_EQ(byte, 0xee) << name;
    EXPECT_EQ(init(nullptr, sizeof(T)), OCTOPAGE_INVALID_ARGUMENT);
    EXPECT_TRUE(mentions({"must not be null"}));
  };
  refuses(octopage_tensor_init, octopage_tensor{}, "octopage_tensor");
  refuses(octopage_executor_init, octopage_executor{}, "octopage_executor");
  refuses(octopage_options_init, octopage_options{}, "octopage_options");
  refuses(octopage_scale_init, octopage_scale{}, "octopage_scale");
  refuses(octopage_sparse_prefill_args_init, octopage_sparse_prefill_args{},
          "octopage_sparse_prefill_args");
  refuses(octopage_backend_info_init, octopage_backend_info{}, "octopage_backend_info");
  refuses(octopage_fill_prefill_pages_args_init, octopage_fill_prefill_pages_args{},
          "octopage_fill_prefill_pages_args");
  refuses(octopage_prefill_plan_args_init, octopage_prefill_plan_args{},
          "octopage_prefill_plan_args");
  refuses(octopage_page_metadata_init, octopage_page_metadata{}, "octopage_page_metadata");
}

// --- Hostile pointers and fields

TEST(CApiHostile, NullArgumentsAreNamed) {
  struct Case {
    const char* name;
    void (*remove)(octopage_sparse_prefill_args*);
  };
  const Case cases[] = {
      {"query", [](octopage_sparse_prefill_args* a) { a->query = nullptr; }},
      {"kv_cache", [](octopage_sparse_prefill_args* a) { a->kv_cache = nullptr; }},
      {"block_table", [](octopage_sparse_prefill_args* a) { a->block_table = nullptr; }},
      {"owners", [](octopage_sparse_prefill_args* a) { a->owners = nullptr; }},
      {"positions", [](octopage_sparse_prefill_args* a) { a->positions = nullptr; }},
      {"regions", [](octopage_sparse_prefill_args* a) { a->regions = nullptr; }},
      {"output", [](octopage_sparse_prefill_args* a) { a->output = nullptr; }},
      {"k_scale", [](octopage_sparse_prefill_args* a) { a->k_scale = nullptr; }},
      {"v_scale", [](octopage_sparse_prefill_args* a) { a->v_scale = nullptr; }},
  };
  for (const Case& c : cases) {
    Call call;
    c.remove(&call.args);
    EXPECT_EQ(octopage_sparse_prefill(&call.args, nullptr), OCTOPAGE_INVALID_ARGUMENT) << c.name;
    EXPECT_EQ(std::string(octopage_last_error()).rfind(std::string(c.name) + ":", 0), 0u)
        << octopage_last_error();
    EXPECT_TRUE(call.outputs_untouched()) << c.name;
  }
  Call call;
  call.args.lse = nullptr;  // may be null
  EXPECT_EQ(octopage_sparse_prefill(&call.args, nullptr), OCTOPAGE_OK);
}

#define EXPECT_NULL_REFUSED(call, argument)                                                  \
  do {                                                                                       \
    octopage_status status_of_call = OCTOPAGE_OK;                                            \
    EXPECT_NO_THROW(status_of_call = (call));                                                \
    EXPECT_EQ(status_of_call, OCTOPAGE_INVALID_ARGUMENT) << #call;                           \
    EXPECT_EQ(octopage_last_error(), std::string(argument) + ": must not be null") << #call; \
  } while (0)

TEST(CApiHostile, EveryFunctionRefusesNull) {
  Call call;
  octopage_tensor* t = &call.query;
  int64_t number = 0;
  int32_t flag = 0;
  size_t bytes = 0;
  char text[32];
  int32_t small[4] = {};
  int64_t wide[4] = {};
  octopage_backend_info info;
  octopage_backend_info_init(&info, sizeof info);
  octopage_page_metadata metadata;
  octopage_page_metadata_init(&metadata, sizeof metadata);
  octopage_prefill_plan_args plan;
  octopage_prefill_plan_args_init(&plan, sizeof plan);
  plan.query_shape[0] = 2;
  octopage_fill_prefill_pages_args fill;
  octopage_fill_prefill_pages_args_init(&fill, sizeof fill);
  octopage_prefill* prefill = nullptr;
  ASSERT_EQ(octopage_prefill_create(nullptr, &prefill), OCTOPAGE_OK);

  EXPECT_NULL_REFUSED(octopage_tensor_init_contiguous(nullptr, sizeof *t, nullptr, 0, 1, wide),
                      "tensor");
  EXPECT_NULL_REFUSED(octopage_tensor_init_contiguous(t, sizeof *t, nullptr, 0, 1, nullptr),
                      "shape");
  EXPECT_NULL_REFUSED(octopage_sparse_prefill(nullptr, nullptr), "args");
  EXPECT_NULL_REFUSED(octopage_sparse_prefill_workspace_size(nullptr, nullptr, &bytes), "args");
  EXPECT_NULL_REFUSED(octopage_sparse_prefill_workspace_size(&call.args, nullptr, nullptr),
                      "bytes");
  EXPECT_NULL_REFUSED(octopage_rows_from_query_start_loc(nullptr, small, 1, 1, small, wide),
                      "query_start_loc");
  EXPECT_NULL_REFUSED(octopage_rows_from_query_start_loc(small, nullptr, 1, 1, small, wide),
                      "seq_lens");
  EXPECT_NULL_REFUSED(octopage_rows_from_query_start_loc(small, small, 1, 1, nullptr, wide),
                      "owners");
  EXPECT_NULL_REFUSED(octopage_rows_from_query_start_loc(small, small, 1, 1, small, nullptr),
                      "positions");
  EXPECT_NULL_REFUSED(octopage_backend_count(nullptr), "count");
  EXPECT_NULL_REFUSED(octopage_backend_describe(0, nullptr), "info");
  EXPECT_NULL_REFUSED(octopage_backend_supports(nullptr, &call.args, nullptr, &flag, text, 32),
                      "backend");
  EXPECT_NULL_REFUSED(octopage_backend_supports("cpu", nullptr, nullptr, &flag, text, 32), "args");
  EXPECT_NULL_REFUSED(octopage_backend_supports("cpu", &call.args, nullptr, nullptr, text, 32),
                      "supported");
  EXPECT_NULL_REFUSED(octopage_backend_supports("cpu", &call.args, nullptr, &flag, nullptr, 32),
                      "reason");
  EXPECT_NULL_REFUSED(octopage_choose_backend(nullptr, nullptr, text, 32), "args");
  EXPECT_NULL_REFUSED(octopage_choose_backend(&call.args, nullptr, nullptr, 32), "name");
  EXPECT_NULL_REFUSED(octopage_kv_page_stride(nullptr, &number), "kv_cache");
  EXPECT_NULL_REFUSED(octopage_kv_page_stride(&call.kv_cache, nullptr), "page_stride");
  EXPECT_NULL_REFUSED(octopage_view_sparse_kv_pages(nullptr, t, t), "kv_cache");
  EXPECT_NULL_REFUSED(octopage_view_sparse_kv_pages(&call.kv_cache, nullptr, t), "k");
  EXPECT_NULL_REFUSED(octopage_view_sparse_kv_pages(&call.kv_cache, t, nullptr), "v");
  EXPECT_NULL_REFUSED(octopage_compact_page_metadata(nullptr, 1, 1, small, small), "positions");
  EXPECT_NULL_REFUSED(octopage_compact_page_metadata(wide, 1, 1, nullptr, small), "indptr");
  EXPECT_NULL_REFUSED(octopage_compact_page_metadata(wide, 1, 1, small, nullptr), "last_page_len");
  EXPECT_NULL_REFUSED(octopage_staged_block_count(nullptr, 1, 8, &number), "lengths");
  EXPECT_NULL_REFUSED(octopage_staged_block_count(wide, 1, 8, nullptr), "count");
  EXPECT_NULL_REFUSED(octopage_plan_staged_prefill_pages(nullptr, wide, 1, 8, t, t, nullptr),
                      "block_table");
  EXPECT_NULL_REFUSED(octopage_plan_staged_prefill_pages(t, nullptr, 1, 8, t, t, nullptr),
                      "lengths");
  EXPECT_NULL_REFUSED(octopage_plan_staged_prefill_pages(t, wide, 1, 8, nullptr, t, nullptr),
                      "staged_blocks");
  EXPECT_NULL_REFUSED(octopage_plan_staged_prefill_pages(t, wide, 1, 8, t, nullptr, nullptr),
                      "staged_table");
  EXPECT_NULL_REFUSED(octopage_stage_prefill_pages(nullptr, t, t, nullptr, nullptr, nullptr),
                      "kv_cache");
  EXPECT_NULL_REFUSED(octopage_stage_prefill_pages(t, nullptr, t, nullptr, nullptr, nullptr),
                      "staged_blocks");
  EXPECT_NULL_REFUSED(octopage_stage_prefill_pages(t, t, nullptr, nullptr, nullptr, nullptr),
                      "output");
  EXPECT_NULL_REFUSED(octopage_fill_prefill_pages(nullptr, nullptr), "args");
  EXPECT_NULL_REFUSED(octopage_fill_prefill_pages(&fill, nullptr), "regions");
  EXPECT_NULL_REFUSED(octopage_prefill_create(nullptr, nullptr), "prefill");
  EXPECT_NULL_REFUSED(octopage_prefill_plan(nullptr, &plan, nullptr), "prefill");
  EXPECT_NULL_REFUSED(octopage_prefill_plan(prefill, nullptr, nullptr), "args");
  EXPECT_NULL_REFUSED(octopage_prefill_plan(prefill, &plan, nullptr), "positions");
  EXPECT_NULL_REFUSED(octopage_prefill_fixup_positions(nullptr, t, nullptr), "prefill");
  EXPECT_NULL_REFUSED(octopage_prefill_fixup_positions(prefill, nullptr, nullptr), "positions");
  EXPECT_NULL_REFUSED(octopage_prefill_page_metadata(nullptr, t, t, 1, 0, -1, &metadata, &flag),
                      "prefill");
  EXPECT_NULL_REFUSED(
      octopage_prefill_page_metadata(prefill, nullptr, t, 1, 0, -1, &metadata, &flag),
      "block_table");
  EXPECT_NULL_REFUSED(
      octopage_prefill_page_metadata(prefill, t, nullptr, 1, 0, -1, &metadata, &flag), "owners");
  EXPECT_NULL_REFUSED(octopage_prefill_page_metadata(prefill, t, t, 1, 0, -1, nullptr, &flag),
                      "metadata");
  EXPECT_NULL_REFUSED(octopage_prefill_page_metadata(prefill, t, t, 1, 0, -1, &metadata, nullptr),
                      "available");
  EXPECT_NULL_REFUSED(octopage_prefill_prepare_chunk(nullptr, 0, t, t, t, t, t, nullptr),
                      "prefill");
  EXPECT_NULL_REFUSED(octopage_prefill_prepare_chunk(prefill, 0, nullptr, t, t, t, t, nullptr),
                      "query");
  EXPECT_NULL_REFUSED(octopage_prefill_prepare_chunk(prefill, 0, t, nullptr, t, t, t, nullptr),
                      "kv_cache");
  EXPECT_NULL_REFUSED(octopage_prefill_prepare_chunk(prefill, 0, t, t, nullptr, t, t, nullptr),
                      "regions");
  EXPECT_NULL_REFUSED(octopage_prefill_prepare_chunk(prefill, 0, t, t, t, nullptr, t, nullptr),
                      "block_table");
  EXPECT_NULL_REFUSED(octopage_prefill_prepare_chunk(prefill, 0, t, t, t, t, nullptr, nullptr),
                      "owners");
  EXPECT_NULL_REFUSED(octopage_prefill_finish(nullptr, t, t, t, t, nullptr, nullptr, nullptr),
                      "prefill");
  EXPECT_NULL_REFUSED(octopage_prefill_finish(prefill, t, nullptr, t, t, nullptr, nullptr, nullptr),
                      "kv_cache");
  EXPECT_NULL_REFUSED(octopage_prefill_finish(prefill, t, t, nullptr, t, nullptr, nullptr, nullptr),
                      "output");
  EXPECT_NULL_REFUSED(octopage_prefill_finish_workspace_size(nullptr, 0, nullptr, &bytes),
                      "prefill");
  EXPECT_NULL_REFUSED(octopage_prefill_finish_workspace_size(prefill, 0, nullptr, nullptr),
                      "bytes");
  for (auto getter :
       {octopage_prefill_pages, octopage_prefill_indptr, octopage_prefill_last_page_len,
        octopage_prefill_positions, octopage_prefill_query_buffer}) {
    EXPECT_NULL_REFUSED(getter(nullptr, t), "prefill");
    EXPECT_NULL_REFUSED(getter(prefill, nullptr), "tensor");
  }
  octopage_prefill_destroy(prefill);
  octopage_prefill_destroy(nullptr);
}

TEST(CApiHostile, FieldsOutsideTheirRangeAreNamed) {
  struct Case {
    const char* field;
    void (*spoil)(Call*);
  };
  const Case cases[] = {
      {"query.rank", [](Call* c) { c->query.rank = 5; }},
      {"query.rank", [](Call* c) { c->query.rank = INT32_MAX; }},
      {"query.rank", [](Call* c) { c->query.rank = -1; }},
      {"query", [](Call* c) { c->query.rank = 0; }},
      {"owners.dtype", [](Call* c) { c->owners.dtype = 7; }},
      {"owners.dtype", [](Call* c) { c->owners.dtype = -1; }},
      {"lse.device_type", [](Call* c) { c->lse.device_type = 2; }},
      {"positions.device_index", [](Call* c) { c->positions.device_index = 1; }},
      {"regions.shape[1]", [](Call* c) { c->regions.shape[1] = -2; }},
      {"query.shape", [](Call* c) { c->query.shape[0] = c->query.shape[1] = INT64_MAX / 2; }},
      {"output.data", [](Call* c) { c->output.data = nullptr; }},
      {"k_scale.kind", [](Call* c) { c->k_scale.kind = 3; }},
      {"v_scale.kind", [](Call* c) { c->v_scale.kind = -1; }},
      {"v_scale.pointer", [](Call* c) { c->v_scale.kind = OCTOPAGE_SCALE_POINTER; }},
  };
  for (const Case& c : cases) {
    Call call;
    c.spoil(&call);
    octopage_status status = OCTOPAGE_OK;
    EXPECT_NO_THROW(status = octopage_sparse_prefill(&call.args, nullptr));
    EXPECT_EQ(status, OCTOPAGE_INVALID_ARGUMENT) << c.field;
    EXPECT_TRUE(mentions({c.field}));
    EXPECT_TRUE(call.outputs_untouched()) << c.field;
  }
}

TEST(CApiHostile, ExecutorWithoutFunctions) {
  Call call;
  octopage_executor executor;
  ASSERT_EQ(octopage_executor_init(&executor, sizeof executor), OCTOPAGE_OK);
  octopage_options options = default_options();
  options.executor = &executor;
  EXPECT_NULL_REFUSED(octopage_sparse_prefill(&call.args, &options),
                      "options.executor.concurrency");
  executor.concurrency = two;
  EXPECT_NULL_REFUSED(octopage_sparse_prefill(&call.args, &options),
                      "options.executor.parallel_for");
  executor.concurrency = [](void*) { return int32_t{0}; };
  executor.parallel_for = throwing_for;
  EXPECT_EQ(octopage_sparse_prefill(&call.args, &options), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"concurrency", "0"}));
}

TEST(CApiHostile, CountsAndBuffers) {
  int32_t owners[2] = {-7, -7};
  int64_t positions[2] = {-7, -7};
  const int32_t starts[] = {0, INT32_MAX}, lens[] = {INT32_MAX};
  // The last entry is compared with the caller's room before anything is allocated.
  EXPECT_EQ(octopage_rows_from_query_start_loc(starts, lens, 1, 2, owners, positions),
            OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"rows = 2", "2147483647"}));
  EXPECT_EQ(octopage_rows_from_query_start_loc(starts, lens, -1, 2, owners, positions),
            OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"requests = -1"}));
  EXPECT_EQ(owners[0], -7);
  EXPECT_EQ(positions[1], -7);

  int32_t indptr[3] = {-7, -7, -7}, last[2] = {-7, -7};
  const int64_t far[] = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_EQ(octopage_compact_page_metadata(far, 2, int64_t{1} << 31, indptr, last),
            OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_EQ(octopage_compact_page_metadata(far, -1, 4, indptr, last), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"rows = -1"}));
  EXPECT_EQ(indptr[0], -7);
  EXPECT_EQ(last[1], -7);

  Call call;
  char name[4] = "old";
  EXPECT_EQ(octopage_choose_backend(&call.args, nullptr, name, 1), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"name_bytes = 1"}));
  EXPECT_STREQ(name, "old");
  octopage_backend_info info;
  ASSERT_EQ(octopage_backend_info_init(&info, sizeof info), OCTOPAGE_OK);
  for (const int32_t index : {-1, 1000, INT32_MIN}) {
    EXPECT_EQ(octopage_backend_describe(index, &info), OCTOPAGE_INVALID_ARGUMENT);
    EXPECT_TRUE(mentions({"index = " + std::to_string(index)}));
  }
  EXPECT_STREQ(info.name, "");
}

TEST(CApiHostile, AFailedPlanKeepsTheFormerOne) {
  const int64_t positions[] = {3, 11};
  octopage_prefill_plan_args plan;
  ASSERT_EQ(octopage_prefill_plan_args_init(&plan, sizeof plan), OCTOPAGE_OK);
  plan.query_shape[0] = 2;
  plan.query_shape[1] = 1;
  plan.query_shape[2] = 64;
  plan.positions = positions;
  plan.region_count = 2;
  plan.block_size = 8;
  octopage_prefill* prefill = nullptr;
  ASSERT_EQ(octopage_prefill_create(nullptr, &prefill), OCTOPAGE_OK);
  ASSERT_EQ(octopage_prefill_plan(prefill, &plan, nullptr), OCTOPAGE_OK) << octopage_last_error();
  plan.query_shape[0] = -4;
  EXPECT_EQ(octopage_prefill_plan(prefill, &plan, nullptr), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"query_shape[0]", "-4"}));
  plan.query_shape[0] = 1;
  plan.block_size = 12;
  EXPECT_EQ(octopage_prefill_plan(prefill, &plan, nullptr), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"block_size", "12"}));
  plan.block_size = 8;
  plan.dtype = 99;
  EXPECT_EQ(octopage_prefill_plan(prefill, &plan, nullptr), OCTOPAGE_INVALID_ARGUMENT);
  EXPECT_TRUE(mentions({"dtype = 99"}));
  octopage_tensor indptr;
  ASSERT_EQ(octopage_tensor_init(&indptr, sizeof indptr), OCTOPAGE_OK);
  ASSERT_EQ(octopage_prefill_indptr(prefill, &indptr), OCTOPAGE_OK);
  ASSERT_EQ(indptr.shape[0], 3);
  EXPECT_EQ(static_cast<const int32_t*>(indptr.data)[2], 3);
  octopage_prefill_destroy(prefill);
}

}  // namespace
}  // namespace octopage::test
