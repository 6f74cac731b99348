#ifndef OCTOPAGE_TESTS_STEP_SMALL_STEP_HPP_
#define OCTOPAGE_TESTS_STEP_SMALL_STEP_HPP_

// A small valid step file as text and bytes, to be broken in one place at a time.

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace octopage::testing {

/// 2 rows at positions 3 and 9 of one request, 2 heads, 1 group, dim 8, 2 blocks of 8 tokens.
struct SmallStep {
  std::string header =
      R"({"__metadata__":{"format":"octopage-step-1","scale":"0.25","k_scale":"0.5","v_scale":"2"},)"
      R"("query":{"dtype":"BF16","shape":[2,2,8],"data_offsets":[0,64]},)"
      R"("kv_cache":{"dtype":"BF16","shape":[2,1,8,16],"data_offsets":[64,576]},)"
      R"("block_table":{"dtype":"I32","shape":[1,2],"data_offsets":[576,584]},)"
      R"("owners":{"dtype":"I32","shape":[2],"data_offsets":[584,592]},)"
      R"("positions":{"dtype":"I32","shape":[2],"data_offsets":[592,600]},)"
      R"("regions":{"dtype":"I32","shape":[2,1,2],"data_offsets":[600,616]},)"
      R"("lengths":{"dtype":"I32","shape":[1],"data_offsets":[616,620]},)"
      R"("expected_output":{"dtype":"F32","shape":[2,2,8],"data_offsets":[620,748]},)"
      R"("expected_lse":{"dtype":"F32","shape":[2,2],"data_offsets":[748,764]},)"
      R"("expected_indptr":{"dtype":"I32","shape":[3],"data_offsets":[764,776]},)"
      R"("expected_last_page_len":{"dtype":"I32","shape":[2],"data_offsets":[776,784]},)"
      R"("expected_pages":{"dtype":"I32","shape":[1,3],"data_offsets":[784,796]},)"
      R"("expected_staged_blocks":{"dtype":"I32","shape":[2],"data_offsets":[796,804]},)"
      R"("expected_staged_table":{"dtype":"I32","shape":[1,2],"data_offsets":[804,812]}})";
  std::string data = std::string(812, '\0');

  SmallStep() {
    set_i32(576, {1, 0});         // block_table
    set_i32(592, {3, 9});         // positions
    set_i32(600, {0, -7, 0, 1});  // regions: the second entry of row 0 does not count
    set_i32(616, {10});           // lengths
    set_i32(764, {0, 1, 3});      // expected_indptr
    set_i32(776, {4, 2});         // expected_last_page_len
    set_i32(784, {1, 1, 0});      // expected_pages
    set_i32(796, {1, 0});         // expected_staged_blocks
    set_i32(804, {0, 1});         // expected_staged_table
  }

  void set_i32(size_t offset, const std::vector<int32_t>& values) {
    std::memcpy(data.data() + offset, values.data(), values.size() * sizeof(int32_t));
  }

  /// Replaces the only place where `from` stands in the header.
  void replace(const std::string& from, const std::string& to) {
    const size_t place = header.find(from);
    if (place == std::string::npos || header.find(from, place + 1) != std::string::npos) {
      throw std::logic_error("not exactly one '" + from + "' in the header");
    }
    header.replace(place, from.size(), to);
  }

  std::string bytes() const { return length_prefix(header.size()) + header + data; }

  static std::string length_prefix(uint64_t length) {
    std::string prefix;
    for (int i = 0; i < 8; ++i) prefix += static_cast<char>(length >> (8 * i) & 0xff);
    return prefix;
  }
};

}  // namespace octopage::testing

#endif  // OCTOPAGE_TESTS_STEP_SMALL_STEP_HPP_
