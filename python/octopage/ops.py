"""Operators of torch: `torch.ops.octopage.sparse_prefill`, `fill_prefill_pages`, `stage_prefill_pages`.

Importing this module registers them; `octopage.sparse_prefill` and the page functions of `octopage.step5` import it by
themselves where torch.compile, fake tensors or another dispatch mode of torch read a call. Each writes into tensors that
its schema declares as mutated and returns nothing. Everywhere else the functions of the package do the same without
torch's dispatcher.
"""

from typing import Optional

import torch
from torch import Tensor

import octopage
from octopage import step5

from ._errors import InvalidArgument
from ._tensor import _LONG_NAMES, ArgumentTypeError, check_out_dtype, dtype_name, refuse_derivatives

__all__ = ["fill_prefill_pages", "sparse_prefill", "stage_prefill_pages"]


def _one(value: Optional[float], tensor: Optional[Tensor]):
    return value if tensor is None else tensor


# Mutated arguments have no default: torch drops trailing defaults and then looks for them.
@torch.library.custom_op("octopage::sparse_prefill", mutates_args=("out", "lse", "workspace", "status"))
def sparse_prefill(query: Tensor, kv_cache: Tensor, block_table: Tensor, owners: Tensor, positions: Tensor,
                   regions: Tensor, out: Tensor, lse: Optional[Tensor], workspace: Optional[Tensor],
                   status: Optional[Tensor], scale: float, k_value: Optional[float] = None,
                   v_value: Optional[float] = None, k_scale: Optional[Tensor] = None, v_scale: Optional[Tensor] = None,
                   backend: Optional[str] = None, strict: bool = False, batch_invariant: bool = False) -> None:
    octopage.sparse_prefill(query, kv_cache, block_table, owners, positions, regions, scale=scale,
                            k_scale=_one(k_value, k_scale), v_scale=_one(v_value, v_scale), out=out, lse=lse,
                            workspace=workspace, backend=backend, strict=strict, status=status,
                            batch_invariant=batch_invariant)


@torch.library.custom_op("octopage::fill_prefill_pages", mutates_args=("pages", "contiguous_query"))
def fill_prefill_pages(regions: Tensor, table: Tensor, owners: Tensor, indptr: Tensor, pages: Tensor,
                       query: Optional[Tensor], contiguous_query: Optional[Tensor], block_size: int,
                       page_stride: int) -> None:
    step5.fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride)


@torch.library.custom_op("octopage::stage_prefill_pages", mutates_args=("output",))
def stage_prefill_pages(cache: Tensor, staged: Tensor, output: Tensor, k_value: Optional[float] = None,
                        v_value: Optional[float] = None, k_scale: Optional[Tensor] = None,
                        v_scale: Optional[Tensor] = None) -> None:
    step5.stage_into(cache, staged, output, _one(k_value, k_scale), _one(v_value, v_scale))


# Everything that a call makes is in its mutated arguments: with fake tensors there is nothing to do.
@sparse_prefill.register_fake
def _(query, kv_cache, block_table, owners, positions, regions, out, lse, workspace, status, scale, k_value=None,
      v_value=None, k_scale=None, v_scale=None, backend=None, strict=False, batch_invariant=False):
    return None


@fill_prefill_pages.register_fake
def _(regions, table, owners, indptr, pages, query, contiguous_query, block_size, page_stride):
    return None


@stage_prefill_pages.register_fake
def _(cache, staged, output, k_value=None, v_value=None, k_scale=None, v_scale=None):
    return None


# What torch.compile traces in place of the package's functions.


def _torch_dtype(argument, dtype):
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, _LONG_NAMES[dtype_name(argument, dtype)])


def _number(argument, value):
    """What the eager call takes, but for scalars of numpy, which torch.compile turns into tensors."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise ArgumentTypeError(f"{argument}: must be a number, is {type(value).__name__}")
    return float(value)


def _value(argument, scale):
    return None if scale is None or isinstance(scale, Tensor) else _number(argument, scale)


def _flag(argument, value):
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{argument}: must be True or False, is {type(value).__name__}")
    return value


def _tensor(scale):
    return scale if isinstance(scale, Tensor) else None


def _refuse_derivatives(**tensors):
    """In a graph, torch would leave the operator out of derivatives without a word."""
    for argument, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            refuse_derivatives(argument, tensor)


def traced_sparse_prefill(query, kv_cache, block_table, owners, positions, regions, scale, k_scale, v_scale, out,
                          out_dtype, lse, workspace, backend, strict, status, batch_invariant):
    _refuse_derivatives(query=query, kv_cache=kv_cache, out=out, lse=lse, k_scale=k_scale, v_scale=v_scale)
    if out is None:
        dtype = query.dtype if out_dtype is None else _torch_dtype("out_dtype", out_dtype)
        check_out_dtype(dtype, query.dtype, torch.float32)
        out = torch.empty(query.shape, dtype=dtype, device=query.device)
    elif out_dtype is not None:
        raise InvalidArgument("out_dtype: must be absent where out is given")
    torch.ops.octopage.sparse_prefill(query, kv_cache, block_table, owners, positions, regions, out, lse,
                                      workspace, status, _number("scale", scale), _value("k_scale", k_scale),
                                      _value("v_scale", v_scale), _tensor(k_scale), _tensor(v_scale), backend,
                                      _flag("strict", strict), _flag("batch_invariant", batch_invariant))
    return out


def traced_fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride):
    _refuse_derivatives(query=query, contiguous_query=contiguous_query)
    torch.ops.octopage.fill_prefill_pages(regions, table, owners, indptr, pages, query, contiguous_query,
                                          block_size, block_size // 8 if page_stride is None else page_stride)


def traced_stage_prefill_pages(cache, blocks, dtype, k_scale, v_scale):
    _refuse_derivatives(cache=cache, k_scale=k_scale, v_scale=v_scale)
    dtype = _torch_dtype("dtype", dtype)
    step5.check_staged_dtype(dtype, torch.bfloat16, torch.float16)
    if len(cache.shape) != 4:
        raise InvalidArgument(f"cache: must have 4 dimensions, has {len(cache.shape)}")
    output = torch.empty((blocks.shape[0], 1, cache.shape[2], cache.shape[3]), dtype=dtype, device=cache.device)
    torch.ops.octopage.stage_prefill_pages(cache, blocks, output, _value("k_scale", k_scale), _value("v_scale", v_scale),
                                           _tensor(k_scale), _tensor(v_scale))
    return output
