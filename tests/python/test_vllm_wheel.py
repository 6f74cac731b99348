"""The plugin on tensors of torch, on a GPU where there is one: on a stand-in in plain torch, and on the page module of a
real vLLM (`pip download --no-deps vllm==0.34.0`, then OCTOPAGE_TEST_VLLM_WHEEL=<its path>)."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

WHEEL = os.environ.get("OCTOPAGE_TEST_VLLM_WHEEL", "")
MISSING = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]


FLASHINFER_FAULT = 3  # as in vllm_wheel.py


def run(*arguments, **environment):
    script = pathlib.Path(__file__).with_name("vllm_wheel.py")
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})


def check(mode, *arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    told, device, calls, functions = done.stdout.split()
    assert told == mode
    # Everything but view_sparse_kv_pages and compact_page_metadata, which only the module itself calls.
    assert (int(calls) > 100, int(functions)) == ((True, 9) if mode == "verify" else (False, 0))
    if "torch" not in MISSING:
        import torch

        assert device == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif("torch" in MISSING, reason="torch is not installed")
@pytest.mark.parametrize("mode", ["off", "on", "verify"])
def test_a_stand_in_on_tensors_of_torch(mode):
    check(mode, str(pathlib.Path(__file__).with_name("standin_torch")), mode, "graph")


FAKE_FLASHINFER = """
__version__ = "9.9"
def plan():
    raise UnboundLocalError("a name of its own")
"""


@pytest.mark.skipif("torch" in MISSING, reason="torch is not installed")
@pytest.mark.parametrize(("fault", "status", "words"), [
    ("import flashinfer; flashinfer.plan()", FLASHINFER_FAULT, "FlashInfer 9.9 does not run vLLM's own module: "
                                                               "UnboundLocalError: a name of its own"),
    ("raise UnboundLocalError('not of FlashInfer')", 1, ""),
    ("import flashinfer; flashinfer.no_such_name", 1, ""),
    ("pass", 0, "")])
def test_only_a_fault_of_flashinfers_own_code_is_told_as_one(fault, status, words, tmp_path):
    shutil.copytree(pathlib.Path(__file__).with_name("standin_torch"), tmp_path / "engine")
    pages = tmp_path / "engine/vllm/models/step5/nvidia/ops/sparse_prefill_pages.py"
    first = "        rows = query_shape[0]\n"
    assert first in pages.read_text()
    pages.write_text(pages.read_text().replace(first, f"        {fault}\n{first}", 1))
    (tmp_path / "flashinfer.py").write_text(FAKE_FLASHINFER)
    done = run(str(tmp_path / "engine"), "alone", "flashinfer",
               PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (done.returncode, done.stdout.strip()) == (status, words), done.stderr


@pytest.fixture(scope="module")
def fault_without_octopage():
    """What the installed FlashInfer fails with under vLLM's module where octopage is not even imported; else empty."""
    done = run(WHEEL, "alone")
    return done.stdout.strip() if done.returncode == FLASHINFER_FAULT else ""


@pytest.mark.skipif(not WHEEL, reason="OCTOPAGE_TEST_VLLM_WHEEL names no wheel of vLLM")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("mode", ["off", "on", "verify"])
def test_the_module_of_a_real_vllm(mode, fault_without_octopage):
    if mode != "on" and fault_without_octopage:  # under `on` nothing of FlashInfer runs
        pytest.skip(fault_without_octopage)
    check(mode, WHEEL, mode)
