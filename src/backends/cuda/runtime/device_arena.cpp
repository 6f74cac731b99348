#include "backends/cuda/runtime/device_arena.hpp"

#include "backends/cuda/runtime/runtime.hpp"
#include "core/check.hpp"

namespace octopage {

DeviceArena::~DeviceArena() {
  for (void* allocation : allocations_) static_cast<void>(cudaFree(allocation));
}

TensorView DeviceArena::allocate(DType dtype, std::initializer_list<int64_t> shape, int fill) {
  const cuda::DeviceGuard guard(device_.index);
  TensorView view = TensorView::contiguous(nullptr, dtype, shape, device_);
  const auto bytes = static_cast<size_t>(view.size() * itemsize(dtype));
  if (bytes == 0) return view;
  cuda::check(cudaMalloc(&view.data, bytes), "cudaMalloc");
  allocations_.push_back(view.data);
  cuda::check(cudaMemset(view.data, fill, bytes), "cudaMemset");
  return view;
}

TensorView DeviceArena::upload(const TensorView& host) {
  if (!host.present()) return {};
  if (!host.is_contiguous()) fail_argument("upload: the tensor must be contiguous");
  const cuda::DeviceGuard guard(device_.index);
  TensorView view = host;
  view.device = device_;
  view.data = nullptr;
  const auto bytes = static_cast<size_t>(host.size() * itemsize(host.dtype));
  if (bytes == 0) return view;
  cuda::check(cudaMalloc(&view.data, bytes), "cudaMalloc");
  allocations_.push_back(view.data);
  cuda::check(cudaMemcpy(view.data, host.data, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return view;
}

void DeviceArena::download(const TensorView& device, void* host) const {
  synchronize();
  const auto bytes = static_cast<size_t>(device.size() * itemsize(device.dtype));
  if (bytes > 0)
    cuda::check(cudaMemcpy(host, device.data, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

void DeviceArena::assign(const TensorView& device, const void* host) const {
  const auto bytes = static_cast<size_t>(device.size() * itemsize(device.dtype));
  if (bytes > 0)
    cuda::check(cudaMemcpy(device.data, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

void DeviceArena::synchronize() const {
  const cuda::DeviceGuard guard(device_.index);
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace octopage
