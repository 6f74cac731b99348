"""What the package refuses, and the words it has for it."""

import threading

import ml_dtypes
import numpy
import octopage
import pytest
from octopage import step5
from test_direct import OnlyDlpack, small

HUGE = 10**400
SURROGATE = "cpu\ud800"


def f8_call():
    arguments = small()
    arguments["kv_cache"] = arguments["kv_cache"].astype(ml_dtypes.float8_e4m3fn)
    return {**arguments, "k_scale": 0.5, "v_scale": 2.0}


def refused(error, words, call):
    with pytest.raises(error) as raised:
        call()
    assert isinstance(raised.value, octopage.OctopageError), repr(raised.value)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    str(raised.value).encode()  # printable


class Unreadable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"k_scale": HUGE}, ValueError, ["k_scale", "f32"]),
    ({"v_scale": float("inf")}, ValueError, ["v_scale", "finite", "inf"]),
    ({"k_scale": 1e39}, ValueError, ["k_scale", "f32", "1e+39"]),
    ({"k_scale": numpy.array(numpy.nan, numpy.float32)}, ValueError, ["k_scale", "nan", "finite"]),
    ({"k_scale": "x"}, TypeError, ["k_scale", "number", "str"]),
    ({"k_scale": Unreadable()}, TypeError, ["k_scale", "number", "Unreadable"]),
    ({"k_scale": None}, ValueError, ["k_scale", "required"]),
    ({"k_scale": numpy.array([1.0])}, TypeError, ["k_scale", "float64"]),
    ({"scale": None}, TypeError, ["scale", "NoneType"]),
    ({"scale": "x"}, TypeError, ["scale", "str"]),
    ({"scale": HUGE}, ValueError, ["scale", "f32"]),
    ({"scale": 1j}, TypeError, ["scale", "complex"]),
    ({"scale": True}, TypeError, ["scale", "number", "bool"]),
    ({"v_scale": True}, TypeError, ["v_scale", "number", "bool"]),
    ({"backend": SURROGATE}, ValueError, ["backend", "\\ud800"]),
    ({"out_dtype": SURROGATE}, TypeError, ["out_dtype", "\\ud800"]),
    ({"out_dtype": object}, TypeError, ["out_dtype", "object"]),
    ({"strict": "no"}, TypeError, ["strict", "True or False", "no"]),
    ({"batch_invariant": 1}, TypeError, ["batch_invariant", "1"]),
    ({"owners": numpy.zeros(5, ">i4")}, TypeError, ["owners", "byte order", ">i4"]),
    ({"query": numpy.zeros((5, 4, 64), ">f2")}, TypeError, ["query", "byte order", ">f2"]),
    ({"query": numpy.float16(1)}, (TypeError, ValueError), ["query"]),
    ({"query": numpy.ndarray}, TypeError, ["query", "type"]),
    ({"status": numpy.zeros(1, numpy.int64)}, ValueError, ["status", "i64"]),
    ({"workspace": numpy.zeros((64, 64), numpy.uint8)[:, ::2]}, ValueError, ["workspace", "contiguous", "[64, 2]"]),
])
def test_arguments_of_the_direct_call(change, error, words):
    refused(error, words, lambda: octopage.sparse_prefill(**{**f8_call(), **change}))


def test_scalars_of_numpy_and_tensors_without_dimensions_are_scales():
    arguments = f8_call()
    expected = octopage.sparse_prefill(**arguments)
    for half, two in ((numpy.float32(0.5), numpy.float64(2)), (numpy.float16(0.5), numpy.int64(2)),
                      (numpy.array(0.5, numpy.float32), numpy.array([2], numpy.float32)),
                      (OnlyDlpack(numpy.array(0.5, numpy.float32)), 2)):
        arguments.update(k_scale=half, v_scale=two, scale=numpy.float32(0.125))
        assert (octopage.sparse_prefill(**arguments) == expected).all()


def test_outputs_share_no_memory():
    arguments = small()
    memory = numpy.zeros((5, 4, 64), numpy.float32)
    once = numpy.lib.stride_tricks.as_strided(memory, (5, 4, 64), (0, 256, 4))
    refused(ValueError, ["out", "share"], lambda: octopage.sparse_prefill(**arguments, out=once))
    closer = numpy.lib.stride_tricks.as_strided(memory, (5, 4, 64), (512, 256, 4))
    refused(ValueError, ["out", "share"], lambda: octopage.sparse_prefill(**arguments, out=closer))
    refused(ValueError, ["out: ", "query"], lambda: octopage.sparse_prefill(**arguments, out=arguments["query"]))
    flat = arguments["kv_cache"].reshape(-1)
    inside = flat[flat.size - 5 * 4 * 64:].reshape(5, 4, 64)
    refused(ValueError, ["out: ", "kv_cache"], lambda: octopage.sparse_prefill(**arguments, out=inside))
    # Columns of one buffer do not overlap.
    both = numpy.zeros((5, 8, 64), ml_dtypes.bfloat16)
    both[:, :4] = arguments["query"]
    expected = octopage.sparse_prefill(**arguments)
    octopage.sparse_prefill(**{**arguments, "query": both[:, :4]}, out=both[:, 4:])
    assert (both[:, 4:] == expected).all()


class Counts(OnlyDlpack):
    """Hands out its capsule once only, as some producers do."""

    calls = 0

    def __dlpack__(self, **options):
        self.calls += 1
        assert self.calls == 1, "asked twice"
        return self.array.__dlpack__(**options)


class Spent(OnlyDlpack):
    def __init__(self, array):
        super().__init__(array)
        self.capsule = array.__dlpack__()

    def __dlpack__(self, **_):
        return self.capsule


class NoCapsule(OnlyDlpack):
    def __dlpack__(self, **_):
        return 7


def test_dlpack_is_asked_once():
    arguments = small(dtype=numpy.float16)
    expected = octopage.sparse_prefill(**arguments)
    foreign = {k: Counts(v) if isinstance(v, numpy.ndarray) else v for k, v in arguments.items()}
    out, lse = numpy.zeros_like(expected), numpy.zeros((5, 4), numpy.float32)
    status = Counts(numpy.zeros(1, numpy.int32))
    workspace = Counts(numpy.zeros(1 << 22, numpy.uint8))
    octopage.sparse_prefill(**foreign, out=Counts(out), lse=Counts(lse), status=status, workspace=workspace)
    assert (out == expected).all() and status.calls == workspace.calls == 1


def test_capsules_that_cannot_be_used():
    spent = Spent(small(dtype=numpy.float16)["query"])
    arguments = {**small(dtype=numpy.float16), "query": spent, "out": numpy.zeros((5, 4, 64), numpy.float16)}
    octopage.sparse_prefill(**arguments)
    refused(TypeError, ["query", "used before"], lambda: octopage.sparse_prefill(**arguments))
    refused(TypeError, ["owners", "capsule", "int"],
            lambda: octopage.sparse_prefill(**{**small(), "owners": NoCapsule(numpy.zeros(5, numpy.int32))}))
    refused(TypeError, ["owners", "64 bits"],
            lambda: octopage.sparse_prefill(**{**small(), "owners": OnlyDlpack(numpy.zeros(5))}))
    refused(ValueError, ["owners", "0"],
            lambda: octopage.sparse_prefill(**{**small(), "owners": OnlyDlpack(numpy.array(1, numpy.int32))}))


class Versioned(OnlyDlpack):
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_read_only_tensors_are_no_outputs():
    out = numpy.zeros((5, 4, 64), numpy.float32)
    out.flags.writeable = False
    refused(ValueError, ["out", "read-only"], lambda: octopage.sparse_prefill(**small(), out=out))
    refused((TypeError, ValueError), ["out"], lambda: octopage.sparse_prefill(**small(), out=Versioned(out)))
    arguments = small()
    for value in arguments.values():
        if isinstance(value, numpy.ndarray):
            value.flags.writeable = False
    octopage.sparse_prefill(**arguments)  # inputs may be


def plan_of(rows=1, **change):
    plan = step5.CompactPagedPrefill()
    arguments = {"query_shape": (rows, 1, 64), "dtype": "float16", "device": "cpu", "positions": [1] * rows,
                 "region_count": 4, "scale": 1.0, "block_size": 16, **change}
    plan.plan(**arguments)
    return plan


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"device": "cuda:x"}, ValueError, ["device", "cuda:x"]),
    ({"device": "cpu:9"}, ValueError, ["device", "cpu:9"]),
    ({"device": "cuda:-1"}, ValueError, ["device", "cuda:-1"]),
    ({"device": "cuda:99999999999"}, ValueError, ["device", "cuda:99999999999"]),
    ({"device": None}, ValueError, ["device", "None"]),
    ({"device": SURROGATE}, ValueError, ["device", "\\ud800"]),
    ({"query_shape": None}, TypeError, ["query_shape", "None"]),
    ({"query_shape": (1, 1.5, 64)}, TypeError, ["query_shape", "float"]),
    ({"positions": [[1], [2, 3]]}, TypeError, ["positions", "integers"]),
    ({"positions": "abc"}, ValueError, ["positions", "dimension"]),
    ({"positions": [2**70]}, ValueError, ["positions", "64 bits"]),
    ({"positions": [2**34]}, ValueError, ["positions[0]", "2^34", str(2**34)]),
    ({"positions": [None]}, TypeError, ["positions"]),
    ({"scale": None}, TypeError, ["scale", "NoneType"]),
    ({"scale": "x"}, TypeError, ["scale", "str"]),
    ({"scale": HUGE}, ValueError, ["scale"]),
    ({"dtype": None}, TypeError, ["dtype", "None"]),
    ({"dtype": SURROGATE}, TypeError, ["dtype", "\\ud800"]),
    ({"dtype": numpy.dtype(">f2")}, TypeError, ["dtype", "byte order"]),
    ({"contiguous_query": "no"}, TypeError, ["contiguous_query", "no"]),
    ({"region_count": HUGE}, ValueError, ["region_count", "64 bits"]),
    ({"region_count": True}, TypeError, ["region_count", "bool"]),
])
def test_arguments_of_a_plan(change, error, words):
    refused(error, words, lambda: plan_of(**change))


@pytest.mark.parametrize("name", ["query", "kv_cache", "block_table", "owners", "positions", "regions", "k_scale", "out", "lse",
                                  "status", "workspace"])
def test_masked_arrays_are_refused(name):
    """Their memory holds values that they do not show."""
    arguments = {**f8_call(), "k_scale": numpy.ones(1, numpy.float32), "out": numpy.zeros((5, 4, 64), numpy.float32),
                 "lse": numpy.zeros((5, 4), numpy.float32), "status": numpy.zeros(1, numpy.int32),
                 "workspace": numpy.zeros(1 << 22, numpy.uint8)}
    octopage.sparse_prefill(**arguments)
    plain = arguments[name]
    masked = plain.view(numpy.ma.MaskedArray)
    refused(TypeError, [f"{name}: ", "mask", "filled"], lambda: octopage.sparse_prefill(**{**arguments, name: masked}))
    octopage.sparse_prefill(**{**arguments, name: masked.data})


def test_masked_positions_are_refused():
    masked = numpy.ma.masked_array([3, 9], mask=[False, True])
    refused(TypeError, ["positions", "mask"], lambda: step5.compact_page_metadata(masked, 4))


def test_ranges_of_metadata():
    plan = plan_of()
    table, owners = numpy.zeros((1, 1), numpy.int32), numpy.zeros(1, numpy.int32)
    for change, words in (({"end": -5}, ["end", "-5"]), ({"end": -1}, ["end", "-1"]), ({"start": -1}, ["start", "-1"]),
                          ({"end": 2}, ["2"]), ({"start": 1, "end": 0}, ["1", "0"])):
        refused(ValueError, words, lambda change=change: plan.page_metadata(table, owners, 2, **change))
    refused(TypeError, ["end", "str"], lambda: plan.page_metadata(table, owners, 2, end="x"))
    refused(TypeError, ["owners", "OnlyDlpack"], lambda: plan.page_metadata(table, OnlyDlpack(owners), 2))


def test_more_memory_than_there_is():
    huge = 2**31 - 1
    with pytest.raises(MemoryError) as raised:
        plan_of(contiguous_query=False, query_shape=(1, 2**20, 2**36))
    assert isinstance(raised.value, octopage.OutOfMemory)
    with pytest.raises(MemoryError) as raised:
        octopage.sparse_prefill(**{**small(), "query": numpy.lib.stride_tricks.as_strided(
            numpy.zeros((1, 1, 64), numpy.float16), (huge, 2**20, 64), (0, 0, 2))})
    assert isinstance(raised.value, octopage.OutOfMemory)
    endless = numpy.lib.stride_tricks.as_strided(numpy.zeros(1, numpy.int64), (2**40,), (0,))
    with pytest.raises(MemoryError, match="positions") as raised:
        step5.compact_page_metadata(endless, 4)
    assert isinstance(raised.value, octopage.OutOfMemory)


def test_attributes_before_a_plan():
    plan = step5.CompactPagedPrefill()
    for name in ("pages", "indptr", "last_page_len", "query_buffer", "query_shape", "region_count", "block_size"):
        with pytest.raises(octopage.WrongState, match=name):
            getattr(plan, name)
        assert not hasattr(plan, name)
        assert getattr(plan, name, None) is None
    plan = plan_of()
    assert plan.query_buffer is None and plan.region_count == 4 and hasattr(plan, "pages")


def test_ranges_of_a_plan_are_read_only():
    plan = plan_of()
    table, owners = numpy.zeros((1, 1), numpy.int32), numpy.zeros(1, numpy.int32)
    for array in (plan.indptr, plan.last_page_len, plan.page_metadata(table, owners, 2).indptr):
        with pytest.raises(ValueError):
            array[0] = 3
        with pytest.raises(ValueError):
            array.flags.writeable = True
    plan.pages[0] = 3


def test_workspaces_of_a_plan():
    refused(ValueError, ["workspace", "contiguous"],
            lambda: step5.CompactPagedPrefill(numpy.zeros((64, 64), numpy.uint8)[:, ::2]))
    refused(TypeError, ["workspace", "int"], lambda: step5.CompactPagedPrefill(7))
    read_only = numpy.zeros(64, numpy.uint8)
    read_only.flags.writeable = False
    refused(ValueError, ["workspace", "read-only"], lambda: step5.CompactPagedPrefill(read_only))


def test_a_plan_keeps_its_workspace_alive():
    import gc
    import weakref

    class Owner(numpy.ndarray):
        pass

    memory = numpy.zeros(1 << 20, numpy.uint8).view(Owner)
    alive = weakref.ref(memory)
    plan = step5.CompactPagedPrefill(OnlyDlpack(memory))
    del memory
    gc.collect()
    assert alive() is not None
    query, cache = numpy.ones((1, 1, 64), numpy.float16), numpy.ones((1, 1, 16, 128), numpy.float16)
    plan.plan((1, 1, 64), "float16", "cpu", [3], 1, 1.0, 16, contiguous_query=False)
    table, owners, regions = numpy.zeros((1, 1), numpy.int32), numpy.zeros(1, numpy.int32), numpy.zeros((1, 1), numpy.int32)
    plan.prepare_chunk(0, query, cache, regions, table, owners)
    assert (plan.finish(None, cache, numpy.zeros_like(query), backend="cpu") == 1).all()
    del plan
    gc.collect()
    assert alive() is None


def test_a_plan_empties_its_page_list():
    query, cache = numpy.ones((2, 1, 64), numpy.float16), numpy.ones((2, 1, 16, 128), numpy.float16)
    table, owners, regions = numpy.zeros((1, 1), numpy.int32), numpy.zeros(2, numpy.int32), numpy.zeros((2, 1), numpy.int32)
    plan = step5.CompactPagedPrefill()
    for _ in range(2):
        plan.plan((2, 1, 64), "float16", "cpu", [3, 4], 1, 1.0, 16, contiguous_query=False)
        assert (plan.pages == -1).all()
        lse = numpy.zeros((2, 1), numpy.float32)
        assert (plan.finish(None, cache, query.copy(), lse=lse) == 0).all() and (lse == -numpy.inf).all()
        plan.prepare_chunk(1, query[1:], cache, regions[1:], table, owners)
        out = plan.finish(None, cache, query.copy(), lse=lse)
        assert (out[0] == 0).all() and (out[1] == 1).all()


def test_threads_on_one_plan_wait_for_each_other():
    plan = step5.CompactPagedPrefill()
    problems = []

    def work(rows):
        try:
            for turn in range(200):
                count = rows + turn % 7
                plan.plan((count, 1, 64), "float16", "cpu", [40 + turn] * count, 4, 1.0, 16, contiguous_query=False)
                shape = plan.query_shape
                assert shape[1:] == (1, 64) and plan.indptr.shape[0] > 1
                plan.fixup_positions(numpy.zeros(plan.query_shape[0], numpy.int32))
        except ValueError as error:  # another thread's plan came between: a refusal, never a crash
            if "shape" not in str(error):
                problems.append(error)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (3, 500, 40, 1200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_every_type(dtype):
    positions = numpy.array([3, 9, 40], dtype)
    indptr, last = step5.compact_page_metadata(positions, 4)
    assert indptr.tolist() == [0, 1, 3, 7] and last.tolist() == [4, 2, 1]
    assert plan_of(3, positions=positions).indptr.tolist() == [0, 1, 3, 7]
    table = numpy.array([[4, 5, 6], [7, 8, 9], [1, 2, 3]], numpy.int32)
    assert step5.plan_staged_prefill_pages(table, positions, 16).pages.tolist() == [4, 7, 1, 2, 3]
    owners, _ = octopage.rows_from_query_start_loc(numpy.array([0, 2, 3], dtype), positions[:2])
    assert owners.tolist() == [0, 0, 1]


def test_integers_of_lists_tuples_ranges():
    for positions in ([3, 9, 40], (3, 9, 40), [numpy.int8(3), 9, numpy.uint64(40)], numpy.array([3, 0, 9, 0, 40])[::2]):
        assert step5.compact_page_metadata(positions, 4)[0].tolist() == [0, 1, 3, 7]
    assert step5.compact_page_metadata(range(3), 4)[0].tolist() == [0, 1, 2, 3]
    assert step5.compact_page_metadata([], 4)[0].tolist() == [0]
    refused(TypeError, ["positions", "bool"], lambda: step5.compact_page_metadata([True], 4))


def test_byte_order_of_host_integers_does_not_matter():
    assert step5.compact_page_metadata(numpy.array([3, 9], ">i4"), 4)[0].tolist() == [0, 1, 3]


def test_fill_where_the_query_is_contiguous_already():
    query = numpy.ones((1, 1, 64), numpy.float16)
    pages = numpy.full(1, 9, numpy.int32)
    zero, indptr = numpy.zeros((1, 1), numpy.int32), numpy.array([0, 1], numpy.int32)
    step5.fill_prefill_pages(zero, zero, zero[0], indptr, pages, 16, query, query)
    assert pages.tolist() == [0]
    refused(ValueError, ["contiguous_query", "query"],
            lambda: step5.fill_prefill_pages(zero, zero, zero[0], indptr, pages, 16, query, query[:]))
    refused(TypeError, ["block_size", "NoneType"],
            lambda: step5.fill_prefill_pages(zero, zero, zero[0], indptr, pages, None))
