"""What type checkers see of the package (mypy, where it is installed), and what its docstrings say."""

import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys

import octopage
import pytest
from octopage import step5

USER = pathlib.Path(__file__).with_name("typed_user.py")
PLAN_METHODS = ("plan", "fixup_positions", "page_metadata", "prepare_chunk", "finish")


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_users_module(tmp_path):
    site = str(pathlib.Path(octopage.__file__).resolve().parents[1])
    # The package is read as mypy reads installed ones. Of numpy no types are needed here.
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-numpy.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", str(config), "--no-error-summary",
                           "--show-error-codes", str(USER)], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "MYPYPATH": site} if "site-packages" not in site else None)
    found = {(int(line), code) for line, code in re.findall(r"typed_user\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout,
                                                            re.MULTILINE)}
    expected = {(number, line.rpartition("# wrong: ")[2]) for number, line in
                enumerate(USER.read_text().splitlines(), 1) if "# wrong: " in line}
    assert found == expected, done.stdout + done.stderr


def public_functions():
    for module, names in ((octopage, octopage.__all__), (step5, step5.__all__)):
        for name in names:
            if inspect.isfunction(getattr(module, name)):
                yield getattr(module, name)
    for name in PLAN_METHODS:
        yield getattr(step5.CompactPagedPrefill, name)


@pytest.mark.parametrize("function", list(public_functions()), ids=lambda f: f.__qualname__)
def test_docstrings_name_their_tensors_and_signatures_are_annotated(function):
    text = inspect.getdoc(function)
    assert text
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        assert parameter.annotation is not inspect.Parameter.empty, name
        is_tensor = "Any" in str(parameter.annotation) and name not in ("dtype", "out_dtype", "device")
        if is_tensor and function is not octopage.sparse_prefill_workspace_size:  # it names another function's arguments
            assert re.search(rf"\b{name}\b", text), name
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
