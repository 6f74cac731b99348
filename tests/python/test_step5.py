"""The calls that an engine makes for a prefill step, on numpy arrays."""

import inspect

import ml_dtypes
import numpy
import octopage
import pytest
from octopage import step5
from steps import CASES, Step, assert_close, attention, tolerance


def test_signatures():
    def names(function):
        return [p.name for p in inspect.signature(function).parameters.values()
                if p.kind is not p.KEYWORD_ONLY and p.name != "self"]

    plan = step5.CompactPagedPrefill
    assert names(plan.__init__) == ["workspace"]
    assert names(plan.plan) == ["query_shape", "dtype", "device", "positions", "region_count", "scale", "block_size"]
    assert "contiguous_query" in inspect.signature(plan.plan).parameters
    assert names(plan.fixup_positions) == ["positions"]
    assert names(plan.page_metadata) == ["table", "owners", "page_stride", "start", "end"]
    assert names(plan.prepare_chunk) == ["start", "query", "cache", "regions", "table", "owners"]
    assert names(plan.finish) == ["query", "cache", "out"]
    assert names(step5.fill_prefill_pages) == ["regions", "table", "owners", "indptr", "pages", "block_size", "query",
                                               "contiguous_query", "page_stride"]
    assert names(step5.stage_prefill_pages) == ["cache", "staged", "dtype", "k_scale", "v_scale"]
    assert names(step5.plan_staged_prefill_pages) == ["table", "lengths", "block_size"]


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_given_cases_planned_and_staged(path):
    step = Step(path)
    rows, heads, dim = step.query.shape
    if rows == 0:
        return
    lengths = [int(n) for n in step.lengths]
    staged = step5.plan_staged_prefill_pages(step.block_table, lengths, step.kv_cache.shape[2])
    assert (staged.pages == step.expected_staged_blocks).all() and (staged.table == step.expected_staged_table).all()
    indptr, last = step5.compact_page_metadata(step.positions, step.regions.shape[-1])
    assert (indptr == step.expected_indptr).all() and (last == step.expected_last_page_len).all()
    for stage in (False, True):
        plan = step5.CompactPagedPrefill()
        plan.plan((rows, heads // step.groups, dim), step.query.dtype, "cpu", step.positions, step.regions.shape[-1],
                  step.scale, step.kv_cache.shape[2], contiguous_query=False)
        assert (plan.indptr == step.expected_indptr).all()
        out, lse = numpy.full(step.query.shape, numpy.nan, numpy.float32), numpy.zeros((rows, heads), numpy.float32)
        for group in range(step.groups):
            cache, table, scales = step.kv_cache[:, group:group + 1], step.block_table, (step.k_scale, step.v_scale)
            if stage:
                cache = step5.stage_prefill_pages(cache, staged, step.query.dtype, *scales)
                table, scales = staged.table, (None, None)
            part = step.group_heads(group)
            half = rows // 2  # in two chunks, the later one first
            for begin, end in ((half, rows), (0, half)):
                plan.prepare_chunk(begin, step.query[begin:end, part], cache, step.group_regions(group)[begin:end], table,
                                   step.owners[begin:end])
            if not stage:
                assert (plan.pages[:indptr[-1]] == step.expected_pages[group]).all()
            plan.finish(None, cache, out[:, part], lse=lse[:, part], k_scale=scales[0], v_scale=scales[1])
        rounded = stage and step.k_scale is not None  # staged values are rounded once more
        assert_close(out, None if rounded else lse, step.expected_output, step.expected_lse,
                     8e-3 if rounded else tolerance(step.query, step.kv_cache) if stage else 1e-5)


def engine_step(seed, rows=12, context=200, heads=4, dim=64, regions=6, block_size=16):
    random = numpy.random.default_rng(seed)
    blocks = 40
    table = random.permutation(blocks)[:2 * 16].reshape(2, 16).astype(numpy.int32)
    owners = numpy.array([0] * (rows // 2) + [1] * (rows - rows // 2), numpy.int32)
    positions = numpy.concatenate([numpy.arange(context - rows // 2, context),
                                   numpy.arange(90, 90 + rows - rows // 2)]).astype(numpy.int64)
    selections = numpy.zeros((rows, regions), numpy.int32)
    for row in range(rows):
        own = positions[row] // 8
        selections[row, 0] = own
        selections[row, 1:] = random.permutation(own)[:regions - 1]
    layers = []
    for _ in range(3):
        layers.append((random.standard_normal((rows, heads, dim)).astype(ml_dtypes.bfloat16),
                       random.standard_normal((blocks, 1, block_size, 2 * dim)).astype(ml_dtypes.bfloat16)))
    return table, owners, positions, selections, layers


def test_layers_share_a_plan_made_from_bounds():
    table, owners, positions, regions, layers = engine_step(1)
    plan = step5.CompactPagedPrefill(numpy.zeros(1 << 26, numpy.uint8))
    rows, heads, dim = layers[0][0].shape
    bounds = positions + 17
    plan.plan((rows, heads, dim), ml_dtypes.bfloat16, "cpu", bounds.tolist(), 6, 0.125, 16, contiguous_query=False)
    assert plan.query_shape == (rows, heads, dim) and plan.region_count == 6 and plan.block_size == 16
    assert plan.query_buffer.dtype == ml_dtypes.bfloat16 and plan.query_buffer.shape == (rows, heads, dim)
    address = plan.pages.ctypes.data
    plan.fixup_positions(positions)
    for query, cache in layers:
        for begin in range(0, rows, 5):
            end = min(begin + 5, rows)
            plan.prepare_chunk(begin, query[begin:end], cache, regions[begin:end], table, owners[begin:end])
        assert (plan.query_buffer == query).all()
        out = numpy.zeros((rows, heads, dim), numpy.float32)
        lse = numpy.zeros((rows, heads), numpy.float32)
        plan.finish(None, cache, out, lse=lse)
        assert_close(out, lse, *attention(query, cache, table, owners, positions, regions, 0.125), 4e-3)
    # The next step: same capacity, same addresses.
    plan.plan((rows, heads, dim), "bfloat16", "cpu", positions, 6, 0.125, 16, contiguous_query=False)
    assert plan.pages.ctypes.data == address


def test_an_indexer_writes_its_pages():
    table, owners, positions, regions, layers = engine_step(2)
    query, cache = layers[0]
    plan = step5.CompactPagedPrefill()
    plan.plan(query.shape, query.dtype, "cpu", positions, 6, 0.125, 16)
    assert plan.query_buffer is None
    stride = step5.kv_page_stride(cache)
    metadata = plan.page_metadata(table, owners, stride)
    assert metadata.block_size == 16 and metadata.page_stride == stride == 2
    assert metadata.pages.ctypes.data == plan.pages.ctypes.data
    assert metadata.indices is metadata.pages and metadata.block_table is metadata.table is table  # vLLM's names
    assert metadata._fields == ("owners", "table", "pages", "indptr", "block_size", "page_stride")
    step5.fill_prefill_pages(regions, metadata.table, metadata.owners, metadata.indptr, metadata.pages,
                             metadata.block_size, None, None, metadata.page_stride)
    out = numpy.zeros(query.shape, numpy.float32)
    plan.finish(query, cache, out)
    assert_close(out, None, attention(query, cache, table, owners, positions, regions, 0.125)[0], None, 4e-3)
    part = plan.page_metadata(table, owners, stride, 3, 7)
    assert part.owners.tolist() == owners[3:7].tolist() and part.indptr.shape == (5,)


def test_page_views():
    cache = numpy.arange(5 * 3 * 16 * 32, dtype=numpy.float32).astype(numpy.float16).reshape(5, 3, 16, 32)
    group = cache[:, 1:2]
    k, v = step5.view_sparse_kv_pages(group)
    assert k.shape == v.shape == (26, 8, 1, 16) and step5.kv_page_stride(group) == 6
    for block in range(5):
        for page in range(2):
            rows = group[block, 0, 8 * page:8 * page + 8]
            assert (k[6 * block + page, :, 0] == rows[:, :16]).all() and (v[6 * block + page, :, 0] == rows[:, 16:]).all()
    assert numpy.shares_memory(k, cache)


@pytest.mark.parametrize(("call", "words"), [
    (lambda p: p.plan((3, 1, 64), "float16", "cpu", [1, 2], 4, 1.0, 16), ["query_shape", "3", "2"]),
    (lambda p: p.plan((1, 1, 64), "float16", "cpu", [1], 4, 1.0, 12), ["block_size", "12"]),
    (lambda p: p.plan((0, 1, 64), "float16", "cpu", [], 4, 1.0, 16), ["positions", "row"]),
    (lambda p: p.plan((1, 1, 64), "float32", "cpu", [1], 4, 1.0, 16), ["dtype", "f32"]),
    (lambda p: p.plan((1, 1, 64), "float16", "tpu", [1], 4, 1.0, 16), ["device", "tpu"]),
    (lambda p: p.finish(None, numpy.zeros((1, 1, 8, 128), numpy.float16), numpy.zeros((1, 1, 64), numpy.float16)),
     ["plan"]),
])
def test_mistakes_have_words(call, words):
    with pytest.raises(octopage.OctopageError) as raised:
        call(step5.CompactPagedPrefill())
    for word in words:
        assert word in str(raised.value), str(raised.value)


def test_tensors_of_a_plan_outlive_its_growth():
    plan = step5.CompactPagedPrefill()
    shown = []
    for rows in (2, 50, 900, 900, 7):
        plan.plan((rows, 1, 64), "float16", "cpu", [4000] * rows, 40, 1.0, 16, contiguous_query=False)
        plan.pages[:] = rows
        plan.query_buffer[:] = rows
        shown.append((rows, plan.pages, plan.query_buffer))
    for rows, pages, buffer in shown[:2]:
        assert (pages == rows).all() and (buffer == rows).all()
    assert plan.indptr.shape == (8,)


@pytest.mark.parametrize("call", [
    lambda p: p.plan((1, 1), "float16", "cpu", [1], 4, 1.0, 16),
    lambda p: p.plan((1, 1, 64), "float16", "cpu", [1.5], 4, 1.0, 16),
    lambda p: p.plan((1, 1, 64), "float16", "cpu", numpy.array([2**63], numpy.uint64), 4, 1.0, 16),
    lambda p: p.plan((1, 1, 64), "float16", "cpu", [1], 2**70, 1.0, 16),
    lambda p: p.plan((1, 1, 64), "float16", "cpu", [2**63 - 1], 2**62, 1.0, 16),
    lambda p: p.plan((1, 2**40, 64), "float16", "cpu", [1], 4, 1.0, 16, contiguous_query=False),
    lambda p: p.page_metadata(numpy.zeros((1, 1), numpy.int32), numpy.zeros(1, numpy.int32), 2),
    lambda p: step5.view_sparse_kv_pages([1]),
    lambda p: step5.view_sparse_kv_pages(numpy.zeros((2, 3, 16, 32), numpy.float16)),
    lambda p: step5.stage_prefill_pages(numpy.zeros((2, 1, 16, 32), numpy.float16), None, "float16"),
    lambda p: step5.stage_prefill_pages(numpy.zeros((2, 1, 16, 32), numpy.float16), numpy.zeros(1, numpy.int32), "f32"),
    lambda p: step5.plan_staged_prefill_pages(numpy.zeros((2, 3), numpy.int32), [1, 10**9], 16),
    lambda p: step5.plan_staged_prefill_pages(numpy.zeros((2, 3), numpy.int32), [1, -1], 16),
    lambda p: step5.plan_staged_prefill_pages(numpy.zeros((2, 3), numpy.int32), [1, 1], 0),
])
def test_hostile_arguments_are_refused(call):
    with pytest.raises(octopage.OctopageError):
        call(step5.CompactPagedPrefill())


def test_plans_own_their_memory():
    plan = step5.CompactPagedPrefill()
    plan.plan((1, 1, 64), "float16", "cpu", [40], 4, 1.0, 16, contiguous_query=False)
    pages, buffer = plan.pages, plan.query_buffer
    del plan
    pages[:] = 1
    buffer[:] = 2
    assert pages.sum() == 4 and buffer.dtype == numpy.float16
