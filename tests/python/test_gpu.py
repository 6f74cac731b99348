"""What runs on a GPU only: each framework against the reference backend on the host, streams, graphs, an engine's
prefill step, FlashInfer. Each test is skipped where its framework is missing; all of them without a GPU."""

import ml_dtypes
import numpy
import octopage
import pytest
from frameworks import cupy_array, jax_array, torch_host, torch_tensor
from octopage import step5
from steps import assert_close

BACKENDS = [b["name"] for b in octopage.backends() if b["device"] == "cuda" and b["available"]]
pytestmark = pytest.mark.skipif(not BACKENDS, reason="no GPU, or a build without CUDA")

BF16, F16, F8 = ml_dtypes.bfloat16, numpy.float16, ml_dtypes.float8_e4m3fn
NAMES = ("query", "kv_cache", "block_table", "owners", "positions", "regions")


def make_step(seed, *, query=BF16, cache=BF16, rows=40, groups=2, heads=16, dim=192, regions=12, block_size=32,
              context=700):
    """Two requests, rows in a row, neighbours that share most of their selections. Slots that no request has written
    hold NaN."""
    random = numpy.random.default_rng(seed)
    columns = -(-context // block_size)
    blocks = 2 * columns + 3
    table = random.permutation(blocks)[:2 * columns].reshape(2, columns).astype(numpy.int32)
    owners = (numpy.arange(rows) >= rows // 2).astype(numpy.int32)
    lengths = [context, context - 203]
    positions = numpy.concatenate([numpy.arange(n - c, n) for n, c in zip(lengths, (rows // 2, rows - rows // 2))])
    values = random.standard_normal((blocks, groups, block_size, 2 * dim)).astype(numpy.float32)
    written = numpy.zeros((blocks, block_size), bool)
    for request in range(2):
        for token in range(lengths[request]):
            written[table[request, token // block_size], token % block_size] = True
    values[~written[:, None, :].repeat(groups, 1)] = numpy.nan
    selections = numpy.zeros((rows, groups, regions), numpy.int32)
    for group in range(groups):
        kept = None
        for row in range(rows):
            own = positions[row] // 8
            if kept is None or owners[row] != owners[row - 1]:
                kept = random.permutation(own)[:regions - 1]
            kept = kept.copy()
            fresh = numpy.setdiff1d(numpy.arange(own), kept)
            kept[random.integers(regions - 1)] = random.choice(fresh)
            selections[row, group] = random.permutation(numpy.append(kept[kept != own], own)[-regions:])
    step = {"query": random.standard_normal((rows, groups * heads, dim)).astype(query), "kv_cache": values.astype(cache),
            "block_table": table, "owners": owners, "positions": positions.astype(numpy.int32), "regions": selections}
    scales = {"k_scale": 0.5, "v_scale": 1.5} if cache == F8 else {}
    return step, {"scale": dim**-0.5, **scales}, numpy.array(lengths)


def reference(step, scalars):
    lse = numpy.zeros(step["query"].shape[:2], numpy.float32)
    out = octopage.sparse_prefill(**step, **scalars, out_dtype="f32", lse=lse, backend="reference")
    assert numpy.isfinite(out).all() and numpy.isfinite(lse).all()
    return out, lse


def bound_of(step):
    return 4e-3 if BF16 in (step["query"].dtype, step["kv_cache"].dtype) else 1e-3


def on_torch(step):
    return {name: torch_tensor(array, "cuda") for name, array in step.items()}


# --- the direct call in every framework ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("query", "cache"), [(BF16, BF16), (F16, F16), (BF16, F8)], ids=["bf16", "f16", "f8"])
def test_torch(backend, query, cache):
    torch = pytest.importorskip("torch")
    step, scalars, _ = make_step(1, query=query, cache=cache)
    inputs = on_torch(step)
    lse = torch.zeros(step["query"].shape[:2], device="cuda")
    out = octopage.sparse_prefill(**inputs, **scalars, out_dtype=torch.float32, lse=lse, backend=backend)
    assert_close(torch_host(out), torch_host(lse), *reference(step, scalars), bound_of(step))
    assert torch.equal(octopage.sparse_prefill(**inputs, **scalars, out_dtype=torch.float32, backend=backend), out)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache", [F16, F8], ids=["f16", "f8"])
def test_cupy(backend, cache):
    cupy = pytest.importorskip("cupy")
    step, scalars, _ = make_step(2, query=F16, cache=cache)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inputs = {name: cupy_array(array) for name, array in step.items()}
        lse = cupy.zeros(step["query"].shape[:2], numpy.float32)
        out = octopage.sparse_prefill(**inputs, **scalars, out_dtype="f32", lse=lse, backend=backend)
    stream.synchronize()
    assert isinstance(out, cupy.ndarray)
    assert_close(out.get(), lse.get(), *reference(step, scalars), bound_of(step))


def test_cupy_plans():
    cupy = pytest.importorskip("cupy")
    step, scalars, _ = make_step(3, query=F16, cache=F16, groups=1)
    inputs = {name: cupy_array(array) for name, array in step.items()}
    plan = step5.CompactPagedPrefill(cupy.zeros(1 << 24, numpy.uint8))
    plan.plan(step["query"].shape, "float16", "cuda", step["positions"], 12, scalars["scale"], 32, contiguous_query=False)
    plan.prepare_chunk(0, inputs["query"], inputs["kv_cache"], inputs["regions"][:, 0], inputs["block_table"],
                       inputs["owners"])
    out, lse = cupy.zeros(step["query"].shape, numpy.float32), cupy.zeros(step["query"].shape[:2], numpy.float32)
    plan.finish(None, inputs["kv_cache"], out, lse=lse)
    assert isinstance(plan.pages, cupy.ndarray) and int(plan.indptr[-1]) == plan.pages.shape[0]
    assert_close(out.get(), lse.get(), *reference(step, scalars), bound_of(step))


@pytest.mark.parametrize("backend", BACKENDS)
def test_jax(backend):
    pytest.importorskip("jax")
    torch = pytest.importorskip("torch")  # arrays of jax cannot be written to
    step, scalars, _ = make_step(4)
    try:
        inputs = {name: jax_array(array) for name, array in step.items()}
    except RuntimeError as error:
        pytest.skip(f"jax sees no GPU: {error}")
    out = torch.zeros(step["query"].shape, device="cuda")
    lse = torch.zeros(step["query"].shape[:2], device="cuda")
    octopage.sparse_prefill(**inputs, **scalars, out=out, lse=lse, backend=backend)
    assert_close(torch_host(out), torch_host(lse), *reference(step, scalars), bound_of(step))
    with pytest.raises(octopage.ArgumentTypeError, match="out.*jax"):
        octopage.sparse_prefill(**inputs, **scalars, out=inputs["query"])


# --- streams ------------------------------------------------------------------------------------------------------


class Sleeping:
    """A stream of torch that is busy for a while: what waits for it, or does not, shows. `work` runs on it once before,
    so that kernels are loaded and memory is at hand."""

    def __init__(self, torch, work):
        self.torch, self.stream = torch, torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            work()

    def __enter__(self):
        self.torch.cuda.synchronize()
        self.scope = self.torch.cuda.stream(self.stream)
        self.scope.__enter__()
        self.torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second or more
        self.torch.cuda.set_sync_debug_mode("error")
        return self

    def still_busy(self):
        return not self.stream.query()

    def __exit__(self, *error):
        self.torch.cuda.set_sync_debug_mode("default")
        self.scope.__exit__(*error)
        self.stream.synchronize()  # and nothing else


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_direct_call_runs_on_the_current_stream_and_does_not_wait(backend):
    torch = pytest.importorskip("torch")
    step, scalars, _ = make_step(5)
    inputs = on_torch(step)
    query = torch.zeros_like(inputs["query"])
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()

    def work():
        query.copy_(inputs["query"])  # behind the sleep: another stream would read zeros
        return octopage.sparse_prefill(**{**inputs, "query": query}, **scalars, out_dtype=torch.float32, status=status,
                                       backend=backend)

    sleeping = Sleeping(torch, work)
    query.zero_()
    with sleeping:
        out = work()
        assert sleeping.still_busy(), "the call waited for its stream"
    assert_close(torch_host(out), None, reference(step, scalars)[0], None, bound_of(step))
    assert status.item() == 0


def test_the_planned_path_runs_on_the_current_stream_and_does_not_wait():
    torch = pytest.importorskip("torch")
    step, scalars, lengths = make_step(6, cache=F8, groups=1)
    inputs = on_torch(step)
    scales = [torch.tensor([scalars[name]], device="cuda") for name in ("k_scale", "v_scale")]
    plan = step5.CompactPagedPrefill(torch.zeros(1 << 24, dtype=torch.uint8, device="cuda"))
    query = torch.zeros_like(inputs["query"])
    outs = [torch.zeros(query.shape, device="cuda") for _ in range(2)]
    bounds = step["positions"].astype(numpy.int64) + 20

    def work():
        plan.plan(tuple(query.shape), torch.bfloat16, "cuda", bounds, 12, scalars["scale"], 32, contiguous_query=False)
        staged = step5.plan_staged_prefill_pages(inputs["block_table"], lengths, 32)
        cache = step5.stage_prefill_pages(inputs["kv_cache"], staged, torch.bfloat16, *scales)
        plan.fixup_positions(inputs["positions"])
        query.copy_(inputs["query"])
        plan.prepare_chunk(0, query, cache, inputs["regions"][:, 0], staged.table, inputs["owners"])
        plan.finish(None, cache, outs[0])
        plan.prepare_chunk(0, query, inputs["kv_cache"], inputs["regions"][:, 0], inputs["block_table"], inputs["owners"])
        plan.finish(None, inputs["kv_cache"], outs[1], k_scale=scales[0], v_scale=scales[1])

    sleeping = Sleeping(torch, work)
    query.zero_()
    with sleeping:
        work()
        assert sleeping.still_busy(), "a call waited for its stream"
    expected = reference(step, scalars)[0]
    assert_close(torch_host(outs[0]), None, expected, None, 8e-3)  # staged values are rounded once more
    assert_close(torch_host(outs[1]), None, expected, None, 4e-3)


# --- graphs -------------------------------------------------------------------------------------------------------


def two_steps_on_torch(*seeds):
    """Two steps of one batch's shape with f8 caches of one group; the first one's tensors, a plan that is not made yet, an
    output and its lse."""
    import torch

    made = [make_step(seed, cache=F8, groups=1) for seed in seeds]
    steps, (_, scalars, lengths) = [step for step, _, _ in made], made[0]
    shape = steps[0]["query"].shape
    plan = step5.CompactPagedPrefill(torch.zeros(1 << 24, dtype=torch.uint8, device="cuda"))
    out, lse = torch.zeros(shape, device="cuda"), torch.zeros(shape[:2], device="cuda")
    return steps, scalars, lengths, on_torch(steps[0]), plan, out, lse


def change_to(inputs, step):
    for name, value in on_torch(step).items():
        inputs[name].copy_(value)


@pytest.mark.parametrize("own_workspace", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_of_the_direct_call(backend, own_workspace):
    torch = pytest.importorskip("torch")
    steps = [make_step(seed)[0] for seed in (7, 8)]
    scalars = make_step(7)[1]
    inputs = on_torch(steps[0])
    out, lse = (torch.zeros(shape, device="cuda") for shape in (steps[0]["query"].shape, steps[0]["query"].shape[:2]))
    workspace = None
    if own_workspace:
        size = octopage.sparse_prefill_workspace_size(**inputs, **scalars, out=out, backend=backend)
        workspace = torch.zeros(max(size, 1), dtype=torch.uint8, device="cuda")

    def call():
        octopage.sparse_prefill(**inputs, **scalars, out=out, lse=lse, workspace=workspace, backend=backend)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in (steps[0], steps[1], steps[0]):
        change_to(inputs, step)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(torch_host(out), torch_host(lse), *reference(step, scalars), bound_of(step))


def test_a_graph_of_the_planned_path_replays_after_a_new_plan():
    torch = pytest.importorskip("torch")
    steps, scalars, lengths, inputs, plan, out, lse = two_steps_on_torch(9, 10)
    shape = out.shape
    staged = step5.plan_staged_prefill_pages(inputs["block_table"], lengths, 32)
    direct = torch.zeros(shape, device="cuda")

    def plan_it():
        plan.plan(shape, torch.bfloat16, "cuda", [700] * shape[0], 12, scalars["scale"], 32, contiguous_query=False)

    def work():
        plan.fixup_positions(inputs["positions"])
        cache = step5.stage_prefill_pages(inputs["kv_cache"], staged, torch.bfloat16, scalars["k_scale"],
                                          scalars["v_scale"])
        for begin, end in ((17, shape[0]), (0, 17)):
            plan.prepare_chunk(begin, inputs["query"][begin:end], cache, inputs["regions"][begin:end, 0], staged.table,
                               inputs["owners"][begin:end])
        plan.finish(None, cache, out, lse=lse)
        plan.prepare_chunk(0, inputs["query"], inputs["kv_cache"], inputs["regions"][:, 0], inputs["block_table"],
                           inputs["owners"])
        plan.finish(None, inputs["kv_cache"], direct, k_scale=scalars["k_scale"], v_scale=scalars["v_scale"])

    plan_it()
    work()
    address = plan.pages.data_ptr()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for step in (steps[0], steps[1]):
        change_to(inputs, step)
        fresh = step5.plan_staged_prefill_pages(inputs["block_table"], lengths, 32)
        staged.pages.copy_(fresh.pages)
        staged.table.copy_(fresh.table)
        plan_it()
        assert plan.pages.data_ptr() == address
        graph.replay()
        expected = reference(step, scalars)
        assert_close(torch_host(out), None, expected[0], None, 8e-3)
        assert_close(torch_host(direct), None, expected[0], None, 4e-3)


def test_a_plan_is_refused_while_its_stream_is_captured():
    torch = pytest.importorskip("torch")
    plan = step5.CompactPagedPrefill()
    arguments = ((2, 1, 64), torch.float16, "cuda", [40, 41], 4, 1.0, 16)
    plan.plan(*arguments)
    before = plan.indptr.tolist()
    value = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        with pytest.raises(octopage.WrongState, match="plan"):
            plan.plan(*arguments)
    graph.replay()
    assert value.item() == 1, "the refusal broke the capture"
    assert plan.indptr.tolist() == before


def test_a_graph_of_all_that_step5_does_for_an_indexer():
    """One capture: staging planned and done, exact positions, a standalone fill, attention; `plan` is refused in it."""
    torch = pytest.importorskip("torch")
    steps, scalars, lengths, inputs, plan, out, lse = two_steps_on_torch(31, 32)
    shape = out.shape
    scales = [torch.tensor(scalars[name], device="cuda") for name in ("k_scale", "v_scale")]
    copied = torch.zeros_like(inputs["query"])

    def plan_it():
        plan.plan(shape, torch.bfloat16, "cuda", [700] * shape[0], 12, scalars["scale"], 32)

    def work():
        staged = step5.plan_staged_prefill_pages(inputs["block_table"], lengths, 32)
        cache = step5.stage_prefill_pages(inputs["kv_cache"], staged, torch.bfloat16, *scales)
        plan.fixup_positions(inputs["positions"])
        metadata = plan.page_metadata(staged.table, inputs["owners"], step5.kv_page_stride(cache))
        step5.fill_prefill_pages(inputs["regions"][:, 0], metadata.block_table, metadata.owners, metadata.indptr,
                                 metadata.indices, metadata.block_size, inputs["query"], copied, metadata.page_stride)
        plan.finish(inputs["query"], cache, out, lse=lse)

    plan_it()
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        with pytest.raises(octopage.WrongState, match="plan"):
            plan_it()
    for step in (steps[1], steps[0]):
        change_to(inputs, step)
        plan_it()
        for tensor in (out, lse, copied):
            tensor.fill_(torch.nan)
        graph.replay()
        assert torch.equal(copied, inputs["query"])
        assert_close(torch_host(out), None, reference(step, scalars)[0], None, 8e-3)
        replayed = out.clone()
        work()
        assert torch.equal(replayed, out)


# --- an engine's prefill step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [BF16, F8], ids=["bf16", "f8_staged"])
@pytest.mark.parametrize("owned", [False, True], ids=["indexer", "chunks"])
def test_the_calls_of_a_prefill_step(cache, owned):
    torch = pytest.importorskip("torch")
    groups, heads, regions, block_size = 2, 16, 12, 32
    layers = [make_step(20, cache=cache)[0]]
    _, scalars, lengths = make_step(20, cache=cache)
    for seed in (21, 22):  # the same batch: only query, cache and selections differ from layer to layer
        other = make_step(seed, cache=cache)[0]
        random = numpy.random.default_rng(seed)
        kv_cache = (layers[0]["kv_cache"].astype(numpy.float32) * random.choice([-1, 1], (1, groups, 1, 384))).astype(cache)
        layers.append({**layers[0], "query": other["query"], "regions": other["regions"], "kv_cache": kv_cache})
    rows, dim = layers[0]["query"].shape[0], layers[0]["query"].shape[2]
    first = on_torch(layers[0])
    plan = step5.CompactPagedPrefill(torch.zeros(1 << 24, dtype=torch.uint8, device="cuda"))
    bounds = (layers[0]["positions"].astype(numpy.int64) + 31).tolist()
    plan.plan((rows, heads, dim), torch.bfloat16, torch.device("cuda"), bounds, regions, scalars["scale"], block_size,
              contiguous_query=not owned)
    plan.fixup_positions(first["positions"])
    assert plan.indptr.tolist() == step5.compact_page_metadata(layers[0]["positions"], regions)[0].tolist()
    staged = step5.plan_staged_prefill_pages(first["block_table"], lengths, block_size) if cache == F8 else None
    for layer in layers:
        inputs = on_torch(layer)
        out = torch.full(layer["query"].shape, torch.nan, device="cuda")
        lse = torch.zeros(layer["query"].shape[:2], device="cuda")
        for group in range(groups):
            part = slice(group * heads, (group + 1) * heads)
            query, selected = inputs["query"][:, part], inputs["regions"][:, group]
            one, table = inputs["kv_cache"][:, group:group + 1], inputs["block_table"]
            if staged is not None:
                one = step5.stage_prefill_pages(one, staged, torch.bfloat16, scalars["k_scale"], scalars["v_scale"])
                table = staged.table
            stride = step5.kv_page_stride(one)
            metadata = plan.page_metadata(table, inputs["owners"], stride)
            if owned:
                assert metadata is None
                for begin in range(0, rows, 13):
                    end = min(begin + 13, rows)
                    plan.prepare_chunk(begin, query[begin:end], one, selected[begin:end], table,
                                       inputs["owners"][begin:end])
                assert torch.equal(plan.query_buffer, query)
            else:
                step5.fill_prefill_pages(selected, metadata.table, metadata.owners, metadata.indptr, metadata.pages,
                                         metadata.block_size, None, None, metadata.page_stride)
            plan.finish(None if owned else query, one, out[:, part], lse=lse[:, part])
        exact = cache == BF16
        expected, expected_lse = reference(layer, scalars)
        assert_close(torch_host(out), torch_host(lse) if exact else None, expected, expected_lse, 4e-3 if exact else 8e-3)


def test_flashinfer_gives_the_same_on_the_same_pages():
    torch = pytest.importorskip("torch")
    flashinfer = pytest.importorskip("flashinfer")
    heads, dim, regions = 16, 128, 12
    step, scalars, _ = make_step(30, groups=1, heads=heads, dim=dim, block_size=32)
    step["kv_cache"] = numpy.nan_to_num(step["kv_cache"].astype(numpy.float32)).astype(BF16)  # nothing is promised of peers
    inputs = on_torch(step)
    rows = step["query"].shape[0]
    plan = step5.CompactPagedPrefill(torch.zeros(1 << 24, dtype=torch.uint8, device="cuda"))
    plan.plan((rows, heads, dim), torch.bfloat16, "cuda", step["positions"], regions, scalars["scale"], 32)
    metadata = plan.page_metadata(inputs["block_table"], inputs["owners"], step5.kv_page_stride(inputs["kv_cache"]))
    step5.fill_prefill_pages(inputs["regions"][:, 0], metadata.table, metadata.owners, metadata.indptr, metadata.pages,
                             metadata.block_size, None, None, metadata.page_stride)
    out, lse = torch.zeros(rows, heads, dim, device="cuda"), torch.zeros(rows, heads, device="cuda")
    plan.finish(inputs["query"], inputs["kv_cache"], out, lse=lse)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(torch.arange(rows + 1, dtype=torch.int32), plan.indptr.cpu(), plan.pages, plan.last_page_len.cpu(), heads,
                 1, dim, 8, causal=False, sm_scale=scalars["scale"], q_data_type=torch.bfloat16)
    theirs, their_lse = wrapper.run(inputs["query"], step5.view_sparse_kv_pages(inputs["kv_cache"]), return_lse=True)
    expected = reference(step, scalars)
    assert_close(torch_host(out), torch_host(lse), *expected, 4e-3)
    assert_close(torch_host(theirs), torch_host(their_lse) * numpy.log(2), *expected, 4e-3)  # theirs is of base 2
    assert_close(torch_host(out), torch_host(lse), torch_host(theirs), torch_host(their_lse) * numpy.log(2), 8e-3)
