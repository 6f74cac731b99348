#!/usr/bin/env bash
# Builds octopage in every way it can be built here and runs all tests. The last line counts them.
#
#     cpu     release, warnings are errors, benchmarks compiled; all tests, installs and consumers too
#     asan    AddressSanitizer and UBSan: library, command line and step-file tests
#     tsan    ThreadSanitizer: the tests of the library
#     fuzz    both libFuzzer targets, briefly (clang)
#     python  the package, installed by pip into an environment of its own; CPU, numpy
#     cuda    all CUDA code compiles without register spills; runs on a GPU if there is one (nvcc)
set -uo pipefail
cd "$(dirname "$0")/.."
scripts/install-deps.sh || exit 1

results=build/test-results
rm -rf "$results"
mkdir -p "$results"
broken=()

# stage WORDS: says what comes, and how many seconds have gone.
stage() { echo "== $* (after $SECONDS s)"; }

# run NAME CTEST-ARGS...: the tests of build/NAME, counted from the report they leave.
run() {
  local name=$1
  shift
  stage "test $name"
  ctest --test-dir "build/$name" -j "$(nproc)" --output-on-failure --no-tests=error \
        --output-junit "$PWD/$results/$name.xml" "$@" || broken+=("$name")
  [ -s "$results/$name.xml" ] || broken+=("$name: no report")
}

# build NAME PRESET TARGETS-OR-EMPTY CONFIGURE-ARGS...
build() {
  local name=$1 preset=$2 targets=$3
  shift 3
  stage "build $name"
  # shellcheck disable=SC2086
  cmake --preset "$preset" -B "build/$name" "$@" >"$results/$name.configure" 2>&1 &&
    cmake --build "build/$name" ${targets:+--target $targets} >"$results/$name.build" 2>&1 && return 0
  tail -n 60 "$results/$name.configure" "$results/$name.build" 2>/dev/null
  broken+=("$name: build")
  return 1
}

build cpu cpu "" -DOCTOPAGE_WERROR=ON -DOCTOPAGE_BENCH=ON && run cpu
build asan asan "" -DOCTOPAGE_EXAMPLES=OFF && run asan -E '^(install|project)_'
build tsan tsan octopage_library_tests -DOCTOPAGE_EXAMPLES=OFF && run tsan -L library
CC=clang CXX=clang++ build fuzz cpu "fuzz_step_file fuzz_planner" -DOCTOPAGE_FUZZ=ON -DOCTOPAGE_EXAMPLES=OFF && run fuzz -R '^fuzz_'

stage "build python"
if { python3 -m venv build/venv &&
     build/venv/bin/pip install -q --upgrade "scikit-build-core>=0.10" "nanobind>=2.4" numpy ml_dtypes pytest &&
     SKBUILD_CMAKE_DEFINE="OCTOPAGE_CUDA=OFF" build/venv/bin/pip install -q --no-build-isolation --no-deps . ; } \
     >"$results/python.build" 2>&1; then
  stage "test python"
  build/venv/bin/python -m pytest -q --junitxml "$results/python.xml" || broken+=("python")
  [ -s "$results/python.xml" ] || broken+=("python: no report")
else
  tail -n 60 "$results/python.build"
  broken+=("python: build")
fi

if command -v nvcc >/dev/null; then
  build cuda cuda "octopage_cli octopage_cuda_tests octopage_bench_gpu octopage_example_indexer" \
        -DOCTOPAGE_BENCH=ON -DOCTOPAGE_WERROR=ON && run cuda -L cuda
  for evidence in measurements/*.json; do
    recorded=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1])).get("cuda_sources_sha256", ""))' "$evidence" 2>/dev/null)
    [ -z "$recorded" ] || [ "$recorded" = "$(scripts/cuda-hash.sh)" ] ||
      echo "warning: $evidence is older than the CUDA sources: run scripts/gpu_evidence.py on a machine with a GPU"
  done
fi

stage "done"
python3 - "$results" "${broken[@]+"${broken[@]}"}" <<'PY'
import pathlib
import sys
import xml.etree.ElementTree

passed = failed = skipped = 0
for report in sorted(pathlib.Path(sys.argv[1]).glob("*.xml")):
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        skip = case.find("skipped")
        if skip is not None and "Unable to find executable" in skip.get("message", ""):
            failed += 1
            print(f"FAILED {report.stem}: {case.get('name')} was not built")
        elif case.get("status") == "notrun" or skip is not None:
            skipped += 1
        elif case.get("status") == "fail" or case.find("failure") is not None or case.find("error") is not None:
            failed += 1
            print(f"FAILED {report.stem}: {case.get('name')}")
        else:
            passed += 1
for what in sys.argv[2:]:
    if "build" in what or "report" in what:
        failed += 1
        print(f"FAILED {what}")
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if failed or passed == 0 else 0)
PY
