#include "tools/octopage/step_device.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "octopage/backends.hpp"
#include "step/tensor_storage.hpp"
#if OCTOPAGE_HAS_CUDA
#include "backends/cuda/runtime/device_arena.hpp"
#include "backends/cuda/runtime/runtime.hpp"
#endif

namespace octopage::cli {
namespace {

constexpr int64_t kFlushBytes = int64_t{256} << 20;  // several times a cache of the last level

class Host final : public StepDevice {
 public:
  Device device() const override { return {}; }
  TensorView upload(const TensorView& host) override { return host; }
  TensorView allocate(DType dtype, std::initializer_list<int64_t> shape) override {
    return storage_.allocate_tensor(dtype, shape);
  }
  void download(const TensorView& tensor, void* host) const override {
    const auto bytes = static_cast<size_t>(tensor.size() * itemsize(tensor.dtype));
    if (bytes > 0) std::memcpy(host, tensor.data, bytes);
  }
  void synchronize() const override {}
  double time(const std::function<void()>& call, bool cold) override {
    call();
    if (cold) {
      flush_.resize(kFlushBytes / sizeof(uint64_t));
      for (uint64_t& word : flush_) ++word;
    }
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::string name() const override { return "host"; }
  std::string driver() const override { return ""; }

 private:
  TensorStorage storage_;
  std::vector<uint64_t> flush_;  // [kFlushBytes / 8] once something was timed cold
};

#if OCTOPAGE_HAS_CUDA
class Gpu final : public StepDevice {
 public:
  Device device() const override { return arena_.device(); }
  TensorView upload(const TensorView& host) override { return arena_.upload(host); }
  TensorView allocate(DType dtype, std::initializer_list<int64_t> shape) override {
    return arena_.allocate(dtype, shape);
  }
  void download(const TensorView& tensor, void* host) const override {
    arena_.download(tensor, host);
  }
  void synchronize() const override { arena_.synchronize(); }
  double time(const std::function<void()>& call, bool cold) override {
    if (cold && !flush_.present()) flush_ = arena_.allocate(DType::u8, {kFlushBytes});
    const Events events;
    call();  // the device is still at it while the timed call is queued: launches do not show
    if (cold) cuda::check(cudaMemsetAsync(flush_.data, 0, kFlushBytes), "cudaMemsetAsync");
    cuda::check(cudaEventRecord(events.begin), "cudaEventRecord");
    call();
    cuda::check(cudaEventRecord(events.end), "cudaEventRecord");
    cuda::check(cudaEventSynchronize(events.end), "cudaEventSynchronize");
    float ms = 0;
    cuda::check(cudaEventElapsedTime(&ms, events.begin, events.end), "cudaEventElapsedTime");
    return ms / 1e3;
  }
  std::string name() const override {
    cudaDeviceProp properties;
    cuda::check(cudaGetDeviceProperties(&properties, arena_.device().index),
                "cudaGetDeviceProperties");
    return properties.name;
  }
  std::string driver() const override {
    int version = 0;
    cuda::check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  }

 private:
  struct Events {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    Events() {
      cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
      cuda::check(cudaEventCreate(&end), "cudaEventCreate");
    }
    ~Events() {
      static_cast<void>(cudaEventDestroy(begin));
      static_cast<void>(cudaEventDestroy(end));
    }
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;
  };

  DeviceArena arena_;
  TensorView flush_;  // [kFlushBytes] u8 once something was timed cold
};
#endif

}  // namespace

std::unique_ptr<StepDevice> make_step_device(std::string_view backend) {
  if (backend.empty()) {
    const char* forced = std::getenv("OCTOPAGE_BACKEND");
    if (forced != nullptr) backend = forced;
  }
#if OCTOPAGE_HAS_CUDA
  for (const BackendInfo& info : backends()) {
    if (info.name == backend && info.device == DeviceType::cuda && info.available)
      return std::make_unique<Gpu>();
  }
#endif
  return std::make_unique<Host>();  // a backend that cannot run says so itself
}

Step step_on(const Step& host, StepDevice& device) {
  Step step = host;
  step.query = device.upload(host.query);
  step.kv_cache = device.upload(host.kv_cache);
  step.block_table = device.upload(host.block_table);
  step.owners = device.upload(host.owners);
  step.positions = device.upload(host.positions);
  step.regions = device.upload(host.regions);
  return step;
}

}  // namespace octopage::cli
