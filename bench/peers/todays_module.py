"""Today's way, as an engine's module does it: plan on the host, fill a flat page list, stage an f8 cache to bf16,
and FlashInfer's FA2 over pages of eight tokens, one row per request.

Fill and staging are written here in Triton, one launch each, so that the peer is not held back by glue.
"""

import numpy
import torch
import triton
import triton.language as tl


@triton.jit
def _fill(regions, table, owners, indptr, positions, pages, query, query_copy, region_count, per_block, page_stride,
          regions_row, table_row, query_row, query_head, HEADS: tl.constexpr, DIM: tl.constexpr, COPY: tl.constexpr,
          COPY_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """A row's pages in the order of its regions, its own region moved to the end; copies the row's query."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - begin
    own = (tl.load(positions + row) // 8).to(tl.int32)
    owner = tl.load(owners + row)
    lane = tl.arange(0, BLOCK)
    region = tl.load(regions + row * regions_row + lane, mask=lane < count, other=-1)
    is_own = (region == own) & (lane < count)
    own_at = tl.sum(tl.where(is_own, lane, 0), 0)
    block = tl.load(table + owner * table_row + region // per_block, mask=region >= 0, other=0)
    page = block * page_stride + region % per_block
    place = tl.where(is_own, count - 1, tl.where(lane > own_at, lane - 1, lane))
    tl.store(pages + begin + place, page, mask=lane < count)
    if COPY:
        element = tl.arange(0, COPY_BLOCK)
        ok = element < HEADS * DIM
        value = tl.load(query + row * query_row + (element // DIM) * query_head + element % DIM, mask=ok)
        tl.store(query_copy + row * HEADS * DIM + element, value, mask=ok)


@triton.jit
def _stage(cache, blocks, staged, k_scale, v_scale, cache_block, cache_token, block_size, DIM: tl.constexpr,
           BLOCK: tl.constexpr):
    """Eight tokens of one staged block: K times k_scale, V times v_scale, rounded once."""
    at = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + at).to(tl.int64)
    token = tl.program_id(1) * 8 + tl.arange(0, 8)
    element = tl.arange(0, BLOCK)
    ok = (element < 2 * DIM)[None, :]
    source = cache + block * cache_block + (token * cache_token)[:, None] + element[None, :]
    value = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    value = value * tl.where(element < DIM, k_scale, v_scale)[None, :]
    target = staged + ((at * block_size + token) * 2 * DIM)[:, None] + element[None, :]
    tl.store(target, value.to(tl.bfloat16), mask=ok)


def page_view(cache, group):
    """K and V of one group as [pages, 8, 1, dim] views, gaps between blocks retained."""
    blocks, _, block_size, width = cache.shape
    one = cache[:, group]
    pages = ((blocks - 1) * one.stride(0) + block_size * one.stride(1)) // (8 * one.stride(1))
    view = one.as_strided((pages, 8, 1, width), (8 * one.stride(1), one.stride(1), width, 1), one.storage_offset())
    return view[..., :width // 2], view[..., width // 2:]


class TodaysModule:
    """One step. `plan` once per step; then for each layer `layer`, or its parts `stage`, `fill`, `attend`."""

    def __init__(self, step, flashinfer, disable_split=True):
        self.step, self._spec, self._disable_split = step, step.spec, disable_split
        device = step.query.device
        self._workspace = torch.empty(256 << 20 if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        self._host_positions = step.rows.positions
        spec = self._spec
        self._copies_query = spec.groups > 1  # heads of one group among others are strided
        if self._copies_query:
            shape = (spec.rows, spec.heads_per_group, spec.dim)
            self._query, self._out = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        self._stages = step.f8
        if self._stages:
            live = -(-spec.context // spec.block_size)
            self.staged_blocks = step.block_table[:, :live].reshape(-1).contiguous()
            table = torch.zeros_like(step.block_table)
            table[:, :live] = torch.arange(len(self.staged_blocks), device=device).view(spec.requests, live)
            self._table = table
            self._staged = torch.empty(len(self.staged_blocks), 1, spec.block_size, 2 * spec.dim, dtype=torch.bfloat16,
                                       device=device)
        else:
            self._table = step.block_table

    def plan(self):
        spec, device = self._spec, self.step.query.device
        counts = numpy.minimum(self._host_positions // 8 + 1, spec.region_count)
        indptr = numpy.zeros(spec.rows + 1, numpy.int32)
        numpy.cumsum(counts, out=indptr[1:])
        indptr = torch.from_numpy(indptr)
        last = torch.from_numpy((self._host_positions % 8 + 1).astype(numpy.int32))
        self._indptr = indptr.to(device, non_blocking=True)
        self._pages = torch.empty(int(indptr[-1]), dtype=torch.int32, device=device)
        self._wrapper.plan(torch.arange(spec.rows + 1, dtype=torch.int32), indptr, self._pages, last, spec.heads_per_group, 1,
                           spec.dim, 8, causal=False, sm_scale=self.step.scale, q_data_type=torch.bfloat16,
                           disable_split_kv=self._disable_split)

    def stage(self, group):
        spec = self._spec
        cache = self.step.kv_cache[:, group]
        _stage[(len(self.staged_blocks), spec.block_size // 8)](
            cache, self.staged_blocks, self._staged, self.step.k_scale, self.step.v_scale, cache.stride(0), cache.stride(1),
            spec.block_size, DIM=spec.dim, BLOCK=triton.next_power_of_2(2 * spec.dim), num_warps=4)

    def fill(self, group):
        spec, step = self._spec, self.step
        per_block = spec.block_size // 8
        regions = step.regions[:, group]
        query = step.query[:, group * spec.heads_per_group:(group + 1) * spec.heads_per_group]
        _fill[(spec.rows,)](
            regions, self._table, step.owners, self._indptr, step.positions, self._pages, query,
            self._query if self._copies_query else query, spec.region_count, per_block,
            per_block if self._stages else per_block * spec.groups, regions.stride(0), self._table.stride(0), query.stride(0),
            query.stride(1), HEADS=spec.heads_per_group, DIM=spec.dim, COPY=self._copies_query,
            COPY_BLOCK=triton.next_power_of_2(spec.heads_per_group * spec.dim), BLOCK=triton.next_power_of_2(spec.region_count),
            num_warps=4)

    def attend(self, group, out):
        spec = self._spec
        heads = slice(group * spec.heads_per_group, (group + 1) * spec.heads_per_group)
        kv = page_view(self._staged, 0) if self._stages else page_view(self.step.kv_cache, group)
        if not self._copies_query:
            self._wrapper.run(self.step.query, kv, out=out)
            return
        self._wrapper.run(self._query, kv, out=self._out)
        out[:, heads].copy_(self._out)

    def layer(self, out):
        for group in range(self._spec.groups):
            if self._stages:
                self.stage(group)
            self.fill(group)
            self.attend(group, out)
        return out

    def flat_list(self):
        """Page list, its ranges and last page lengths of the group that was filled last."""
        last = torch.from_numpy((self._host_positions % 8 + 1).astype(numpy.int32))
        return self._pages, self._indptr, last
