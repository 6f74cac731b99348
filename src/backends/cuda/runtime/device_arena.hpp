#ifndef OCTOPAGE_BACKENDS_CUDA_RUNTIME_DEVICE_ARENA_HPP_
#define OCTOPAGE_BACKENDS_CUDA_RUNTIME_DEVICE_ARENA_HPP_

// Device memory for programs that start from host tensors: the command line, tests, benchmarks. No
// CUDA header here. Library calls never allocate this way.

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "octopage/tensor.hpp"

namespace octopage {

/// Owns device allocations, one cudaMalloc each, so that sanitizers see every bound.
class DeviceArena {
 public:
  explicit DeviceArena(int32_t device = 0) : device_{DeviceType::cuda, device} {}
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  /// A copy of a contiguous host tensor; an absent tensor stays absent.
  TensorView upload(const TensorView& host);
  /// Contiguous, every byte set to `fill`.
  TensorView allocate(DType dtype, std::initializer_list<int64_t> shape, int fill = 0xff);
  /// Copies a contiguous device tensor to the host and waits for the device.
  void download(const TensorView& device, void* host) const;
  /// Copies host memory into a contiguous device tensor.
  void assign(const TensorView& device, const void* host) const;
  /// Waits for the device; throws Error(device_error) for what ran before.
  void synchronize() const;
  Device device() const { return device_; }

 private:
  Device device_;
  std::vector<void*> allocations_;
};

}  // namespace octopage

#endif  // OCTOPAGE_BACKENDS_CUDA_RUNTIME_DEVICE_ARENA_HPP_
