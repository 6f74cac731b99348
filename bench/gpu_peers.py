#!/usr/bin/env python3
"""octopage beside its peers on one GPU, in one run: verified, then timed, written as JSON.

    bench/gpu_peers.py --out measurements/peers-nvidia-h200.json            everything that fits the budget
    bench/gpu_peers.py --budget 280 --out FILE.json                         seconds, kernels compiled at run time included
    bench/gpu_peers.py --only base --only 'keep-*'                          these scenarios; --skip leaves some out
    bench/gpu_peers.py --skip 'grid-*' --out A.json                         in two calls: single points, entry points
    bench/gpu_peers.py --only 'grid-*' --out B.json                             and the grid
    bench/gpu_peers.py --merge A.json B.json --out FILE.json                as one file; needs no GPU
    bench/gpu_peers.py --list                                               scenarios with their purpose
    bench/gpu_peers.py --cpu --out FILE.json                                self-check on tiny shapes without a GPU

Needs torch and triton; FlashInfer and the octopage package are used where they can be imported (octopage from an
installed package; `--python DIR` puts a folder first on the path). A peer that fails is recorded with its reason and
does not stop the run. Purpose and rules stand in the JSON; docs/benchmarks.md describes its format.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import fnmatch
import json
import multiprocessing
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from peers.merging import merge  # noqa: E402
from peers.selections import Spec, make_rows, sharing, work  # noqa: E402  (numpy only: workers are forked before torch is there)

LAYERS = 32  # of a step that shares one plan, for the line that counts planning and Python
ENTRIES = "entries"  # what --only and --skip call FlashInfer's other entry points
WHOLE_STEPS = ("octopage", "octopage-planned", "today")  # the peers whose whole steps are timed
ENTRIES_S = 80  # kept for FlashInfer's other entry points, a quarter of the budget at most
DEVICE_LOST = 70  # exit code of a process that tries entry points, once a fault has made its device useless
QUIET_S = 25  # an entry point that says nothing for so long is stopped

RULES = [
    "Every result is verified before it is timed: sampled rows against float64 on the stored values, output poisoned with "
    "NaN beforehand; a peer that is wrong is not timed.",
    "A call is warmed up. `warm` repeats it; `cold` overwrites 256 MiB before each repetition, so that nothing is in L2. "
    "Thirty repetitions, or ten where those spread over less than 2% of their median; `calls` tells.",
    "`layer` counts everything that runs on the device for one layer: unions or fill, staging of an f8 cache, copies of a "
    "group's query and output, attention. It is device time between events, queued behind a sleeping device, so that "
    "Python and launches do not show.",
    "`layer_wall` is the wall time of the same from an idle device: Python and launches included. `plan_wall` is planning "
    f"once per step on the host. `step_wall_per_layer` is the wall time of plan and {LAYERS} layers over {LAYERS}, of "
    f"{', '.join(WHOLE_STEPS)}.",
    "torch gather + SDPA runs at the base point and where rows times groups are at most 1024. Scenarios of the grid time "
    "octopage and today's layer alone, with ten repetitions at most and no whole steps.",
    "Useful work is 4 * dim operations for each head and token that a row attends to: valid tokens only. Gathered bytes are "
    "K and V of every selected page, once per row that selects it.",
    "The roofs are measured in the same run: a bf16 product of torch, a Triton kernel that only loads the scenario's pages row "
    "by row (warm), a device copy.",
]


@dataclasses.dataclass(frozen=True)
class Scenario:
    name: str
    purpose: str
    spec: Spec
    rules: str = ""  # beyond RULES
    peers: tuple = ()  # () is all
    grid: bool = False  # one point among many: few repetitions, no whole steps

    def chosen_peers(self, every):
        """Of `every` peer, those that run here: torch gathers copies of all that is selected, for small shapes only."""
        small = self.name == "base" or self.spec.rows * self.spec.groups <= 1024
        return tuple(name for name in self.peers or every if small or name != "torch-sdpa")


KEEPS = (1.0, 0.97, 0.95, 0.87, 0.8, 0.5, 0.0)
CONTEXTS = (131072, 16384, 1 << 20)
COMMON = {"dim": 128, "heads_per_group": 8, "region_count": 256}
F8 = {"cache": "f8_e4m3fn"}


def scenarios():
    """Most important first: what does not fit the budget is dropped from the end."""
    base = Spec()
    change = dataclasses.replace
    curve = ("octopage", "octopage-portable", "today", "today-attention")
    found = [
        Scenario("base", "The Step-5 shape at the overlap that models show: how far ahead of today's way?", base),
        Scenario("f8", "An f8 cache at the base point: half the bytes, and today's way stages it.", change(base, **F8)),
        Scenario("rows-16384", "A large chunk: the tail no longer shows.", change(base, rows=16384), peers=curve),
        Scenario("groups-4", "Four groups in one call; today's way runs them one by one.", change(base, groups=4),
                 peers=curve),
        Scenario("f8-groups-4", "Four groups of an f8 cache.", change(base, groups=4, **F8), peers=curve),
        Scenario("f8-context-1048576", "A long f8 context: staging copies all of it for every layer.",
                 change(base, context=1 << 20, **F8), peers=curve),
    ]
    for keep in (0.5, 0.0, 0.8, 0.87, 1.0, 0.97):
        found.append(Scenario(f"keep-{keep:.2f}", "Overlap of neighbouring rows: what sharing pages is worth.",
                              change(base, keep=keep), peers=() if keep in (0.5, 0.0) else curve + ("triton-rows",)))
    found += [
        Scenario("rows-256", "Few rows: tiles do not fill the chip.", change(base, rows=256)),
        Scenario("rows-1024", "A medium chunk.", change(base, rows=1024)),
        Scenario("context-16384", "A short context: the cache of the step stays in L2.", change(base, context=16384)),
        Scenario("context-1048576", "A long context: pages come from memory.", change(base, context=1 << 20)),
        Scenario("dim-128", "A common shape: 8 heads, dim 128, 256 regions.", change(base, **COMMON)),
        Scenario("short-requests", "Chunked prefill of many short requests: 64 requests with 64 rows each.",
                 change(base, requests=64, context=8192)),
        Scenario("shortest-requests", "256 requests with 16 rows each whose whole context is selected.",
                 change(base, requests=256, context=2048), "All regions of the context are selected: keep has no effect.",
                 curve),
        Scenario("f8-short-requests", "Chunked prefill of many short requests over an f8 cache.",
                 change(base, requests=64, context=8192, **F8), peers=curve),
        Scenario("f8-keep-0.50", "An f8 cache at low overlap.", change(base, keep=0.5, **F8), peers=curve),
        Scenario("f8-keep-0.00", "An f8 cache, rows that share nothing.", change(base, keep=0.0, **F8), peers=curve),
        Scenario("dim-128-f8", "The common shape with an f8 cache.", change(base, **COMMON, **F8), peers=curve),
        Scenario("rows-16384-context-1048576", "A large chunk of a long context.",
                 change(base, rows=16384, context=1 << 20), peers=curve),
    ]
    for rows in (8192, 512, 2048):
        found.append(Scenario(f"rows-{rows}", "Scaling with the rows of a chunk.", change(base, rows=rows), peers=curve))
    for context in (262144, 32768, 524288, 65536):
        found.append(Scenario(f"context-{context}", "Scaling with the context.", change(base, context=context), peers=curve))
    return found + grid({s.spec for s in found})


def grid(there):
    """Rows by context by overlap, for both cache types; four groups and the common shape along the axes. Without the
    points that are `there` already."""
    base, change = Spec(), dataclasses.replace
    specs = [change(base, rows=rows, context=context, keep=keep, **cache) for context in CONTEXTS for cache in ({}, F8)
             for keep in KEEPS for rows in (4096, 16384, 1024, 256)]
    for cache in ({}, F8):
        for other in ({"groups": 4}, COMMON):
            specs += [change(base, rows=rows, context=context, **other, **cache) for context in CONTEXTS
                      for rows in (256, 1024, 4096, 16384)]
            specs += [change(base, keep=keep, **other, **cache) for keep in KEEPS]
    specs = [spec for spec in dict.fromkeys(specs) if spec not in there]
    return [Scenario(grid_name(spec), "A point of the grid: rows, context and overlap together.", spec,
                     peers=("octopage", "today"), grid=True) for spec in specs]


def grid_name(spec):
    kind = "".join(word for word, there in (("dim-128-", spec.dim == 128), ("groups-4-", spec.groups == 4),
                                            ("f8-", spec.cache != "bf16")) if there)
    return f"grid-{kind}{spec.rows}-{spec.context}-{spec.keep:.2f}"


def tiny(scenario):
    """The same scenario small enough for a self-check on a CPU."""
    spec = scenario.spec
    spec = dataclasses.replace(spec, rows=6, context=512 + 3 * (spec.requests > 64),
                               region_count=16, requests=min(3, spec.requests), dim=64 if spec.dim == 128 else 192)
    return dataclasses.replace(scenario, spec=spec)


def selection_of(spec):
    """What selections depend on: caches of both types share them."""
    return dataclasses.replace(spec, cache="bf16")


def select(spec):
    """In a worker: what is slow on the host."""
    rows = make_rows(spec)
    return rows, sharing(spec, rows)


def make_selections(spec):
    rows, shared = select(spec)
    return rows, work(spec, rows, shared)


class Recorder:
    """The JSON of a run; written every few seconds, so that a run that is cut off leaves what it knows."""

    def __init__(self, path, data):
        self.path, self.data, self.begin, self.saved = path, data, time.monotonic(), -1e9

    def elapsed(self):
        return time.monotonic() - self.begin

    def save_now_and_then(self):
        """Writing hundreds of scenarios after each of them would cost seconds."""
        if time.monotonic() - self.saved > 5:
            self.save()

    def save(self):
        self.saved = time.monotonic()
        self.data["elapsed_s"] = round(self.elapsed(), 1)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def short_reason(error):
    text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    return text if len(text) <= 600 else text[:300] + " ... " + text[-300:]


def output_of(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def optional_import(name):
    """A module, or the reason why it is not there."""
    try:
        module = __import__(name, fromlist=["_"])
        return module, ""
    except Exception as error:  # noqa: BLE001  (a broken peer is a result, too)
        return None, short_reason(error)


class Peers:
    """Makes each peer for a step. A factory raises where the peer cannot serve it; the reason is recorded."""

    def __init__(self, on_gpu):
        self.on_gpu = on_gpu
        self.octopage, self.no_octopage = optional_import("octopage")
        self.step5, _ = optional_import("octopage.step5") if self.octopage else (None, "")
        self.flashinfer, self.no_flashinfer = optional_import("flashinfer")
        self.no_kernels = {}  # head dim: why FlashInfer's kernels for it are not there
        self.factories = {"octopage": self._octopage, "octopage-portable": self._portable, "octopage-planned": self._planned,
                          "today": self._today, "today-attention": self._today_attention, "triton-rows": self._triton_rows,
                          "torch-sdpa": self._torch_sdpa}

    def _need_octopage(self):
        if self.octopage is None:
            raise RuntimeError(f"octopage cannot be imported: {self.no_octopage}")

    def _octopage(self, step):
        """The direct path on the Hopper kernel; where that refuses the step, on what octopage itself chooses."""
        self._need_octopage()
        from peers.octopage_calls import Direct

        if not self.on_gpu:
            return Direct(step, self.octopage, "cpu"), {"backend": "cpu"}
        try:
            return Direct(step, self.octopage, "cuda-sm90a"), {"backend": "cuda-sm90a"}
        except self.octopage.Unsupported as error:
            return Direct(step, self.octopage, None), {"backend": "default", "cuda-sm90a refused": str(error)}

    def _portable(self, step):
        self._need_octopage()
        from peers.octopage_calls import Direct

        name = "cuda-sm80" if self.on_gpu else "reference"
        return Direct(step, self.octopage, name), {"backend": name}

    def _planned(self, step):
        self._need_octopage()
        from peers.octopage_calls import Planned

        return Planned(step, self.step5), {}

    def _today(self, step):
        if self.flashinfer is None:
            raise RuntimeError(f"FlashInfer cannot be imported: {self.no_flashinfer}")
        if step.spec.dim in self.no_kernels:
            raise RuntimeError(f"FlashInfer's kernels for dim {step.spec.dim}: {self.no_kernels[step.spec.dim]}")
        from peers.todays_module import TodaysModule

        return TodaysModule(step, self.flashinfer), {}

    def _today_attention(self, step):
        module, about = self._today(step)
        if step.spec.groups > 1:
            raise RuntimeError("its attention alone is timed for one group: several are several calls of it")
        return AttentionOnly(module), about

    def _triton_rows(self, step):
        from peers import triton_rows

        return Plain(lambda out: triton_rows.row_attention(step, out)), {}

    def _torch_sdpa(self, step):
        from peers import torch_sdpa

        return Plain(lambda out: torch_sdpa.attend(step, out)), {}


class Plain:
    def __init__(self, layer):
        self.layer = layer


class AttentionOnly:
    """A planned peer whose list is filled (and staged) once; then only its attention runs."""

    def __init__(self, module):
        self._module, self._filled = module, False

    def layer(self, out):
        if not self._filled:
            self._module.plan()
            self._module.layer(out)
            self._filled = True
        self._module.attend(0, out)


def time_peer(peer, out, clock, calls, whole_step):
    """Cold and warm device times, and the wall times; `whole_step`: of planning and of a step of many layers, too."""

    def layer():
        peer.layer(out)

    result = {"warm": clock.device(layer, calls, cold=False), "cold": clock.device(layer, calls, cold=True),
              "layer_wall": clock.host(layer, min(5, calls))}
    if not whole_step:
        return result
    plans = hasattr(peer, "plan")
    if plans:
        result["plan_wall"] = clock.host(peer.plan, 5)
    layers = clock.layers(LAYERS)

    def step():
        if plans:
            peer.plan()
        for _ in range(layers):
            peer.layer(out)

    whole = clock.host(step, 3)
    result["step_wall_per_layer"] = {k: v / layers if k.endswith("_ms") else v for k, v in whole.items()}
    return result


def add_rates(result, costs, roofs):
    """Rates of a timed peer and fractions of the roofs of the same run."""
    for state in ("warm", "cold"):
        seconds = result[state]["median_ms"] / 1e3
        rates = {"useful_tflops": costs["useful_flops"] / seconds / 1e12,
                 "gathered_gbs": costs["row_by_row_bytes"] / seconds / 1e9}
        rates["fraction_of_matrix_peak"] = rates["useful_tflops"] / roofs["matrix_tflops"]
        if roofs.get("gather_gbs"):
            rates["fraction_of_gather"] = rates["gathered_gbs"] / roofs["gather_gbs"]
        rates["fraction_of_copy"] = costs["compulsory_bytes"] / seconds / 1e9 / roofs["copy_gbs"]
        result[state].update(rates)


def gather_roof(step, clock):
    """GB/s of loading the step's pages row by row; verified on one row."""
    import torch

    from peers import steps, triton_rows

    pages, indptr = steps.flat_pages(step)
    sums = torch.zeros(len(indptr) - 1, dtype=torch.int64, device=pages.device)
    triton_rows.gather_pages(step.kv_cache, pages, indptr, sums)
    words = step.kv_cache.view(torch.uint8).reshape(-1).view(torch.int32).view(-1, step.spec.page_bytes // 4)
    expected = words[pages[:int(indptr[1])].long()].long().sum()
    if (int(sums[0]) - int(expected)) % 2**32:
        raise AssertionError(f"the gather kernel is wrong: row 0 sums to {int(sums[0])}, expected {int(expected)} mod 2^32")
    warm = clock.device(lambda: triton_rows.gather_pages(step.kv_cache, pages, indptr, sums), 20, cold=False)
    return len(pages) * step.spec.page_bytes / warm["median_ms"] / 1e6


def predicted_bound(costs, roofs):
    """Least times of a kernel that loads unions of eight rows and computes on unions of four; which one binds."""
    times = {"matrix unit": costs["useful_flops"] * costs["union_factor"]["4"] / roofs["matrix_tflops"] / 1e9,
             "memory": costs["compulsory_bytes"] / roofs["copy_gbs"] / 1e6}
    if roofs.get("gather_gbs"):
        times["page gather"] = costs["union_of_8_bytes"] / roofs["gather_gbs"] / 1e6
    return {"times_ms": times, "binds": max(times, key=times.get)}


def run_peer(name, peers, step, verifier, clock, roofs, grid):
    """One peer on one step: made, verified, timed; or the reason why not."""
    import torch

    from peers import steps

    record = {"peer": name}
    try:
        peer, about = peers.factories[name](step)
        record["about"] = about
        bound = steps.BOUND_ROUNDED_CACHE if step.f8 and not name.startswith("octopage") else steps.BOUND
        if name == "triton-rows" and not peers.on_gpu:
            bound = steps.BOUND_INTERPRETED
        out = torch.full_like(step.query, float("nan"))
        if hasattr(peer, "plan"):
            peer.plan()
        peer.layer(out)
        clock.synchronize()
        record["verified"] = verifier.check(out, bound)
        calls = 3 if name == "torch-sdpa" else 10 if grid else 30
        record.update(time_peer(peer, out, clock, calls, whole_step=name in WHOLE_STEPS and not grid))
        add_rates(record, step.work, roofs)
    except Exception as error:  # noqa: BLE001
        record["failed"] = short_reason(error)
    return record


def run_scenario(scenario, selections, peers, clock, device, machine_roofs):
    from peers import steps

    spec = scenario.spec
    begin = time.monotonic()
    step = steps.make_step(spec, *selections, device)
    roofs = dict(machine_roofs)
    try:
        roofs["gather_gbs"] = gather_roof(step, clock)
    except Exception as error:  # noqa: BLE001
        roofs["gather_failed"] = short_reason(error)
    record = {"name": scenario.name, "purpose": scenario.purpose, "rules": scenario.rules, "grid": scenario.grid,
              "spec": dataclasses.asdict(spec),
              "work": step.work, "roofs": roofs, "predicted": predicted_bound(step.work, roofs), "results": []}
    verifier = steps.Verifier(step)
    for name in scenario.chosen_peers(tuple(peers.factories)):
        result = run_peer(name, peers, step, verifier, clock, roofs, scenario.grid)
        record["results"].append(result)
        print(line_of(result), flush=True)
    record["seconds"] = round(time.monotonic() - begin, 2)
    print(f"  {record['seconds']:.2f} s", flush=True)
    return record, step


def line_of(result):
    if "failed" in result:
        return f"  {result['peer']:18s} failed: {result['failed'][:150]}"
    warm, cold = result["warm"], result["cold"]
    return (f"  {result['peer']:18s} warm {warm['median_ms']:8.3f} ms (p10 {warm['p10_ms']:.3f}, p90 {warm['p90_ms']:.3f})  "
            f"cold {cold['median_ms']:8.3f} ms  {warm['useful_tflops']:6.1f} useful TFLOP/s  "
            f"{warm['gathered_gbs']:7.0f} GB/s gathered  matrix {warm['fraction_of_matrix_peak']:.2f}  "
            f"gather {warm.get('fraction_of_gather', 0):.2f}  copy {warm['fraction_of_copy']:.2f}  "
            f"with Python {result['layer_wall']['median_ms']:.3f} ms")


def sustained(step, peers, names, calls, clock):
    """Mean time of a layer when many run back to back: the chip is as hot as in an engine."""
    import torch

    results = []
    for name in names:
        try:
            peer, _ = peers.factories[name](step)
            out = torch.empty_like(step.query)
            if hasattr(peer, "plan"):
                peer.plan()
            peer.layer(out)

            def many(peer=peer, out=out):
                for _ in range(calls):
                    peer.layer(out)

            results.append({"peer": name, "calls": calls, "mean_ms": clock.host(many, 1)["median_ms"] / calls})
        except Exception as error:  # noqa: BLE001
            results.append({"peer": name, "failed": short_reason(error)})
    return results


# FlashInfer's other entry points, each tried in a process that may die.

def try_entries(args):
    """In a process of its own: every entry of --entries; one JSON line each, flushed before the next. A fault stays with
    the process, and whatever ran after it would be blamed for it: the process ends there."""
    import torch

    from peers import flashinfer_entries as entries
    from peers import steps, timing
    from peers.todays_module import TodaysModule

    peers = Peers(not args.cpu)
    device = "cpu" if args.cpu else "cuda"
    clock = timing.CpuClock() if args.cpu else timing.GpuClock()
    spec = tiny(scenarios()[0]).spec if args.cpu else Spec()
    made = {}
    for name in args.entries:
        record = {"entry": name}
        try:
            if peers.flashinfer is None:
                raise RuntimeError(f"FlashInfer cannot be imported: {peers.no_flashinfer}")
            cache = "f8_e4m3fn" if name.endswith("f8 cache") else "bf16"
            if cache not in made:
                step = steps.make_step(dataclasses.replace(spec, cache=cache), *make_selections(spec_of(spec, cache)), device)
                module = TodaysModule(step, peers.flashinfer)
                module.plan()
                if cache != "bf16":
                    module.stage(0)
                module.fill(0)
                made[cache] = (step, module, steps.Verifier(step))
            step, module, verifier = made[cache]
            call = entries.ENTRIES[name](step, peers.flashinfer, module)
            out = torch.full_like(step.query, float("nan"))
            call(out)
            clock.synchronize()
            record["verified"] = verifier.check(out, steps.BOUND_ROUNDED_CACHE if step.f8 else steps.BOUND)
            record["warm"] = clock.device(lambda: call(out), 20, cold=False)
            record["cold"] = clock.device(lambda: call(out), 20, cold=True)
        except Exception as error:  # noqa: BLE001
            record["refused"] = short_reason(error)
        with open(args.out, "a") as file:
            file.write(json.dumps(record) + "\n")
        try:
            clock.synchronize()
        except Exception:  # noqa: BLE001
            return DEVICE_LOST
    return 0


def spec_of(spec, cache):
    return dataclasses.replace(spec, cache=cache)


def run_entries(names, seconds, args):
    """Tries entries in processes; one that dies costs only the entry it died in."""
    results, left, stop = [], list(names), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        while left:
            out = pathlib.Path(scratch) / "entries.jsonl"
            out.write_text("")
            remaining = stop - time.monotonic()
            if remaining < (3 if args.cpu else 12):
                results += [{"entry": name, "dropped": "no time left in the budget"} for name in left]
                break
            command = [sys.executable, __file__, "--out", str(out)] + (["--cpu"] if args.cpu else [])
            command += [part for folder in args.python for part in ("--python", folder)]
            process = Group(command + ["--entries", *left])
            why = process.finish(remaining, quiet=QUIET_S, grows=out) or "its process ended without a result"
            known = [json.loads(line) for line in out.read_text().splitlines()]
            results += known
            left = left[len(known):]
            if left and not (known and process.code == DEVICE_LOST):  # the first one that gave no answer is to blame
                results.append({"entry": left[0], "refused": why})
                left = left[1:]
    return results


class Group:
    """A process that is stopped together with all that it started, such as compilers."""

    def __init__(self, command, environment=None):
        self._errors, self.code = tempfile.TemporaryFile("w+"), None
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._errors, env=environment,
                                         start_new_session=True)

    def finish(self, seconds, quiet=None, grows=None):
        """Waits as long and stops what is not done by then, or while the file `grows` has not grown for `quiet` seconds;
        "" where it succeeded, else the reason."""
        stop, size = time.monotonic() + max(0.1, seconds), -1
        while True:
            now = time.monotonic()
            if quiet and grows.stat().st_size != size:
                size, silent = grows.stat().st_size, now + quiet
            until = min(stop, silent) if quiet else stop
            try:
                self.code = self._process.wait(max(0.0, min(until - now, 0.5)))
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() >= until:
                    self.stop()
                    return "not finished within the budget" if until == stop else f"no result in {quiet} s"
        self._errors.seek(0)
        return "" if self.code == 0 else f"exit code {self.code}: {self._errors.read().strip()[-400:]}"

    def stop(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Build:
    """Compiles FlashInfer's kernels for an entry point; nothing runs on the device."""

    def __init__(self, name, dim, args, jobs):
        self._about, self._begin = {"kernels": name, "dim": dim}, time.monotonic()
        command = ["nice", "-n", "10", sys.executable, __file__, "--build", name, "--dim", str(dim)]
        command += [part for folder in args.python for part in ("--python", folder)]
        self._group = Group(command, dict(os.environ, MAX_JOBS=str(jobs)))
        self.stop = self._group.stop

    def finish(self, seconds):
        why = self._group.finish(seconds)
        return {**self._about, "ok": not why, "why": why, "seconds": round(time.monotonic() - self._begin, 1)}


BACKGROUND = ("BlockSparseAttentionWrapper, 1 x 8 blocks", "BatchPrefillWithPagedKVCacheWrapper fa2, f8 cache", "BatchAttention",
              "BatchPrefillWithPagedKVCacheWrapper fa3")


def describe_run(args, peers, torch, triton):
    on_gpu = not args.cpu
    driver = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[0] if on_gpu else ""
    data = {
        "format": "octopage-peers-1",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu, self-check: times mean nothing",
        "driver": driver,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "revision": args.revision or output_of(["git", "rev-parse", "HEAD"]),
        "command": "bench/gpu_peers.py " + shlex.join(args.command),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__,
                     "flashinfer": getattr(peers.flashinfer, "__version__", f"absent: {peers.no_flashinfer}"),
                     "octopage": getattr(peers.octopage, "__version__", f"absent: {peers.no_octopage}")},
        "budget_s": args.budget, "layers_of_a_step": LAYERS, "rules": RULES, "scenarios": [], "dropped": [], "kernels": [],
        "entries": [],
    }
    if peers.octopage:
        data["octopage_backends"] = [{k: str(v) for k, v in b.items()} for b in peers.octopage.backends()]
    return data


def is_chosen(name, args):
    return ((not args.only or any(fnmatch.fnmatchcase(name, pattern) for pattern in args.only))
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in args.skip))


def chosen_scenarios(args):
    known = scenarios()
    names = [s.name for s in known] + [ENTRIES]
    for pattern in args.only + args.skip:
        if not fnmatch.filter(names, pattern):
            sys.exit(f"no such scenario: {pattern}; --list shows them")
    found = [s for s in known if is_chosen(s.name, args) and (args.only or not (args.cpu and s.grid))]
    return [tiny(s) for s in found] if args.cpu else found


def measure(args):
    begin = time.monotonic()
    wanted, wants_entries = chosen_scenarios(args), is_chosen(ENTRIES, args)
    if not wanted and not wants_entries:
        sys.exit("--skip leaves nothing of what --only names")
    workers = max(1, min(16, (os.cpu_count() or 2) - 2))
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
    futures = {}
    for scenario in wanted:
        key = selection_of(scenario.spec)
        futures[key] = futures.get(key) or pool.submit(select, key)
    import torch
    import triton

    from peers import flashinfer_entries, timing

    if not args.cpu and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; --cpu runs the self-check")
    peers = Peers(not args.cpu)
    recorder = Recorder(pathlib.Path(args.out) if args.out else None, describe_run(args, peers, torch, triton))
    recorder.begin = begin
    data = recorder.data
    builds = {}
    if peers.flashinfer and not args.cpu:
        for dim in sorted({s.spec.dim for s in wanted} | ({Spec().dim} if wants_entries else set()), reverse=True):
            builds[dim] = Build("today", dim, args, 8)
    device = "cpu" if args.cpu else "cuda"
    clock = timing.CpuClock() if args.cpu else timing.GpuClock()
    data["roofs"] = roofs = {"matrix_tflops": timing.matrix_peak(clock, device, 256 if args.cpu else 8192),
                             "copy_gbs": timing.copy_peak(clock, device, 1 << 20 if args.cpu else 1 << 30)}
    print(f"roofs: {roofs['matrix_tflops']:.1f} TFLOP/s bf16, copy {roofs['copy_gbs']:.0f} GB/s", flush=True)
    compile_triton(wanted, device, clock)
    concurrent.futures.wait(futures.values())
    for dim, build in builds.items():
        made = build.finish(args.budget * 0.6 - recorder.elapsed())
        data["kernels"].append(made)
        if not made["ok"]:
            peers.no_kernels[dim] = made["why"]
    recorder.save()
    background = {}
    if peers.flashinfer and not args.cpu and wants_entries:
        background = {name: Build(name, Spec().dim, args, 3) for name in BACKGROUND}
    try:
        reserve = min(ENTRIES_S, 0.25 * args.budget) if wants_entries else 0
        keep = run_scenarios(wanted, futures, peers, clock, device, roofs, recorder, args.budget - reserve)
        if keep is not None:
            data["sustained"] = sustained(keep, peers, ("octopage", "today", "triton-rows"), 2 if args.cpu else 400, clock)
        keep = None
        if wants_entries:
            entries = list(flashinfer_entries.ENTRIES)
            for name, build in background.items():
                made = build.finish(0)
                data["kernels"].append(made)
                if not made["ok"]:
                    entries.remove(name)
                    data["entries"].append({"entry": name, "refused": made["why"]})
            data["entries"] += run_entries(entries, args.budget - recorder.elapsed(), args)
            data["entries"] += [{"entry": k, "refused": "not tried: " + v} for k, v in flashinfer_entries.NOT_APPLICABLE.items()]
    finally:
        for build in [*builds.values(), *background.values()]:
            build.stop()
        pool.shutdown(cancel_futures=True)
        recorder.save()
    for entry in data["entries"]:
        print("entry", json.dumps(entry)[:240])
    print(f"{len(data['scenarios'])} scenarios, {len(data['dropped'])} dropped, {recorder.elapsed():.0f} s; {args.out or ''}")
    return verdict(data)


def compile_triton(wanted, device, clock):
    """Runs the Triton kernels once on few rows of each shape, so that their compilation falls into the wait for
    FlashInfer's. What fails here fails again where it is recorded."""
    import torch

    from peers import steps, triton_rows

    if device == "cpu":
        return
    for spec in {dataclasses.replace(s.spec, rows=64, context=16384, keep=0.95, requests=1) for s in wanted}:
        try:
            step = steps.make_step(spec, *make_selections(spec), device)
            gather_roof(step, clock)
            triton_rows.row_attention(step, torch.empty_like(step.query))
            clock.synchronize()
        except Exception as error:  # noqa: BLE001
            print(f"compiling for {spec}: {short_reason(error)[:200]}", flush=True)


def run_scenarios(wanted, futures, peers, clock, device, roofs, recorder, budget):
    """All scenarios that fit into `budget` seconds; returns the base step for what runs on it afterwards."""
    data, base, cost = recorder.data, None, {}  # seconds for each row, group and peer, on the grid and off it
    for scenario in wanted:
        spec = scenario.spec
        amount = spec.rows * spec.groups * len(scenario.chosen_peers(tuple(peers.factories)))
        estimate = 0.5 + cost.get(scenario.grid, 0.0) * amount
        if recorder.elapsed() + estimate > budget:
            data["dropped"].append({"name": scenario.name, "purpose": scenario.purpose,
                                    "why": f"{recorder.elapsed():.0f} s of {budget:.0f} s were spent"})
            continue
        print(f"{scenario.name}: {scenario.purpose}", flush=True)
        try:
            rows, shared = futures[selection_of(spec)].result()
            record, step = run_scenario(scenario, (rows, work(spec, rows, shared)), peers, clock, device, roofs)
        except Exception as error:  # noqa: BLE001
            data["dropped"].append({"name": scenario.name, "purpose": scenario.purpose, "why": short_reason(error)})
            print(f"  dropped: {short_reason(error)[:200]}", flush=True)
            continue
        data["scenarios"].append(record)
        if spec.rows >= 4096 and scenario.name != "base":  # which compiles and loads what the others use
            cost[scenario.grid] = max(cost.get(scenario.grid, 0.0), record["seconds"] / amount)
        base = step if scenario.name == "base" else base
        recorder.save_now_and_then()
    return base


def verdict(data):
    """1 where a peer's result was wrong or octopage failed; a refusal of others is no failure of the run."""
    bad = []
    for scenario in data["scenarios"]:
        for result in scenario["results"]:
            why = result.get("failed", "")
            if "AssertionError" in why or (why and result["peer"] == "octopage" and "cannot be imported" not in why):
                bad.append(f"{scenario['name']}: {result['peer']}: {why}")
    for line in bad:
        print("FAILED", line)
    return 1 if bad else 0


def merge_files(args):
    if not args.out:
        sys.exit("--merge needs --out")
    try:
        data = merge([json.loads(pathlib.Path(path).read_text()) for path in args.merge])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--merge: {short_reason(error)}")
    pathlib.Path(args.out).write_text(json.dumps(data, indent=1) + "\n")
    print(f"{len(data['scenarios'])} scenarios, {len(data['dropped'])} dropped, {len(data['runs'])} runs; {args.out}")
    return verdict(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON to write")
    parser.add_argument("--budget", type=float, default=280, help="seconds for everything")
    parser.add_argument("--only", action="append", default=[], help=f"names or patterns of scenarios, or '{ENTRIES}'; may be repeated")
    parser.add_argument("--skip", action="append", default=[], help="the same, left out")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="make one file of several; measures nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--cpu", "--dry-run", action="store_true", help="self-check: tiny shapes on the CPU")
    parser.add_argument("--python", action="append", default=[], help="a folder to put first on Python's path")
    parser.add_argument("--revision", help="where the tree is no git checkout")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--dim", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--entries", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.command = sys.argv[1:]
    sys.path[:0] = args.python
    if args.cpu:
        os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    if args.merge:
        return merge_files(args)
    if args.list:
        for scenario in chosen_scenarios(args):
            print(f"{scenario.name:28s} {scenario.purpose} {scenario.rules}")
        return 0
    if args.build:
        from peers import flashinfer_entries

        return 0 if flashinfer_entries.build_kernels(args.build, args.dim) else 1
    if args.entries:
        return try_entries(args)
    return measure(args)


if __name__ == "__main__":
    sys.exit(main())
