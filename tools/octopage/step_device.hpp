#ifndef OCTOPAGE_TOOLS_STEP_DEVICE_HPP_
#define OCTOPAGE_TOOLS_STEP_DEVICE_HPP_

// Where `octopage attend` keeps a step's tensors while it runs: in host memory, or copied to a GPU.

#include <initializer_list>
#include <memory>
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
};

/// The device of the backend that `backend` or OCTOPAGE_BACKEND forces, the CPU if none is forced.
std::unique_ptr<StepDevice> make_step_device(std::string_view backend);

/// The tensors of a step that a call reads, on the device. `host` must outlive the result.
Step step_on(const Step& host, StepDevice& device);

}  // namespace octopage::cli

#endif  // OCTOPAGE_TOOLS_STEP_DEVICE_HPP_
