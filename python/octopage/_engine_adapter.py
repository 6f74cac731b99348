"""`octopage.step5` as an engine's module of page functions would have it (vLLM 0.34's conventions).

Where the two differ, calls are translated:

    regions of a row   the engine's stand at the end of a row, behind padding; octopage reads those at its start.
                       A view that runs backwards turns one into the other; pages are listed in another order then,
                       the row's own region last in both
    ids                regions and owners are i64 there, i32 here: a view of the low halves, nothing is copied
    scales             tensors without dimensions there, of one element here
    records            stay the engine's own classes
"""

import functools
import sys

from . import _core, _tensor, step5
from ._engine_match import FUNCTIONS


def adapted(module):
    """{name: octopage's object for it} for the functions and the plan class of an engine's module."""
    names = vars(module)
    staged_pages, metadata = names["StagedPrefillPages"], names["PagedPrefillMetadata"]
    as_torch = "torch" in names  # what the host function returns does not follow from its arguments

    @functools.wraps(step5.compact_page_metadata)
    def compact_page_metadata(positions, region_count):
        found = step5.compact_page_metadata(positions, region_count)
        return tuple(_to_torch(array) for array in found) if as_torch else found

    @functools.wraps(step5.plan_staged_prefill_pages)
    def plan_staged_prefill_pages(table, lengths, block_size):
        return staged_pages(*step5.plan_staged_prefill_pages(table, lengths, block_size))

    class CompactPagedPrefill(_Plan):
        def page_metadata(self, table, owners, page_stride, start=0, end=None):
            found = super().page_metadata(table, low_halves(owners), page_stride, start, end)
            if found is None:
                return None
            _, table, pages, indptr, block_size, page_stride = found
            return metadata(owners[start:self.query_shape[0] if end is None else end], table, pages, indptr,
                            block_size, page_stride)

    CompactPagedPrefill.__doc__ = step5.CompactPagedPrefill.__doc__
    new = {name: getattr(step5, name) for name in FUNCTIONS}
    new.update(compact_page_metadata=compact_page_metadata, fill_prefill_pages=_fill_prefill_pages,
               plan_staged_prefill_pages=plan_staged_prefill_pages, stage_prefill_pages=_stage_prefill_pages,
               CompactPagedPrefill=CompactPagedPrefill)
    return new


class _Plan(step5.CompactPagedPrefill):
    def prepare_chunk(self, start, query, cache, regions, table, owners, *, status=None, strict=False):
        super().prepare_chunk(start, query, cache, backwards(low_halves(regions)), table, low_halves(owners),
                              status=status, strict=strict)


@functools.wraps(step5.fill_prefill_pages)
def _fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query=None, contiguous_query=None,
                        page_stride=None):
    call = _tensor.Call(table)
    regions, owners = backwards(low_halves(regions)), low_halves(owners)
    stride = _tensor.integer("block_size", block_size) // 8 if page_stride is None else \
        _tensor.integer("page_stride", page_stride)
    _core.fill_prefill_pages(
        call.view("regions", regions), call.view("table", table), call.view("owners", owners),
        call.view("indptr", indptr), call.view("pages", pages, write=True),
        _tensor.integer("block_size", block_size), stride, -1, None, call.maybe("query", query),
        call.maybe("contiguous_query", contiguous_query, write=True), call.options)


@functools.wraps(step5.stage_prefill_pages)
def _stage_prefill_pages(cache, staged, dtype, k_scale=None, v_scale=None):
    return step5.stage_prefill_pages(cache, getattr(staged, "pages", staged), dtype, _one(k_scale), _one(v_scale))


def low_halves(ids):
    """i64 ids as i32; anything else as it is."""
    kind = _tensor.framework(ids)
    if kind not in ("torch", "numpy", "cupy") or _tensor.dtype_name("ids", ids.dtype) != "i64":
        return ids
    int32 = sys.modules["torch"].int32 if kind == "torch" else "int32"
    element = 1 if kind == "torch" else ids.itemsize
    strides = ids.stride() if kind == "torch" else ids.strides
    if sys.byteorder == "little" and ids.ndim and strides[-1] == element:
        return ids.view(int32)[..., ::2]
    return ids.to(int32) if kind == "torch" else ids.astype(int32)


def backwards(regions):
    """`regions` [rows, region_count] with the last column first; nothing is copied."""
    if _tensor.framework(regions) in ("numpy", "cupy"):
        return regions[:, ::-1]
    view, owner = _tensor.view("regions", regions)
    if len(view.shape) != 2 or view.shape[1] == 0:
        return regions
    rows, columns = view.strides
    last = view.pointer + (view.shape[1] - 1) * columns * 4  # ids are i32, or the call refuses them
    flipped = _core.tensor(last, view.dtype, view.shape, [rows, -columns], view.on_cuda, view.device_index)
    return _tensor._Exported(flipped, owner)  # torch has no negative strides


def _one(scale):
    """A scale tensor without dimensions gets one."""
    return scale.reshape(1) if getattr(scale, "ndim", None) == 0 else scale


def _to_torch(array):
    torch = sys.modules["torch"]
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
