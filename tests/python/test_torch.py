"""torch: tensors of every kind, operators, torch.compile. On the CPU, and on a GPU where there is one."""

import numpy
import octopage
import pytest
from frameworks import torch_host as host
from frameworks import torch_tensor as tensor
from octopage import step5
from steps import CASES, Step, assert_close, tolerance

torch = pytest.importorskip("torch")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

def arguments_of(step, device):
    query, cache, table, owners, positions, regions = (tensor(a, device) for a in step.inputs())
    return {"query": query, "kv_cache": cache, "block_table": table, "owners": owners, "positions": positions,
            "regions": regions, "scale": step.scale, "k_scale": step.k_scale, "v_scale": step.v_scale}


def case(name):
    return Step(next(path for path in CASES if path.stem == name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_given_cases(path, device):
    step = Step(path)
    arguments = arguments_of(step, device)
    lse = torch.full(step.query.shape[:2], 7.0, device=device)
    out = octopage.sparse_prefill(**arguments, out_dtype=torch.float32, lse=lse)
    assert out.dtype == torch.float32 and out.device == arguments["query"].device
    bound = 1e-5 if device == "cpu" else tolerance(step.query, step.kv_cache)
    assert_close(host(out), host(lse), step.expected_output, step.expected_lse, bound if step.query.size else 1)
    typed = octopage.sparse_prefill(**arguments)
    assert typed.dtype == arguments["query"].dtype and typed.shape == arguments["query"].shape
    assert_close(host(typed), None, step.expected_output, None, tolerance(step.query, step.kv_cache))


@pytest.mark.parametrize("device", DEVICES)
def test_scales_status_and_strides(device):
    step = case("fp8_cache_scaled")
    arguments = arguments_of(step, device)
    expected = octopage.sparse_prefill(**arguments)
    for k, v in ((torch.tensor(step.k_scale), torch.tensor([step.v_scale])),  # no dimensions, and one
                 (numpy.float32(step.k_scale), step.v_scale)):
        arguments["k_scale"], arguments["v_scale"] = (t.to(device) if torch.is_tensor(t) else t for t in (k, v))
        assert_close(host(octopage.sparse_prefill(**arguments)), None, host(expected), None, 8e-3)
    arguments["kv_cache"] = arguments["kv_cache"].view(torch.uint8)
    arguments["positions"] = arguments["positions"].long()
    wide = torch.zeros((*arguments["query"].shape[:1], arguments["query"].shape[1] + 3, arguments["query"].shape[2]),
                       dtype=arguments["query"].dtype, device=device)
    wide[:, 2:-1] = arguments["query"]
    arguments["query"] = wide[:, 2:-1]
    assert_close(host(octopage.sparse_prefill(**arguments)), None, host(expected), None, 8e-3)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    arguments["regions"] = arguments["regions"].clone()
    arguments["regions"].view(-1)[0] = 2**30
    octopage.sparse_prefill(**arguments, status=status)
    assert status.item() == 1
    with pytest.raises(octopage.InvalidEntry, match="1073741824"):
        octopage.sparse_prefill(**arguments, strict=True)


def test_mistakes_have_words():
    arguments = arguments_of(case("region_edges"), "cpu")
    for change, error, words in (
            ({"query": arguments["query"].double()}, TypeError, ["query", "float64"]),
            ({"query": arguments["query"].to("meta")}, TypeError, ["query", "meta"]),
            ({"owners": arguments["owners"].to_sparse()}, TypeError, ["owners", "sparse"]),
            ({"out": torch.zeros(1, 4, 64).expand(arguments["query"].shape[0], 4, 64)}, ValueError, ["out: ", "shape"]),
            ({"workspace": torch.zeros(64, 64)[:, ::2]}, ValueError, ["workspace", "contiguous"])):
        with pytest.raises(error) as raised:
            octopage.sparse_prefill(**{**arguments, **change})
        assert isinstance(raised.value, octopage.OctopageError)
        for word in words:
            assert word in str(raised.value)


FLOATS = ("query", "kv_cache", "k_scale", "v_scale", "out", "lse")


def with_all_tensors(device):
    """Arguments of a call with every tensor there, and functions that read them."""
    step = case("fp8_cache_scaled")
    a = arguments_of(step, device)
    a.update(k_scale=torch.tensor([step.k_scale], device=device), v_scale=torch.tensor([step.v_scale], device=device),
             kv_cache=a["kv_cache"].view(torch.uint8), out=torch.zeros_like(a["query"]),
             lse=torch.zeros(a["query"].shape[:2], device=device), status=torch.zeros(1, dtype=torch.int32, device=device),
             workspace=torch.zeros(1 << 24, dtype=torch.uint8, device=device))
    return a


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["query", "k_scale", "v_scale", "out", "lse", "positions", "owners", "regions"])
def test_lazy_negations_are_refused(name, device):
    a = with_all_tensors(device)
    octopage.sparse_prefill(**a)
    with pytest.raises(octopage.ArgumentTypeError, match=f"^{name}: .*resolve_neg"):
        octopage.sparse_prefill(**{**a, name: torch._neg_view(a[name])})
    if name == "query":
        right = octopage.sparse_prefill(**{**a, name: torch._neg_view(a[name]).resolve_neg()}).clone()
        assert torch.equal(right, octopage.sparse_prefill(**{**a, name: -a[name]}))


def test_lazy_conjugates_are_refused():
    a = with_all_tensors("cpu")
    complex_query = torch.zeros(a["query"].shape, dtype=torch.complex64).conj()
    for query in (complex_query, complex_query.imag):
        with pytest.raises(octopage.ArgumentTypeError, match="^query: "):
            octopage.sparse_prefill(**{**a, "query": query})


class OnlyDlpack:
    """An object of another framework that hands on what torch exports."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_lazy_values_behind_dlpack():
    """torch refuses to export a lazy conjugate; of a lazy negation it exports the memory, and DLPack has no word for the
    sign: every reader, torch itself included, sees what octopage sees."""
    a = with_all_tensors("cpu")
    lazy = torch._neg_view(a["query"])
    behind = torch.from_dlpack(OnlyDlpack(lazy))
    assert not behind.is_neg() and torch.equal(behind, -lazy), "torch has changed: docs/python.md says otherwise"
    expected = octopage.sparse_prefill(**{**a, "query": behind}).clone()
    assert torch.equal(octopage.sparse_prefill(**{**a, "query": OnlyDlpack(lazy)}), expected)
    conjugate = torch.zeros(a["query"].shape, dtype=torch.complex64).conj()
    with pytest.raises(octopage.ArgumentTypeError, match="^query: OnlyDlpack.__dlpack__ fails.*conjugate"):
        octopage.sparse_prefill(**{**a, "query": OnlyDlpack(conjugate)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FLOATS)
def test_gradients_are_refused_where_torch_records_them(name, device):
    a = with_all_tensors(device)
    if name == "kv_cache":
        a[name] = a[name].view(torch.float8_e4m3fn).to(torch.bfloat16)
        a.update(k_scale=None, v_scale=None)
    expected = octopage.sparse_prefill(**a).clone()
    asked = {**a, name: a[name].clone().requires_grad_()}
    with pytest.raises(octopage.ArgumentTypeError, match=f"^{name}: requires grad.*no backward"):
        octopage.sparse_prefill(**asked)
    with torch.no_grad():
        assert torch.equal(octopage.sparse_prefill(**asked), expected)
    with torch.inference_mode():
        assert torch.equal(octopage.sparse_prefill(**asked), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="requires grad|Observed exception"):
        torch.compile(lambda: octopage.sparse_prefill(**asked), backend="eager", fullgraph=True)()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["query", "k_scale", "v_scale", "out", "lse"])
def test_dual_tensors_are_refused(name, device):
    """Their tangents would be lost, and those of an output would stay as they were."""
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    a = with_all_tensors(device)
    expected = octopage.sparse_prefill(**a).clone()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a[name].clone(), torch.ones_like(a[name]))
        for context in (torch.enable_grad, torch.no_grad, Passing):  # the last takes the operators' way
            with pytest.raises(octopage.ArgumentTypeError, match=f"^{name}: is a dual tensor"), context():
                octopage.sparse_prefill(**{**a, name: dual})
        assert torch.equal(octopage.sparse_prefill(**{**a, name: forward_ad.unpack_dual(dual).primal}), expected)


def test_plans_refuse_what_has_derivatives_or_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd import forward_ad

    plan = step5.CompactPagedPrefill()
    plan.plan((2, 1, 64), torch.float16, "cpu", [9, 40], 2, 1.0, 16, contiguous_query=False)
    query, cache = torch.zeros(2, 1, 64, dtype=torch.float16), torch.zeros(4, 1, 16, 128, dtype=torch.float16)
    regions, owners = torch.tensor([[0, 1], [0, 5]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    table, out = torch.arange(4, dtype=torch.int32)[None], torch.zeros_like(query)
    plan.prepare_chunk(0, query, cache, regions, table, owners)
    with pytest.raises(octopage.ArgumentTypeError, match="^query: requires grad"):
        plan.prepare_chunk(0, query.clone().requires_grad_(), cache, regions, table, owners)
    with pytest.raises(octopage.ArgumentTypeError, match="^cache: requires grad"):
        plan.finish(None, cache.clone().requires_grad_(), out)
    with forward_ad.dual_level(), pytest.raises(octopage.ArgumentTypeError, match="^cache: is a dual tensor"):
        plan.finish(None, forward_ad.make_dual(cache, torch.ones_like(cache)), out)
    with pytest.raises(octopage.ArgumentTypeError, match="^regions: must have memory"):
        torch.vmap(lambda regions: plan.prepare_chunk(0, query, cache, regions, table, owners))(regions[None])
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in (cache, out)]
    with mode, pytest.raises(octopage.ArgumentTypeError, match="must have memory"):
        plan.finish(None, *fakes)
    for positions in (torch._neg_view(torch.tensor([-9, -40])), mode.from_tensor(torch.tensor([9, 40]))):
        with pytest.raises(octopage.ArgumentTypeError, match="^positions: "):
            plan.plan((2, 1, 64), torch.float16, "cpu", positions, 2, 1.0, 16)
    plan.finish(None, cache, out)  # and the plan is as good as before


@pytest.mark.parametrize("name", ["query", "kv_cache", "block_table", "owners", "positions", "regions", "k_scale", "v_scale",
                                  "out", "lse", "status", "workspace"])
def test_tensors_without_memory_are_refused(name):
    """A fake status or workspace must not pass for one that is absent."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    a = with_all_tensors("cpu")
    with pytest.raises(octopage.ArgumentTypeError, match=f"^{name}: must have memory"):
        octopage.sparse_prefill(**{**a, name: FakeTensorMode().from_tensor(a[name])})
    freed = a[name].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(octopage.ArgumentTypeError, match=f"^{name}: must have memory"):
        octopage.sparse_prefill(**{**a, name: freed})


def test_transforms_of_functions_are_refused():
    a = arguments_of(case("region_edges"), "cpu")
    query = a.pop("query")

    def call(query):
        return octopage.sparse_prefill(query, **a)

    for run in (lambda: torch.vmap(call)(query[None]), lambda: torch.func.jvp(call, (query,), (query,)),
                lambda: torch.func.grad(lambda q: call(q).float().sum())(query),
                lambda: call(torch.nested.nested_tensor([query, query]))):
        with pytest.raises(octopage.ArgumentTypeError, match="^query: "):
            run()


@pytest.mark.parametrize("device", DEVICES)
def test_dispatch_modes_see_the_operators(device):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    a = arguments_of(case("four_groups"), device)
    query = a.pop("query")
    expected = octopage.sparse_prefill(query, **a)
    mode = FakeTensorMode()
    with mode:
        fake = {name: mode.from_tensor(value) if torch.is_tensor(value) else value for name, value in a.items()}
        out = octopage.sparse_prefill(mode.from_tensor(query), **fake)
    assert type(out) is not torch.Tensor and (out.shape, out.dtype, out.device) == (query.shape, query.dtype, query.device)
    graph = make_fx(lambda query: octopage.sparse_prefill(query, **a))(query)
    assert torch.equal(graph(query), expected) and not torch.equal(graph(-query), expected)
    seen = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Listening(), Listening():
        assert torch.equal(octopage.sparse_prefill(query, **a), expected)
    assert seen.count("octopage.sparse_prefill.default") == 2


def test_an_engines_record_of_staged_pages_is_taken():
    from typing import NamedTuple

    class Staged(NamedTuple):
        pages: torch.Tensor
        table: torch.Tensor

    step = case("four_groups")
    a = arguments_of(step, "cpu")
    cache = a["kv_cache"][:, :1]
    staged = step5.plan_staged_prefill_pages(a["block_table"], step.lengths, cache.shape[2])
    assert torch.equal(*(step5.stage_prefill_pages(cache, record, a["query"].dtype).view(torch.int16)
                         for record in (staged, Staged(*staged))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["owners", "k_scale", "status", "workspace", "out"])
def test_tensors_of_another_device_are_refused(name):
    step = case("fp8_cache_scaled")
    arguments = arguments_of(step, "cuda")
    other = {"owners": arguments["owners"].cpu(), "k_scale": torch.tensor([step.k_scale]),
             "status": torch.zeros(1, dtype=torch.int32), "workspace": torch.zeros(1 << 20, dtype=torch.uint8),
             "out": torch.zeros(arguments["query"].shape, dtype=arguments["query"].dtype)}
    with pytest.raises(ValueError, match="must be on cuda:0, is on cpu"):
        octopage.sparse_prefill(**{**arguments, name: other[name]})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_host_integers_of_every_type(device, dtype):
    positions = torch.tensor([3, 9, 40], dtype=dtype, device=device)
    indptr, last = step5.compact_page_metadata(positions, 4)
    assert indptr.tolist() == [0, 1, 3, 7] and last.tolist() == [4, 2, 1] and torch.is_tensor(indptr)
    plan = step5.CompactPagedPrefill()
    plan.plan((3, 1, 64), torch.float16, device, positions, 4, 1.0, 16)
    assert plan.indptr.tolist() == [0, 1, 3, 7] and plan.indptr.device.type == device


def planned(step, device, stage):
    rows, heads, dim = step.query.shape
    arguments = arguments_of(step, device)
    query, cache = arguments["query"], arguments["kv_cache"]
    staged = step5.plan_staged_prefill_pages(arguments["block_table"], torch.from_numpy(step.lengths.copy()), cache.shape[2])
    out, lse = torch.full(query.shape, torch.nan, device=device), torch.zeros((rows, heads), device=device)
    plan = step5.CompactPagedPrefill(torch.empty(1 << 26, dtype=torch.uint8, device=device))
    plan.plan((rows, heads // step.groups, dim), query.dtype, torch.device(device), step.positions, step.regions.shape[-1],
              step.scale, cache.shape[2], contiguous_query=False)
    for group in range(step.groups):
        part_of_cache, table, scales = cache[:, group:group + 1], arguments["block_table"], (step.k_scale, step.v_scale)
        if stage:
            part_of_cache = step5.stage_prefill_pages(part_of_cache, staged, query.dtype, *scales)
            table, scales = staged.table, (None, None)
        part = step.group_heads(group)
        regions = arguments["regions"] if step.regions.ndim == 2 else arguments["regions"][:, group]
        half = rows // 2
        for begin, end in ((half, rows), (0, half)):
            plan.prepare_chunk(begin, query[begin:end, part], part_of_cache, regions[begin:end], table,
                               arguments["owners"][begin:end])
        plan.finish(None, part_of_cache, out[:, part], lse=lse[:, part], k_scale=scales[0], v_scale=scales[1])
    return plan, out, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_given_cases_planned_and_staged(path, stage, device):
    step = Step(path)
    if step.query.shape[0] == 0:
        return
    plan, out, lse = planned(step, device, stage)
    assert plan.indptr.tolist() == step.expected_indptr.tolist()
    rounded = stage and step.k_scale is not None  # staged values are rounded once more
    assert_close(host(out), None if rounded else host(lse), step.expected_output, step.expected_lse,
                 8e-3 if rounded else tolerance(step.query, step.kv_cache))


def test_tensors_of_a_plan_outlive_it():
    plan = step5.CompactPagedPrefill()
    plan.plan((2, 1, 64), torch.bfloat16, "cpu", [40, 41], 4, 1.0, 16, contiguous_query=False)
    pages, buffer = plan.pages, plan.query_buffer
    assert buffer.dtype == torch.bfloat16 and buffer.shape == (2, 1, 64)
    plan.plan((900, 1, 64), torch.bfloat16, "cpu", [4000] * 900, 40, 1.0, 16, contiguous_query=False)
    del plan
    pages.fill_(3)
    buffer.fill_(2)
    assert pages.sum() == 24 and buffer.sum() == 256


def test_page_views():
    cache = torch.arange(5 * 3 * 16 * 32).reshape(5, 3, 16, 32).to(torch.float16)[:, 1:2]
    k, v = step5.view_sparse_kv_pages(cache)
    assert k.shape == v.shape == (26, 8, 1, 16) and step5.kv_page_stride(cache) == 6
    assert torch.equal(k[13, :, 0], cache[2, 0, 8:, :16]) and torch.equal(v[13, :, 0], cache[2, 0, 8:, 16:])
    assert k.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


# --- operators and torch.compile ----------------------------------------------------------------------------------


def operator_samples(device):
    import octopage.ops  # noqa: F401

    ops = torch.ops.octopage
    for name in ("four_groups", "fp8_cache_scaled"):
        step = case(name)
        a = arguments_of(step, device)
        if step.k_scale is not None:
            a["kv_cache"] = a["kv_cache"].view(torch.uint8)  # opcheck itself knows no arithmetic of f8
        inputs = [a[n] for n in ("query", "kv_cache", "block_table", "owners", "positions", "regions")]
        out = torch.zeros(a["query"].shape, device=device)
        lse = torch.zeros(a["query"].shape[:2], device=device)
        status = torch.zeros(1, dtype=torch.int32, device=device)
        yield ops.sparse_prefill, (*inputs, out, lse, None, status, step.scale), {"k_value": step.k_scale,
                                                                                  "v_value": step.v_scale}
        if step.k_scale is not None:
            scales = [torch.tensor([s], device=device) for s in (step.k_scale, step.v_scale)]
            yield ops.sparse_prefill, (*inputs, out, None, None, None, step.scale), {"k_scale": scales[0], "v_scale": scales[1]}
        cache = a["kv_cache"][:, :1]
        blocks = torch.arange(cache.shape[0] - 1, dtype=torch.int32, device=device)
        staged = torch.zeros((cache.shape[0] - 1, 1, *cache.shape[2:]), dtype=a["query"].dtype, device=device)
        yield ops.stage_prefill_pages, (cache, blocks, staged), {"k_value": step.k_scale, "v_value": step.v_scale}
        regions = a["regions"] if a["regions"].ndim == 2 else a["regions"][:, 0]
        indptr = torch.from_numpy(step.expected_indptr.copy()).to(device)
        pages = torch.zeros(int(step.expected_indptr[-1]), dtype=torch.int32, device=device)
        copied = torch.zeros_like(a["query"])
        yield ops.fill_prefill_pages, (regions, a["block_table"], a["owners"], indptr, pages, a["query"],
                                       copied, cache.shape[2], step5.kv_page_stride(cache)), {}


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    checked = 0
    for operator, args, kwargs in operator_samples(device):
        torch.library.opcheck(operator, args, kwargs)
        checked += 1
    assert checked == 7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(device, backend, monkeypatch, tmp_path):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # no code that was compiled for another octopage
    step = case("fp8_cache_scaled")
    arguments = arguments_of(step, device)
    query, scale = arguments.pop("query"), arguments.pop("scale")

    def layer(query, lse, status):
        out = octopage.sparse_prefill(query * 1, **arguments, scale=scale, out_dtype=torch.float32, lse=lse, status=status)
        return out * 2

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    lses = [torch.zeros(query.shape[:2], device=device) for _ in range(2)]
    words = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
    arguments["regions"] = arguments["regions"].clone()
    arguments["regions"].view(-1)[0] = 2**30
    expected, out = layer(query, lses[0], words[0]), compiled(query, lses[1], words[1])
    assert torch.equal(out, expected) and torch.equal(*lses) and words[0].item() == words[1].item() == 1
    assert torch.equal(compiled(query * 2, lses[1], words[1]), layer(query * 2, lses[0], words[0]))
    # Scales as tensors, and an output of the caller's.
    arguments.update(k_scale=torch.tensor(step.k_scale, device=device), v_scale=torch.tensor([step.v_scale], device=device))
    torch._dynamo.reset()
    given = torch.compile(lambda q, o: octopage.sparse_prefill(q, **arguments, scale=scale, out=o), fullgraph=True,
                          backend=backend)
    buffer = torch.zeros_like(query)
    assert given(query, buffer) is buffer
    torch.testing.assert_close(host(buffer), host(octopage.sparse_prefill(query, **arguments, scale=scale)))


def test_operators_name_their_parameters():
    step = case("four_groups")
    a = arguments_of(step, "cpu")
    cache, blocks = a["kv_cache"][:, :1], torch.zeros(2, dtype=torch.int32)
    output = torch.zeros(2, 1, *cache.shape[2:], dtype=a["query"].dtype)
    stage = torch.ops.octopage.stage_prefill_pages
    for name, arguments in (("cache", (a["kv_cache"], blocks, output)), ("staged", (cache, blocks.long(), output)),
                            ("output", (cache, blocks, output.float())), ("output", (cache, blocks, output[:1]))):
        with pytest.raises(octopage.InvalidArgument, match=rf"^{name}\b"):
            stage(*arguments)
    traced = torch.compile(lambda t, **options: octopage.sparse_prefill(**a, **options), backend="eager")
    for name, options in (("out_dtype", {"out_dtype": torch.int32}), ("out", {"out": torch.zeros(3)})):
        with pytest.raises(octopage.InvalidArgument, match=rf"^{name}\b"):
            traced(a["query"], **options)


@pytest.mark.parametrize("options", [{"scale": True}, {"strict": 1}, {"batch_invariant": None}, {"k_scale": "1"}])
def test_compiled_calls_refuse_what_eager_ones_do(options):
    arguments = {**arguments_of(case("four_groups"), "cpu"), **options}
    for call in (lambda: octopage.sparse_prefill(**arguments),
                 torch.compile(lambda: octopage.sparse_prefill(**arguments), backend="eager")):
        with pytest.raises(octopage.ArgumentTypeError, match=f"^{next(iter(options))}: must be "):
            call()


@pytest.mark.parametrize("device", DEVICES)
def test_compile_of_page_functions(device):
    torch._dynamo.reset()
    step = case("four_groups")
    a = arguments_of(step, device)
    cache = a["kv_cache"][:, :1]
    stride, block_size = step5.kv_page_stride(cache), cache.shape[2]
    staged = step5.plan_staged_prefill_pages(a["block_table"], step.lengths, block_size)
    indptr = torch.from_numpy(step.expected_indptr.copy()).to(device)

    def work(pages, copied):
        step5.fill_prefill_pages(a["regions"][:, 0], a["block_table"], a["owners"], indptr, pages, block_size, a["query"],
                                 copied, stride)
        return pages + 0, step5.stage_prefill_pages(cache, staged, a["query"].dtype)

    results = []
    for function in (work, torch.compile(work, fullgraph=True, backend="aot_eager")):
        pages = torch.zeros(int(step.expected_indptr[-1]), dtype=torch.int32, device=device)
        copied = torch.zeros_like(a["query"])
        seen, cached = function(pages, copied)
        assert torch.equal(copied, a["query"]) and torch.equal(seen, pages)
        results.append((seen, cached.view(torch.int16)))
    assert all(torch.equal(x, y) for x, y in zip(*results))
    assert results[0][0].tolist() == step.expected_pages[0].tolist()


def test_the_package_does_not_import_torch():
    import subprocess
    import sys

    code = "import octopage, octopage.step5, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    code = ("import torch, octopage; octopage.sparse_prefill\n"
            "import sys; sys.exit('octopage.ops' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
