"""Every Python example of the pages runs, each in a process of its own."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGES = ["engine-authors.md"]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples():
    for page in PAGES:
        text = (DOCS / page).read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            yield pytest.param(match[1].split(), match[2], id=f"{page}:{line}")


def imported(code):
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def has_gpu():
    """Asked in another process, so that this one stays free of it."""
    ask = "import octopage as o, sys; sys.exit(not any(b['device'] == 'cuda' and b['available'] for b in o.backends()))"
    return subprocess.run([sys.executable, "-c", ask]).returncode == 0


@pytest.mark.parametrize(("marks", "code"), list(examples()))
def test_example(marks, code, tmp_path):
    assert set(marks) <= {"gpu"}
    assert "assert" in code, "an example that checks nothing cannot fail"
    missing = sorted(name for name in imported(code) if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if "gpu" in marks and not has_gpu():
        pytest.skip("no GPU that octopage can use")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_page_has_an_example_of_each_framework():
    for name in ("numpy", "torch", "cupy", "jax"):
        assert [e for e in examples() if name in imported(e.values[1])], name
