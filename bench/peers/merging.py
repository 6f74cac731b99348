"""Several files of bench/gpu_peers.py as one: parts of one measurement, made by calls with other scenarios."""

# What parts of one measurement have in common.
SAME = ("format", "device", "driver", "revision", "versions", "layers_of_a_step", "rules")
OF_A_RUN = ("date", "command", "elapsed_s", "budget_s", "roofs")


def runs_of(part):
    """What `part` is made of: itself, unless it was merged before."""
    return part.get("runs") or [{key: part[key] for key in OF_A_RUN}]


def check_same(parts):
    for key in SAME:
        for number, part in enumerate(parts[1:], 2):
            if part[key] != parts[0][key]:
                raise ValueError(f"file {number} is no part of the same measurement: {key} is {part[key]!r}, in file 1 "
                                 f"{parts[0][key]!r}")


def latest_by_name(parts, what, name):
    """The records under `what`, each with the number of its run. Of those with one name the last one stands, in the place
    of the first; one for which no time was left displaces none."""
    found, first_run = {}, 0
    for part in parts:
        for record in part[what]:
            if record[name] not in found or "dropped" not in record:
                found[record[name]] = {**record, "run": first_run + record.get("run", 0)}
        first_run += len(runs_of(part))
    return list(found.values())


def merge(parts):
    """Times of one scenario all come from one run. Raises ValueError where device, driver, revision, versions or rules
    differ."""
    check_same(parts)
    runs = [run for part in parts for run in runs_of(part)]
    scenarios = latest_by_name(parts, "scenarios", "name")
    measured = {s["name"] for s in scenarios}
    return {**parts[0], "date": " to ".join(sorted({run["date"] for run in runs})),
            "command": " && ".join(run["command"] for run in runs), "runs": runs,
            "elapsed_s": round(sum(run["elapsed_s"] for run in runs), 1), "budget_s": sum(run["budget_s"] for run in runs),
            "scenarios": scenarios, "entries": latest_by_name(parts, "entries", "entry"),
            "dropped": [d for d in latest_by_name(parts, "dropped", "name") if d["name"] not in measured],
            "kernels": [kernel for part in parts for kernel in part["kernels"]],
            "sustained": next((part["sustained"] for part in reversed(parts) if part.get("sustained")), [])}
