#!/usr/bin/env bash
# subproject.sh SOURCE SCRATCH: octopage by add_subdirectory.
set -euo pipefail
source=$1 scratch=$2
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$scratch"
env -u CMAKE_EXPORT_COMPILE_COMMANDS cmake -S "$here/subproject" -B "$scratch" -G Ninja -DOCTOPAGE_SOURCE="$source" \
  -DOCTOPAGE_CUDA=OFF -DCONSUMER="$here/consumer/main.cpp" >/dev/null
cmake --build "$scratch" --target host
"$scratch/host"
count=$(ctest --test-dir "$scratch" -N | sed -n 's/^Total Tests: //p')
[ "$count" = 0 ] || { echo "the host has $count tests of octopage's"; exit 1; }
mkdir -p "$scratch/prefix"
cmake --install "$scratch" --prefix "$scratch/prefix" >/dev/null
[ -z "$(find "$scratch/prefix" -type f)" ] || { echo "octopage installs itself with the host"; exit 1; }
