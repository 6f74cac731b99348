"""The plain alternative in Triton, row by row; and a gather that only loads, as a roof.

`row_attention`: one program per row and group walks over the row's regions, 64 tokens at a time, straight
from the paged cache through the block table, with an online softmax. No page is shared between rows.
`gather_pages`: the same pages, row by row, loaded and added up: the best that a row-by-row kernel in
Triton can hope for.
"""

import os

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its products of bf16 are wrong: made in f32 there


@triton.jit
def _product(a, b, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def _attend(query, cache, table, owners, positions, regions, out, qk_scale, v_scale, region_count, block_size,
            q_row, q_head, cache_block, cache_group, cache_token, table_row, regions_row, regions_group, out_row, out_head,
            HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
            TOKENS: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    owner = tl.load(owners + row)
    position = tl.load(positions + row)
    heads = tl.arange(0, HEADS_PADDED)
    head_ok = heads[:, None] < HEADS
    q_base = query + row * q_row + (group * HEADS + heads)[:, None] * q_head
    low = tl.arange(0, D0)
    q0 = tl.load(q_base + low[None, :], mask=head_ok, other=0.0)
    acc0 = tl.zeros([HEADS_PADDED, D0], tl.float32)
    if D1 > 0:
        high = D0 + tl.arange(0, D1)
        q1 = tl.load(q_base + high[None, :], mask=head_ok, other=0.0)
        acc1 = tl.zeros([HEADS_PADDED, D1], tl.float32)
    top = tl.full([HEADS_PADDED], -1e30, tl.float32)
    total = tl.zeros([HEADS_PADDED], tl.float32)
    count = tl.minimum(position // 8 + 1, region_count)
    lane = tl.arange(0, TOKENS)
    listed = regions + row * regions_row + group * regions_group
    for first in range(0, count, TOKENS // 8):
        entry = first + lane // 8
        region = tl.load(listed + entry, mask=entry < count, other=-1)
        token = region * 8 + lane % 8
        seen = (region >= 0) & (token <= position)
        block = tl.load(table + owner * table_row + token // block_size, mask=seen, other=0).to(tl.int64)
        base = cache + block * cache_block + group * cache_group + (token % block_size).to(tl.int64) * cache_token
        k0 = tl.load(base[:, None] + low[None, :], mask=seen[:, None], other=0.0).to(q0.dtype)
        scores = _product(q0, tl.trans(k0), WIDE)
        if D1 > 0:
            k1 = tl.load(base[:, None] + high[None, :], mask=seen[:, None], other=0.0).to(q0.dtype)
            scores += _product(q1, tl.trans(k1), WIDE)
        scores = tl.where(seen[None, :], scores * qk_scale, float("-inf"))
        fresh = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - fresh[:, None])
        shrink = tl.exp2(top - fresh)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(q0.dtype)
        v0 = tl.load(base[:, None] + DIM + low[None, :], mask=seen[:, None], other=0.0).to(q0.dtype)
        acc0 = acc0 * shrink[:, None] + _product(weights, v0, WIDE)
        if D1 > 0:
            v1 = tl.load(base[:, None] + DIM + high[None, :], mask=seen[:, None], other=0.0).to(q0.dtype)
            acc1 = acc1 * shrink[:, None] + _product(weights, v1, WIDE)
        top = fresh
    factor = v_scale / tl.where(total > 0, total, 1.0)
    out_base = out + row * out_row + (group * HEADS + heads)[:, None] * out_head
    tl.store(out_base + low[None, :], (acc0 * factor[:, None]).to(out.dtype.element_ty), mask=head_ok)
    if D1 > 0:
        tl.store(out_base + high[None, :], (acc1 * factor[:, None]).to(out.dtype.element_ty), mask=head_ok)


def row_attention(step, out):
    """Fills `out` [rows, heads, dim] from the step's tensors."""
    rows, heads, dim = step.query.shape
    groups = step.kv_cache.shape[1]
    low = 1 << (dim.bit_length() - 1)  # 192 = 128 + 64
    high = dim - low
    if high & (high - 1):
        raise ValueError(f"dim: must be a sum of at most two powers of two, is {dim}")
    _attend[(rows, groups)](
        step.query, step.kv_cache, step.block_table, step.owners, step.positions, step.regions, out,
        step.scale * step.k_scale * LOG2E, step.v_scale, step.regions.shape[2], step.kv_cache.shape[2],
        step.query.stride(0), step.query.stride(1), step.kv_cache.stride(0), step.kv_cache.stride(1),
        step.kv_cache.stride(2), step.block_table.stride(0), step.regions.stride(0), step.regions.stride(1),
        out.stride(0), out.stride(1),
        HEADS=heads // groups, HEADS_PADDED=max(16, triton.next_power_of_2(heads // groups)), DIM=dim, D0=low, D1=high,
        TOKENS=64, WIDE=INTERPRETED, num_warps=4, num_stages=2)
    return out


@triton.jit
def _gather(words, pages, indptr, sums, PAGE_WORDS: tl.constexpr, CHUNK: tl.constexpr, PAGES: tl.constexpr):
    row = tl.program_id(0)
    begin = tl.load(indptr + row)
    end = tl.load(indptr + row + 1)
    lane = tl.arange(0, CHUNK)
    acc = tl.zeros([PAGES, CHUNK], tl.int32)
    for first in range(begin, end, PAGES):
        entry = first + tl.arange(0, PAGES)
        page = tl.load(pages + entry, mask=entry < end, other=-1)
        base = words + page.to(tl.int64)[:, None] * PAGE_WORDS + lane[None, :]
        for chunk in tl.static_range(PAGE_WORDS // CHUNK):
            acc += tl.load(base + chunk * CHUNK, mask=(page >= 0)[:, None], other=0)
    tl.store(sums + row, tl.sum(tl.sum(acc.to(tl.int64), 1), 0))


def gather_pages(kv_cache, pages, indptr, sums):
    """Loads every listed page of a contiguous cache once per row that lists it; `sums` [rows] i64."""
    words = kv_cache.view(torch.uint8).reshape(-1).view(torch.int32)
    page_words = 8 * kv_cache.shape[3] * kv_cache.element_size() // 4
    chunk = min(1024, page_words & -page_words)
    _gather[(indptr.shape[0] - 1,)](words, pages, indptr, sums, PAGE_WORDS=page_words, CHUNK=chunk,
                                    PAGES=max(1, 4096 // chunk), num_warps=8, num_stages=3)
    return sums
