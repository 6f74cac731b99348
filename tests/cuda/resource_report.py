#!/usr/bin/env python3
"""Reads the compiler's resource report of every kernel of the library: none may spill registers.

Runs the build's own compile commands of the library's .cu files once more, compiler cache included (it
answers with the report it has kept), and fails if a kernel spills, or if there is no report to read.

    resource_report.py BUILD_DIR
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile


def kernels_of(report):
    """Yields (kernel, architecture, registers, spilled bytes) of a `ptxas -v` report."""
    for part in report.split("Compiling entry function ")[1:]:
        name, architecture = re.match(r"'([^']+)' for '([^']+)'", part).groups()
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", part.split("Used")[0]))
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        yield name, architecture, registers, spilled


def self_test():
    sample = ("ptxas info    : Compiling entry function 'f' for 'sm_80'\nptxas info    : Function properties for f\n"
              "    8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nptxas info    : Used 96 registers\n")
    assert list(kernels_of(sample)) == [("f", "sm_80", 96, 12)], list(kernels_of(sample))
    assert list(kernels_of("")) == []


def main():
    self_test()
    build = pathlib.Path(sys.argv[1])
    commands = json.loads(subprocess.run(["ninja", "-C", build, "-t", "compdb"], check=True, capture_output=True,
                                         text=True).stdout)
    library = str(pathlib.Path(__file__).resolve().parents[2] / "src") + "/"
    sources = [entry for entry in commands if entry["file"].startswith(library) and entry["output"].endswith(".cu.o")]
    spills, count = [], 0
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        def compile_again(entry):
            command = shlex.split(entry["command"])
            to = pathlib.Path(scratch) / pathlib.Path(entry["file"]).stem
            command[command.index("-o") + 1] = f"{to}.o"
            command[command.index("-MF") + 1] = f"{to}.d"
            return subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)

        for entry, done in zip(sources, pool.map(compile_again, sources)):
            report = done.stdout + done.stderr
            if done.returncode != 0:
                sys.exit(f"{entry['file']}: does not compile:\n{report[-2000:]}")
            found = list(kernels_of(report))
            if not found:
                sys.exit(f"{entry['file']}: the compiler gave no resource report")
            count += len(found)
            for name, architecture, registers, spilled in found:
                print(f"{architecture:8s} {registers:4d} registers {spilled:4d} bytes spilled  {name[:110]}")
                if spilled:
                    spills.append(f"{name} for {architecture}: {spilled} bytes")
    print(f"{count} kernels in {len(sources)} files")
    if not sources or spills:
        sys.exit("spilled registers:\n" + "\n".join(spills) if spills else "no CUDA file was compiled")


if __name__ == "__main__":
    main()
