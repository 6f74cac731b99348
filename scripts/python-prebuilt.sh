#!/usr/bin/env bash
# The Python package on a machine that does not compile the library: builds the module alone, on an octopage
# installed at PREFIX, and runs the Python tests. Needs no network.
#
#     where the library is compiled:
#       cmake --preset cuda -B build/carry-build -DBUILD_SHARED_LIBS=ON -DOCTOPAGE_BUNDLE=ON \
#             -DOCTOPAGE_TESTS=OFF -DOCTOPAGE_EXAMPLES=OFF
#       cmake --build build/carry-build && cmake --install build/carry-build --prefix build/carry --strip
#     on the other machine, with build/carry copied there:
#       scripts/python-prebuilt.sh build/carry [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$(realpath "${1:?python-prebuilt: name the folder that octopage is installed in}")
shift
python=${PYTHON:-python3}
rm -rf build/python-site
SKBUILD_CMAKE_DEFINE="OCTOPAGE_PYTHON_PREBUILT=$prefix" \
  "$python" -m pip install -q --no-index --no-build-isolation --no-deps --target build/python-site .
PYTHONPATH=$PWD/build/python-site "$python" -m pytest -q "$@"
