#include "tools/octopage/step_device.hpp"

#include <cstdlib>
#include <cstring>

#include "octopage/backends.hpp"
#include "step/tensor_storage.hpp"
#if OCTOPAGE_HAS_CUDA
#include "backends/cuda/runtime/device_arena.hpp"
#endif

namespace octopage::cli {
namespace {

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

 private:
  TensorStorage storage_;
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

 private:
  DeviceArena arena_;
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
