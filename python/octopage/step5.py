"""The planned path under the names and signatures that engines use for it.

One native plan serves a whole prefill step and its layers: `plan`, then per layer fill (`prepare_chunk`,
or an indexer that writes pages itself from `page_metadata`) and `finish`. It serves one group: callers
pass slices of the cache, of the query and of the selections.
"""

import sys
from typing import Any, NamedTuple, Optional

import numpy

from . import _core
from ._errors import InvalidArgument
from ._tensor import (ArgumentTypeError, Call, dtype_name, empty_like, exported, framework,
                      host_integers, integer)

__all__ = ["CompactPagedPrefill", "PagedPrefillMetadata", "StagedPrefillPages", "compact_page_metadata",
           "fill_prefill_pages", "kv_page_stride", "plan_staged_prefill_pages", "stage_prefill_pages",
           "view_sparse_kv_pages"]


class StagedPrefillPages(NamedTuple):
    """Physical blocks in the order they are staged, and the table that finds them in the staged cache."""

    pages: Any  # [staged] i32
    table: Any  # [requests, max_blocks] i32


class PagedPrefillMetadata(NamedTuple):
    """What an indexer needs to write pages itself."""

    owners: Any  # [rows] i32
    table: Any  # [requests, max_blocks] i32
    pages: Any  # [capacity] i32, the plan's whole list
    indptr: Any  # [rows+1] i32
    block_size: int
    page_stride: int


def compact_page_metadata(positions, region_count):
    """(indptr [rows+1], last_page_len [rows]), i32 on the host, of rows at `positions`."""
    result = _core.compact_page_metadata(host_integers("positions", positions), integer("region_count", region_count))
    if framework(positions) == "torch":
        import torch

        return tuple(torch.from_numpy(array) for array in result)
    return result


def kv_page_stride(cache):
    """Eight-token pages between neighbouring blocks of a group of `cache` [blocks, groups, block_size, 2*dim]."""
    return _core.kv_page_stride(Call(cache).view("cache", cache))


def view_sparse_kv_pages(cache):
    """K and V of a cache with one group as [pages, 8, 1, dim] views, no copy, gaps between blocks retained."""
    call = Call(cache)
    k, v = _core.view_sparse_kv_pages(call.view("cache", cache))
    kind = framework(cache)
    if kind == "torch":
        first = cache.storage_offset()
        return (cache.as_strided(k.shape, k.strides, first),
                cache.as_strided(v.shape, v.strides, first + k.shape[3]))
    if kind != "numpy":
        raise ArgumentTypeError(f"cache: must be a tensor of torch or numpy, is {type(cache).__name__}")
    views = []
    for pages, offset in ((k, 0), (v, k.shape[3])):
        base = cache[..., offset:] if cache.size else cache
        views.append(numpy.lib.stride_tricks.as_strided(base, pages.shape,
                                                        [s * cache.itemsize for s in pages.strides]))
    return tuple(views)


def plan_staged_prefill_pages(table, lengths, block_size):
    """The live blocks of `table` [requests, max_blocks] i32, request by request, and a table of the same width that
    numbers them 0, 1, 2, ... `lengths` [requests] are integers on the host."""
    lengths = host_integers("lengths", lengths)
    call = Call(table)
    described = call.view("table", table)
    pages = empty_like(table, (_core.staged_block_count(lengths, integer("block_size", block_size)),), "i32")
    staged = empty_like(table, tuple(described.shape), "i32")
    _core.plan_staged_prefill_pages(described, lengths, integer("block_size", block_size), call.view("pages", pages, write=True),
                                    call.view("table", staged, write=True), call.options)
    return StagedPrefillPages(pages, staged)


def stage_prefill_pages(cache, staged, dtype, k_scale=None, v_scale=None):
    """Gathers the staged blocks of `cache` [blocks, 1, block_size, 2*dim] into a contiguous cache of `dtype` (bf16 or
    f16). u8 and f8_e4m3fn caches need both scales, numbers or tensors of one f32 on the device."""
    call = Call(cache)
    described = call.view("cache", cache)
    pages = staged.pages if isinstance(staged, StagedPrefillPages) else staged
    blocks = call.view("staged", pages)
    if len(described.shape) != 4:
        raise InvalidArgument(f"cache: must have 4 dimensions, has {len(described.shape)}")
    dtype = dtype_name("dtype", dtype)
    output = empty_like(cache, (blocks.shape[0], 1, *described.shape[2:]), dtype)
    _core.stage_prefill_pages(described, blocks, call.view("output", output, write=True),
                              call.scale("k_scale", k_scale), call.scale("v_scale", v_scale), call.options)
    return output


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query=None, contiguous_query=None,
                       page_stride=None):
    """Writes each row's pages at `indptr[row]` of `pages`, in the order of its regions, its own region last; copies
    `query` to `contiguous_query` where both are given. `page_stride` defaults to that of a cache without gaps."""
    call = Call(regions)
    _core.fill_prefill_pages(
        call.view("regions", regions), call.view("table", table), call.view("owners", owners),
        call.view("indptr", indptr), call.view("pages", pages, write=True), integer("block_size", block_size),
        int(block_size) // 8 if page_stride is None else integer("page_stride", page_stride), -1, None,
        call.maybe("query", query), call.maybe("contiguous_query", contiguous_query, write=True), call.options)


class CompactPagedPrefill:
    """One plan for a whole prefill step, shared by its layers. `workspace` is scratch; nothing lives in it."""

    def __init__(self, workspace=None):
        self._workspace = workspace
        call = None if workspace is None else Call(workspace)
        self._core_workspace = None if call is None else call.view("workspace", workspace, write=True)
        self._core = _core.CompactPagedPrefill(self._core_workspace)
        self._framework = "numpy"
        self._capacity = (0, 0, 0)

    def plan(self, query_shape, dtype, device, positions, region_count, scale, block_size, *, contiguous_query=True):
        """Plans from host positions (upper bounds are allowed): [rows] integers of any type, rows > 0.

        `query_shape` is (rows, heads, dim), `device` 'cpu', 'cuda', 'cuda:1' or a torch.device. With
        `contiguous_query=False` the plan owns a contiguous copy of the query. Refused while the stream is captured.
        """
        if not isinstance(dtype, (str, type)) and type(dtype).__module__ == "torch":
            self._framework = "torch"
        elif not str(device).startswith("cpu"):
            self._framework = "cupy"
        else:
            self._framework = "numpy"
        name = dtype_name("dtype", dtype)
        kind, _, index = str(device).partition(":")
        if kind not in ("cpu", "cuda"):
            raise InvalidArgument(f"device: must be cpu or cuda, is {device}")
        options = _core.Options()
        if kind == "cuda":
            if self._framework == "torch":
                import torch

                current = torch.cuda.current_device() if not index else int(index)
                index = str(current)
                options.stream = torch.cuda.current_stream(current).cuda_stream
            elif "cupy" in sys.modules:
                options.stream = sys.modules["cupy"].cuda.get_current_stream().ptr
        shape = [integer("query_shape", extent) for extent in query_shape]
        if len(shape) != 3:
            raise InvalidArgument(f"query_shape: must be (rows, heads, dim), has {len(shape)} extents")
        positions = host_integers("positions", positions)
        region_count = integer("region_count", region_count)
        # Growing frees memory that tensors of this plan may still show: then a new object takes over, and the old one
        # lives as long as they do.
        entries = int(numpy.minimum(numpy.maximum(positions, -1) // 8 + 1, max(region_count, 0)).sum())
        needed = (shape[0], entries, 0 if contiguous_query else shape[0] * shape[1] * shape[2])
        grows = any(now > most for now, most in zip(needed, self._capacity))
        core = _core.CompactPagedPrefill(self._core_workspace) if grows else self._core
        core.plan(shape, name, kind == "cuda", int(index or 0), positions, region_count, float(scale),
                  integer("block_size", block_size), bool(contiguous_query), options)
        if grows:
            self._core, self._capacity = core, needed

    def fixup_positions(self, positions, *, status=None):
        """Exact positions, [rows] i32 or i64 on the plan's device, replace the bounds."""
        call = Call(positions, status=status)
        self._core.fixup_positions(call.view("positions", positions), call.options)

    def page_metadata(self, table, owners, page_stride, start=0, end=None) -> Optional[PagedPrefillMetadata]:
        """What an indexer needs to write pages of rows [start, end) itself; None if this object owns a query copy."""
        call = Call(table)
        end = -1 if end is None else integer("end", end)
        found = self._core.page_metadata(call.view("table", table), call.view("owners", owners), integer("page_stride", page_stride),
                                         integer("start", start), end)
        if found is None:
            return None
        _, pages, indptr, _, block_size, stride = found
        rows = self.query_shape[0]
        return PagedPrefillMetadata(owners[start:rows if end < 0 else end] if owners.shape[0] == rows else owners,
                                    table, self._tensor(pages), self._tensor(indptr), block_size, stride)

    def prepare_chunk(self, start, query, cache, regions, table, owners, *, status=None, strict=False):
        """Fills the pages of rows start .. start + len(query) and copies their query; only with an owned copy."""
        call = Call(query, status=status, strict=strict)
        self._core.prepare_chunk(integer("start", start), call.view("query", query), call.view("cache", cache),
                                 call.view("regions", regions), call.view("table", table),
                                 call.view("owners", owners), call.options)

    def finish(self, query, cache, out, *, lse=None, k_scale=None, v_scale=None):
        """Attention over the prepared pages. Reads the owned query copy, or `query` where there is none."""
        call = Call(cache)
        self._core.finish(call.maybe("query", query), call.view("cache", cache), call.view("out", out, write=True),
                          call.maybe("lse", lse, write=True), call.scale("k_scale", k_scale),
                          call.scale("v_scale", v_scale), call.options)
        return out

    def _tensor(self, core_tensor):
        return exported(core_tensor, self._core, self._framework)

    @property
    def pages(self):
        """[capacity] i32 on the plan's device."""
        return self._tensor(self._core.pages)

    @property
    def indptr(self):
        """[rows+1] i32 on the plan's device."""
        return self._tensor(self._core.indptr)

    @property
    def last_page_len(self):
        """[rows] i32 on the plan's device."""
        return self._tensor(self._core.last_page_len)

    @property
    def query_buffer(self):
        """[rows, heads, dim], or None where the plan owns no copy of the query."""
        buffer = self._core.query_buffer
        return self._tensor(buffer) if buffer.present else None

    @property
    def query_shape(self):
        """(rows, heads, dim)."""
        return tuple(self._core.query_shape)

    @property
    def region_count(self):
        return self._core.region_count

    @property
    def block_size(self):
        return self._core.block_size
