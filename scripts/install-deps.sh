#!/usr/bin/env bash
# Installs what octopage needs from Debian's packages; does nothing where all of it is there.
# CUDA is not among them: it is used where nvcc is found.
set -euo pipefail

packages=(
  cmake g++ ninja-build ccache git python3 pkg-config                     # build
  libcli11-dev nlohmann-json3-dev libfmt-dev libhwy-dev libtbb-dev libpng-dev  # library and command line
  libgtest-dev librapidcheck-dev                                          # tests
  chromium                                                                # the test of the report page
  libbenchmark-dev libopenblas-dev                                        # benchmarks
  python3-venv python3-dev                                                # Python package and its tests
  clang libclang-rt-14-dev                                                # fuzzing
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "install-deps: root or sudo is needed to install: ${missing[*]}" >&2; exit 1; }
  sudo=(sudo)
fi
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
