"""Errors of the library name the parameters of the Python function that was called."""

import inspect
import re

import ml_dtypes
import numpy
import octopage
import pytest
from octopage import step5
from test_direct import small

as_strided = numpy.lib.stride_tricks.as_strided
# What no message may say, whatever function was called: names that only the C++ API has.
FOREIGN = ("options", "staged_blocks", "staged_table")


def overlapping(array):
    """Rows that all lie at one address."""
    return as_strided(array, strides=(0, *array.strides[1:]))


def refused(function, name, call, error=octopage.InvalidArgument):
    """The message begins with the parameter `name` of `function`, and has no name that the function does not have."""
    with pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    parameters = inspect.signature(function).parameters
    assert name in parameters
    assert re.match(rf"{name}\b", text), text
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    foreign = [*FOREIGN, *(n for n in ("kv_cache", "block_table", "output") if n not in parameters)]
    assert not words.intersection(foreign), text
    return text


def shared_outputs():
    memory = numpy.zeros(5 * 4 * 64, numpy.float32)
    return {"out": memory.reshape(5, 4, 64), "lse": memory[:20].reshape(5, 4)}


# What a size query, which looks at no memory, refuses as well.
WRONG_SHAPES = [
    ("query", lambda a: {"query": a["query"].astype(numpy.float32)}),
    ("query", lambda a: {"query": numpy.zeros((5, 4, 128), a["query"].dtype)}),
    ("kv_cache", lambda a: {"kv_cache": a["kv_cache"][0]}),
    ("kv_cache", lambda a: {"kv_cache": a["kv_cache"][:, :, :12]}),
    ("kv_cache", lambda a: {"kv_cache": a["kv_cache"].astype(numpy.float32)}),
    ("block_table", lambda a: {"block_table": a["block_table"].astype(numpy.int64)}),
    ("owners", lambda a: {"owners": a["owners"][:2]}),
    ("positions", lambda a: {"positions": a["positions"][:2]}),
    ("regions", lambda a: {"regions": a["regions"][:2]}),
    ("k_scale", lambda a: {"kv_cache": a["kv_cache"].astype(ml_dtypes.float8_e4m3fn)}),
    ("out", lambda a: {"out": numpy.zeros((5, 4, 32), numpy.float32)}),
    ("out", lambda a: {"out": numpy.zeros((5, 4, 64), numpy.int32)}),
    ("out", lambda a: {"out": overlapping(numpy.zeros((5, 4, 64), numpy.float32))}),
    ("out", lambda a: {"out": as_strided(numpy.zeros(2000, numpy.float32), (5, 4, 64), (4 * 300, 4 * 64 - 4, 4))}),
    ("lse", lambda a: {"lse": numpy.zeros((5, 3), numpy.float32)}),
    ("backend", lambda a: {"backend": "fastest"}),
]
WRONG_MEMORY = [
    ("out", lambda a: {"out": a["query"]}),
    ("out", lambda a: {"out": a["kv_cache"].reshape(-1)[:5 * 4 * 64].reshape(5, 4, 64)}),
    ("out", lambda a: shared_outputs()),
    ("out_dtype", lambda a: {"out_dtype": "int32"}),
    ("out_dtype", lambda a: {"out_dtype": "float16"}),
    ("workspace", lambda a: {"workspace": numpy.zeros(64, numpy.uint8)}),
    ("workspace", lambda a: {"workspace": a["regions"].view(numpy.uint8)}),
    ("status", lambda a: {"status": a["owners"][:1]}),
]


@pytest.mark.parametrize(("name", "change"), WRONG_SHAPES + WRONG_MEMORY)
def test_direct(name, change):
    arguments = small()
    arguments.update(change(arguments))
    refused(octopage.sparse_prefill, name, lambda: octopage.sparse_prefill(**arguments))


@pytest.mark.parametrize(("name", "change"), WRONG_SHAPES)
def test_sizes(name, change):
    arguments = {**small(), "out": numpy.zeros((5, 4, 64), numpy.float32)}
    arguments.update(change(arguments))
    size = octopage.sparse_prefill_workspace_size
    refused(size, name, lambda: size(**arguments))


def test_direct_entries():
    arguments = {**small(), "strict": True}
    for name, index, value in (("regions", (1, 2), 99), ("owners", 1, 5), ("regions", (1, 2), 1)):
        array = arguments[name].copy()
        array[index] = value
        refused(octopage.sparse_prefill, name, lambda n=name, a=array: octopage.sparse_prefill(**{**arguments, n: a}),
                octopage.InvalidEntry)
    table = arguments["block_table"].copy()
    table[0, 1] = 77
    text = refused(octopage.sparse_prefill, "regions", lambda: octopage.sparse_prefill(**{**arguments, "block_table": table}),
                   octopage.InvalidEntry)
    assert "block_table[request 0, column 1] = 77" in text


def test_backends_that_cannot_serve():
    arguments = small(dim=32)
    with pytest.raises(octopage.Unsupported, match="^backend = 'cpu': cpu: head dim"):
        octopage.sparse_prefill(**arguments, backend="cpu")
    with pytest.raises(octopage.Unsupported, match="^backend = 'cuda-sm80'"):
        octopage.sparse_prefill(**small(), backend="cuda-sm80")


@pytest.mark.parametrize("name", ["options.cpu", "output", "kv_cache"])
def test_values_are_told_as_they_were_given(name):
    with pytest.raises(octopage.OctopageError, match=re.escape(f"'{name}'")):
        octopage.sparse_prefill(**small(), backend=name)


def test_a_name_of_any_bytes(monkeypatch):
    monkeypatch.setenv("OCTOPAGE_BACKEND", "\udcff\udcfe")
    with pytest.raises(octopage.OctopageError):
        octopage.sparse_prefill(**small())


def test_rows_of_a_batch():
    rows = octopage.rows_from_query_start_loc
    refused(rows, "query_start_loc", lambda: rows([0, 1, 2], [4]))
    refused(rows, "query_start_loc", lambda: rows([0, 2, 1], [4, 4]))
    refused(rows, "seq_lens", lambda: rows([0, 2], [1]))


CACHE = numpy.zeros((4, 1, 16, 128), numpy.float16)
BAD_CACHES = [CACHE[0], CACHE[:, :, :12], CACHE.astype(numpy.float32), CACHE[..., ::2], CACHE[..., :127], CACHE[:, :0],
              as_strided(CACHE, strides=(2 * 16 * 128 + 16, *CACHE.strides[1:])), CACHE.reshape(-1)[1:2049].reshape(1, 1, 16, 128),
              as_strided(CACHE, strides=(2 * 16 * 128, 0, 2 * 64, 2))]


@pytest.mark.parametrize("cache", BAD_CACHES)
def test_caches(cache):
    refused(step5.kv_page_stride, "cache", lambda: step5.kv_page_stride(cache))
    refused(step5.view_sparse_kv_pages, "cache", lambda: step5.view_sparse_kv_pages(cache))
    staged = numpy.zeros(2, numpy.int32)
    refused(step5.stage_prefill_pages, "cache", lambda: step5.stage_prefill_pages(cache, staged, "float16"))
    plan = a_plan()
    refused(plan.finish, "cache", lambda: plan.finish(None, cache, numpy.zeros((2, 1, 64), numpy.float16)))
    refused(plan.prepare_chunk, "cache", lambda: plan.prepare_chunk(**{**a_chunk(), "cache": cache}))


def test_caches_of_several_groups():
    cache = numpy.zeros((4, 2, 16, 128), numpy.float16)
    refused(step5.view_sparse_kv_pages, "cache", lambda: step5.view_sparse_kv_pages(cache))
    refused(step5.stage_prefill_pages, "cache",
            lambda: step5.stage_prefill_pages(cache, numpy.zeros(2, numpy.int32), "float16"))
    plan = a_plan()
    refused(plan.finish, "cache", lambda: plan.finish(None, cache, numpy.zeros((2, 1, 64), numpy.float16)))
    refused(plan.prepare_chunk, "cache", lambda: plan.prepare_chunk(**{**a_chunk(), "cache": cache}))


def test_metadata():
    metadata = step5.compact_page_metadata
    refused(metadata, "positions", lambda: metadata([2**34], 4))
    refused(metadata, "positions", lambda: metadata([2**33] * 2, 2**31 - 1))
    refused(metadata, "region_count", lambda: metadata([3], -1))


def test_staging():
    table = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
    plan, stage = step5.plan_staged_prefill_pages, step5.stage_prefill_pages
    refused(plan, "table", lambda: plan(table.astype(numpy.int64), [16, 16], 16))
    refused(plan, "table", lambda: plan(table[0], [16, 16], 16))
    refused(plan, "lengths", lambda: plan(table, [16], 16))
    refused(plan, "lengths", lambda: plan(table, [16, -1], 16))
    assert "table has 3 columns" in refused(plan, "lengths", lambda: plan(table, [16, 49], 16))
    refused(plan, "block_size", lambda: plan(table, [16, 16], 12))
    blocks = numpy.zeros(2, numpy.int32)
    refused(stage, "staged", lambda: stage(CACHE, blocks.astype(numpy.int64), "float16"))
    refused(stage, "staged", lambda: stage(CACHE, blocks.reshape(1, 2), "float16"))
    refused(stage, "dtype", lambda: stage(CACHE, blocks, "float32"))
    refused(stage, "k_scale", lambda: stage(CACHE.astype(ml_dtypes.float8_e4m3fn), blocks, "float16"))
    refused(stage, "v_scale", lambda: stage(CACHE.astype(ml_dtypes.float8_e4m3fn), blocks, "float16", 1.0))


def test_fill():
    good = {"regions": numpy.zeros((2, 1), numpy.int32), "table": numpy.zeros((1, 2), numpy.int32),
            "owners": numpy.zeros(2, numpy.int32), "indptr": numpy.arange(3, dtype=numpy.int32),
            "pages": numpy.zeros(2, numpy.int32), "block_size": 16}
    query = numpy.zeros((2, 1, 64), numpy.float16)
    fill = step5.fill_prefill_pages
    fill(**good)
    for name, change in (
            ("regions", {"regions": good["regions"][0]}), ("table", {"table": good["table"].astype(numpy.int64)}),
            ("table", {"table": good["table"][0]}), ("owners", {"owners": good["owners"][:1]}),
            ("indptr", {"indptr": good["indptr"][:2]}), ("pages", {"pages": good["pages"].reshape(1, 2)}),
            ("pages", {"pages": numpy.zeros(4, numpy.int32)[::2]}), ("pages", {"pages": good["owners"]}),
            ("pages", {"pages": good["table"][0]}), ("block_size", {"block_size": 12}), ("page_stride", {"page_stride": 0}),
            ("query", {"contiguous_query": query}), ("contiguous_query", {"query": query}),
            ("query", {"query": query.astype(numpy.float32), "contiguous_query": query}),
            ("contiguous_query", {"query": query, "contiguous_query": query.astype(numpy.float32)}),
            ("contiguous_query", {"query": query, "contiguous_query": query[:]}),
            ("contiguous_query", {"query": query, "contiguous_query": numpy.zeros((2, 1, 128), numpy.float16)[..., :64]})):
        refused(fill, name, lambda change=change: fill(**{**good, **change}))


def a_plan(owned=True, workspace=None):
    plan = step5.CompactPagedPrefill(workspace)
    plan.plan((2, 1, 64), "float16", "cpu", [17, 18], 2, 1.0, 16, contiguous_query=not owned)
    return plan


def a_chunk():
    return {"start": 0, "query": numpy.zeros((2, 1, 64), numpy.float16), "cache": CACHE,
            "regions": numpy.array([[0, 2]] * 2, numpy.int32), "table": numpy.array([[0, 1]], numpy.int32),
            "owners": numpy.zeros(2, numpy.int32)}


def test_plans():
    plan = step5.CompactPagedPrefill()
    good = {"query_shape": (1, 1, 64), "dtype": "float16", "device": "cpu", "positions": [1], "region_count": 4,
            "scale": 1.0, "block_size": 16}
    for name, change in (("query_shape", {"query_shape": (2, 1, 64)}), ("query_shape", {"query_shape": (1, 0, 64)}),
                         ("query_shape", {"query_shape": (1, 1, 0)}), ("dtype", {"dtype": "float32"}),
                         ("positions", {"positions": []}), ("positions", {"positions": [2**34]}),
                         ("region_count", {"region_count": -1}), ("block_size", {"block_size": 12})):
        refused(plan.plan, name, lambda change=change: plan.plan(**{**good, **change}))
    plan.plan(**good)
    refused(plan.fixup_positions, "positions", lambda: plan.fixup_positions(numpy.zeros(2, numpy.int32)))
    refused(plan.fixup_positions, "positions", lambda: plan.fixup_positions(numpy.zeros((1, 1), numpy.int32)))
    metadata = plan.page_metadata
    table, owners = numpy.zeros((1, 2), numpy.int32), numpy.zeros(1, numpy.int32)
    refused(metadata, "table", lambda: metadata(table.astype(numpy.int64), owners, 2))
    refused(metadata, "table", lambda: metadata(table[0], owners, 2))
    refused(metadata, "owners", lambda: metadata(table, table[0], 2))
    refused(metadata, "page_stride", lambda: metadata(table, owners, 0))
    with pytest.raises(octopage.InvalidArgument, match=r"^\[start, end\) = \[1, 0\)"):
        metadata(table, owners, 2, 1, 0)


def test_chunks_of_a_plan():
    plan, good = a_plan(), a_chunk()
    call = plan.prepare_chunk
    call(**good)
    for name, change in (("start", {"start": 1}), ("query", {"query": good["query"][:, :, :32]}),
                         ("cache", {"cache": CACHE[:, :, :8]}), ("regions", {"regions": good["regions"][:1]}),
                         ("table", {"table": good["table"].astype(numpy.int64)}), ("table", {"table": good["table"][0]}),
                         ("owners", {"owners": good["owners"][:1]}), ("status", {"status": good["owners"][:1]}),
                         ("status", {"status": good["table"][0, :1]})):
        refused(call, name, lambda change=change: call(**{**good, **change}))
    with pytest.raises(octopage.InvalidArgument, match="^query_buffer: must not share memory with query"):
        call(**{**good, "query": plan.query_buffer})  # an attribute of the plan
    table = numpy.array([[0, 9]], numpy.int32)
    text = refused(call, "regions", lambda: call(**{**good, "table": table}, strict=True), octopage.InvalidEntry)
    assert "entry 1] = 2: table[request 0, column 1] = 9" in text
    text = refused(call, "regions", lambda: call(**{**good, "table": table[:, :1]}, strict=True), octopage.InvalidEntry)
    assert "needs column 1 of table" in text


def test_attention_of_a_plan():
    plan = a_plan(owned=False)
    query = numpy.zeros((2, 1, 64), numpy.float16)
    good = {"query": query, "cache": CACHE, "out": numpy.zeros_like(query)}
    f8 = CACHE.astype(ml_dtypes.float8_e4m3fn)
    plan.finish(**good)
    for name, change in (("query", {"query": None}), ("query", {"query": query[:1]}),
                         ("query", {"cache": numpy.zeros((4, 1, 16, 256), numpy.float16)}),
                         ("cache", {"cache": CACHE.astype(numpy.float32)}), ("out", {"out": query[:1]}),
                         ("out", {"out": numpy.zeros((2, 1, 64), numpy.int32)}), ("out", {"out": query}),
                         ("out", {"out": CACHE[:2, :, 0, :64]}), ("out", {"out": overlapping(numpy.zeros_like(query))}),
                         ("out", {"out": numpy.zeros((2, 1, 128), numpy.float16)[..., ::2]}),
                         ("lse", {"lse": numpy.zeros((2, 2), numpy.float32)}), ("k_scale", {"cache": f8}),
                         ("v_scale", {"cache": f8, "k_scale": 1.0}), ("backend", {"backend": "fastest"})):
        refused(plan.finish, name, lambda change=change: plan.finish(**{**good, **change}))
    with pytest.raises(octopage.InvalidArgument, match="^workspace = 8 bytes: this call needs"):
        a_plan(owned=True, workspace=numpy.zeros(8, numpy.uint8)).finish(**good)


def test_calls_out_of_order():
    plan, query = step5.CompactPagedPrefill(), numpy.zeros((2, 1, 64), numpy.float16)
    for name, call in (("finish", lambda: plan.finish(query, CACHE, query.copy())),
                       ("prepare_chunk", lambda: plan.prepare_chunk(**a_chunk())),
                       ("fixup_positions", lambda: plan.fixup_positions(numpy.zeros(2, numpy.int32))),
                       ("page_metadata", lambda: plan.page_metadata(numpy.zeros((1, 1), numpy.int32), numpy.zeros(2, numpy.int32), 2))):
        with pytest.raises(octopage.WrongState, match=f"^{name}: needs a plan first"):
            call()


def test_the_stride_of_a_single_entry_means_nothing():
    records = numpy.zeros(1, [("owner", "<i4"), ("other", "i1")])
    described, _ = octopage._tensor.view("owners", records["owner"])
    assert list(described.shape) == [1]
