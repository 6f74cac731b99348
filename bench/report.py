#!/usr/bin/env python3
"""Writes the tables of docs/performance.md from the JSON files in measurements/: no figure is typed.

    bench/report.py            rewrite the tables, and draw the curves where matplotlib can be imported
    bench/report.py --check    exit 1 if the page or a drawing does not show what the files say
"""

import argparse
import json
import pathlib
import re
import statistics
import sys

from report_peers import cpu_peers_tables, draw_plots, peers_tables, stale_plots, table

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/performance.md"


def cpu_tables(path):
    report = json.loads(path.read_text())
    context = report["context"]
    rates = {}
    for run in report["benchmarks"]:
        if run.get("run_type") == "iteration" and "GFLOP/s" in run:
            rates.setdefault(run["run_name"].replace("/real_time", ""), []).append(run["GFLOP/s"])
    median = {name: statistics.median(values) for name, values in rates.items()}
    spread = {name: (max(v) - min(v)) / statistics.median(v) for name, v in rates.items()}

    def ratio(a, b):
        return f"{median[a] / median[b]:.2f}"

    where = (f"{context['octopage_cpu']}; BLAS: {context['blas']}; {context['num_cpus']} cores; "
             f"{len(rates['sgemm/1'])} repetitions, interleaved; largest spread {max(spread.values()):.0%}; "
             f"revision {context.get('revision', 'unknown')[:12]}.")
    targets = table(
        ["ratio, same run", "measured", "target"],
        [["octopage over sgemm 2048^3, 1 thread", ratio("octopage_cpu/1", "sgemm/1"), "at least 0.50"],
         ["octopage over sgemm 2048^3, 2 threads", ratio("octopage_cpu/2", "sgemm/2"), "at least 0.50"],
         ["octopage over gather-then-matmul, 1 thread", ratio("octopage_cpu/1", "gather_matmul/1"), "at least 2"],
         ["octopage over gather-then-matmul, 2 threads", ratio("octopage_cpu/2", "gather_matmul/2"), "at least 2"],
         ["octopage, 2 threads over 1", ratio("octopage_cpu/2", "octopage_cpu/1"), "near 2"]])
    context_rows = [[f"context {n}", ratio(f"by_context/{n}", "by_context/8192")] for n in (8192, 32768, 131072, 524288)]
    keep_rows = [[f"keep {n / 100}", ratio(f"by_keep/{n}", "by_keep/100")] for n in (100, 95, 80, 50, 0)]
    kinds = {0: "bf16", 1: "f16", 3: "f8_e4m3fn"}
    type_rows = [[f"cache {kinds[n]}", ratio(f"by_cache_type/{n}", "by_cache_type/0")] for n in kinds]
    memory = [[f"{threads} threads", f"{int(context[f'workspace_bytes_16384_rows_{threads}_threads']) / 2**20:.1f} MiB"]
              for threads in (1, 2, 16, 64)]
    return "\n\n".join([
        "Measured on: " + where, targets,
        "Rate by context length, over that at 8,192 tokens (1 thread):", table(["case", "relative rate"], context_rows),
        "Rate by overlap of neighbouring rows, over identical selections (1 thread):",
        table(["case", "relative rate"], keep_rows),
        "Rate by cache type, over bf16 (1 thread):", table(["case", "relative rate"], type_rows),
        "Memory beyond inputs and output, direct path, 16,384 rows (target: under 64 MiB):",
        table(["threads", "workspace"], memory)])


def gpu_tables(path):
    evidence = json.loads(path.read_text())
    results = {r["name"]: r for r in evidence["benchmarks"]["results"]}
    peer = evidence["peer"]
    where = (f"{evidence['gpu']}, driver {evidence['driver']}, {evidence['date']}, revision {evidence['revision'][:12]}, "
             f"command `{evidence['command']}`.")
    peer_ms = peer.get("attention_ms_median")
    attention = []
    for name, result in results.items():
        match = re.match(r"(direct|planned|union|union_sustained)/rows:(\d+)/context:(\d+)/keep:([\d.]+)/(\w+)(.*)", name)
        if not match:
            continue
        path, rows, context, keep, kv, rest = match.groups()
        shape = ", ".join(f"{value} {what}" for what, value in re.findall(r"/(\w+):(\d+)", rest))
        beside = not rest and peer_ms is not None and (rows, context, kv) == (str(peer["rows"]), str(peer["context"]), "bf16")
        attention.append([path, rows, context, keep, kv, shape, f"{result['median_us'] / 1000:.3f} ms", f"{result['TFLOP/s']:.0f}",
                          f"{peer_ms * 1000 / result['median_us']:.2f}" if beside and float(keep) == peer["keep"] else ""])
    heads = ["path", "rows", "context", "keep", "cache", "else", "time", "useful TFLOP/s", "speed over the peer"]
    missing = []
    if peer_ms is None:
        missing = ["FlashInfer could not be run in this run; its times stand in the tables beside the peers."]
        heads, attention = heads[:-1], [row[:-1] for row in attention]
    parts = ["Measured on: " + where,
             "`union`: `cuda-sm90a`, one call, all kernels included; `direct` and `planned`: `cuda-sm80`. `union_sustained`: "
             "1,500 calls back to back, mean of one. Times are medians of three means of thirty calls.",
             table(heads, attention)] + missing
    if peer_ms is not None:
        plan = results["plan/host_time"]["median_us"] / 1000
        parts += ["The peer, in the same run, its attention alone (it does the same work whatever the overlap):",
                  table([f"{peer['rows']} rows, context {peer['context']}, keep {peer['keep']}, bf16", "time"],
                        [[peer["peer"], f"{peer_ms:.3f} ms"],
                         [f"its plan, {peer['rows']} rows, host", f"{peer['plan_ms']:.1f} ms"],
                         ["octopage's plan, 16384 rows, host", f"{plan:.3f} ms"]])]
    copies = []
    for name, result in results.items():
        copy = results.get(name + "_copy_of_as_many_bytes")
        if copy:
            copies.append([name, f"{result['median_us']:.1f} us", f"{copy['median_us']:.1f} us",
                           f"{copy['median_us'] / result['median_us']:.2f}"])
    parts += ["Fill (16,384 rows) and staging beside a plain copy of as many bytes (target: 0.80):",
              table(["call", "time", "plain copy", "ratio"], copies)]
    parts.append("What the same run showed ([racecheck](kernels/sm90-prefill.md#racecheck) has a page of its own; `scripts/test.sh` tells whether the CUDA sources have changed since):")
    tools = ["memcheck", "synccheck", "initcheck", "racecheck"]
    rows = []
    for backend in sorted(evidence["cases"]):
        cases = evidence["cases"][backend]
        refused = f", {cases['refused']} refused by name" if cases["refused"] else ""
        results = [evidence["sanitizers"][backend][tool] for tool in tools]
        rows.append([backend, evidence["tests"][backend]["passed"], f"{cases['runs']}{refused}"]
                    + [f"{r['tests']} tests, {r['summary'].strip('= ').split('SUMMARY: ')[-1]}" for r in results])
    parts.append(table(["backend", "GPU tests", "runs of the step files"] + tools, rows))
    return "\n\n".join(parts)


TABLES = {"cpu": cpu_tables, "cpu-peers": cpu_peers_tables, "gpu": gpu_tables, "peers": peers_tables}


def render_page(page):
    """The page with every marked part made anew."""
    def body(match):
        return f"{match.group(1)}\n{TABLES[match.group(2)](ROOT / 'measurements' / match.group(3))}\n\n<!-- end -->"

    return re.sub(r"(<!-- (cpu|cpu-peers|gpu|peers) (\S+) -->\n).*?<!-- end -->", body, page, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = PAGE.read_text()
    fresh = render_page(page)
    runs = [ROOT / "measurements" / name for name in re.findall(r"<!-- peers (\S+) -->", page)]
    if args.check:
        if fresh != page:
            sys.exit("docs/performance.md does not show what measurements/ says: run bench/report.py")
        for stale in sum(map(stale_plots, runs), []):
            sys.exit(f"docs/performance/{stale}.svg was not drawn from measurements/: run bench/report.py with matplotlib")
        return
    PAGE.write_text(fresh)
    if not all([draw_plots(run) for run in runs]):
        print("matplotlib is not installed: the curves in docs/performance/ are left as they are")


if __name__ == "__main__":
    main()
