"""The vLLM plugin on a stand-in package: names, signatures, conventions and ways to import are vLLM 0.34's."""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import subprocess
import sys
import threading
import weakref

import ml_dtypes
import numpy
import octopage.step5
import pytest
from engine import ATTENTION, PAGES, STANDIN, expected, forget, make_step
from octopage import _engine_verify, vllm_plugin
from steps import assert_close

# What the engine does: pages written by an indexer, two groups staged, an f8 cache staged.
STEPS = {"indexer": {}, "groups": {"groups": 2}, "f8": {"cache_dtype": numpy.uint8}}
# Staged f8 values are rounded to bf16 once more before the attention.
BOUND = {"indexer": 4e-3, "groups": 4e-3, "f8": 8e-3}


@pytest.fixture
def switch(monkeypatch):
    """switch(mode) sets OCTOPAGE_VLLM; the engine is as if never imported, before and after."""
    vllm_plugin.disable()
    forget()
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.delenv("OCTOPAGE_VLLM", raising=False)
    monkeypatch.delenv("OCTOPAGE_VLLM_MODULE", raising=False)
    yield lambda mode: monkeypatch.setenv("OCTOPAGE_VLLM", mode)
    vllm_plugin.disable()
    forget()


def engine():
    return importlib.import_module(PAGES), importlib.import_module(ATTENTION)


def start(switch, mode, order="plugin first"):
    """(the module of pages, the attention module that binds its names) under a mode."""
    switch(mode)
    if order == "plugin first":
        vllm_plugin.register()
        assert "vllm" not in sys.modules
    modules = engine()
    vllm_plugin.register()
    modules[0].calls.clear()
    return modules


def check(step, outputs, bound=4e-3):
    for layer, out in enumerate(outputs):
        assert_close(out, None, expected(step, layer), None, bound)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "vllm.octopage"]


@pytest.mark.parametrize("kind", STEPS)
def test_the_stand_in_is_right_by_itself(switch, kind):
    pages, attention = start(switch, "off")
    step = make_step(1, **STEPS[kind])
    check(step, attention.prefill(step, spare=9), BOUND[kind])
    assert "compact_page_metadata" in pages.calls and vllm_plugin.status() == \
        {"mode": "off", "replaced": [], "compared": {}}


@pytest.mark.parametrize("spare", [0, 9])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("order", ["plugin first", "engine first"])
def test_on_runs_octopage_alone(switch, order, kind, spare):
    pages, attention = start(switch, "on", order)
    step = make_step(2, **STEPS[kind])
    check(step, attention.prefill(step, spare=spare), BOUND[kind])
    k, v = attention.page_views(step.caches[0][:, :1])
    assert k.shape == v.shape and pages.calls == []
    assert vllm_plugin.status()["replaced"] == [PAGES]
    assert attention.kv_page_stride is pages.kv_page_stride is octopage.step5.kv_page_stride
    assert issubclass(pages.CompactPagedPrefill, octopage.step5.CompactPagedPrefill)


@pytest.mark.parametrize("spare", [0, 9])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("order", ["plugin first", "engine first"])
def test_verify_runs_both_and_gives_the_engines_bits(switch, order, kind, spare):
    step = make_step(3, **STEPS[kind])
    pages, attention = start(switch, "off")
    alone = attention.prefill(step, spare=spare)
    calls = list(pages.calls)
    forget()
    pages, attention = start(switch, "verify", order)
    both = attention.prefill(step, spare=spare)
    assert pages.calls == calls
    for a, b in zip(alone, both):
        assert a.tobytes() == b.tobytes()
    attention.page_views(step.caches[0][:, :1])
    compared = vllm_plugin.status()["compared"]
    chunks = 3 * len(step.caches) * step.caches[0].shape[1]
    staging = kind != "indexer"
    assert compared == {
        "plan": 1, "page_metadata": chunks, "kv_page_stride": chunks, "finish": chunks // 3,
        "view_sparse_kv_pages": 1, **({"fixup_positions": 1} if spare else {}),
        **({"plan_staged_prefill_pages": 1, "stage_prefill_pages": chunks // 3} if staging else {}),
        **({"prepare_chunk": chunks} if kind == "groups" else {})}


def test_records_stay_the_engines_own(switch):
    pages, _ = start(switch, "on")
    staged = pages.plan_staged_prefill_pages(numpy.array([[3, 4, 9]], numpy.int32), [30], 16)
    assert type(staged) is pages.StagedPrefillPages and staged.pages.tolist() == [3, 4]
    plan = pages.CompactPagedPrefill(None)
    plan.plan((2, 4, 64), ml_dtypes.bfloat16, "cpu", [5, 9], 4, 1.0, 16)
    metadata = plan.page_metadata(staged.table, numpy.zeros(2, numpy.int64), 2, 1)
    assert type(metadata) is pages.PagedPrefillMetadata and metadata.owners.shape == (1,)
    assert metadata.indices.ctypes.data == plan.pages.ctypes.data and metadata.indptr.tolist() == [1, 3]


def test_standalone_fill_writes_the_engines_pages(switch):
    pages, _ = engine()
    step = make_step(4)
    rows, width = step.regions.shape
    indptr, _ = pages.compact_page_metadata(step.positions, width)
    results = []
    for fill in (pages.fill_prefill_pages, start(switch, "on", "engine first")[0].fill_prefill_pages):
        listed, copy = numpy.full(indptr[-1], -7, numpy.int32), numpy.zeros((rows, 4, 64), ml_dtypes.bfloat16)
        fill(step.regions, step.table, step.owners, indptr, listed, 16, step.queries[0], copy, 4)
        assert copy.tobytes() == step.queries[0].tobytes()
        results.append(listed)
    for begin, end in zip(indptr[:-1], indptr[1:]):
        theirs, ours = results[0][begin:end], results[1][begin:end]
        assert sorted(theirs) == sorted(ours) and theirs[-1] == ours[-1]


@pytest.mark.parametrize("change", [
    lambda ids: ids,
    lambda ids: ids.astype(numpy.int32),
    lambda ids: numpy.asfortranarray(ids),
    lambda ids: numpy.repeat(ids, 2, axis=-1)[..., ::2],
])
def test_ids_of_either_type_and_any_strides(switch, change):
    _, attention = start(switch, "on")
    step = make_step(13, groups=2)
    step.regions, step.owners = change(step.regions), change(step.owners)
    check(step, attention.prefill(step))


def wrong_finish(original):
    def finish(self, query, cache, out):
        original(self, query, cache, out)
        out[11, 2] *= 1.02
    return finish


def not_finite(original):
    def finish(self, query, cache, out):
        original(self, query, cache, out)
        out[4, 1, 3] = numpy.nan
    return finish


def wrong_fill(original):
    def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride):
        original(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride)
        pages[indptr[0]] += 1
    return fill_prefill_pages


def wrong_copy(original):
    def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride):
        original(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride)
        contiguous_query[0, 0, 0] += 1
    return fill_prefill_pages


def wrong_fixup(original):
    def fixup_positions(self, positions):
        original(self, positions - 8 * (numpy.arange(len(positions)) == 12))
    return fixup_positions


def wrong_plan(original):
    @functools.wraps(original)
    def plan(self, query_shape, dtype, device, positions, region_count, scale, block_size, *, contiguous_query=True):
        original(self, query_shape, dtype, device, positions, region_count, scale, block_size,
                 contiguous_query=contiguous_query)
        self.indptr[-1] -= 1
    return plan


def wrong_scale(original):
    def stage_prefill_pages(cache, staged, dtype, k_scale=None, v_scale=None):
        return original(cache, staged, dtype, k_scale, k_scale)
    return stage_prefill_pages


def wrong_table(original):
    def plan_staged_prefill_pages(table, lengths, block_size):
        staged = original(table, lengths, block_size)
        staged.table[1, 0] = 0
        return staged
    return plan_staged_prefill_pages


def wrong_stride(original):
    def kv_page_stride(cache):
        return original(cache) + 1
    return kv_page_stride


def wrong_metadata(original):
    def page_metadata(self, table, owners, page_stride, start=0, end=None):
        found = original(self, table, owners, page_stride, start, end)
        return found and found._replace(page_stride=page_stride + 1)
    return page_metadata


@pytest.mark.parametrize(("name", "wrong", "kind", "words"), [
    ("CompactPagedPrefill.finish", wrong_finish, "indexer", ["out of row 11, head 2", "allowed"]),
    ("CompactPagedPrefill.finish", wrong_finish, "f8", ["out of row 11, head 2", "allowed"]),
    ("CompactPagedPrefill.finish", not_finite, "groups", ["out of row 4, head 1", "the engine", "not finite"]),
    ("CompactPagedPrefill.plan", wrong_plan, "indexer", ["plan: indptr[14]"]),
    ("CompactPagedPrefill.fixup_positions", wrong_fixup, "indexer", ["fixup_positions"]),
    ("CompactPagedPrefill.page_metadata", wrong_metadata, "indexer", ["page_stride"]),
    ("fill_prefill_pages", wrong_fill, "groups", ["prepare_chunk: pages of row 0"]),
    ("fill_prefill_pages", wrong_copy, "groups", ["prepare_chunk: query_buffer[0, 0, 0]"]),
    ("stage_prefill_pages", wrong_scale, "f8", ["staged cache"]),
    ("plan_staged_prefill_pages", wrong_table, "groups", ["table[1, 0]"]),
    ("kv_page_stride", wrong_stride, "groups", ["page stride"]),
])
@pytest.mark.parametrize("order", ["plugin first", "engine first"])
def test_verify_catches_a_wrong_engine(switch, caplog, order, name, wrong, kind, words):
    switch("off")
    pages, attention = engine()
    holder, _, attribute = name.rpartition(".")
    holder = getattr(pages, holder) if holder else pages
    right = getattr(holder, attribute)
    broken = wrong(right)
    setattr(holder, attribute, broken)
    if hasattr(attention, attribute):  # as if the module had been written so
        setattr(attention, attribute, broken)
    switch("verify")
    vllm_plugin.register()
    with pytest.raises(vllm_plugin.VerificationError) as raised:
        attention.prefill(make_step(5, region_count=30, **STEPS[kind]), spare=9)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert str(raised.value) in messages(caplog)[-1]


def test_verify_of_a_standalone_fill(switch):
    pages, _ = engine()
    right = pages.fill_prefill_pages
    step = make_step(6)
    indptr, _ = pages.compact_page_metadata(step.positions, step.regions.shape[1])
    arguments = (step.regions, step.table, step.owners, indptr, numpy.zeros(indptr[-1], numpy.int32), 16,
                 step.queries[0], numpy.zeros_like(step.queries[0]), 2)
    start(switch, "verify", "engine first")[0].fill_prefill_pages(*arguments)
    assert vllm_plugin.status()["compared"] == {"fill_prefill_pages": 1}
    vllm_plugin.disable()
    pages.fill_prefill_pages = wrong_fill(right)
    vllm_plugin.register()
    with pytest.raises(vllm_plugin.VerificationError, match="pages of row 0, entry 0"):
        pages.fill_prefill_pages(*arguments)


def test_verify_gives_both_the_same_query_where_the_output_overwrites_it(switch):
    pages, attention = start(switch, "verify")
    step = make_step(7)
    out = step.queries[0].copy()
    plan = pages.CompactPagedPrefill(numpy.zeros(1 << 12, numpy.uint8))
    plan.plan(out.shape, out.dtype, "cpu", step.positions, step.regions.shape[1], step.scale, 16)
    attention.attend(plan, out, step.caches[0], out, step, None, 14)
    check(step, [out])


def test_verify_leaves_errors_of_the_engine_to_the_caller(switch):
    pages, _ = start(switch, "verify")
    with pytest.raises(ValueError, match="must not be negative"):
        pages.compact_page_metadata([-1], 4)
    with pytest.raises(TypeError):
        pages.kv_page_stride()
    plan = pages.CompactPagedPrefill(numpy.zeros(64, numpy.uint8))
    with pytest.raises(AssertionError):
        plan.plan((3, 1, 64), ml_dtypes.bfloat16, "cpu", [1, 2], 4, 1.0, 16)


def test_verify_tells_an_error_of_octopage_alone(switch):
    pages, _ = start(switch, "verify")
    with pytest.raises(vllm_plugin.VerificationError, match="octopage raises InvalidArgument.*block_size"):
        pages.plan_staged_prefill_pages(numpy.zeros((1, 2), numpy.int32), [3], 12)


def test_verify_says_that_rows_with_invalid_entries_are_not_compared(switch, caplog):
    pages, attention = start(switch, "verify")
    step = make_step(8, groups=2)
    step.regions[13, -1] = 0  # the row's own region is not among its regions
    attention.prefill(step)
    assert [m for m in messages(caplog) if "1 rows have invalid" in m], messages(caplog)


def test_verify_does_not_compare_what_lies_outside_the_cache(switch, caplog):
    pages, attention = start(switch, "verify")
    step = make_step(8, groups=1)
    step.table[0, 0] = -1  # an indexer follows it; numpy's engine then reads the cache's last block
    out = numpy.zeros_like(step.queries[0])
    plan = pages.CompactPagedPrefill(numpy.zeros(1 << 12, numpy.uint8))
    plan.plan(out.shape, out.dtype, "cpu", step.positions, step.regions.shape[1], step.scale, 16)
    attention.attend(plan, step.queries[0], step.caches[0], out, step, None, 14)
    assert [m for m in messages(caplog) if "7 rows list pages outside the cache" in m], messages(caplog)
    assert vllm_plugin.status()["compared"]["finish"] == 1
    # Rows inside are compared all the same.
    plan._scale *= 2
    with pytest.raises(vllm_plugin.VerificationError, match="out of row (7|8|9|10|11|12|13), "):
        plan.finish(step.queries[0], step.caches[0], out)


def test_verify_compares_objects_that_are_older_than_it(switch):
    pages, attention = engine()
    plan = pages.CompactPagedPrefill(numpy.zeros(1 << 12, numpy.uint8))
    step = make_step(9)
    shape = step.queries[0].shape
    plan.plan(shape, step.queries[0].dtype, "cpu", step.positions, 7, step.scale, 16)
    start(switch, "verify", "engine first")
    out = numpy.zeros_like(step.queries[0])
    attention.attend(plan, step.queries[0], step.caches[0], out, step, None, 14)  # its plan was not seen
    check(step, [out])
    assert "finish" not in vllm_plugin.status()["compared"]
    plan.plan(shape, step.queries[0].dtype, "cpu", step.positions, 7, step.scale, 16)
    attention.attend(plan, step.queries[0], step.caches[0], out, step, None, 14)
    assert vllm_plugin.status()["compared"]["finish"] == 1


def test_verify_keeps_its_plans_memory_while_a_stream_is_captured(switch, monkeypatch):
    """Memory that is freed during a capture ends the capture."""
    pages, attention = start(switch, "verify")
    step = make_step(9)
    out = numpy.zeros_like(step.queries[0])
    plan = pages.CompactPagedPrefill(numpy.zeros(1 << 12, numpy.uint8))

    def plan_it():
        plan.plan(out.shape, out.dtype, "cpu", step.positions, 7, step.scale, 16)

    def attend():
        attention.attend(plan, step.queries[0], step.caches[0], out, step, None, 14)
        check(step, [out])
        return vllm_plugin.status()["compared"].get("finish", 0)

    plan_it()
    own = weakref.ref(vars(plan)[_engine_verify._PlanShadow.KEY])
    with monkeypatch.context() as patched:
        patched.setattr(_engine_verify.Verifier, "_capturing", lambda self, name: True)
        assert attend() == 0
    assert own() is not None
    assert attend() == 0  # octopage has missed calls since the plan
    plan_it()
    assert attend() == 1


def renamed(pages):
    def kv_page_stride(kv_cache):
        pass
    pages.kv_page_stride = kv_page_stride


def reordered(pages):
    def plan_staged_prefill_pages(lengths, table, block_size):
        pass
    pages.plan_staged_prefill_pages = plan_staged_prefill_pages


def another_default(pages):
    def page_metadata(self, table, owners, page_stride, start=1, end=None):
        pass
    pages.CompactPagedPrefill.page_metadata = page_metadata


def more_arguments(pages):
    def finish(self, query, cache, out, sinks=None):
        pass
    pages.CompactPagedPrefill.finish = finish


def keyword_of_its_own(pages):
    def finish(self, query, cache, out, *, sinks=None):
        pass
    pages.CompactPagedPrefill.finish = finish


def missing_function(pages):
    del pages.stage_prefill_pages


def missing_method(pages):
    del pages.CompactPagedPrefill.fixup_positions


def another_method(pages):
    pages.CompactPagedPrefill.reset = lambda self: None


def another_field(pages):
    from typing import NamedTuple

    class StagedPrefillPages(NamedTuple):
        pages: object
        table: object
        lengths: object
    pages.StagedPrefillPages = StagedPrefillPages


def missing_attribute(pages):
    def plan(self, query_shape, dtype, device, positions, region_count, scale, block_size, *, contiguous_query=True):
        self.pages = self.indptr = self.query_buffer = self.query_shape = self.region_count = None
    pages.CompactPagedPrefill.plan = plan


@pytest.mark.parametrize(("change", "word"), [
    (renamed, "kv_page_stride(kv_cache), octopage expects kv_page_stride(cache)"),
    (reordered, "plan_staged_prefill_pages(lengths, table"), (another_default, "start=1"),
    (more_arguments, "sinks=None"), (keyword_of_its_own, "sinks=None"), (missing_function, "no stage_prefill_pages"),
    (missing_method, "no method fixup_positions"), (another_method, "reset"), (another_field, "lengths"),
    (missing_attribute, "block_size"),
])
@pytest.mark.parametrize("mode", ["on", "verify"])
def test_another_module_is_left_alone(switch, caplog, mode, change, word):
    switch(mode)
    pages, attention = engine()
    change(pages)
    before, methods = dict(vars(pages)), dict(vars(pages.CompactPagedPrefill))
    for _ in range(3):
        vllm_plugin.register()
    assert dict(vars(pages)) == before and dict(vars(pages.CompactPagedPrefill)) == methods
    assert vllm_plugin.status() == {"mode": mode, "replaced": [], "compared": {}}
    assert len(messages(caplog)) == 1 and word in messages(caplog)[0] and PAGES in messages(caplog)[0]


@pytest.mark.parametrize("value", ["yes", "ON!", "2"])
def test_an_unknown_mode_is_off_with_a_warning(switch, caplog, value):
    pages, _ = start(switch, value)
    vllm_plugin.register()
    assert pages.kv_page_stride.__module__ == PAGES and vllm_plugin.status()["mode"] == "off"
    assert len(messages(caplog)) == 1 and repr(value.lower()) in messages(caplog)[0] and "verify" in messages(caplog)[0]


@pytest.mark.parametrize("value", ["", " ON ", "Verify"])
def test_modes_in_any_case(switch, value):
    switch(value)
    vllm_plugin.register()
    assert vllm_plugin.status()["mode"] == (value.strip().lower() or "off")


@pytest.mark.parametrize("mode", ["on", "verify"])
def test_registering_again_changes_nothing_and_logs_once(switch, caplog, mode):
    caplog.set_level(logging.INFO, logger="vllm.octopage")
    pages, attention = start(switch, mode)
    before = dict(vars(pages)), dict(vars(attention)), dict(vars(pages.CompactPagedPrefill))
    for _ in range(5):
        vllm_plugin.register()
    assert before == (dict(vars(pages)), dict(vars(attention)), dict(vars(pages.CompactPagedPrefill)))
    assert len(messages(caplog)) == 1 and PAGES in messages(caplog)[0]
    assert len([finder for finder in sys.meta_path if type(finder).__module__ == "octopage.vllm_plugin"]) == 1


@pytest.mark.parametrize("mode", ["on", "verify"])
@pytest.mark.parametrize("order", ["plugin first", "engine first"])
def test_disable_puts_everything_back(switch, mode, order):
    pages, attention = start(switch, mode, order)
    plugin_made = pages.fill_prefill_pages
    vllm_plugin.disable()
    assert pages.fill_prefill_pages is not plugin_made
    for name in ("fill_prefill_pages", "kv_page_stride", "CompactPagedPrefill", "view_sparse_kv_pages"):
        assert getattr(pages, name).__module__ == PAGES
        assert inspect.unwrap(getattr(pages, name)) is getattr(pages, name)
    assert not hasattr(pages.CompactPagedPrefill.finish, "__wrapped__")
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "octopage.vllm_plugin"]
    if order == "engine first":
        assert attention.kv_page_stride is pages.kv_page_stride
    step = make_step(10)
    check(step, attention.prefill(step))
    if order == "engine first":
        assert "kv_page_stride" in pages.calls and "CompactPagedPrefill" in pages.calls


def test_the_mode_may_change(switch):
    pages, attention = start(switch, "on", "engine first")
    switch("verify")
    vllm_plugin.register()
    step = make_step(11)
    check(step, attention.prefill(step))
    assert vllm_plugin.status()["mode"] == "verify" and vllm_plugin.status()["compared"]["finish"] == 2


@pytest.mark.parametrize("order", ["plugin first", "engine first"])
def test_a_module_that_is_loaded_again_is_replaced_again(switch, order):
    pages, attention = start(switch, "on", order)
    importlib.reload(pages)
    assert pages.kv_page_stride is octopage.step5.kv_page_stride
    forget()
    pages, attention = engine()
    step = make_step(12)
    check(step, attention.prefill(step))
    assert pages.calls == [] and attention.kv_page_stride is octopage.step5.kv_page_stride


def test_a_module_of_another_name(switch, monkeypatch, tmp_path):
    (tmp_path / "other_pages.py").write_text(f"from {PAGES} import *\nfrom {PAGES} import PagedPrefillMetadata\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OCTOPAGE_VLLM_MODULE", "no.such.module, other_pages")
    switch("on")
    vllm_plugin.register()
    import other_pages

    try:
        assert vllm_plugin.status()["replaced"] == ["other_pages"]
        assert other_pages.kv_page_stride is octopage.step5.kv_page_stride
    finally:
        del sys.modules["other_pages"]


def test_the_import_system_sees_the_module_as_it_is(switch):
    pages, _ = start(switch, "on")
    assert type(pages.__spec__.loader).__name__ == type(pages.__loader__).__name__ == "SourceFileLoader"
    assert "class CompactPagedPrefill" in inspect.getsource(pages)
    forget()
    assert "class CompactPagedPrefill" in importlib.util.find_spec(PAGES).loader.get_source(PAGES)


def test_a_module_that_fails_to_import_fails_as_without_the_plugin(switch, monkeypatch, tmp_path):
    (tmp_path / "broken_pages.py").write_text("raise RuntimeError('no driver')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OCTOPAGE_VLLM_MODULE", "broken_pages, missing_pages")
    switch("on")
    vllm_plugin.register()
    with pytest.raises(RuntimeError, match="no driver"):
        importlib.import_module("broken_pages")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("missing_pages")


def test_a_module_that_loads_the_plugin_itself_is_replaced_when_it_is_complete(switch, caplog, monkeypatch, tmp_path):
    (tmp_path / "loading_pages.py").write_text(
        f"from octopage import vllm_plugin\nvllm_plugin.register()\nfrom {PAGES} import *\n"
        f"from {PAGES} import PagedPrefillMetadata\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OCTOPAGE_VLLM_MODULE", "loading_pages")
    switch("on")
    loading_pages = importlib.import_module("loading_pages")
    try:
        assert vllm_plugin.status()["replaced"] == [] and "being imported" in messages(caplog)[0]
        vllm_plugin.register()
        assert loading_pages.kv_page_stride is octopage.step5.kv_page_stride
    finally:
        del sys.modules["loading_pages"]


def test_a_module_whose_code_fails_in_another_thread_does_no_harm(switch, monkeypatch, tmp_path):
    (tmp_path / "failing_pages.py").write_text(
        "import time\nstarted = True\ntime.sleep(0.5)\nraise RuntimeError('no driver')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OCTOPAGE_VLLM_MODULE", "failing_pages")
    failures = []

    def load():
        try:
            importlib.import_module("failing_pages")
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    while not hasattr(sys.modules.get("failing_pages"), "started") and thread.is_alive():
        pass
    switch("on")
    vllm_plugin.register()
    thread.join(30)
    assert failures == ["no driver"] and vllm_plugin.status()["replaced"] == []


@pytest.mark.parametrize("mode", ["on", "verify"])
def test_threads_that_load_the_plugin_and_the_engine_at_once(switch, caplog, mode):
    caplog.set_level(logging.INFO, logger="vllm.octopage")
    switch(mode)
    gate, failures = threading.Barrier(16), []

    def load(index):
        try:
            gate.wait(30)
            for _ in range(3):
                if index % 2:
                    vllm_plugin.register()
                engine()
            vllm_plugin.register()
            step = make_step(index, layers=1)
            check(step, importlib.import_module(ATTENTION).prefill(step))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert len(messages(caplog)) == 1, messages(caplog)
    assert vllm_plugin.status()["replaced"] == [PAGES]


def test_the_package_has_the_entry_point():
    found = [p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "octopage"]
    assert len(found) == 1 and found[0].load() is vllm_plugin.register


ENGINE_PROCESS = """
import importlib, sys
sys.path.insert(0, {tests!r})
from engine import ATTENTION, PAGES, expected, make_step
from steps import assert_close
if {order!r} == "engine first":
    importlib.import_module(ATTENTION)
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
attention, pages = importlib.import_module(ATTENTION), importlib.import_module(PAGES)
pages.calls.clear()
step = make_step(20, groups=2)
for layer, out in enumerate(attention.prefill(step)):
    assert_close(out, None, expected(step, layer), None, 4e-3)
plugin = sys.modules.get("octopage.vllm_plugin")
print(len(pages.calls), plugin.status()["mode"], plugin.status()["compared"].get("finish", 0), "torch" in sys.modules)
"""


@pytest.mark.parametrize(("mode", "ran", "compared"), [("off", True, 0), ("on", False, 0), ("verify", True, 4)])
@pytest.mark.parametrize("order", ["plugin first", "engine first"])
def test_a_process_of_the_engine(mode, ran, compared, order, tmp_path):
    code = ENGINE_PROCESS.format(tests=str(STANDIN.parent), order=order)
    path = os.pathsep.join(filter(None, [str(STANDIN), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OCTOPAGE_VLLM": mode}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls, told, finished, torch = done.stdout.split()
    assert (int(calls) > 0) == ran and told == mode and int(finished) == compared and torch == "False"


def test_importing_octopage_imports_neither_torch_nor_the_plugin(tmp_path):
    code = "import octopage, octopage.step5, sys; print([m for m in sys.modules if m.partition('.')[0] in " \
           "('torch', 'vllm') or m == 'octopage.vllm_plugin'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
