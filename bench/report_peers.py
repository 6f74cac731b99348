"""The tables and curves of docs/performance.md that come from bench/gpu_peers.py and bench/cpu_peers.py."""

import hashlib
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLOTS = ROOT / "docs/performance"
PEER_NAMES = {"octopage": "octopage", "octopage-portable": "`cuda-sm80`", "octopage-planned": "octopage, planned path",
              "today": "today's layer", "today-attention": "its attention alone", "triton-rows": "Triton, row by row",
              "torch-sdpa": "torch gather + SDPA"}
# name, what varies, what the other things are; which scenarios belong to it.
CURVES = (("overlap", "keep", "4,096 rows, context 131,072, bf16 cache", r"base|keep-[\d.]+"),
          ("rows", "rows", "context 131,072, keep 0.95, bf16 cache", r"base|rows-\d+"),
          ("context", "context", "4,096 rows, keep 0.95, bf16 cache", r"base|context-\d+"))


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join(lines + ["| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in row) + " |" for row in rows])


def timed(scenario, peer):
    """A peer's record where it was timed, else None."""
    for result in scenario["results"]:
        if result["peer"] == peer and "warm" in result:
            return result
    return None


def speed(scenario, peer, state="warm"):
    ours, theirs = timed(scenario, "octopage"), timed(scenario, peer)
    return theirs[state]["median_ms"] / ours[state]["median_ms"] if ours and theirs else None


def number(value, pattern="{:.2f}"):
    return "" if value is None else pattern.format(value)


def shape_text(spec):
    text = f"{spec['rows']} x {spec['context']}, keep {spec['keep']:.2f}, {spec['cache']}"
    extra = [f"{spec[key]} {key}" for key in ("requests", "groups") if spec[key] > 1]
    if (spec["heads_per_group"], spec["dim"], spec["region_count"]) != (16, 192, 512):
        extra.append(f"{spec['heads_per_group']} heads, dim {spec['dim']}, {spec['region_count']} regions")
    return ", ".join([text] + extra)


def curve_scenarios(run, pattern, key):
    found = [s for s in run["scenarios"] if re.fullmatch(pattern, s["name"])]
    return sorted(found, key=lambda s: s["spec"][key], reverse=key == "keep")


def octopage_table(run):
    rows = []
    for s in run["scenarios"]:
        ours = timed(s, "octopage")
        if not ours:
            continue
        warm = ours["warm"]
        rows.append([s["name"], shape_text(s["spec"]), ours["about"].get("backend", ""),
                     f"{warm['median_ms']:.3f} ({warm['p10_ms']:.3f} .. {warm['p90_ms']:.3f})",
                     f"{ours['cold']['median_ms']:.3f}", f"{warm['useful_tflops']:.0f}",
                     number(warm.get("fraction_of_matrix_peak")), number(warm.get("fraction_of_gather")),
                     number(warm.get("fraction_of_copy")), number(s["work"]["union_factor"]["8"]), s["predicted"]["binds"]])
    return table(["scenario", "rows x context", "backend", "warm ms (p10 .. p90)", "cold ms", "useful TFLOP/s", "of matrix peak",
                  "of page gather", "of copy", "union of 8 rows", "binds by the roofs"], rows)


def speeds_table(run):
    peers = [p for p in PEER_NAMES if p != "octopage" and any(timed(s, p) for s in run["scenarios"])]
    rows = []
    for s in run["scenarios"]:
        if timed(s, "octopage"):
            rows.append([s["name"]] + [f"{speed(s, p):.2f} / {speed(s, p, 'cold'):.2f}" if speed(s, p) else "" for p in peers])
    return table(["octopage's speed over, warm / cold"] + [PEER_NAMES[p] for p in peers], rows)


def end_to_end_table(run):
    rows = []
    for s in run["scenarios"]:
        ours, today = timed(s, "octopage"), timed(s, "today")
        if not (ours and today and "step_wall_per_layer" in ours and "step_wall_per_layer" in today):
            continue
        planned = timed(s, "octopage-planned")
        a, b = ours["step_wall_per_layer"]["median_ms"], today["step_wall_per_layer"]["median_ms"]
        rows.append([s["name"], f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}", f"{ours['layer_wall']['median_ms']:.3f}",
                     f"{today['layer_wall']['median_ms']:.3f}", f"{today['plan_wall']['median_ms']:.2f}",
                     number(planned and planned["plan_wall"]["median_ms"])])
    if not rows:
        return ""
    return "\n\n".join([
        f"A step of {run['layers_of_a_step']} layers by wall time, planning, Python and launches included, in ms per layer; and one "
        "layer from an idle device:",
        table(["scenario", "octopage", "today's way", "speed", "octopage, one layer", "today, one layer", "today's plan",
               "plan of octopage's planned path"], rows)])


def slower_list(run):
    """Every place where octopage is behind: the honest part, made from the figures."""
    lines = []
    for s in run["scenarios"]:
        for peer in PEER_NAMES:
            for state in ("warm", "cold"):
                ratio = speed(s, peer, state) if peer != "octopage" else None
                if ratio is not None and ratio < 1:
                    lines.append(f"- {s['name']}: {PEER_NAMES[peer]} is faster, {state}: octopage has {ratio:.3f} of its speed "
                                 f"(by the roofs the {s['predicted']['binds']} binds)")
    return "\n".join(lines) if lines else "In no scenario of this run was a peer faster than octopage, warm or cold."


def failures_list(run):
    lines = {}
    for s in run["scenarios"]:
        for result in s["results"]:
            if "failed" in result:
                lines.setdefault((PEER_NAMES[result["peer"]], result["failed"]), []).append(s["name"])
    return [[peer, ", ".join(names), why] for (peer, why), names in lines.items()]


def refusal(entry):
    """Why an entry point was not timed; the compiler's messages in short."""
    why = entry.get("refused") or "dropped: " + entry.get("dropped", "")
    failed = re.search(r"\d+ errors? detected in the compilation of .*?head_dim_qk_(\d+)", why, re.DOTALL)
    return f"its kernel does not compile for head dim {failed.group(1)}" if failed else why


def entries_table(run):
    base = next((s for s in run["scenarios"] if s["name"] == "base"), None)
    ours = base and timed(base, "octopage")
    rows = []
    for entry in run["entries"]:
        if "warm" in entry:
            one_run = base and entry.get("run") == base.get("run")
            ratio = entry["warm"]["median_ms"] / ours["warm"]["median_ms"] if ours and one_run else None
            rows.append([entry["entry"], f"{entry['warm']['median_ms']:.3f} ms", number(ratio), ""])
        else:
            rows.append([entry["entry"], "", "", refusal(entry)])
    return table(["entry point, base scenario", "warm", "octopage's speed over it (its own bf16 time)", "why not"], rows)


def plot_links(run):
    return "\n\n".join(f"![{name}: {fixed}](performance/{name}.svg)" for name, key, fixed, pattern in CURVES
                       if len(curve_scenarios(run, pattern, key)) > 1)


def grid_tables(run):
    """Rows by context and overlap, a table for each shape; empty without points of a grid."""
    varied = ("rows", "context", "keep")
    shapes = {}
    for s in run["scenarios"]:
        kind = tuple(sorted((k, v) for k, v in s["spec"].items() if k not in varied))
        shapes.setdefault(kind, []).append(s)
    parts = []
    for kind, found in shapes.items():
        if not any(s.get("grid") for s in found):
            continue
        keeps = sorted({s["spec"]["keep"] for s in found}, reverse=True)
        cells = {}
        for s in found:
            ours, ratio = timed(s, "octopage"), speed(s, "today")
            if ours:
                text = f"{ours['warm']['median_ms']:.3f}" + (f" ({ratio:.2f})" if ratio else "")
                cells[s["spec"]["rows"], s["spec"]["context"], s["spec"]["keep"]] = f"**{text}**" if ratio and ratio < 1 else text
        places = sorted({key[:2] for key in cells})
        shape = dict(kind)
        parts += [f"{shape['cache']} cache, {shape['groups']} group{'s' * (shape['groups'] > 1)}, {shape['heads_per_group']} heads "
                  f"for each, dim {shape['dim']}, {shape['region_count']} regions:",
                  table(["rows x context"] + [f"keep {keep:.2f}" for keep in keeps],
                        [[f"{rows} x {context}"] + [cells.get((rows, context, keep), "") for keep in keeps]
                         for rows, context in places])]
    if parts:
        parts.insert(0, "The grid: octopage's warm time of a layer in ms, and its speed over today's layer; bold where today's is "
                        "faster.")
    return "\n\n".join(parts)


def commands_text(run):
    return ", then ".join(f"command `{part['command']}`, {part['elapsed_s']:.0f} s" for part in run.get("runs") or [run])


def roofs_text(run):
    found = [f"{part['roofs']['matrix_tflops']:.0f} TFLOP/s (bf16 product of torch), {part['roofs']['copy_gbs']:.0f} GB/s (device "
             "copy, read plus write)" for part in run.get("runs") or [run]]
    return ", then ".join(found)


def peers_tables(path):
    if not path.exists():
        return (f"Not measured yet: `bench/gpu_peers.py --out measurements/{path.name}` on a machine with such a GPU writes the "
                "file that these tables are made from.")
    whole = json.loads(path.read_text())
    run = {**whole, "scenarios": [s for s in whole["scenarios"] if not s.get("grid")]}
    versions = run["versions"]
    parts = [f"Measured on: {run['device']}, driver {run['driver']}, {run['date']}, revision {run['revision'][:12]}, "
             f"{commands_text(run)}; torch {versions['torch']}, triton {versions['triton']}, FlashInfer {versions['flashinfer']}.",
             f"Roofs of the same run: {roofs_text(run)}; the page gather is measured for each scenario. A fraction of the page "
             "gather above 1 means that pages were shared between rows.",
             octopage_table(run), plot_links(run), speeds_table(run), end_to_end_table(run),
             "Where octopage is slower:", slower_list(run), grid_tables(whole)]
    if run.get("sustained"):
        rows = [[PEER_NAMES[r["peer"]], f"{r['mean_ms']:.3f} ms" if "mean_ms" in r else r["failed"]] for r in run["sustained"]]
        parts += ["Base scenario, many layers back to back, mean of one:", table(["", "time"], rows)]
    parts += ["FlashInfer's other entry points:", entries_table(run)]
    failures = failures_list(run)
    if failures:
        parts += ["Peers that did not serve a scenario:", table(["peer", "scenarios", "why"], failures)]
    if run["dropped"]:
        parts.append("Dropped, to keep the budget: " + ", ".join(d["name"] for d in run["dropped"]) + ".")
    return "\n\n".join(part for part in parts if part)


def cpu_peers_tables(path):
    if not path.exists():
        return (f"torch beside octopage on the CPU is not measured yet: `bench/cpu_peers.py --out measurements/{path.name}` where "
                "torch and the octopage package are installed.")
    run = json.loads(path.read_text())
    rows = [[threads, f"{r['ratio']:.2f}", f"{r['p10']:.2f} .. {r['p90']:.2f}", r["pairs"]] for threads, r in run["ratios"].items()]
    return "\n\n".join([
        f"octopage beside torch's gather and `scaled_dot_product_attention`, turn by turn in one run: {run['device']}, torch "
        f"{run['torch']}, {run['shape']}, revision {run['revision'][:12]}, command `{run['command']}`.",
        table(["threads", "octopage's speed over torch", "p10 .. p90", "pairs"], rows)])


def curve_points(run, name, key, pattern):
    """{peer: [(x, ms)]} of a curve; its hash tells whether a drawing is of these figures."""
    points = {}
    for s in curve_scenarios(run, pattern, key):
        for peer in PEER_NAMES:
            result = timed(s, peer)
            if result:
                points.setdefault(peer, []).append((s["spec"][key], round(result["warm"]["median_ms"], 4)))
    return points


def digest(points):
    return hashlib.sha256(json.dumps(points, sort_keys=True).encode()).hexdigest()


def stale_plots(path):
    """Names of the drawings that are missing or were made from other figures; needs no matplotlib."""
    if not path.exists():
        return []
    run = json.loads(path.read_text())
    stale = []
    for name, key, _, pattern in CURVES:
        points = curve_points(run, name, key, pattern)
        file = PLOTS / f"{name}.svg"
        if len(curve_scenarios(run, pattern, key)) > 1 and not (file.exists() and digest(points) in file.read_text()):
            stale.append(name)
    return stale


def draw_plots(path, folder=PLOTS):
    """Draws the curves; returns whether matplotlib was there."""
    if not path.exists():
        return True
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "octopage", "svg.fonttype": "none", "font.size": 10})
    import matplotlib.pyplot as pyplot

    run = json.loads(path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for name, key, fixed, pattern in CURVES:
        points = curve_points(run, name, key, pattern)
        if len(curve_scenarios(run, pattern, key)) < 2:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        for peer, line in points.items():
            axes.plot(*zip(*line), marker="o", label=PEER_NAMES[peer].strip("`"))
        axes.set(xlabel=key, ylabel="ms for one layer, warm", title=fixed, yscale="log")
        if key == "keep":
            axes.invert_xaxis()
        else:
            axes.set_xscale("log", base=2)
            axes.set_xticks([s["spec"][key] for s in curve_scenarios(run, pattern, key)])
            axes.xaxis.set_major_formatter("{x:,.0f}")
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:g}")
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Description": "data " + digest(points)})
        pyplot.close(figure)
    return True
