"""Pages of eight tokens for sparse prefill attention, on numpy."""

from typing import NamedTuple

import numpy

from ...common.ops.sparse_indexer import PagedPrefillMetadata

calls = []  # what ran, for tests


class StagedPrefillPages(NamedTuple):
    pages: numpy.ndarray
    table: numpy.ndarray


def kv_page_stride(cache):
    calls.append("kv_page_stride")
    page = 8 * cache.strides[2]
    if cache.strides[0] % page:
        raise ValueError(f"block stride {cache.strides[0]} is no multiple of a page, {page}")
    return cache.strides[0] // page


def view_sparse_kv_pages(cache):
    calls.append("view_sparse_kv_pages")
    blocks, _, block_size, width = cache.shape
    token = cache.strides[2]
    count = ((blocks - 1) * cache.strides[0] + block_size * token) // (8 * token)
    pages = numpy.lib.stride_tricks.as_strided(
        cache, (count, 8, 1, width), (8 * token, token, width * cache.itemsize, cache.itemsize))
    return pages[..., :width // 2], pages[..., width // 2:]


def compact_page_metadata(positions, region_count):
    calls.append("compact_page_metadata")
    positions = numpy.asarray(positions, numpy.int64)
    if region_count < 1 or (positions < 0).any():
        raise ValueError("positions must not be negative, and a row has its own region at least")
    indptr = numpy.zeros(len(positions) + 1, numpy.int32)
    numpy.cumsum(numpy.minimum(positions // 8 + 1, region_count), out=indptr[1:])
    return indptr, (positions % 8 + 1).astype(numpy.int32)


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride):
    calls.append("fill_prefill_pages")
    per_block = block_size // 8
    for row, selected in enumerate(regions):
        begin, end = indptr[row], indptr[row + 1]
        chosen = selected[len(selected) - (end - begin):]
        pages[begin:end] = table[owners[row], chosen // per_block] * page_stride + chosen % per_block
    contiguous_query[...] = query


def plan_staged_prefill_pages(table, lengths, block_size):
    calls.append("plan_staged_prefill_pages")
    pages, staged = [], numpy.zeros_like(table)
    for request, length in enumerate(lengths):
        count = -(-length // block_size)
        staged[request, :count] = range(len(pages), len(pages) + count)
        pages += table[request, :count].tolist()
    return StagedPrefillPages(numpy.array(pages, numpy.int32), staged)


def stage_prefill_pages(cache, staged, dtype, k_scale=None, v_scale=None):
    calls.append("stage_prefill_pages")
    blocks = cache[staged.pages]
    if cache.itemsize > 1:
        return blocks.astype(dtype)
    import ml_dtypes

    dim = cache.shape[3] // 2
    values = blocks.view(ml_dtypes.float8_e4m3fn).astype(numpy.float32)
    values[..., :dim] *= k_scale
    values[..., dim:] *= v_scale
    return values.astype(dtype)


class CompactPagedPrefill:
    """Keeps the rows' last page lengths in the workspace from `plan` to `finish`, as a native planner may."""

    def __init__(self, workspace):
        calls.append("CompactPagedPrefill")
        self.workspace = workspace

    def plan(self, query_shape, dtype, device, positions, region_count, scale, block_size, *, contiguous_query=True):
        rows = query_shape[0]
        assert rows == len(positions) and rows > 0
        self.indptr, last = compact_page_metadata(positions, region_count)
        self.pages = numpy.empty(self.indptr[-1], numpy.int32)
        self._last_page_len = self.workspace[:4 * rows].view(numpy.int32)
        self._last_page_len[:] = last
        self.region_count, self.block_size, self._scale = region_count, block_size, scale
        self.query_shape = tuple(query_shape)
        self.query_buffer = None if contiguous_query else numpy.empty(query_shape, dtype)

    def fixup_positions(self, positions):
        counts = numpy.minimum(positions // 8 + 1, self.region_count)
        self.indptr[1:] = numpy.cumsum(counts)
        self._last_page_len[:] = positions % 8 + 1

    def page_metadata(self, table, owners, page_stride, start=0, end=None):
        if self.query_buffer is not None:
            return None
        end = self.query_shape[0] if end is None else end
        return PagedPrefillMetadata(owners[start:end], table, self.pages, self.indptr[start:end + 1],
                                    self.block_size, page_stride)

    def prepare_chunk(self, start, query, cache, regions, table, owners):
        end = start + query.shape[0]
        assert self.query_buffer is not None and regions.shape == (query.shape[0], self.region_count)
        fill_prefill_pages(regions, table, owners, self.indptr[start:end + 1], self.pages, cache.shape[2], query,
                           self.query_buffer[start:end], kv_page_stride(cache))

    def finish(self, query, cache, out):
        assert query.shape == self.query_shape
        keys, values = view_sparse_kv_pages(cache)
        source = query if self.query_buffer is None else self.query_buffer
        for row in range(len(query)):
            chosen = self.pages[self.indptr[row]:self.indptr[row + 1]]
            tokens = 8 * (len(chosen) - 1) + self._last_page_len[row]
            k = keys[chosen].astype(numpy.float64).reshape(8 * len(chosen), -1)[:tokens]
            v = values[chosen].astype(numpy.float64).reshape(8 * len(chosen), -1)[:tokens]
            scores = self._scale * source[row].astype(numpy.float64) @ k.T
            weights = numpy.exp(scores - scores.max(axis=1, keepdims=True))
            out[row] = (weights @ v / weights.sum(axis=1, keepdims=True)).astype(out.dtype)
