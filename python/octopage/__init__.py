"""Sparse prefill attention over a paged KV cache, at eight-token granularity.

    octopage.sparse_prefill(query, kv_cache, block_table, owners, positions, regions, scale=...)

is the whole job in one call; `octopage.step5` has the planned path under the names that engines use.
Nothing is compiled at run time.
"""

import pathlib
from typing import Any, Optional, Sequence, Tuple, Union

import numpy

from . import _core
from ._core import __version__
from ._errors import (BadFile, DeviceError, InternalError, InvalidArgument, InvalidEntry, OctopageError,
                      OutOfMemory, Unsupported, WrongState)
from ._tensor import (ArgumentTypeError, Call, check_out_dtype, dtype_name, empty_like, framework, host_integers, real,
                      tracing)

__all__ = ["ArgumentTypeError", "BadFile", "DeviceError", "InternalError", "InvalidArgument", "InvalidEntry",
           "OctopageError", "OutOfMemory", "Unsupported", "WrongState", "__version__", "backends", "get_cmake_dir",
           "get_include", "rows_from_query_start_loc", "sparse_prefill", "sparse_prefill_workspace_size"]

Tensor = Any  # of torch, numpy, cupy or jax, or anything with __dlpack__


def _prepare(call, query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale, out, out_dtype,
             lse):
    described = call.view("query", query)
    if len(described.shape) != 3:
        raise InvalidArgument(f"query: must have 3 dimensions [rows, heads, dim], has shape {described.shape}")
    if out is None:
        dtype = described.dtype if out_dtype is None else dtype_name("out_dtype", out_dtype)
        check_out_dtype(dtype, described.dtype, "f32")
        out = empty_like(query, tuple(described.shape), dtype)
    elif out_dtype is not None:
        raise InvalidArgument("out_dtype: must be absent where out is given")
    args = _core.SparsePrefillArgs(
        described, call.view("kv_cache", kv_cache), call.view("block_table", block_table),
        call.view("owners", owners), call.view("positions", positions), call.view("regions", regions),
        call.view("out", out, write=True), call.maybe("lse", lse, write=True), real("scale", scale),
        call.scale("k_scale", k_scale, described), call.scale("v_scale", v_scale, described))
    return args, described, out


def sparse_prefill(query: Tensor, kv_cache: Tensor, block_table: Tensor, owners: Tensor, positions: Tensor,
                   regions: Tensor, *, scale: float, k_scale: Union[None, float, Tensor] = None,
                   v_scale: Union[None, float, Tensor] = None, out: Optional[Tensor] = None, out_dtype: Any = None,
                   lse: Optional[Tensor] = None, workspace: Optional[Tensor] = None, backend: Optional[str] = None,
                   strict: bool = False, status: Optional[Tensor] = None, batch_invariant: bool = False) -> Tensor:
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
    workspace    scratch on the tensors' device, contiguous; on a GPU one is allocated by torch or cupy where absent
    backend      a name of `backends()`; default: the fastest that serves the call
    strict       fail at the first invalid entry before anything is written; default: skip it
    status       i32 [1] on the tensors' device; invalid entries OR their bits into it
    batch_invariant  a row's bits do not depend on the other rows

    Returns `out`. Outputs share no memory with inputs. On a GPU the work is queued on the framework's current
    stream. Raises InvalidArgument (a ValueError), ArgumentTypeError (a TypeError), Unsupported, InvalidEntry.
    """
    if tracing():
        from .ops import traced_sparse_prefill

        return traced_sparse_prefill(query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale,
                                     out, out_dtype, lse, workspace, backend, strict, status, batch_invariant)
    call = Call(query, kv_cache, out, backend=backend, strict=strict, status=status, batch_invariant=batch_invariant,
                workspace=workspace)
    args, first, out = _prepare(call, query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale,
                                out, out_dtype, lse)
    options = call.finish_options(first)
    if workspace is None and first.on_cuda and framework(out) in ("torch", "cupy"):
        size = _core.sparse_prefill_workspace_size(args, options)
        if size:
            call.set_workspace(empty_like(out, (size,), "u8"), first)
    _core.sparse_prefill(args, options)
    return out


def sparse_prefill_workspace_size(query: Tensor, kv_cache: Tensor, block_table: Tensor, owners: Tensor,
                                  positions: Tensor, regions: Tensor, *, scale: float, out: Tensor,
                                  k_scale: Union[None, float, Tensor] = None,
                                  v_scale: Union[None, float, Tensor] = None, lse: Optional[Tensor] = None,
                                  backend: Optional[str] = None, batch_invariant: bool = False) -> int:
    """Bytes of workspace that `sparse_prefill` uses for the same arguments."""
    call = Call(query, kv_cache, out, backend=backend, batch_invariant=batch_invariant)
    args, first, _ = _prepare(call, query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale,
                              out, None, lse)
    return _core.sparse_prefill_workspace_size(args, call.finish_options(first))


def rows_from_query_start_loc(query_start_loc: Union[Sequence[int], Tensor],
                              seq_lens: Union[Sequence[int], Tensor]) -> Tuple[numpy.ndarray, numpy.ndarray]:
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


def backends() -> list[dict[str, Any]]:
    """What this build and this machine can do: a list of dicts, highest priority first."""
    return _core.backends()


def get_include() -> str:
    """The folder of the C++ and C headers."""
    return str(pathlib.Path(__file__).resolve().parent / "include")


def get_cmake_dir() -> str:
    """The folder for `octopage_DIR` of CMake's find_package."""
    return str(pathlib.Path(__file__).resolve().parent / "lib" / "cmake" / "octopage")
