#!/usr/bin/env bash
# consume.sh static|shared SOURCE SCRATCH CXX WERROR: installs octopage into a tree of its own, moves the
# tree, and builds and runs a consumer by CMake package and by pkg-config.
set -euo pipefail
kind=$1 source=$2 scratch=$3 cxx=$4 werror=$5
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$scratch"
mkdir -p "$scratch"
shared=OFF
[ "$kind" = shared ] && shared=ON

# A plain build, as a packager makes it: not this build's sanitizers or options. Warnings as in this one, so that a
# compiler cache knows the objects.
cmake -S "$source" -B "$scratch/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=$shared \
  -DOCTOPAGE_CUDA=OFF -DOCTOPAGE_TESTS=OFF -DOCTOPAGE_EXAMPLES=OFF -DOCTOPAGE_WERROR="$werror" >/dev/null
cmake --build "$scratch/build"
DESTDIR= cmake --install "$scratch/build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/installed"
prefix=$scratch/installed
libdir=$(dirname "$(find "$prefix" -name 'liboctopage.*' -not -type d | head -1)")

if grep -rqs "fmt::" "$prefix"; then echo "fmt shows in the package"; exit 1; fi
"$prefix/bin/octopage" --version

echo "-- find_package"
cmake -S "$here/consumer" -B "$scratch/by-package" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$cxx" >/dev/null
cmake --build "$scratch/by-package"
"$scratch/by-package/consumer"

echo "-- pkg-config"
export PKG_CONFIG_PATH="$libdir/pkgconfig"
for flag in "" --static; do # without the flag too: as README says
  # shellcheck disable=SC2046
  "$cxx" -std=c++20 "$here/consumer/main.cpp" -o "$scratch/by-pkg-config" $(pkg-config --cflags --libs $flag octopage)
  LD_LIBRARY_PATH="$libdir" "$scratch/by-pkg-config"
done
grep -qF '$(pkg-config --cflags --libs octopage)' "$source/README.md" || { echo "README has no such line"; exit 1; }

if [ "$kind" = shared ]; then
  echo "-- exported symbols"
  # Weak instantiations of the standard library's templates cannot be hidden by a library.
  nm -D --defined-only -C "$libdir/liboctopage.so" >"$scratch/symbols"
  foreign=$(grep -vE ' (octopage(::|_)|(vtable|typeinfo|typeinfo name|guard variable|VTT) for octopage::)' "$scratch/symbols" |
    grep -vE '^[0-9a-f]+ [WVu] .*\bstd::' || true)
  [ -z "$foreign" ] || { echo "$foreign"; echo "these symbols are not octopage's"; exit 1; }
  grep -q ' T octopage::sparse_prefill(' "$scratch/symbols" || { echo "the API is not exported"; exit 1; }
fi
