#ifndef OCTOPAGE_OCTOPAGE_HPP_
#define OCTOPAGE_OCTOPAGE_HPP_

/// The whole public C++ API.

#include "octopage/backends.hpp"
#include "octopage/error.hpp"
#include "octopage/kv_cache.hpp"
#include "octopage/options.hpp"
#include "octopage/page_arithmetic.hpp"
#include "octopage/page_plan.hpp"
#include "octopage/sparse_prefill.hpp"
#include "octopage/tensor.hpp"
#include "octopage/version.h"

#endif  // OCTOPAGE_OCTOPAGE_HPP_
