#!/usr/bin/env python3
"""Builds, tests and measures everything on a machine with a GPU, in one go, and writes the evidence.

    scripts/gpu_evidence.py                       build the cuda preset, then everything
    scripts/gpu_evidence.py --prebuilt DIR        run the programs in DIR instead of building
    scripts/gpu_evidence.py --prebuilt DIR --carry PREFIX     and the Python package on the octopage installed there
    scripts/gpu_evidence.py --out FILE.json       where to write; measurements/<gpu>.json by default

Runs, in this order: the GPU tests; the step files through the command line on every path;
the benchmarks; the peer, where FlashInfer can be imported; compute-sanitizer (memcheck, synccheck, initcheck on small
tests, racecheck on a few); the Python package's GPU tests; bench/gpu_peers.py, which writes a file of its own beside. The
JSON holds the device, the driver, the revision, the commands, a hash of the CUDA sources and all results.
Exit code 1 if a test or a sanitizer failed. Until all has run, what is known stands in FILE.partial.json.
"""

import argparse
import concurrent.futures
import datetime
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BACKENDS = ("cuda-sm80", "cuda-sm90a")
PYTHON_TESTS = [f"tests/python/test_{name}.py" for name in ("gpu", "torch", "vllm_wheel", "docs")]
# Which tests run under which tool: racecheck slows them down a thousandfold.
SANITIZED = {
    "cuda-sm80": {"all": "-Large*:Fill.SeventyThousandRows:Stream*:Union*",
                  "racecheck": "Attention.ShortRowsAndManyRegions:Attention.ZeroRowsIsLegal:"
                               "Plan.MissingOwnRegionEmptiesTheRow"},
    "cuda-sm90a": {"all": "Cases.Direct:Attention.Every*:Attention.Invalid*:Attention.Strided*:Graph*:Union.EveryHead*:"
                          "Union.Interleaved*:Union.OneSelection*:Union.ANonFinite*:Union.Requests*:Union.AnEmpty*:"
                          "Union.Splits*:Union.Long*:Union.F8Scales*:Attention.QueriesOfAnyMagnitudeOnF8",
                   "racecheck": "Attention.ShortRowsAndManyRegions:Union.OneSelectionForAllGroups:"
                                "Union.SplitsKeepStrangersOut:Attention.QueriesOfAnyMagnitudeOnF8"},
}


def run(command, timeout, env=None):
    """Runs a command; returns its exit code (124: too slow, 127: not there) and its output."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT,
                                   start_new_session=True)
    except OSError as error:
        return 127, str(error)
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        return 124, process.communicate()[0]


def timed(call):
    """What `call` returns, and the seconds it took."""
    begin = time.monotonic()
    return call(), round(time.monotonic() - begin, 1)


def first_line(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def build():
    for command in (["cmake", "--preset", "cuda", "-DOCTOPAGE_BENCH=ON"], ["cmake", "--build", "build/cuda"],
                    ["cmake", "--preset", "cuda", "-B", "build/racecheck", "-DOCTOPAGE_RACECHECK=ON", "-DOCTOPAGE_EXAMPLES=OFF"],
                    ["cmake", "--build", "build/racecheck", "--target", "octopage_cuda_tests"]):
        subprocess.run(command, check=True, cwd=ROOT)
    carry = ROOT / "build/carry"
    for command in (["cmake", "--preset", "cuda", "-B", "build/carry-build", "-DBUILD_SHARED_LIBS=ON", "-DOCTOPAGE_BUNDLE=ON",
                     "-DOCTOPAGE_TESTS=OFF", "-DOCTOPAGE_EXAMPLES=OFF"],
                    ["cmake", "--build", "build/carry-build"],
                    ["cmake", "--install", "build/carry-build", "--prefix", carry, "--strip"]):
        subprocess.run(command, check=True, cwd=ROOT)
    return {
        "carry": carry,
        "tests": ROOT / "build/cuda/tests/cuda/octopage_cuda_tests",
        "racecheck": ROOT / "build/racecheck/tests/cuda/octopage_cuda_tests",
        "bench": ROOT / "build/cuda/bench/octopage_bench_gpu",
        "cli": ROOT / "build/cuda/tools/octopage/octopage",
        "indexer": ROOT / "build/cuda/examples/cuda/octopage_example_indexer",
    }


def prebuilt(directory, carry):
    directory = pathlib.Path(directory).resolve()
    return {"carry": pathlib.Path(carry).resolve() if carry else None, "tests": directory / "octopage_cuda_tests",
            "racecheck": directory / "octopage_cuda_tests_racecheck", "bench": directory / "octopage_bench_gpu",
            "cli": directory / "octopage", "indexer": directory / "octopage_example_indexer"}


def run_shards(command, count):
    """A GoogleTest program in `count` processes at a time, each with its share of the tests: most of their time is one
    host thread's. Returns an exit code that is not 0, or 0, and all output."""
    def shard(index):
        return run(command, 600, os.environ | {"GTEST_TOTAL_SHARDS": str(count), "GTEST_SHARD_INDEX": str(index)})

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        done = sorted(pool.map(shard, range(count)), key=lambda result: result[0] != 0)  # failures last
    return done[-1][0], "\n".join(output for _, output in done)


def count_in(pattern, output):
    return sum(int(n) for n in re.findall(pattern, output))


def run_tests(programs, backend):
    code, output = run_shards([programs["tests"], "--cases", ROOT / "tests/cases", "--backend", backend], 16)
    failed = re.findall(r"^\[  FAILED  \] (\S+)(?: \(|$)", output, re.MULTILINE)
    slowest = sorted(((int(ms), name) for name, ms in re.findall(r"^\[       OK \] (\S+) \((\d+) ms\)", output, re.MULTILINE)),
                     reverse=True)[:5]
    return {"exit_code": code, "passed": count_in(r"\[  PASSED  \] (\d+) test", output), "failed": sorted(set(failed)),
            "calls_on_the_backend": count_in(r"(\d+) calls on", output),
            "slowest_s": {name: round(ms / 1000, 1) for ms, name in slowest},
            "output_end": "" if code == 0 else output[-2000:]}


def run_cases(programs, backend):
    """Every given step file on every path through the command line, outputs compared by it. A shape
    that the backend does not serve must be refused with its name; that is counted."""
    calls = [(path, case) for path in ("direct", "planned", "staged")
             for case in sorted((ROOT / "tests/cases").glob("*.safetensors"))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda call: run([programs["cli"], "attend", call[1], "--backend", backend, "--path", call[0]],
                                              60), calls))
    results, refused, failed = 0, 0, []
    for (path, case), (code, output) in zip(calls, done):
        if code == 2 and f"{backend}: " in output:
            refused += 1
        elif code != 0:
            failed.append(f"{case.stem} {path} {backend}: {output.strip()[-300:]}")
        else:
            results += 1
    return {"runs": results, "refused": refused, "failed": failed}


def run_sanitizer(programs, backend, tool):
    tests = SANITIZED[backend]["racecheck" if tool == "racecheck" else "all"]
    program = programs["racecheck" if tool == "racecheck" else "tests"]  # see OCTOPAGE_RACECHECK
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", program,
               "--cases", ROOT / "tests/cases", "--backend", backend, f"--gtest_filter={tests}"]
    code, output = run_shards(command, 6 if backend == "cuda-sm90a" and tool != "racecheck" else 1)
    summaries = re.findall(r"=+ (?:ERROR|RACECHECK) SUMMARY.*", output)
    result = {"exit_code": code, "tests": count_in(r"\[  PASSED  \] (\d+) test", output), "filter": tests,
              "summary": max(summaries, key=lambda line: count_in(r"\d+", line)) if summaries else output[-500:]}
    if code != 0:  # where, once for each kind
        found = re.findall(r"=+ (?:Error|Warning|Invalid|Uninitialized|Barrier).*(?:\n=+ {5,}.*){0,3}", output)
        kinds = {re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d+", "_", one): one for one in found}
        result["first_of_each_kind"] = list(kinds.values())[:12]
    return result


def correctness(programs, backends):
    calls = {("example_indexer_exit_code",): lambda: run([programs["indexer"]], 60)[0],
             ("sass",): lambda: run_sass(programs)}
    for b in backends:
        calls[("tests", b)] = functools.partial(run_tests, programs, b)
        calls[("cases", b)] = functools.partial(run_cases, programs, b)
    return calls


def sanitizers(programs, backends):
    return {("sanitizers", b, tool): functools.partial(run_sanitizer, programs, b, tool)
            for b in backends for tool in ("memcheck", "synccheck", "initcheck", "racecheck")}


def side_by_side(calls, known):
    """They keep CPU cores busy, and the GPU hardly at all. Each result goes to `known` as it comes."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        names = {pool.submit(timed, call): name for name, call in calls.items()}
        for future in concurrent.futures.as_completed(names):
            known(names[future], *future.result())


def run_sass(programs):
    code, output = run([sys.executable, ROOT / "tests/cuda/sass_report.py", programs["tests"]], 120)
    return {"exit_code": code, "report": output.strip().splitlines()}


def run_benchmarks(programs, scratch):
    out = scratch / "bench.json"
    code, output = run([programs["bench"], f"--benchmark_out={out}", "--benchmark_out_format=json",
                         "--benchmark_repetitions=3", "--benchmark_report_aggregates_only=true"], 600)
    if code != 0:
        return {"exit_code": code, "output_end": output[-2000:]}
    report = json.loads(out.read_text())
    rows = [{"name": re.sub(r"/iterations:\d+.*", "", b["name"]), "median_us": b["real_time"]}
            | {k: v for k, v in b.items() if k in ("TFLOP/s", "GB/s")}
            for b in report["benchmarks"] if b.get("aggregate_name", "median") == "median"]
    return {"exit_code": 0, "results": rows}


def run_peer(scratch):
    out = scratch / "peer.json"
    code, output = run([sys.executable, ROOT / "bench/peers/flashinfer_fa2.py", "--out", out], 300)
    if code != 0:
        return {"exit_code": code, "why": output.strip()[-400:]}
    return json.loads(out.read_text())


def run_python(programs):
    """The package built on the installed library, and all of its tests that use a GPU."""
    if programs["carry"] is None:
        return {"exit_code": 77, "why": "no --carry"}
    code, output = run(["bash", "scripts/python-prebuilt.sh", programs["carry"], *PYTHON_TESTS, "-rs"], 600)
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output.strip().split("\n")[-1])}
    return {"exit_code": code, **counts, "left_out": re.findall(r"^SKIPPED .*", output, re.MULTILINE),
            "output_end": "" if code == 0 else output[-2000:]}


def run_peers(programs, out, revision):
    """Needs the package that `run_python` has built."""
    if programs["carry"] is None:
        return {"exit_code": 77, "why": "no --carry"}
    path = os.pathsep.join(filter(None, [str(ROOT / "build/python-site"), os.environ.get("PYTHONPATH")]))
    file = out.with_name("peers-" + out.name)
    code, output = run([sys.executable, "bench/gpu_peers.py", "--revision", revision, "--out", file], 400,
                       os.environ | {"PYTHONPATH": path})
    return {"exit_code": code, "file": file.name, "output_end": output[-500:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prebuilt")
    parser.add_argument("--carry")
    parser.add_argument("--out")
    parser.add_argument("--revision", help="where the tree is no git checkout")
    parser.add_argument("--backend", action="append", help="only this one; may be repeated")
    args = parser.parse_args()
    programs = prebuilt(args.prebuilt, args.carry) if args.prebuilt else build()
    gpu = first_line(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()[0]
    evidence = {
        "gpu": gpu,
        "driver": first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "revision": args.revision or first_line(["git", "rev-parse", "HEAD"]),
        "cuda_sources_sha256": first_line(["bash", "scripts/cuda-hash.sh"]),
        "command": "scripts/gpu_evidence.py",
    }
    out = pathlib.Path(args.out) if args.out else ROOT / "measurements" / (gpu.lower().replace(" ", "-") + ".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial.json")  # takes the place of `out` when all has been run
    wanted = [b for b in BACKENDS if not args.backend or b in args.backend]
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)

        def known(name, result, seconds):
            place = evidence
            for part in name[:-1]:
                place = place.setdefault(part, {})
            place[name[-1]] = result
            evidence.setdefault("seconds", {})[" ".join(name)] = seconds
            partial.write_text(json.dumps(evidence, indent=1) + "\n")

        side_by_side(correctness(programs, wanted), known)
        if any(result["exit_code"] not in (0, 77) for result in evidence["tests"].values()):
            print(json.dumps(evidence["tests"], indent=1))
            print("FAILED: nothing is measured before the tests pass")
            return 1
        for name, stage in (("benchmarks", lambda: run_benchmarks(programs, scratch)),
                            ("peer", lambda: run_peer(scratch))):
            known((name,), *timed(stage))
        side_by_side(sanitizers(programs, wanted), known)
        for name, stage in (("python", lambda: run_python(programs)),
                            ("peers", lambda: run_peers(programs, out, evidence["revision"]))):
            known((name,), *timed(stage))
    partial.replace(out)
    bad = ["examples/cuda/indexer_pages.cu"] if evidence["example_indexer_exit_code"] else []
    bad += [f"sass: {evidence['sass']}"] if evidence["sass"]["exit_code"] not in (0, 77) else []
    bad += [f"{name}: {evidence[name]}" for name in ("python", "peers") if evidence[name]["exit_code"] not in (0, 77)]
    for b in wanted:
        tests, cases = evidence["tests"][b], evidence["cases"][b]
        bad += [f"tests: {b}: {tests}"] if tests["exit_code"] not in (0, 77) else []
        bad += cases["failed"] if tests["exit_code"] != 77 else []
        bad += [f"{tool}: {b}: {result}" for tool, result in evidence["sanitizers"][b].items()
                if result["exit_code"] not in (0, 77)]
        print(f"{b}: {tests['passed']} tests, {cases['runs']} case runs, {cases['refused']} refused")
    print(f"evidence in {out}")
    for result in evidence["benchmarks"].get("results", []):
        rate = f"{result['TFLOP/s'] / 1:.1f} TFLOP/s" if "TFLOP/s" in result else f"{result.get('GB/s', 0):.0f} GB/s"
        print(f"{result['name']:75s} {result['median_us']:9.1f} us  {rate}")
    print("peer:", json.dumps(evidence["peer"]))
    for line in bad:
        print("FAILED", line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
