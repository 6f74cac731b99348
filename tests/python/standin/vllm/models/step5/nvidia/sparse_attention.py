"""A prefill step as the attention layers run it: binds functions by name, and the module."""

import numpy

from ..common.ops.sparse_indexer import select_regions
from .flashinfer_sparse import Adapter
from .ops import sparse_prefill_pages
from .ops.sparse_prefill_pages import kv_page_stride, plan_staged_prefill_pages, stage_prefill_pages


def prefill(step, *, chunk=5, spare=0):
    """[layer][rows, heads, dim]. Positions are planned `spare` too high and corrected."""
    first = step.caches[0]
    groups, block_size = first.shape[1], first.shape[2]
    staging = groups > 1 or first.itemsize == 1
    rows, heads, dim = step.queries[0].shape
    per_group = heads // groups
    plan = Adapter(numpy.zeros(1 << 26, numpy.uint8)).prepare_prefill_attention(
        (rows, per_group, dim), step.queries[0].dtype, step.positions + spare, step.regions.shape[1], step.scale,
        block_size, contiguous_query=groups == 1)
    if spare:
        plan.fixup_positions(step.positions)
    staged = plan_staged_prefill_pages(step.table, step.lengths, block_size) if staging else None
    outputs = []
    for query, cache in zip(step.queries, step.caches):
        out = numpy.full(query.shape, numpy.nan, query.dtype)
        for group in range(groups):
            heads_of_group = slice(group * per_group, (group + 1) * per_group)
            attend(plan, query[:, heads_of_group], cache[:, group:group + 1], out[:, heads_of_group], step, staged,
                   chunk)
        outputs.append(out)
    return outputs


def attend(plan, query, cache, out, step, staged, chunk):
    table = step.table
    if staged is not None:
        scales = (step.k_scale, step.v_scale) if cache.itemsize == 1 else (None, None)
        cache, table = stage_prefill_pages(cache, staged, query.dtype, *scales), staged.table
    for start in range(0, len(query), chunk):
        end = min(start + chunk, len(query))
        metadata = plan.page_metadata(table, step.owners, kv_page_stride(cache), start, end)
        if metadata is not None:
            select_regions(step.regions[start:end], metadata)
        else:
            plan.prepare_chunk(start, query[start:end], cache, step.regions[start:end], table, step.owners[start:end])
    plan.finish(query, cache, out)


def page_views(cache):
    return sparse_prefill_pages.view_sparse_kv_pages(cache)
