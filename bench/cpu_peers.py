#!/usr/bin/env python3
"""octopage beside torch on the CPU, turn by turn in one run: gather + scaled_dot_product_attention.

    bench/cpu_peers.py --out measurements/cpu-peers.json
    bench/cpu_peers.py --rows 16 --context 2048 --regions 32 --pairs 3       a quick look

Purpose: the naive way that anybody writes with torch, beside the other CPU targets (bench/cpu_targets.cpp).
Rules: both are verified against float64 on sampled rows before anything is timed. Each number of threads has a
process of its own that may use as many cores, so both see the same. They run by turns, A B A B, and the ratio is of
neighbours; only ratios are written. torch gathers and computes in bf16 and in f32; both are shown.
Needs torch and the octopage package.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))


def seconds_of(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(args):
    """In a process that may use --threads cores: ratios of neighbouring turns, for both of torch's ways."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:args.threads])  # before anything starts threads
    import octopage
    import torch

    from peers import selections, steps, torch_sdpa
    from peers.octopage_calls import Direct

    torch.set_num_threads(args.threads)
    spec = selections.Spec(rows=args.rows, context=args.context, region_count=args.regions)
    rows = selections.make_rows(spec)
    step = steps.make_step(spec, rows, selections.work(spec, rows), "cpu")
    verifier = steps.Verifier(step)
    ours = Direct(step, octopage, "cpu")
    ways = {"bf16": torch.bfloat16, "f32": torch.float32}
    outputs = {}
    for name, call in [("octopage", ours.layer)] + [
            (way, lambda out, dtype=dtype: torch_sdpa.attend(step, out, 64 << 20, dtype)) for way, dtype in ways.items()]:
        outputs[name] = torch.full_like(step.query, float("nan"))
        call(outputs[name])
        verifier.check(outputs[name], steps.BOUND)
    ratios = {}
    for way, dtype in ways.items():
        pairs = []
        for _ in range(args.pairs):
            a = seconds_of(lambda: ours.layer(outputs["octopage"]))
            b = seconds_of(lambda dtype=dtype: torch_sdpa.attend(step, outputs["f32"], 64 << 20, dtype))
            pairs.append(b / a)
        pairs.sort()
        last = len(pairs) - 1
        ratios[way] = {"ratio": statistics.median(pairs), "p10": pairs[int(0.1 * last)], "p90": pairs[int(0.9 * last + 0.999)],
                       "pairs": len(pairs)}
    print(json.dumps({"torch": torch.__version__, "ratios": ratios}))


def revision():
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--regions", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        return measure(args)
    cores = len(os.sched_getaffinity(0))
    run = {"format": "octopage-cpu-peers-1", "device": f"CPU, {cores} cores", "revision": revision(),
           "command": "bench/cpu_peers.py " + " ".join(sys.argv[1:]),
           "shape": f"{args.rows} rows, context {args.context}, 16 heads, dim 192, {args.regions} regions, keep 0.95, bf16",
           "rules": " ".join(__doc__.split("Rules: ")[1].split("Needs")[0].split()), "ratios": {}}
    for threads in [n for n in (1, 2) if n <= cores]:
        command = [sys.executable, __file__, "--threads", threads, "--rows", args.rows, "--context", args.context, "--regions",
                   args.regions, "--pairs", args.pairs]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{threads} threads: {done.stderr.strip()[-600:]}")
        result = json.loads(done.stdout)
        run["torch"] = result["torch"]
        for way, ratio in result["ratios"].items():
            run["ratios"][f"{threads}, torch in {way}"] = ratio
            print(f"{threads} threads, torch in {way}: octopage is {ratio['ratio']:.2f} times as fast "
                  f"({ratio['p10']:.2f} .. {ratio['p90']:.2f})")
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(run, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
