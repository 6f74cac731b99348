"""The benchmarks' own code: the selections they make, and the GPU harness on tiny shapes without a GPU."""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import pathlib
import subprocess
import sys
import time

import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu_peers  # noqa: E402
from peers import selections  # noqa: E402

SPEC = selections.Spec(rows=64, context=4096, region_count=64)


@pytest.mark.parametrize("spec", [SPEC, dataclasses.replace(SPEC, keep=0.0), dataclasses.replace(SPEC, keep=1.0),
                                  dataclasses.replace(SPEC, context=600, region_count=70), dataclasses.replace(SPEC, requests=3),
                                  dataclasses.replace(SPEC, region_count=4), dataclasses.replace(SPEC, context=64, groups=2)],
                         ids=["base", "keep 0", "keep 1", "nearly all", "requests", "few regions", "all regions"])
def test_selections_are_legal(spec):
    rows = selections.make_rows(spec)
    assert (numpy.bincount(rows.owners) == [len(part) for part in numpy.array_split(numpy.arange(spec.rows), spec.requests)]).all()
    for row in range(spec.rows):
        own = rows.positions[row] // 8
        assert rows.counts[row] == min(own + 1, spec.region_count)
        for group in range(spec.groups):
            chosen = rows.regions[row, group, :rows.counts[row]]
            assert (numpy.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] == own
            assert (rows.regions[row, group, rows.counts[row]:] == -1).all()


@pytest.mark.parametrize("keep", [1.0, 0.95, 0.5, 0.0])
def test_neighbours_share_what_keep_says(keep):
    spec = dataclasses.replace(SPEC, rows=256, context=65536, region_count=256, keep=keep)
    rows = selections.make_rows(spec)
    shared = []
    for before, row in zip(rows.regions[:-1, 0], rows.regions[1:, 0]):
        others = 256 - 1 - spec.sink_regions - spec.local_regions
        shared.append((len(numpy.intersect1d(before, row)) - (256 - others)) / others)
    assert abs(numpy.mean(shared) - keep) < 0.02


def test_union_factors():
    rows = selections.make_rows(dataclasses.replace(SPEC, keep=0.95))
    eight, four = (selections.union_factor(SPEC, rows, height) for height in (8, 4))
    assert 1 < four < eight < 8
    alone = dataclasses.replace(SPEC, requests=64)
    assert selections.union_factor(alone, selections.make_rows(alone), 8) == 8  # tiles never cross requests


def test_work_counts_valid_tokens_only():
    spec = dataclasses.replace(SPEC, rows=1, context=20, region_count=64)
    work = selections.work(spec, selections.make_rows(spec))
    assert work["useful_flops"] == 4 * 192 * 16 * 20 and work["selected_pages"] == 3


def test_processes_are_stopped_with_what_they_started(tmp_path):
    child = tmp_path / "child"
    group = gpu_peers.Group(["sh", "-c", f"sleep 60 & echo $! > {child}; wait"])
    begin = time.monotonic()
    assert group.finish(1) == "not finished within the budget"
    assert time.monotonic() - begin < 20
    state = subprocess.run(["ps", "-o", "stat=", "-p", child.read_text().strip()], capture_output=True, text=True).stdout
    assert state.strip() == "" or state.startswith("Z")
    assert gpu_peers.Group(["true"]).finish(10) == ""
    told = tmp_path / "told"
    told.write_text("")
    assert gpu_peers.Group(["sleep", "60"]).finish(30, quiet=1, grows=told) == "no result in 1 s"
    talks = f"for i in 1 2 3 4; do sleep 0.6; echo >> {told}; done"
    assert gpu_peers.Group(["sh", "-c", talks]).finish(60, quiet=2, grows=told) == ""
    assert "exit code 3: why" in gpu_peers.Group(["sh", "-c", "echo why >&2; exit 3"]).finish(10)


def test_kernels_that_cannot_be_built_are_a_reason():
    args = argparse.Namespace(python=[str(ROOT / "tests/python/fakes")])  # a FlashInfer without kernels
    made = gpu_peers.Build("today", 192, args, 1).finish(120)
    assert not made["ok"] and "Error" in made["why"] and made["dim"] == 192


def test_scenarios():
    found = gpu_peers.scenarios()
    names = [s.name for s in found]
    assert len(set(names)) == len(names) and names[0] == "base" and all(s.purpose for s in found)
    assert {s.spec.keep for s in found} >= {1.0, 0.97, 0.95, 0.87, 0.8, 0.5, 0.0}
    assert {s.spec.rows for s in found} >= {256, 1024, 4096, 16384}
    assert {s.spec.context for s in found} >= {16384, 131072, 1 << 20}
    specs = [s.spec for s in found]
    assert len(set(specs)) == len(specs)
    there = {(s.cache, s.rows, s.context, s.keep) for s in specs if s == dataclasses.replace(
        selections.Spec(), cache=s.cache, rows=s.rows, context=s.context, keep=s.keep)}
    assert there >= set(itertools.product(("bf16", "f8_e4m3fn"), (256, 1024, 4096, 16384), (16384, 131072, 1 << 20),
                                          gpu_peers.KEEPS))
    assert [s.grid for s in found] == sorted(s.grid for s in found)  # single points before the grid
    assert all(s.spec.rows * s.spec.groups <= 1024 or s.name == "base" for s in found if "torch-sdpa" in s.chosen_peers(
        ("octopage", "torch-sdpa")))


def test_both_caches_share_their_selections():
    bf16, f8 = SPEC, dataclasses.replace(SPEC, cache="f8_e4m3fn")
    assert gpu_peers.selection_of(bf16) == gpu_peers.selection_of(f8)
    rows, shared = gpu_peers.select(gpu_peers.selection_of(f8))
    mine = selections.make_rows(f8)
    assert (rows.regions == mine.regions).all() and selections.work(f8, rows, shared) == selections.work(f8, mine)


def test_steady_times_need_no_more_calls():
    timing = pytest.importorskip("peers.timing", exc_type=ImportError)  # which needs torch
    assert timing.steady([1.0, 1.005, 1.01] * 3 + [1.0]) and not timing.steady([1.0] * 9 + [1.1])


def chosen(**options):
    args = argparse.Namespace(**{"only": [], "skip": [], "cpu": False, **options})
    return [s.name for s in gpu_peers.chosen_scenarios(args)], gpu_peers.is_chosen(gpu_peers.ENTRIES, args)


def test_names_and_patterns_choose():
    every = [s.name for s in gpu_peers.scenarios()]
    points = [s.name for s in gpu_peers.scenarios() if not s.grid]
    assert chosen() == (every, True) and chosen(skip=["grid-*"]) == (points, True)
    assert chosen(only=["grid-*"]) == (every[len(points):], False)
    assert chosen(only=["base", "keep-*"], skip=["keep-0.8?"])[0] == [
        n for n in points if n == "base" or n.startswith("keep") and n not in ("keep-0.80", "keep-0.87")]
    assert chosen(only=["entries"]) == ([], True) and chosen(skip=["entries"]) == (every, False)
    assert chosen(cpu=True)[0] == points and chosen(cpu=True, only=["grid-f8-*-0.50"])[0]
    for wrong in ({"only": ["keep-0.99"]}, {"skip": ["nothing-*"]}):
        with pytest.raises(SystemExit, match="no such scenario"):
            chosen(**wrong)


def part(number, scenarios=(), entries=(), dropped=(), **changes):
    return {"format": "octopage-peers-1", "device": "A GPU", "driver": "1", "revision": "r", "versions": {"torch": "1"},
            "layers_of_a_step": 32, "rules": ["x"], "date": "2000-01-01", "command": f"call {number}", "elapsed_s": 10.0,
            "budget_s": 20, "roofs": {"matrix_tflops": 700.0 + number}, "kernels": [{"kernels": number}],
            "scenarios": [{"name": n, "of": number, "results": []} for n in scenarios],
            "entries": [{"entry": n, **how} for n, how in entries], "dropped": [{"name": n} for n in dropped], **changes}


def test_parts_of_a_measurement_become_one():
    late = {"dropped": "no time left"}
    first = part(1, ["base", "f8"], [("X", {"warm": 1}), ("Y", late)], ["grid-a", "grid-b"], sustained=[{"peer": "octopage"}])
    second = part(2, ["f8", "grid-a"], [("X", late), ("Y", {"warm": 2})])
    whole = gpu_peers.merge([first, second])
    assert [(s["name"], s["of"], s["run"]) for s in whole["scenarios"]] == [("base", 1, 0), ("f8", 2, 1), ("grid-a", 2, 1)]
    assert [(e["entry"], e.get("warm"), e["run"]) for e in whole["entries"]] == [("X", 1, 0), ("Y", 2, 1)]
    assert [d["name"] for d in whole["dropped"]] == ["grid-b"] and whole["sustained"] == first["sustained"]
    assert whole["command"] == "call 1 && call 2" and (whole["elapsed_s"], whole["budget_s"]) == (20.0, 40)
    assert [r["roofs"]["matrix_tflops"] for r in whole["runs"]] == [701.0, 702.0] and whole["date"] == "2000-01-01"
    more = gpu_peers.merge([whole, part(3, ["grid-b"])])  # what was merged can be added to
    assert len(more["runs"]) == 3 and more["scenarios"][-1]["run"] == 2 and more["scenarios"][1]["run"] == 1
    assert more["dropped"] == []
    for key, value in (("revision", "q"), ("device", "Another"), ("rules", []), ("versions", {"torch": "2"})):
        with pytest.raises(ValueError, match=f"file 2 is no part of the same measurement: {key}"):
            gpu_peers.merge([first, part(2, **{key: value})])


def test_a_merged_file_is_judged_as_its_parts_are(tmp_path):
    bad = part(2, ["f8"])
    bad["scenarios"][0]["results"] = [{"peer": "today", "failed": "AssertionError: relative error"}]
    names = []
    for name, data in (("a", part(1, ["base"])), ("b", part(2, ["f8"])), ("bad", bad), ("other", part(2, device="Another"))):
        names.append(tmp_path / name)
        names[-1].write_text(json.dumps(data))
    a, b, bad, other = names

    def run(*files):
        out = tmp_path / "whole.json"
        out.unlink(missing_ok=True)
        done = subprocess.run([sys.executable, ROOT / "bench/gpu_peers.py", "--merge", *files, "--out", out], capture_output=True,
                              text=True)
        return done.returncode, out.exists(), done.stdout + done.stderr

    assert run(a, b)[:2] == (0, True) and run(a, bad)[:2] == (1, True)
    for refused in (run(a, other), run(a, tmp_path / "none")):
        assert refused[:2] == (1, False) and "Traceback" not in refused[2]


def test_a_fault_costs_only_its_own_entry(tmp_path, monkeypatch):
    """B faults and says so; C dies without a word; A and D are served, each by a process that is whole."""
    script = tmp_path / "entries.py"
    script.write_text("""
import json, os, sys
out, names = sys.argv[2], sys.argv[sys.argv.index("--entries") + 1:]
for name in names:
    if name == "C":
        sys.exit("dead")
    with open(out, "a") as file:
        file.write(json.dumps({"entry": name, "refused" if name == "B" else "warm": os.getpid()}) + "\\n")
    if name == "B":
        sys.exit(%d)
""" % gpu_peers.DEVICE_LOST)
    monkeypatch.setattr(gpu_peers, "__file__", str(script))
    results = gpu_peers.run_entries(["A", "B", "C", "D"], 60, argparse.Namespace(cpu=False, python=[]))
    assert [r["entry"] for r in results] == ["A", "B", "C", "D"]
    assert results[0]["warm"] == results[1]["refused"] != results[3]["warm"] and "dead" in results[2]["refused"]


torch_and_triton = pytest.mark.skipif(not all(importlib.util.find_spec(m) for m in ("torch", "triton")),
                                      reason="torch and triton are not installed")


@torch_and_triton
def test_harness_without_a_gpu(tmp_path):
    out = tmp_path / "peers.json"
    done = subprocess.run([sys.executable, ROOT / "bench/gpu_peers.py", "--cpu", "--python", ROOT / "tests/python/fakes",
                           "--only", "base", "--only", "f8", "--only", "groups-4", "--only", "entries", "--out", out, "--budget", "500"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(out.read_text())
    assert run["format"] == "octopage-peers-1" and not run["dropped"]
    for scenario in run["scenarios"]:
        assert scenario["purpose"] and scenario["roofs"]["gather_gbs"] > 0
        failed = {r["peer"]: r["failed"] for r in scenario["results"] if "failed" in r}
        assert set(failed) == ({"today-attention"} if scenario["name"] == "groups-4" else set()), failed
        for result in scenario["results"]:
            if "failed" not in result:
                assert result["verified"]["worst_relative_error"] <= result["verified"]["bound"]
                assert result["warm"]["p10_ms"] <= result["warm"]["median_ms"] <= result["warm"]["p90_ms"]
    entries = {e["entry"]: e for e in run["entries"]}
    assert "warm" in entries["BatchPrefillWithPagedKVCacheWrapper fa2, split allowed"]
    assert "warm" in entries["BatchPrefillWithPagedKVCacheWrapper fa2, f8 cache"]
    assert "fa3" in entries["BatchPrefillWithPagedKVCacheWrapper fa3"]["refused"]
    wrong = entries["BatchDecodeWithPagedKVCacheWrapper, tensor cores"]
    assert "relative error" in wrong["refused"] and "warm" not in wrong


@torch_and_triton
def test_two_calls_make_one_file(tmp_path):
    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, options in zip(parts, (["--only", "base", "--only", "rows-25?", "--skip", "rows-*"], ["--only", "grid-f8-256-16384-0.5*"])):
        done = subprocess.run([sys.executable, ROOT / "bench/gpu_peers.py", "--cpu", "--python", ROOT / "tests/python/fakes",
                               *options, "--out", path, "--budget", "500"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(path.read_text())["entries"] == []
    whole = tmp_path / "whole.json"
    done = subprocess.run([sys.executable, ROOT / "bench/gpu_peers.py", "--merge", *parts, "--out", whole], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(whole.read_text())
    assert [(s["name"], s["run"], s["grid"]) for s in run["scenarios"]] == [("base", 0, False), ("grid-f8-256-16384-0.50", 1, True)]
    assert "'grid-f8-256-16384-0.5*'" in run["command"] and len(run["runs"]) == 2


@torch_and_triton
def test_the_budget_drops_and_says_so(tmp_path):
    out = tmp_path / "peers.json"
    subprocess.run([sys.executable, ROOT / "bench/gpu_peers.py", "--cpu", "--budget", "0.1", "--out", out], capture_output=True)
    run = json.loads(out.read_text())
    assert run["scenarios"] == [] and len(run["dropped"]) > 20 and "were spent" in run["dropped"][0]["why"]
    assert all("dropped" in e or "not tried" in e["refused"] for e in run["entries"])


@torch_and_triton
def test_nothing_is_tried_on_a_lost_device(tmp_path, monkeypatch):
    from peers import timing

    def lost(clock):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(timing.CpuClock, "synchronize", lost)
    out = tmp_path / "entries.jsonl"
    names = ["BatchAttention", "xqa_batch_decode_with_kv_cache"]
    assert gpu_peers.try_entries(argparse.Namespace(cpu=True, entries=names, out=out)) == gpu_peers.DEVICE_LOST
    assert [json.loads(line)["entry"] for line in out.read_text().splitlines()] == names[:1]
