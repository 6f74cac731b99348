"""Pages of eight tokens for sparse prefill attention in plain torch, on any device: the names, signatures and
conventions of vLLM 0.34's module."""

from typing import NamedTuple

import numpy
import torch

from ...common.ops.sparse_indexer import PagedPrefillMetadata


class StagedPrefillPages(NamedTuple):
    pages: torch.Tensor
    table: torch.Tensor


def kv_page_stride(cache):
    page = 8 * cache.stride(2)
    if cache.stride(0) % page:
        raise ValueError(f"block stride {cache.stride(0)} is no multiple of a page, {page}")
    return cache.stride(0) // page


def view_sparse_kv_pages(cache):
    blocks, _, block_size, width = cache.shape
    token = cache.stride(2)
    count = ((blocks - 1) * cache.stride(0) + block_size * token) // (8 * token)
    return cache.as_strided((count, 8, 1, width), (8 * token, token, width, 1)).split(width // 2, -1)


def compact_page_metadata(positions, region_count):
    positions = numpy.asarray(positions, numpy.int64)
    if region_count < 1 or (positions < 0).any():
        raise ValueError("positions must not be negative, and a row has its own region at least")
    indptr = numpy.zeros(len(positions) + 1, numpy.int32)
    numpy.cumsum(numpy.minimum(positions // 8 + 1, region_count), out=indptr[1:])
    return torch.from_numpy(indptr), torch.from_numpy((positions % 8 + 1).astype(numpy.int32))


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride):
    """No loop over rows and nothing that waits for the device, so that it can be captured."""
    rows, columns = regions.shape
    place = torch.arange(columns, device=regions.device)[None] - (columns - (indptr[1:] - indptr[:-1]))[:, None]
    region = torch.where(place >= 0, regions, 0)
    found = table[owners[:, None], region // (block_size // 8)] * page_stride + region % (block_size // 8)
    at = torch.where(place >= 0, indptr[:-1, None] + place, len(pages)).long()  # the rest goes behind the list
    longer = torch.cat([pages, pages.new_zeros(1)])
    pages.copy_(longer.scatter(0, at.flatten(), found.to(torch.int32).flatten())[:-1])
    contiguous_query.copy_(query)


def plan_staged_prefill_pages(table, lengths, block_size):
    pages, staged = [], torch.zeros_like(table)
    base = 0
    for request, length in enumerate(lengths):
        count = -(-length // block_size)
        staged[request, :count] = torch.arange(base, base + count, device=table.device)
        pages.append(table[request, :count])
        base += count
    return StagedPrefillPages(torch.cat(pages), staged)


def stage_prefill_pages(cache, staged, dtype, k_scale=None, v_scale=None):
    blocks = cache.view(torch.uint8 if cache.element_size() == 1 else torch.int16)[staged.pages.long()]
    if cache.element_size() > 1:
        return blocks.view(cache.dtype).to(dtype)
    values = blocks.view(torch.float8_e4m3fn).float()
    return torch.cat([half * scale for half, scale in zip(values.chunk(2, -1), (k_scale, v_scale))], -1).to(dtype)


class CompactPagedPrefill:
    """Keeps the rows' last page lengths in the workspace from `plan` to `finish`, as a native planner may."""

    def __init__(self, workspace):
        self.workspace = workspace

    def plan(self, query_shape, dtype, device, positions, region_count, scale, block_size, *, contiguous_query=True):
        rows = query_shape[0]
        assert rows == len(positions) and rows > 0
        indptr, last = compact_page_metadata(positions, region_count)
        self.indptr = indptr.to(device)
        self.pages = torch.zeros(int(indptr[-1]), dtype=torch.int32, device=device)
        self._last_page_len = self.workspace[:4 * rows].view(torch.int32)
        self._last_page_len.copy_(last)
        self.region_count, self.block_size, self._scale = region_count, block_size, scale
        self.query_shape = torch.Size(query_shape)
        self.query_buffer = None if contiguous_query else torch.empty(query_shape, dtype=dtype, device=device)

    def fixup_positions(self, positions):
        counts = torch.clamp(positions // 8 + 1, max=self.region_count)
        self.indptr[1:].copy_(torch.cumsum(counts, 0))
        self._last_page_len.copy_(positions % 8 + 1)

    def page_metadata(self, table, owners, page_stride, start=0, end=None):
        if self.query_buffer is not None:
            return None
        end = self.query_shape[0] if end is None else end
        return PagedPrefillMetadata(owners[start:end], table, self.pages, self.indptr[start:end + 1], self.block_size,
                                    page_stride)

    def prepare_chunk(self, start, query, cache, regions, table, owners):
        end = start + query.shape[0]
        assert self.query_buffer is not None and regions.shape == (query.shape[0], self.region_count)
        fill_prefill_pages(regions, table, owners, self.indptr[start:end + 1], self.pages, cache.shape[2], query,
                           self.query_buffer[start:end], kv_page_stride(cache))

    def finish(self, query, cache, out):
        """Every row over as many entries as the longest may have, masked."""
        assert query.shape == self.query_shape
        source = query if self.query_buffer is None else self.query_buffer
        begin, entry = self.indptr[:-1, None], torch.arange(self.region_count, device=cache.device)[None]
        count = self.indptr[1:, None] - begin
        listed = self.pages[(begin + entry).clamp(max=len(self.pages) - 1).long()]
        tokens = torch.arange(8 * self.region_count, device=cache.device)[None]
        seen = tokens < 8 * (count - 1) + self._last_page_len[:, None]
        k, v = (half[torch.where(entry < count, listed, 0).long()].double().flatten(1, 3).masked_fill(~seen[..., None], 0)
                for half in view_sparse_kv_pages(cache))
        scores = (self._scale * source.double() @ k.transpose(1, 2)).masked_fill(~seen[:, None], -torch.inf)
        out.copy_(torch.softmax(scores, -1) @ v)
