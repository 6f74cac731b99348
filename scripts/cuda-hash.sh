#!/usr/bin/env bash
# Prints one hash over everything that the CUDA kernels are compiled from: the age of measurements.
set -euo pipefail
cd "$(dirname "$0")/.."
{ find src/backends/cuda -type f | LC_ALL=C sort; echo include/octopage/page_arithmetic.hpp; echo src/plan/page_functions.hpp; } |
  xargs cat | sha256sum | cut -d' ' -f1
