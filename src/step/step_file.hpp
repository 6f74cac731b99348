#ifndef OCTOPAGE_STEP_STEP_FILE_HPP_
#define OCTOPAGE_STEP_STEP_FILE_HPP_

// Step files: everything one prefill call needs, in one .safetensors file.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "octopage/tensor.hpp"

namespace octopage {

/// One step. All tensors are contiguous CPU tensors inside `storage`; absent ones have rank 0.
struct Step {
  TensorView query;  ///< [rows, heads, dim] bf16 or f16
  TensorView
      kv_cache;  ///< [blocks, groups, block_size, 2*dim] bf16, f16 or f8_e4m3fn; 16-byte aligned
  TensorView block_table;  ///< [requests, max_blocks] i32
  TensorView owners;       ///< [rows] i32
  TensorView positions;    ///< [rows] i32 or i64
  TensorView regions;      ///< [rows, groups, region_count] or [rows, region_count] i32
  float scale = 1.0f;
  float k_scale = 1.0f;  ///< used for f8 caches only
  float v_scale = 1.0f;

  TensorView lengths;                 ///< [requests] i32
  TensorView expected_output;         ///< [rows, heads, dim] f32
  TensorView expected_lse;            ///< [rows, heads] f32
  TensorView expected_indptr;         ///< [rows+1] i32
  TensorView expected_last_page_len;  ///< [rows] i32
  TensorView expected_pages;          ///< [groups, indptr[rows]] i32
  TensorView expected_staged_blocks;  ///< [staged] i32
  TensorView expected_staged_table;   ///< [requests, max_blocks] i32

  std::vector<std::string> notes;       ///< what the reader ignored, one line each
  std::shared_ptr<const void> storage;  ///< keeps the tensors alive: a mapping or owned memory

  int64_t rows() const { return query.shape[0]; }
  int64_t heads() const { return query.shape[1]; }
  int64_t dim() const { return query.shape[2]; }
  int64_t groups() const { return kv_cache.shape[1]; }
  int64_t block_size() const { return kv_cache.shape[2]; }
  int64_t requests() const { return block_table.shape[0]; }
  int64_t region_count() const { return regions.shape[static_cast<size_t>(regions.rank) - 1]; }
};

/// Maps and checks a step file. Throws Error(bad_file), one message that names the file, the tensor
/// and the rule, for anything that the format or the contract does not allow.
Step read_step(const std::filesystem::path& path);

/// The same from bytes in memory; the tensors are copied, so the bytes need not outlive the call.
Step parse_step(const uint8_t* bytes, uint64_t size, std::string_view origin);

/// Writes a step file: to a temporary name beside `path`, then renamed.
void write_step(const std::filesystem::path& path, const Step& step);

/// Writes named contiguous CPU tensors and string metadata as a .safetensors file, in the given
/// order, to a temporary name beside `path`, then renamed. The data begins 16-byte aligned.
void write_safetensors(const std::filesystem::path& path,
                       const std::vector<std::pair<std::string, TensorView>>& tensors,
                       const std::vector<std::pair<std::string, std::string>>& metadata);

}  // namespace octopage

#endif  // OCTOPAGE_STEP_STEP_FILE_HPP_
