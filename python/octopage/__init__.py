"""Sparse prefill attention over a paged KV cache, at eight-token granularity.

    octopage.sparse_prefill(query, kv_cache, block_table, owners, positions, regions, scale=...)

is the whole job in one call; `octopage.step5` has the planned path under the names that engines use.
Nothing is compiled at run time.
"""

import pathlib

import numpy

from . import _core
from ._core import __version__
from ._errors import (BadFile, DeviceError, InternalError, InvalidArgument, InvalidEntry, OctopageError,
                      OutOfMemory, Unsupported, WrongState)
from ._tensor import ArgumentTypeError, Call, dtype_name, empty_like, host_integers

__all__ = ["ArgumentTypeError", "BadFile", "DeviceError", "InternalError", "InvalidArgument", "InvalidEntry",
           "OctopageError", "OutOfMemory", "Unsupported", "WrongState", "__version__", "backends", "get_cmake_dir",
           "get_include", "rows_from_query_start_loc", "sparse_prefill", "sparse_prefill_workspace_size"]


def _prepare(query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale, out, out_dtype, lse,
             call):
    described = call.view("query", query)
    if len(described.shape) != 3:
        raise InvalidArgument(f"query: must have 3 dimensions [rows, heads, dim], has shape {described.shape}")
    if out is None:
        dtype = described.dtype if out_dtype is None else dtype_name("out_dtype", out_dtype)
        out = empty_like(query, tuple(described.shape), dtype)
    elif out_dtype is not None:
        raise InvalidArgument("out_dtype: must be absent where out is given")
    args = _core.SparsePrefillArgs(
        described, call.view("kv_cache", kv_cache), call.view("block_table", block_table),
        call.view("owners", owners), call.view("positions", positions), call.view("regions", regions),
        call.view("out", out, write=True), call.maybe("lse", lse, write=True), float(scale),
        call.scale("k_scale", k_scale), call.scale("v_scale", v_scale))
    return args, out


def sparse_prefill(query, kv_cache, block_table, owners, positions, regions, *, scale, k_scale=None, v_scale=None,
                   out=None, out_dtype=None, lse=None, workspace=None, backend=None, strict=False, status=None,
                   batch_invariant=False):
    """Attention of every row to the tokens `t <= position` of its selected regions.

    query        [rows, heads, dim] bf16 or f16, last dimension contiguous
    kv_cache     [blocks, groups, block_size, 2*dim] bf16, f16, f8_e4m3fn, or u8 that holds f8_e4m3fn
    block_table  [requests, max_blocks] i32
    owners       [rows] i32, the request of each row
    positions    [rows] i32 or i64; negative: a padding row
    regions      [rows, groups, region_count] i32, or [rows, region_count] for all groups
    scale        multiplies q . k
    k_scale, v_scale  for f8 caches: numbers, or tensors of one f32 on the cache's device
    out          [rows, heads, dim], the query's type or f32; allocated where absent (`out_dtype`)
    lse          [rows, heads] f32, natural logarithm; filled where given
    workspace    scratch on the tensors' device; on a GPU one is allocated by torch or cupy where absent
    backend      a name of `backends()`; default: the fastest that serves the call
    strict       fail at the first invalid entry before anything is written; default: skip it
    status       i32 [1] on the tensors' device; invalid entries OR their bits into it
    batch_invariant  a row's bits do not depend on the other rows

    Returns `out`. On a GPU the work is queued on the framework's current stream. Raises
    InvalidArgument (a ValueError), ArgumentTypeError (a TypeError), Unsupported, InvalidEntry.
    """
    call = Call(query, backend=backend, strict=strict, status=status, batch_invariant=batch_invariant,
                workspace=workspace)
    args, out = _prepare(query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale, out,
                         out_dtype, lse, call)
    if workspace is None and call.view("query", query).on_cuda:
        size = _core.sparse_prefill_workspace_size(args, call.options)
        if size:
            call.set_workspace(empty_like(query, (size,), "u8"))
    _core.sparse_prefill(args, call.options)
    return out


def sparse_prefill_workspace_size(query, kv_cache, block_table, owners, positions, regions, *, scale, out, k_scale=None,
                                  v_scale=None, lse=None, backend=None, batch_invariant=False):
    """Bytes of workspace that `sparse_prefill` uses for the same arguments."""
    call = Call(query, backend=backend, batch_invariant=batch_invariant)
    args, _ = _prepare(query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale, out, None,
                       lse, call)
    return _core.sparse_prefill_workspace_size(args, call.options)


def rows_from_query_start_loc(query_start_loc, seq_lens):
    """Owners ([rows] i32) and positions ([rows] i64) of a batch as engines describe it.

    Request i owns rows query_start_loc[i] .. query_start_loc[i+1], the last tokens of its seq_lens[i].
    Both may be lists, arrays or tensors of any integer type. Returns numpy arrays.
    """
    return _core.rows_from_query_start_loc(_int32s("query_start_loc", query_start_loc), _int32s("seq_lens", seq_lens))


def _int32s(argument, values):
    integers = host_integers(argument, values).tolist()
    for i, value in enumerate(integers):
        if not -2**31 <= value < 2**31:
            raise InvalidArgument(f"{argument}[{i}] = {value}: does not fit 32 bits")
    return integers


def backends():
    """What this build and this machine can do: a list of dicts, highest priority first."""
    return _core.backends()


def get_include():
    """The folder of the C++ and C headers."""
    return str(pathlib.Path(__file__).resolve().parent / "include")


def get_cmake_dir():
    """The folder for `octopage_DIR` of CMake's find_package."""
    return str(pathlib.Path(__file__).resolve().parent / "lib" / "cmake" / "octopage")
