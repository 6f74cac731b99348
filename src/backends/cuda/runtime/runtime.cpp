#include "backends/cuda/runtime/runtime.hpp"

#include <limits>

#include "core/check.hpp"

namespace octopage::cuda {

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // a sticky error stays, any other is reported once
  const ErrorCode code =
      result == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::device_error;
  fail(code, "{}: {} ({})", what, cudaGetErrorString(result), cudaGetErrorName(result));
}

void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

int grid_size(int64_t work, int64_t per_cta, const char* kernel) {
  const int64_t ctas = (work + per_cta - 1) / per_cta;
  if (ctas > INT32_MAX)
    fail(ErrorCode::unsupported, "{}: {} CTAs exceed the grid's 2^31 - 1", kernel, ctas);
  return static_cast<int>(ctas);
}

DeviceGuard::DeviceGuard(int32_t device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
}

DeviceGuard::~DeviceGuard() {
  if (changed_) static_cast<void>(cudaSetDevice(before_));
}

void refuse_capture(cudaStream_t stream, const char* what) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status != cudaStreamCaptureStatusNone) {
    fail(ErrorCode::wrong_state, "{}: is not possible while the stream is being captured", what);
  }
}

DeviceSummary summarize_device(int32_t device) {
  DeviceSummary summary;
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    summary.reason = fmt::format("no CUDA device: {}", cudaGetErrorString(result));
    return summary;
  }
  if (device < 0 || device >= count) {
    summary.reason = fmt::format("device {} does not exist, there are {}", device, count);
    return summary;
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  summary.name = properties.name;
  summary.compute_major = properties.major;
  summary.compute_minor = properties.minor;
  if (properties.major < 8) {
    summary.reason = fmt::format("{} has compute capability {}.{}, 8.0 is required", summary.name,
                                 properties.major, properties.minor);
    return summary;
  }
  summary.usable = true;
  return summary;
}

DeviceLimits device_limits(int32_t device) {
  DeviceLimits limits;
  const auto read = [&](int* value, cudaDeviceAttr attribute) {
    check(cudaDeviceGetAttribute(value, attribute, device), "cudaDeviceGetAttribute");
  };
  read(&limits.compute_major, cudaDevAttrComputeCapabilityMajor);
  read(&limits.compute_minor, cudaDevAttrComputeCapabilityMinor);
  read(&limits.shared_bytes_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  read(&limits.multiprocessors, cudaDevAttrMultiProcessorCount);
  return limits;
}

DeviceBuffer::~DeviceBuffer() {
  // NOTE: even freeing nothing would break a capture that is under way.
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
  if (next_ != nullptr) static_cast<void>(cudaFree(next_));
}

void DeviceBuffer::prepare(size_t bytes) {
  if (bytes <= capacity_ || bytes <= next_capacity_) return;
  if (next_ != nullptr) static_cast<void>(cudaFree(next_));
  next_ = nullptr;
  next_capacity_ = 0;
  check(cudaMalloc(&next_, bytes), "cudaMalloc");
  next_capacity_ = bytes;
}

bool DeviceBuffer::commit() {
  if (next_ == nullptr) return false;
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));  // waits for work that still uses it
  data_ = next_;
  capacity_ = next_capacity_;
  next_ = nullptr;
  next_capacity_ = 0;
  return true;
}

PinnedBuffer::~PinnedBuffer() {
  if (copied_ != nullptr) {
    static_cast<void>(cudaEventSynchronize(copied_));
    static_cast<void>(cudaEventDestroy(copied_));
  }
  if (data_ != nullptr) static_cast<void>(cudaFreeHost(data_));
}

std::byte* PinnedBuffer::acquire(size_t bytes) {
  if (in_flight_) {
    check(cudaEventSynchronize(copied_), "cudaEventSynchronize");
    in_flight_ = false;
  }
  if (copied_ == nullptr) {
    check(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  if (bytes > capacity_) {
    if (data_ != nullptr) static_cast<void>(cudaFreeHost(data_));
    data_ = nullptr;
    capacity_ = 0;
    void* memory = nullptr;
    check(cudaMallocHost(&memory, bytes), "cudaMallocHost");
    data_ = static_cast<std::byte*>(memory);
    capacity_ = bytes;
  }
  return data_;
}

void PinnedBuffer::upload(void* device, size_t bytes, cudaStream_t stream) {
  check(cudaMemcpyAsync(device, data_, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  mark(stream);
}

void PinnedBuffer::mark(cudaStream_t stream) {
  check(cudaEventRecord(copied_, stream), "cudaEventRecord");
  in_flight_ = true;
}

}  // namespace octopage::cuda
