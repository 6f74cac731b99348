"""A step for the stand-in engine, and what its outputs must be."""

import pathlib
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy
from steps import attention

STANDIN = pathlib.Path(__file__).resolve().parent / "standin"
PAGES = "vllm.models.step5.nvidia.ops.sparse_prefill_pages"
ATTENTION = "vllm.models.step5.nvidia.sparse_attention"


def make_step(seed=0, *, groups=1, cache_dtype=ml_dtypes.bfloat16, layers=2, region_count=7):
    """Two requests; rows with fewer regions than there are columns have padding (-1) at the left."""
    random = numpy.random.default_rng(seed)
    blocks, block_size, dim, heads = 40, 16, 64, 4 * groups
    table = random.permutation(blocks)[:2 * 16].reshape(2, 16).astype(numpy.int32)
    positions = numpy.concatenate([numpy.arange(3), numpy.arange(20, 24), numpy.arange(190, 197)]).astype(numpy.int64)
    owners = numpy.array([0] * 7 + [1] * 7, numpy.int64)
    regions = numpy.full((len(positions), region_count), -1, numpy.int64)
    for row, position in enumerate(positions):
        own = position // 8
        count = min(own, region_count - 1)
        regions[row, region_count - 1 - count:] = [*random.permutation(own)[:count], own]
    caches = []
    for _ in range(layers):
        values = random.standard_normal((blocks, groups, block_size, 2 * dim)).astype(numpy.float32)
        if numpy.dtype(cache_dtype).itemsize == 1:
            values = values.astype(ml_dtypes.float8_e4m3fn).view(numpy.uint8)
        caches.append(values.astype(cache_dtype) if values.dtype == numpy.float32 else values)
    queries = [random.standard_normal((len(positions), heads, dim)).astype(ml_dtypes.bfloat16) for _ in caches]
    return SimpleNamespace(table=table, positions=positions, owners=owners, regions=regions, caches=caches,
                           queries=queries, lengths=[24, 197], scale=dim ** -0.5, k_scale=numpy.float32(0.5),
                           v_scale=numpy.float32(2.0))


def expected(step, layer):
    """[rows, heads, dim] float64."""
    query, cache = step.queries[layer], step.caches[layer]
    groups, dim = cache.shape[1], query.shape[2]
    values = cache.view(ml_dtypes.float8_e4m3fn) if cache.itemsize == 1 else cache
    values = values.astype(numpy.float64)
    if cache.itemsize == 1:
        values[..., :dim] *= step.k_scale
        values[..., dim:] *= step.v_scale
    counts = numpy.minimum(step.positions // 8 + 1, step.regions.shape[1])
    first = numpy.full_like(step.regions, -1)
    for row, count in enumerate(counts):
        first[row, :count] = step.regions[row, step.regions.shape[1] - count:]
    heads = query.shape[1] // groups
    return numpy.concatenate([
        attention(query[:, g * heads:(g + 1) * heads], values[:, g:g + 1], step.table, step.owners, step.positions,
                  first, step.scale)[0] for g in range(groups)], axis=1)


def forget():
    """As if the engine had never been imported."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
