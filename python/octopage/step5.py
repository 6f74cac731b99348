"""The planned path under the names and signatures that engines use for it.

One native plan serves a whole prefill step and its layers: `plan`, then per layer fill (`prepare_chunk`,
or an indexer that writes pages itself from `page_metadata`) and `finish`. It serves one group: callers
pass slices of the cache, of the query and of the selections.

Every function raises InvalidArgument (a ValueError) where a shape, a stride, a device or a value breaks a rule, and
ArgumentTypeError (a TypeError, too) where an argument is of the wrong kind or dtype; the docstrings say what else.
Strides are in elements. On a GPU work is queued on the framework's current stream.
"""

import functools
import sys
import threading
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union, cast

import numpy

from . import _core
from ._errors import InvalidArgument
from ._tensor import (ArgumentTypeError, Call, NotPlanned, device_of, dtype_name, empty_like, exported, flag, framework,
                      host_integers, integer, real, shown, stream_of, tracing, view)

__all__ = ["CompactPagedPrefill", "PagedPrefillMetadata", "StagedPrefillPages", "compact_page_metadata",
           "fill_prefill_pages", "kv_page_stride", "plan_staged_prefill_pages", "stage_prefill_pages",
           "view_sparse_kv_pages"]

Tensor = Any  # of torch, numpy, cupy or jax, or anything with __dlpack__


class StagedPrefillPages(NamedTuple):
    """Physical blocks in the order they are staged, and the table that finds them in the staged cache."""

    pages: Tensor  # [staged] i32
    table: Tensor  # [requests, max_blocks] i32


class PagedPrefillMetadata(NamedTuple):
    """What an indexer needs to write pages itself. `block_table` and `indices` are vLLM's names of `table` and `pages`,
    and read the same."""

    owners: Tensor  # [rows] i32
    table: Tensor  # [requests, max_blocks] i32
    pages: Tensor  # [capacity] i32, the plan's whole list
    indptr: Tensor  # [rows+1] i32
    block_size: int
    page_stride: int

    @property
    def block_table(self) -> Tensor:
        """`table`."""
        return self.table

    @property
    def indices(self) -> Tensor:
        """`pages`."""
        return self.pages


def compact_page_metadata(positions: Any, region_count: int) -> Tuple[Tensor, Tensor]:
    """(indptr [rows+1], last_page_len [rows]), i32 on the host, of rows at `positions` [rows], in tokens: a row has
    min(position // 8 + 1, region_count) pages, and position % 8 + 1 tokens of its last one. A padding row (a negative
    position) has none."""
    indptr, last_page_len = _core.compact_page_metadata(host_integers("positions", positions),
                                                        integer("region_count", region_count))
    if framework(positions) == "torch":
        import torch

        return torch.from_numpy(indptr), torch.from_numpy(last_page_len)
    return indptr, last_page_len


def kv_page_stride(cache: Tensor) -> int:
    """Eight-token pages between neighbouring blocks of a group of `cache` [blocks, groups, block_size, 2*dim].
    Raises InvalidArgument where that is no whole number of pages."""
    return _core.kv_page_stride(Call(cache).view("cache", cache))


def view_sparse_kv_pages(cache: Tensor) -> Tuple[Tensor, Tensor]:
    """K and V of `cache` [blocks, 1, block_size, 2*dim] as [pages, 8, 1, dim] views, no copy, gaps between blocks
    retained. Tensors of torch, numpy and cupy alone."""
    call = Call(cache)
    k, v = _core.view_sparse_kv_pages(call.view("cache", cache))
    kind = framework(cache)
    if kind == "torch":
        first = cache.storage_offset()
        return (cache.as_strided(k.shape, k.strides, first),
                cache.as_strided(v.shape, v.strides, first + k.shape[3]))
    if kind not in ("numpy", "cupy"):
        raise ArgumentTypeError(f"cache: must be a tensor of torch, numpy or cupy, is {type(cache).__name__}")
    strided = sys.modules[kind].lib.stride_tricks.as_strided
    views = []
    for pages, offset in ((k, 0), (v, k.shape[3])):
        base = cache[..., offset:] if cache.size else cache
        views.append(strided(base, pages.shape, [s * cache.itemsize for s in pages.strides]))
    return views[0], views[1]


def plan_staged_prefill_pages(table: Tensor, lengths: Any, block_size: int) -> StagedPrefillPages:
    """The live blocks of `table` [requests, max_blocks] i32, request by request, and a table of the same width that
    numbers them 0, 1, 2, ... `lengths` [requests], in tokens, are integers on the host: at most max_blocks *
    block_size each. Both tensors are new ones of the framework, on the table's device."""
    lengths = host_integers("lengths", lengths)
    block_size = integer("block_size", block_size)
    call = Call(table)
    described = call.view("table", table)
    pages = empty_like(table, (_core.staged_block_count(lengths, block_size),), "i32")
    staged = empty_like(table, tuple(described.shape), "i32")
    _core.plan_staged_prefill_pages(described, lengths, block_size, call.view("pages", pages, write=True),
                                    call.view("table", staged, write=True), call.options)
    return StagedPrefillPages(pages, staged)


def stage_prefill_pages(cache: Tensor, staged: Union[StagedPrefillPages, Tensor], dtype: Any,
                        k_scale: Union[None, float, Tensor] = None,
                        v_scale: Union[None, float, Tensor] = None) -> Tensor:
    """Gathers the staged blocks of `cache` [blocks, 1, block_size, 2*dim] into a contiguous cache of `dtype` (bf16 or
    f16), [staged, 1, block_size, 2*dim], a new tensor. `staged` is a StagedPrefillPages, or its blocks [staged] i32; ids
    outside of the cache give zeros. u8 and f8_e4m3fn caches need `k_scale` and `v_scale`: numbers, or tensors of one f32
    on the device."""
    blocks = getattr(staged, "pages", staged)  # an engine's record is as good
    if tracing():
        from .ops import traced_stage_prefill_pages

        return traced_stage_prefill_pages(cache, blocks, dtype, k_scale, v_scale)
    return stage_into(cache, blocks, None, k_scale, v_scale, dtype)


def check_staged_cache(shape):
    if len(shape) != 4:
        raise InvalidArgument(f"cache: must have 4 dimensions, has {len(shape)}")


def check_staged_dtype(dtype, bf16, f16):
    """Of a staged cache that is allocated here: the library would call it `output`. Names, or dtypes of torch."""
    if dtype not in (bf16, f16):
        raise InvalidArgument(f"dtype: must be {bf16} or {f16}, is {dtype}")


def stage_into(cache: Tensor, blocks: Tensor, output: Optional[Tensor], k_scale: Union[None, float, Tensor] = None,
               v_scale: Union[None, float, Tensor] = None, dtype: Any = None) -> Tensor:
    """`stage_prefill_pages` into `output` [len(blocks), 1, block_size, 2*dim], contiguous; None allocates `dtype`."""
    call = Call(cache, output)
    described = call.view("cache", cache)
    listed = call.view("staged", blocks)
    check_staged_cache(described.shape)
    if output is None:
        dtype = dtype_name("dtype", dtype)
        check_staged_dtype(dtype, "bf16", "f16")
        output = empty_like(cache, (listed.shape[0], 1, *described.shape[2:]), dtype)
    _core.stage_prefill_pages(described, listed, call.view("output", output, write=True),
                              call.scale("k_scale", k_scale, described), call.scale("v_scale", v_scale, described),
                              call.options)
    return output


def fill_prefill_pages(regions: Tensor, table: Tensor, owners: Tensor, indptr: Tensor, pages: Tensor, block_size: int,
                       query: Optional[Tensor] = None, contiguous_query: Optional[Tensor] = None,
                       page_stride: Optional[int] = None) -> None:
    """Writes each row's pages at `indptr[row]` of `pages`, in the order of its regions, its own region last; copies
    `query` to `contiguous_query` where both are given and not the same.

    regions      [rows, region_count] i32
    table        [requests, max_blocks] i32, physical blocks
    owners       [rows] i32, the request of each row
    indptr       [rows+1] i32; ranges outside of `pages` are not written
    pages        [capacity] i32, contiguous, written; an invalid entry becomes -1
    block_size   tokens of a block, a multiple of 8
    query, contiguous_query  [rows, heads, dim], the latter contiguous and written
    page_stride  pages between neighbouring blocks (`kv_page_stride`); default: that of a cache without gaps
    """
    if contiguous_query is query:  # contiguous already: nothing to copy
        query = contiguous_query = None
    if tracing():
        from .ops import traced_fill_prefill_pages

        return traced_fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query,
                                         page_stride)
    block_size = integer("block_size", block_size)
    call = Call(regions, pages)
    _core.fill_prefill_pages(
        call.view("regions", regions), call.view("table", table), call.view("owners", owners),
        call.view("indptr", indptr), call.view("pages", pages, write=True), block_size,
        block_size // 8 if page_stride is None else integer("page_stride", page_stride), -1, None,
        call.maybe("query", query), call.maybe("contiguous_query", contiguous_query, write=True), call.options)


Method = TypeVar("Method", bound=Callable[..., Any])


def _locked(method: Method) -> Method:
    """One call at a time: the library's object is used by one thread at a time."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Method, call)


def _of_plan(getter: Method) -> Method:
    """What a plan makes."""

    @functools.wraps(getter)
    def attribute(self):
        with self._lock:
            if not self._core.planned:
                raise NotPlanned(f"{getter.__name__}: needs a plan first")
            return getter(self)

    return cast(Method, attribute)


class CompactPagedPrefill:
    """One plan for a whole prefill step, shared by its layers. `workspace` is scratch; nothing lives in it.

    Calls of several threads on one object wait for each other. Reading an attribute before the first plan raises
    WrongState (which is an AttributeError there, so that `hasattr` says no). A plan empties the page list: until its
    rows are filled again, `finish` gives them output 0 and lse -inf.
    """

    def __init__(self, workspace: Optional[Tensor] = None):
        self._lock = threading.RLock()
        self._workspace = None  # and what keeps the memory behind it alive
        self._workspace_owner = None
        self._kind = None if workspace is None else framework(workspace)
        if workspace is not None:
            self._workspace, self._workspace_owner = view("workspace", workspace, write=True,
                                                          stream=stream_of(workspace) or 0)
            if not self._workspace.is_contiguous:
                raise InvalidArgument(f"workspace: must be contiguous, has shape {self._workspace.shape} with strides "
                                      f"{self._workspace.strides}")
        self._core = self._new_core()
        self._framework = "numpy"
        self._capacity = (0, 0, 0)

    def _new_core(self):
        return _core.CompactPagedPrefill(self._workspace)

    def _framework_of(self, dtype, device, on_cuda):
        """Whose tensors the plan hands out."""
        if any((type(said).__module__ or "").partition(".")[0] == "torch" for said in (dtype, device)):
            return "torch"
        if not on_cuda:
            return "torch" if self._kind == "torch" else "numpy"
        for kind in (self._kind, "cupy", "torch"):
            if kind in ("cupy", "torch") and kind in sys.modules:
                return kind
        raise InvalidArgument("device: tensors of a plan on cuda are torch's or cupy's, and neither is imported")

    def _current(self, kind, index):
        """(device index, stream) that are current in the framework."""
        if kind == "torch":
            torch = sys.modules["torch"]
            index = torch.cuda.current_device() if index is None else index
            return index, torch.cuda.current_stream(index).cuda_stream
        cupy = sys.modules["cupy"]
        index = cupy.cuda.runtime.getDevice() if index is None else index
        return index, cupy.cuda.get_current_stream(index).ptr

    @_locked
    def plan(self, query_shape: Sequence[int], dtype: Any, device: Any, positions: Any, region_count: int, scale: float,
             block_size: int, *, contiguous_query: bool = True) -> None:
        """Plans from host positions (upper bounds are allowed): [rows] integers of any type, rows > 0.

        `query_shape` is (rows, heads, dim), `device` 'cpu', 'cuda', 'cuda:1' or a torch.device. With
        `contiguous_query=False` the plan owns a contiguous copy of the query. `scale` multiplies q . k, `block_size` is in
        tokens. Raises WrongState while the stream is captured, OutOfMemory where the buffers cannot be had; the former
        plan then stands.
        """
        name = dtype_name("dtype", dtype)
        on_cuda, index = device_of("device", device)
        kind = self._framework_of(dtype, device, on_cuda)
        options = _core.Options()
        if on_cuda:
            index, options.stream = self._current(kind, index)
        try:
            shape = [integer("query_shape", extent) for extent in query_shape]
        except TypeError as error:
            if isinstance(error, InvalidArgument):
                raise
            raise ArgumentTypeError(f"query_shape: must be (rows, heads, dim), is {shown(query_shape)}") from None
        if len(shape) != 3:
            raise InvalidArgument(f"query_shape: must be (rows, heads, dim), has {len(shape)} extents")
        positions = host_integers("positions", positions)
        region_count = integer("region_count", region_count)
        contiguous_query = flag("contiguous_query", contiguous_query)
        # Growing frees memory that tensors of this plan may still show: then a new object takes over, and the old one
        # lives as long as they do.
        entries = int(numpy.minimum(numpy.maximum(positions, -1) // 8 + 1, max(region_count, 0)).sum())
        needed = (shape[0], entries, 0 if contiguous_query else shape[0] * shape[1] * shape[2])
        grows = any(now > most for now, most in zip(needed, self._capacity))
        core = self._new_core() if grows else self._core
        core.plan(shape, name, on_cuda, index or 0, positions, region_count, real("scale", scale),
                  integer("block_size", block_size), contiguous_query, options)
        self._framework = kind
        if grows:
            self._core, self._capacity = core, needed

    @_locked
    def fixup_positions(self, positions: Tensor, *, status: Optional[Tensor] = None) -> None:
        """Exact positions, [rows] i32 or i64 on the plan's device, replace the bounds. A row that needs more pages than
        planned is cut, and raises a bit of `status` (i32 [1]). Raises WrongState before a plan."""
        call = Call(positions, status=status)
        exact = call.view("positions", positions)
        self._core.fixup_positions(exact, call.finish_options(exact))

    @_locked
    def page_metadata(self, table: Tensor, owners: Tensor, page_stride: int, start: int = 0,
                      end: Optional[int] = None) -> Optional[PagedPrefillMetadata]:
        """What an indexer needs to write pages of rows [start, end) itself; None if this object owns a query copy.
        `table` [requests, max_blocks] i32, `owners` [rows] i32, `page_stride` in pages. Raises WrongState before a
        plan."""
        call = Call(table)
        if end is not None and integer("end", end) < 0:
            raise InvalidArgument(f"end = {end}: must not be negative")
        found = self._core.page_metadata(call.view("table", table), call.view("owners", owners),
                                         integer("page_stride", page_stride), integer("start", start),
                                         -1 if end is None else integer("end", end))
        if found is None:
            return None
        if framework(owners) == "dlpack":
            raise ArgumentTypeError(f"owners: must be a tensor of torch, numpy, cupy or jax, is {type(owners).__name__}")
        _, pages, indptr, _, block_size, stride = found
        return PagedPrefillMetadata(owners[start:end], table, self._tensor(pages), self._tensor(indptr, read_only=True),
                                    block_size, stride)

    @_locked
    def prepare_chunk(self, start: int, query: Tensor, cache: Tensor, regions: Tensor, table: Tensor, owners: Tensor, *,
                      status: Optional[Tensor] = None, strict: bool = False) -> None:
        """Fills the pages of rows start .. start + chunk and copies their query; only with an owned copy.

        query    [chunk, heads, dim] of the plan's dtype
        cache    [blocks, 1, block_size, 2*dim]
        regions  [chunk, region_count] i32
        table    [requests, max_blocks] i32
        owners   [chunk] i32, or [rows] of the whole plan
        status   i32 [1] on the plan's device; invalid entries OR their bits into it

        Raises WrongState before a plan or where the plan owns no copy, InvalidEntry under `strict`.
        """
        call = Call(query, cache, regions, status=status, strict=strict)
        first = call.view("query", query)
        self._core.prepare_chunk(integer("start", start), first, call.view("cache", cache),
                                 call.view("regions", regions), call.view("table", table),
                                 call.view("owners", owners), call.finish_options(first))

    @_locked
    def finish(self, query: Optional[Tensor], cache: Tensor, out: Tensor, *, lse: Optional[Tensor] = None,
               k_scale: Union[None, float, Tensor] = None, v_scale: Union[None, float, Tensor] = None,
               backend: Optional[str] = None) -> Tensor:
        """Attention over the prepared pages. Reads the owned query copy, or `query` where there is none; returns `out`.

        query    [rows, heads, dim] of the plan's dtype; may be None where the plan owns a copy
        cache    [blocks, 1, block_size, 2*dim] bf16, f16, f8_e4m3fn, or u8 that holds f8_e4m3fn
        out      [rows, heads, dim], the query's type or f32
        lse      [rows, heads] f32, natural logarithm; filled where given
        k_scale, v_scale  for f8 caches: numbers, or tensors of one f32 on the cache's device

        Raises WrongState before a plan, Unsupported where no backend (or not the one named) serves the call.
        """
        call = Call(cache, out, query, backend=backend)
        first = call.view("cache", cache)
        self._core.finish(call.maybe("query", query), first, call.view("out", out, write=True),
                          call.maybe("lse", lse, write=True), call.scale("k_scale", k_scale, first),
                          call.scale("v_scale", v_scale, first), call.finish_options(first))
        return out

    def _tensor(self, core_tensor, *, read_only=False):
        return exported(core_tensor, self._core, self._framework, read_only=read_only)

    @property
    @_of_plan
    def pages(self) -> Tensor:
        """[capacity] i32 on the plan's device."""
        return self._tensor(self._core.pages)

    @property
    @_of_plan
    def indptr(self) -> Tensor:
        """[rows+1] i32 on the plan's device; to be read only, which numpy's arrays enforce."""
        return self._tensor(self._core.indptr, read_only=True)

    @property
    @_of_plan
    def last_page_len(self) -> Tensor:
        """[rows] i32 on the plan's device; to be read only, which numpy's arrays enforce."""
        return self._tensor(self._core.last_page_len, read_only=True)

    @property
    @_of_plan
    def query_buffer(self) -> Optional[Tensor]:
        """[rows, heads, dim], or None where the plan owns no copy of the query."""
        buffer = self._core.query_buffer
        return self._tensor(buffer) if buffer.present else None

    @property
    @_of_plan
    def query_shape(self) -> Tuple[int, int, int]:
        """(rows, heads, dim)."""
        rows, heads, dim = self._core.query_shape
        return rows, heads, dim

    @property
    @_of_plan
    def region_count(self) -> int:
        """Entries of a selection."""
        return self._core.region_count

    @property
    @_of_plan
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._core.block_size
