#ifndef OCTOPAGE_STEP_TENSOR_STORAGE_HPP_
#define OCTOPAGE_STEP_TENSOR_STORAGE_HPP_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <vector>

#include "octopage/tensor.hpp"

namespace octopage {

/// Memory of a step's tensors: owned allocations and at most one read-only file mapping.
class TensorStorage {
 public:
  TensorStorage() = default;
  ~TensorStorage();
  TensorStorage(const TensorStorage&) = delete;
  TensorStorage& operator=(const TensorStorage&) = delete;

  /// Uninitialised memory, aligned to 64 bytes, never null. Throws Error(out_of_memory).
  void* allocate(int64_t bytes);

  /// A contiguous CPU tensor in memory of its own, uninitialised.
  TensorView allocate_tensor(DType dtype, std::initializer_list<int64_t> shape);

  /// Maps a regular file read-only. Throws Error(bad_file) with the file's name and the reason.
  void map(const std::filesystem::path& path);
  const uint8_t* mapped() const { return mapped_; }  ///< [mapped_bytes()], null for an empty file
  uint64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::vector<std::unique_ptr<void, Free>> owned_;
  uint8_t* mapped_ = nullptr;
  uint64_t mapped_bytes_ = 0;
};

}  // namespace octopage

#endif  // OCTOPAGE_STEP_TENSOR_STORAGE_HPP_
