#ifndef OCTOPAGE_BACKENDS_CUDA_CUDA_BACKEND_HPP_
#define OCTOPAGE_BACKENDS_CUDA_CUDA_BACKEND_HPP_

// What the registry takes from the CUDA folder. No CUDA header here.

#include "backends/backend.hpp"
#include "backends/page_device.hpp"

namespace octopage {

/// Row by row with mma.sync and cp.async, compute capability 8.0 and newer.
const Backend& cuda_sm80_backend();
/// Its direct path, which does nothing where `*only_if` on the device is 0 by then.
void attend_row_by_row_if(const int32_t* only_if, const DirectParams& d, const RunContext& context);
/// Unions of neighbouring rows with TMA and WGMMA, compute capability 9.0.
const Backend& cuda_sm90a_backend();
const PageDevice& cuda_page_device();

}  // namespace octopage

#endif  // OCTOPAGE_BACKENDS_CUDA_CUDA_BACKEND_HPP_
