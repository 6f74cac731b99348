#ifndef OCTOPAGE_BACKENDS_CUDA_RUNTIME_RUNTIME_HPP_
#define OCTOPAGE_BACKENDS_CUDA_RUNTIME_RUNTIME_HPP_

// The few things octopage asks of the CUDA runtime, with errors as exceptions.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace octopage::cuda {

/// Throws Error(device_error) with the runtime's words unless `result` is success.
void check(cudaError_t result, const char* what);

/// Checks the launch just made on this thread; a failed one is never silent.
void check_launch(const char* kernel);

/// CTAs for `work` pieces, `per_cta` each. Throws Error(unsupported) beyond grid.x.
int grid_size(int64_t work, int64_t per_cta, const char* kernel);

/// Makes `device` current for this scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// Throws Error(wrong_state) naming `what` while `stream` is being captured.
void refuse_capture(cudaStream_t stream, const char* what);

/// What a device offers; `reason` says why it cannot be used.
struct DeviceSummary {
  bool usable = false;
  std::string reason;
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
};
DeviceSummary summarize_device(int32_t device);

/// The limits that choose a kernel, cheap enough for every call. Throws Error(device_error).
struct DeviceLimits {
  int compute_major = 0;
  int compute_minor = 0;
  int shared_bytes_optin = 0;  ///< most shared memory of a CTA
  int multiprocessors = 0;
};
DeviceLimits device_limits(int32_t device);

/// Device memory that keeps its address while its capacity suffices. Growing waits for the device.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  /// Allocates what `commit` will take over, if `bytes` exceed the capacity.
  void prepare(size_t bytes);
  /// True where the memory is new.
  bool commit();
  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
  void* next_ = nullptr;
  size_t next_capacity_ = 0;
};

/// Pinned host memory behind an event: the host may write again once the last copy is through.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  /// Waits for the last copy, then offers at least `bytes`.
  std::byte* acquire(size_t bytes);
  /// Copies the first `bytes` to the device and marks the end of the copy.
  void upload(void* device, size_t bytes, cudaStream_t stream);
  /// Marks the end of copies that the caller made.
  void mark(cudaStream_t stream);

 private:
  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  cudaEvent_t copied_ = nullptr;
  bool in_flight_ = false;
};

}  // namespace octopage::cuda

#endif  // OCTOPAGE_BACKENDS_CUDA_RUNTIME_RUNTIME_HPP_
