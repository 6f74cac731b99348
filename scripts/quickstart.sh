#!/usr/bin/env bash
# From a fresh Debian 12 machine to checked attention output, on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install-deps.sh
cmake --preset cpu
cmake --build --preset cpu --target octopage_cli
build/cpu/tools/octopage/octopage attend examples/step.safetensors --check
