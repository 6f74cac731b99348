#!/usr/bin/env python3
"""Checks over #include lines that dependencies run one way.

    core <- kv <- plan <- backends <- api <- tools, python

Steps (src/step) use core, kv and plan, and what is read out of them (src/inspect) uses steps. plan includes no backend; no backend includes another; files
directly in src/backends are shared by all, and only the registry names a backend. device/ptx includes
nothing of ours. Public headers include only public headers and the standard library.

    include_direction.py ROOT
"""

import pathlib
import re
import sys
import tempfile

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
# What each layer may include, besides itself and the public headers.
MAY = {
    "core": set(),
    "kv": {"core"},
    "plan": {"core", "kv"},
    "step": {"core", "kv", "plan"},
    "inspect": {"core", "kv", "plan", "step"},
    "backends": {"core", "kv", "plan"},
    "api": {"core", "kv", "plan", "backends"},
    "tools": {"core", "kv", "plan", "backends", "api", "step", "inspect"},
    "python": {"core", "kv", "plan", "backends", "api", "step"},
}
SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".inc"}


def backend_of(path):
    """The backend that src/backends/<name>/... belongs to; None for the shared files."""
    parts = path.split("/")
    return parts[1] if parts[0] == "backends" and len(parts) > 2 else None


def violations_of(where, included):
    """Why the file `where` (relative to the root) must not include `included`; empty if it may."""
    if where.startswith("include/"):
        own = included.startswith("octopage/")
        standard = "/" not in included and "." not in included
        c_header = included in ("stddef.h", "stdint.h", "stdbool.h")
        device = where.startswith("include/octopage/device/") and included.startswith("cuda")
        return "" if own or standard or c_header or device else "a public header includes only public ones and the standard library"
    if where.startswith("src/"):
        inside = where[len("src/"):]
        layer = inside.split("/")[0]
    elif where.startswith(("tools/", "python/")):
        inside = where
        layer = where.split("/")[0]
    else:
        return ""
    target = included.split("/")[0]
    if target not in MAY and target != "tools":
        if "/device/ptx/" in where and included.startswith("octopage/"):
            return "device/ptx includes nothing of ours"
        return ""  # public headers, the standard library, third parties
    if "/device/ptx/" in where:
        return "device/ptx includes nothing of ours"
    if target != layer and target not in MAY.get(layer, set()):
        return f"{layer} does not include {target}"
    if layer == "backends" and target == "backends":
        own, other = backend_of(inside), backend_of(included)
        if other is not None and own != other and inside != "backends/registry.cpp":
            return f"{own or 'a shared file of backends'} does not include the backend {other}"
    return ""


def check(root):
    found, files = [], 0
    for top in ("include", "src", "tools", "python"):
        for path in sorted((root / top).rglob("*")) if (root / top).is_dir() else []:
            if path.suffix not in SUFFIXES:
                continue
            files += 1
            where = path.relative_to(root).as_posix()
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                why = violations_of(where, match.group(1)) if match else ""
                if why:
                    found.append(f"{where}:{number}: includes {match.group(1)}: {why}")
    return files, found


def self_test():
    """Every rule can fail, and what is allowed passes."""
    bad = {
        "src/core/a.hpp": "kv/x.hpp", "src/kv/a.hpp": "plan/x.hpp", "src/plan/a.cpp": "backends/backend.hpp",
        "src/step/a.cpp": "api/x.hpp", "src/backends/cpu/a.cpp": "backends/reference/x.hpp",
        "src/backends/shared.cpp": "backends/cpu/x.hpp", "src/backends/cuda/device/ptx/a.cuh": "core/x.hpp",
        "src/backends/cpu/b.cpp": "api/x.hpp", "src/api/a.cpp": "tools/octopage/x.hpp",
        "include/octopage/a.hpp": "fmt/format.h", "include/octopage/b.hpp": "core/x.hpp",
        "src/backends/cuda/device/ptx/b.cuh": "octopage/tensor.hpp", "src/api/b.cpp": "step/x.hpp",
        "src/inspect/a.cpp": "backends/backend.hpp", "src/step/b.cpp": "inspect/x.hpp",
    }
    good = {
        "src/kv/a.cpp": "core/x.hpp", "src/plan/a.cpp": "kv/x.hpp", "src/api/a.cpp": "backends/backend.hpp",
        "src/backends/registry.cpp": "backends/cuda/x.hpp", "src/backends/cpu/a.cpp": "backends/backend.hpp",
        "src/backends/cpu/c.cpp": "hwy/highway.h", "tools/octopage/a.cpp": "step/x.hpp", "include/octopage/a.hpp": "cstdint",
        "include/octopage/octopage.h": "stdint.h", "src/backends/cuda/device/ptx/a.cuh": "cuda_fp16.h",
    }
    for files, expected in ((bad, True), (good, False)):
        for where, included in files.items():
            with tempfile.TemporaryDirectory() as scratch:
                path = pathlib.Path(scratch) / where
                path.parent.mkdir(parents=True)
                path.write_text(f"#include <{included}>\n")
                assert bool(check(pathlib.Path(scratch))[1]) == expected, (where, included)


def main():
    self_test()
    files, found = check(pathlib.Path(sys.argv[1]))
    print("\n".join(found))
    print(f"{files} files, {len(found)} violations")
    sys.exit(1 if found or files < 20 else 0)


if __name__ == "__main__":
    main()
