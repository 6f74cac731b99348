"""`octopage.sparse_prefill` on numpy arrays and on what only speaks DLPack."""

import ml_dtypes
import numpy
import octopage
import pytest
from steps import CASES, Step, assert_close, tolerance


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_given_cases(path, backend):
    step = Step(path)
    lse = numpy.full(step.query.shape[:2], 7, numpy.float32)
    out = numpy.full(step.query.shape, numpy.nan, numpy.float32)
    returned = octopage.sparse_prefill(*step.inputs(), scale=step.scale, k_scale=step.k_scale, v_scale=step.v_scale,
                                       out=out, lse=lse, backend=backend)
    assert returned is out
    assert_close(out, lse, step.expected_output, step.expected_lse, 1e-5 if step.query.size else 1)
    typed = octopage.sparse_prefill(*step.inputs(), scale=step.scale, k_scale=step.k_scale, v_scale=step.v_scale,
                                    backend=backend)
    assert typed.dtype == step.query.dtype and typed.shape == step.query.shape
    assert_close(typed, None, step.expected_output, None, tolerance(typed, step.kv_cache))


def small(rows=5, requests=2, heads=4, dim=64, seed=0, dtype=ml_dtypes.bfloat16):
    random = numpy.random.default_rng(seed)
    cache = random.standard_normal((7, 1, 16, 2 * dim)).astype(dtype)
    return {"query": random.standard_normal((rows, heads, dim)).astype(dtype), "kv_cache": cache,
            "block_table": numpy.array([[0, 2, 4], [6, 3, 1]], numpy.int32)[:requests],
            "owners": numpy.zeros(rows, numpy.int32), "positions": numpy.arange(30, 30 + rows, dtype=numpy.int32),
            "regions": numpy.tile(numpy.array([0, 1, 2, 3], numpy.int32), (rows, 1)), "scale": 0.125}


def test_types_and_strides():
    arguments = small()
    expected = octopage.sparse_prefill(**arguments, out_dtype="float32")
    assert expected.dtype == numpy.float32
    assert (octopage.sparse_prefill(**arguments, out_dtype=numpy.float32) == expected).all()
    # Strides of size-1 dimensions mean nothing; gaps are fine.
    wide = numpy.zeros((5, 9, 64), ml_dtypes.bfloat16)
    wide[:, 2:6] = arguments["query"]
    arguments["query"] = wide[:, 2:6]
    one_group = numpy.lib.stride_tricks.as_strided(
        arguments["kv_cache"], strides=(arguments["kv_cache"].strides[0], 2, *arguments["kv_cache"].strides[2:]))
    arguments["kv_cache"] = one_group
    assert (octopage.sparse_prefill(**arguments, out_dtype="f32") == expected).all()
    arguments["positions"] = arguments["positions"].astype(numpy.int64)
    assert (octopage.sparse_prefill(**arguments, out_dtype="f32") == expected).all()


class OnlyDlpack:
    """What a framework looks like that octopage does not know."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack():
    arguments = small(dtype=numpy.float16)
    expected = octopage.sparse_prefill(**arguments)
    foreign = {k: OnlyDlpack(v) if isinstance(v, numpy.ndarray) else v for k, v in arguments.items()}
    out = numpy.zeros_like(expected)
    octopage.sparse_prefill(**foreign, out=OnlyDlpack(out))
    assert (out == expected).all()


class Raises(OnlyDlpack):
    def __dlpack__(self, **_):
        raise RuntimeError("not today")


class Rubbish(OnlyDlpack):
    def __dlpack__(self, **_):
        return 5


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"query": None}, TypeError, ["query", "NoneType"]),
    ({"query": Raises(numpy.zeros(3))}, TypeError, ["query", "Raises"]),
    ({"query": Rubbish(numpy.zeros(3))}, TypeError, ["query", "Rubbish"]),
    ({"query": numpy.lib.stride_tricks.as_strided(numpy.zeros(1, numpy.float16), (2**40,), (0,))}, ValueError,
     ["query", "1099511627776"]),
    ({"owners": numpy.array(3, numpy.int32)}, ValueError, ["owners", "0"]),
    ({"owners": numpy.zeros((1, 1, 1, 1, 5), numpy.int32)}, ValueError, ["owners", "5"]),
    ({"backend": 3}, TypeError, ["backend", "int"]),
    ({"out_dtype": "float64"}, TypeError, ["out_dtype", "float64"]),
    ({"query": [1, 2]}, TypeError, ["query", "list"]),
    ({"query": numpy.zeros((5, 4, 64))}, TypeError, ["query", "float64"]),
    ({"query": numpy.zeros((5, 4), numpy.float16)}, ValueError, ["query", "3 dimensions", "[5, 4]"]),
    ({"query": numpy.zeros((5, 4, 32), numpy.float16)}, ValueError, ["query", "32", "64"]),
    ({"owners": numpy.zeros(5, numpy.int64)}, ValueError, ["owners", "i32", "i64"]),
    ({"owners": numpy.zeros(4, numpy.int32)}, ValueError, ["owners", "4", "5"]),
    ({"regions": numpy.zeros((5, 2, 3), numpy.int32)}, ValueError, ["regions", "2"]),
    ({"backend": "fastest"}, ValueError, ["backend", "fastest", "cpu"]),
    ({"backend": "cuda-sm90a"}, NotImplementedError, ["cuda-sm90a"]),
    ({"scale": float("nan")}, ValueError, ["scale"]),
    ({"k_scale": numpy.zeros(2, numpy.float32)}, ValueError, ["k_scale", "2"]),
    ({"out": numpy.zeros((5, 4, 64), numpy.float16)}, ValueError, ["out: "]),
    ({"status": numpy.zeros(2, numpy.int32)}, ValueError, ["status"]),
    ({"workspace": numpy.zeros(4, numpy.uint8)}, ValueError, ["workspace", "4"]),
])
def test_mistakes_have_words(change, error, words):
    arguments = {**small(), **change}
    with pytest.raises(error) as raised:
        octopage.sparse_prefill(**arguments)
    assert isinstance(raised.value, octopage.OctopageError)
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_outputs_must_be_writable():
    arguments = small()
    out = numpy.zeros((5, 4, 64), numpy.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out.*read-only"):
        octopage.sparse_prefill(**arguments, out=out)


def test_invalid_entries():
    arguments = small()
    arguments["regions"][2, 1] = 99
    arguments["owners"][4] = 5
    status = numpy.zeros(1, numpy.int32)
    out = octopage.sparse_prefill(**arguments, status=status, out_dtype="f32")
    assert status[0] == 3
    assert (out[4] == 0).all() and (out[2] != 0).any()
    untouched = numpy.full((5, 4, 64), 3, numpy.float32)
    with pytest.raises(octopage.InvalidEntry, match=r"2.*99"):
        octopage.sparse_prefill(**arguments, strict=True, out=untouched)
    assert (untouched == 3).all()


def test_batch_invariant_and_workspace():
    arguments = small(rows=5)
    whole = octopage.sparse_prefill(**arguments, batch_invariant=True, out_dtype="f32")
    for name in ("query", "owners", "positions", "regions"):
        arguments[name] = arguments[name][3:4]
    assert (octopage.sparse_prefill(**arguments, batch_invariant=True, out_dtype="f32") == whole[3:4]).all()
    size = octopage.sparse_prefill_workspace_size(**arguments, out=whole[3:4])
    octopage.sparse_prefill(**arguments, workspace=numpy.zeros(size, numpy.uint8))


def test_zero_rows():
    arguments = small(rows=0)
    assert octopage.sparse_prefill(**arguments).shape == (0, 4, 64)


def test_rows_from_query_start_loc():
    owners, positions = octopage.rows_from_query_start_loc(numpy.array([0, 2, 2, 5], numpy.int64), [10, 4, 3])
    assert owners.tolist() == [0, 0, 2, 2, 2] and positions.tolist() == [8, 9, 0, 1, 2]
    with pytest.raises(ValueError):
        octopage.rows_from_query_start_loc([0, 3], [2])
    with pytest.raises(TypeError):
        octopage.rows_from_query_start_loc([0.0, 1.0], [2])
    with pytest.raises(ValueError, match="query_start_loc.*1099511627776"):
        octopage.rows_from_query_start_loc([0, 2**40], [2])


def test_the_stub_names_what_the_module_has():
    import ast
    import pathlib

    from octopage import _core

    def public(thing):
        return {name for name in vars(thing) if not name.startswith("_")}

    folder = pathlib.Path(octopage.__file__).parent
    assert (folder / "py.typed").is_file()
    stub = {}
    for node in ast.parse((folder / "_core.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            stub[node.name] = set()
        elif isinstance(node, ast.ClassDef):
            stub[node.name] = {n.target.id if isinstance(n, ast.AnnAssign) else n.name for n in node.body} - {"__init__"}
    assert set(stub) == public(_core)
    for name, members in stub.items():
        assert members == (public(getattr(_core, name)) if members else set()), name


def test_what_the_package_carries(tmp_path):
    import os
    import pathlib
    import subprocess
    import sys

    assert (pathlib.Path(octopage.get_include()) / "octopage" / "octopage.hpp").is_file()
    assert (pathlib.Path(octopage.get_cmake_dir()) / "octopage-config.cmake").is_file()
    names = [entry["name"] for entry in octopage.backends()]
    assert names[-1] == "reference" and "cpu" in names
    # Where pip puts commands: beside the interpreter, or beside the package (--target).
    folders = [pathlib.Path(sys.executable).parent, pathlib.Path(octopage.__file__).resolve().parents[1] / "bin"]
    program = next(f / "octopage" for f in folders if (f / "octopage").is_file())
    command = [sys.executable, str(program), "attend", str(CASES[0])]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(octopage.__file__).resolve().parents[1])}
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment).returncode == 0
