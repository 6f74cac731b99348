"""docs/performance.md is what bench/report.py makes of measurements/, with the files there and without them."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import report  # noqa: E402
import report_peers  # noqa: E402


def times(ms):
    return {"median_ms": ms, "p10_ms": ms * 0.9, "p90_ms": ms * 1.1, "calls": 9, "useful_tflops": 200 / ms, "gathered_gbs": 1.0,
            "fraction_of_matrix_peak": 0.5, "fraction_of_gather": 1.5, "fraction_of_copy": 0.1}


def scenario(name, **changes):
    spec = {"rows": 4096, "context": 131072, "keep": 0.95, "cache": "bf16", "groups": 1, "heads_per_group": 16, "dim": 192,
            "region_count": 512, "requests": 1} | changes
    ours = {"peer": "octopage", "about": {"backend": "cuda-sm90a"}, "warm": times(0.4), "cold": times(0.5),
            "layer_wall": times(0.45), "step_wall_per_layer": times(0.41)}
    today = {"peer": "today", "about": {}, "warm": times(1.6), "cold": times(0.25), "layer_wall": times(1.7),
             "step_wall_per_layer": times(2.05), "plan_wall": times(23.0)}
    return {"name": name, "purpose": "p", "rules": "", "spec": spec, "work": {"union_factor": {"4": 1.2, "8": 1.4}},
            "roofs": {}, "predicted": {"binds": "matrix unit"},
            "results": [ours, today, {"peer": "torch-sdpa", "failed": "no | memory"}]}


def run(scenarios):
    return {"format": "octopage-peers-1", "device": "A GPU", "driver": "1.2", "date": "2000-01-01", "revision": "0" * 40,
            "command": "bench/gpu_peers.py", "elapsed_s": 99.0, "layers_of_a_step": 32,
            "versions": {"torch": "1", "triton": "2", "flashinfer": "3"}, "roofs": {"matrix_tflops": 800.0, "copy_gbs": 4000.0},
            "scenarios": scenarios, "dropped": [{"name": "late", "why": "time"}],
            "entries": [{"entry": "X", "refused": "because"}, {"entry": "Y", "warm": times(0.8)}]}


@pytest.fixture
def peers_file(tmp_path):
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(run([scenario("base"), scenario("keep-0.50", keep=0.5), scenario("rows-256", rows=256)])))
    return path


def test_the_page_is_what_the_files_say():
    page = (ROOT / "docs/performance.md").read_text()
    assert report.render_page(page) == page
    changed = page.replace("| octopage, 2 threads over 1 |", "| octopage, 2 threads over 1 | 9.99 |", 1)
    assert changed != page and report.render_page(changed) == page


def test_absent_files_are_said_to_be_absent(tmp_path):
    for render in (report_peers.peers_tables, report_peers.cpu_peers_tables):
        text = render(tmp_path / "none.json")
        assert "not measured yet" in text.lower() and "none.json" in text
    assert report_peers.stale_plots(tmp_path / "none.json") == []


def test_tables_of_a_run(peers_file):
    text = report_peers.peers_tables(peers_file)
    assert "A GPU, driver 1.2" in text and "Dropped, to keep the budget: late." in text
    assert "| base | 4.00 / 0.50 |" in text  # speeds over today's layer, warm and cold
    assert "| base | 0.410 | 2.050 | 5.00 |" in text  # end to end
    assert "- base: today's layer is faster, cold: octopage has 0.500 of its speed" in text and "faster, warm" not in text
    assert "| X |  |  | because |" in text and "| Y | 0.800 ms | 2.00 |" in text
    assert "| torch gather + SDPA | base, keep-0.50, rows-256 | no \\| memory |" in text
    assert "performance/overlap.svg" in text and "performance/context.svg" not in text  # one point is no curve


def test_a_grid_stands_in_a_table_of_its_own(tmp_path):
    slow = scenario("grid-256-131072-0.50", rows=256, keep=0.5) | {"grid": True}
    slow["results"][0]["warm"] = times(2.0)
    path = tmp_path / "grid.json"
    path.write_text(json.dumps(run([scenario("base"), slow])))
    text = report_peers.peers_tables(path)
    assert "grid-256" not in text and "| rows x context | keep 0.95 | keep 0.50 |" in text
    assert "| 4096 x 131072 | 0.400 (4.00) |  |" in text and "| 256 x 131072 |  | **2.000 (0.80)** |" in text


def test_a_merged_run_names_its_parts(tmp_path):
    merged = run([scenario("base") | {"run": 0}])
    merged["entries"] = [{"entry": "X", "warm": times(0.8), "run": 0}, {"entry": "Y", "warm": times(0.8), "run": 1}]
    merged["runs"] = [{"command": f"call {i}", "elapsed_s": 10.0 + i, "roofs": {"matrix_tflops": 700.0 + i, "copy_gbs": 4e3}}
                      for i in range(2)]
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(merged))
    text = report_peers.peers_tables(path)
    assert "command `call 0`, 10 s, then command `call 1`, 11 s; torch" in text
    assert "700 TFLOP/s" in text and "701 TFLOP/s" in text
    assert "| X | 0.800 ms | 2.00 |" in text and "| Y | 0.800 ms |  |" in text  # no ratio of two runs


def test_tables_without_octopage_or_peers(tmp_path):
    bare = run([scenario("base")])
    bare["scenarios"][0]["results"] = []
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(bare))
    assert "A GPU" in report_peers.peers_tables(path)


def test_cpu_peers(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"device": "CPU, 2 cores", "torch": "2", "shape": "s", "revision": "0" * 40, "command": "c",
                                "ratios": {"1, torch in bf16": {"ratio": 3.0, "p10": 2.5, "p90": 3.5, "pairs": 9}}}))
    assert "| 1, torch in bf16 | 3.00 | 2.50 .. 3.50 | 9 |" in report_peers.cpu_peers_tables(path)


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")
def test_drawings_belong_to_their_figures(peers_file, tmp_path, monkeypatch):
    monkeypatch.setattr(report_peers, "PLOTS", tmp_path)
    assert report_peers.stale_plots(peers_file) == ["overlap", "rows"]
    assert report_peers.draw_plots(peers_file, tmp_path)
    assert report_peers.stale_plots(peers_file) == []
    first = (tmp_path / "overlap.svg").read_bytes()
    report_peers.draw_plots(peers_file, tmp_path)
    assert (tmp_path / "overlap.svg").read_bytes() == first
    peers_file.write_text(peers_file.read_text().replace('"median_ms": 0.4,', '"median_ms": 0.3,'))
    assert report_peers.stale_plots(peers_file) == ["overlap", "rows"]


def test_check_passes_on_this_tree():
    done = subprocess.run([sys.executable, ROOT / "bench/report.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
