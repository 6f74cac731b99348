"""The plugin on tensors of torch, on a GPU where there is one: on a stand-in in plain torch, and on the page module of a
real vLLM (`pip download --no-deps vllm==0.34.0`, then OCTOPAGE_TEST_VLLM_WHEEL=<its path>)."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

WHEEL = os.environ.get("OCTOPAGE_TEST_VLLM_WHEEL", "")
MISSING = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]


def check(mode, *arguments):
    script = pathlib.Path(__file__).with_name("vllm_wheel.py")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
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


@pytest.mark.skipif(not WHEEL, reason="OCTOPAGE_TEST_VLLM_WHEEL names no wheel of vLLM")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("mode", ["off", "on", "verify"])
def test_the_module_of_a_real_vllm(mode):
    check(mode, WHEEL, mode)
