#ifndef OCTOPAGE_TOOLS_STEP_DEVICE_HPP_
#define OCTOPAGE_TOOLS_STEP_DEVICE_HPP_

// Where `octopage attend` and `bench` keep a step's tensors while they run: in host memory, or
// copied to a GPU.

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include "octopage/tensor.hpp"
#include "step/step_file.hpp"

namespace octopage::cli {

class StepDevice {
 public:
  virtual ~StepDevice() = default;
  virtual Device device() const = 0;
  /// A contiguous host tensor on the device; an absent one stays absent.
  virtual TensorView upload(const TensorView& host) = 0;
  /// Contiguous and uninitialised.
  virtual TensorView allocate(DType dtype, std::initializer_list<int64_t> shape) = 0;
  /// Waits, then copies a contiguous device tensor to host memory.
  virtual void download(const TensorView& tensor, void* host) const = 0;
  /// Waits for what was started.
  virtual void synchronize() const = 0;
  /// Seconds that one call takes on the device, on a GPU between events. The call runs once before,
  /// untimed; `cold`: 256 MiB are overwritten in between, so that nothing of it is left in a cache.
  virtual double time(const std::function<void()>& call, bool cold) = 0;
  /// "NVIDIA H200", or "host".
  virtual std::string name() const = 0;
  /// Version of the driver, "" on the host.
  virtual std::string driver() const = 0;
};

/// The device of the backend that `backend` or OCTOPAGE_BACKEND forces, the CPU if none is forced.
std::unique_ptr<StepDevice> make_step_device(std::string_view backend);

/// The tensors of a step that a call reads, on the device. `host` must outlive the result.
Step step_on(const Step& host, StepDevice& device);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_STEP_DEVICE_HPP_
