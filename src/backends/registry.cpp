#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>

#include "backends/backend.hpp"
#include "backends/page_device.hpp"
#include "core/check.hpp"
#include "core/read_once.hpp"
#if OCTOPAGE_HAS_CUDA
#include "backends/cuda/cuda_backend.hpp"
#endif

namespace octopage {

std::span<const Backend* const> compiled_backends() {
  static const std::array backends = {
#if OCTOPAGE_HAS_CUDA
    &cuda_sm90a_backend(),
    &cuda_sm80_backend(),
#endif
    &cpu_backend(),
    &reference_backend()
  };
  return backends;
}

const PageDevice& page_device(Device device) {
  if (device.type == DeviceType::cpu) return host_page_device();
#if OCTOPAGE_HAS_CUDA
  return cuda_page_device();
#else
  fail(ErrorCode::unsupported, "{}: this build of octopage has no CUDA backend", name(device));
#endif
}

Support supports_on_cpu(const char* backend, const Problem& problem) {
  if (problem.device.type != DeviceType::cpu) {
    return {false,
            fmt::format("{}: runs on cpu tensors; these are on {}", backend, name(problem.device))};
  }
  return supports_shape(backend, problem);
}

Support supports_shape(const char* backend, const Problem& problem) {
  if (problem.query_dtype != DType::bf16 && problem.query_dtype != DType::f16) {
    return {false, fmt::format("{}: query dtype must be bf16 or f16, is {}", backend,
                               name(problem.query_dtype))};
  }
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), problem.dim) == std::end(kHeadDims)) {
    return {false, fmt::format("{}: head dim must be one of 64, 128, 192, 256, is {}", backend,
                               problem.dim)};
  }
  if (problem.heads_per_group < 1 || problem.heads_per_group > kMaxHeadsPerGroup) {
    return {false, fmt::format("{}: heads per group must be 1 .. {}, is {}", backend,
                               kMaxHeadsPerGroup, problem.heads_per_group)};
  }
  return {true, ""};
}

PageRange page_range(const PagedParams& params, int64_t row) {
  const int64_t begin =
      std::clamp<int64_t>(read_once(params.indptr + row), 0, params.page_capacity);
  const int64_t most = std::min(params.page_capacity, begin + params.problem.region_count);
  const int64_t end = std::clamp<int64_t>(read_once(params.indptr + row + 1), begin, most);
  return {begin, end, std::clamp<int32_t>(read_once(params.last_page_len + row), 1, kPageTokens)};
}

void raise_status(int32_t* status, int32_t bits) {
  if (status != nullptr && bits != 0) {
    std::atomic_ref<int32_t>(*status).fetch_or(bits, std::memory_order_relaxed);
  }
}

}  // namespace octopage
