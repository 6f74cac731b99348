"""Runs the page module of a vLLM, or of a stand-in in torch, with or without octopage in its place.

    vllm_wheel.py SOURCE off|on|verify|alone [graph] [flashinfer]

SOURCE is a wheel, or a folder that holds vllm/models/step5. `graph`: on a GPU, also captures a layer. `alone`: one plan
and one layer of the module, and octopage is not even imported; a fault that FlashInfer's own code raises there is
printed, and the exit status is FLASHINFER_FAULT. Without a GPU the module's Triton kernels run in Triton's interpreter,
and what such a machine lacks is replaced: pinned memory, events, streams. FlashInfer's attention over pages is replaced
where it is not installed or there is no GPU (`flashinfer`: it is not); the rest of vLLM always is.
"""

import ast
import importlib
import importlib.util
import os
import pathlib
import sys
import tempfile
import types
import zipfile
from typing import NamedTuple

MODULE = "vllm.models.step5.nvidia.ops.sparse_prefill_pages"
INDEXER = "vllm.models.step5.common.ops.sparse_indexer"
MODE = sys.argv[2]
FLASHINFER_FAULT = 3
os.environ["OCTOPAGE_VLLM"] = MODE

import engine  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

try:
    import triton
    import triton.language
except ImportError:  # a stand-in needs none
    triton = None
if MODE != "alone":
    from octopage import vllm_plugin
from steps import assert_close  # noqa: E402


class Event:
    def synchronize(self):
        pass

    def record(self, stream=None):
        pass


class PagedAttention:
    """Attention over pages as FlashInfer's wrapper is called for it."""

    def __init__(self, workspace, layout, backend):
        self._workspace = workspace

    def plan(self, query_indptr, indptr, pages, last_page_len, heads, groups, dim, page_size, **options):
        assert groups == 1 and page_size == 8 and not options["causal"]
        self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf = indptr.clone(), last_page_len.clone()
        self._pages, self._scale = pages, options["sm_scale"]
        self._workspace[:64] = 7

    def run(self, query, cache, out):
        assert (self._workspace[:64] == 7).all(), "the planner's workspace was written to"
        indptr = self._paged_kv_indptr_buf.tolist()
        for row, tokens in enumerate(self._paged_kv_last_page_len_buf.tolist()):
            pages = self._pages[indptr[row]:indptr[row + 1]].long()
            k, v = (half[pages].double().flatten(0, 2)[:8 * (len(pages) - 1) + tokens] for half in cache)
            out[row] = (torch.softmax(self._scale * query[row].double() @ k.T, -1) @ v).to(out.dtype)


def module(name, **names):
    made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(names)
    sys.modules[name] = made
    return made


def stand_for_the_rest(sources):
    for name in ("vllm", "vllm.models", "vllm.models.step5", "vllm.models.step5.common",
                 "vllm.models.step5.common.ops", "vllm.models.step5.nvidia"):
        module(name)
    module("vllm.models.step5.nvidia.ops").__path__ = [str(sources / "vllm/models/step5/nvidia/ops")]
    if triton is not None:
        module("vllm.triton_utils", tl=triton.language, triton=triton)
    if importlib.util.find_spec("flashinfer") is None or (DEVICE.type == "cpu" and "flashinfer" not in sys.argv[3:]):
        module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=PagedAttention)
    # Of the indexer only the record is needed, as the wheel has it.
    code = ast.parse((sources / (INDEXER.replace(".", "/") + ".py")).read_text())
    record = [node for node in code.body if isinstance(node, ast.ClassDef) and node.name == "PagedPrefillMetadata"]
    exec(compile(ast.Module(record, []), INDEXER, "exec"),
         vars(module(INDEXER, NamedTuple=NamedTuple, torch=torch)))
    if DEVICE.type == "cuda":
        return
    torch.Tensor.pin_memory = lambda self: self
    torch.cuda.Event = Event
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda device=None: None


def tensor(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(array).to(DEVICE)


def run(pages, step, spare, chunk=5):
    """The calls of vLLM's attention layers; every layer's output is checked."""
    rows, heads, dim = step.queries[0].shape
    groups, block_size = step.caches[0].shape[1:3]
    f8 = step.caches[0].itemsize == 1
    staging, heads = groups > 1 or f8, heads // groups
    table, owners, regions = tensor(step.table), tensor(step.owners), tensor(step.regions)
    plan = pages.CompactPagedPrefill(torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE))
    plan.plan((rows, heads, dim), torch.bfloat16, DEVICE, step.positions + spare, regions.shape[1],
              step.scale, block_size, contiguous_query=False)
    if spare:
        plan.fixup_positions(tensor(step.positions))
    staged = pages.plan_staged_prefill_pages(table, list(step.lengths), block_size) if staging else None
    scales = tuple(torch.tensor(float(x), device=DEVICE) for x in (step.k_scale, step.v_scale)) if f8 else (None, None)
    for layer, (query, cache) in enumerate(zip(map(tensor, step.queries), map(tensor, step.caches))):
        out = torch.full_like(query, float("nan"))
        for group in range(groups):
            part = slice(group * heads, (group + 1) * heads)
            attended, attended_table = cache[:, group:group + 1], table
            if staging:
                attended = pages.stage_prefill_pages(attended, staged, query.dtype, *scales)
                attended_table = staged.table
            stride = pages.kv_page_stride(attended)
            assert plan.page_metadata(attended_table, owners, stride) is None
            for begin in range(0, rows, chunk):
                end = min(begin + chunk, rows)
                plan.prepare_chunk(begin, query[begin:end, part], attended, regions[begin:end], attended_table,
                                   owners[begin:end])
            group_out = torch.full_like(query[:, part], float("nan"), memory_format=torch.contiguous_format)
            plan.finish(query[:, part], attended, group_out)  # FlashInfer takes its strides for granted
            out[:, part] = group_out
        assert_close(out.double().cpu().numpy(), None, engine.expected(step, layer), None, 8e-3)


def run_with_metadata(pages, step):
    """The indexer's way: it writes the list itself, here with the module's own fill into another buffer."""
    query, cache = tensor(step.queries[0]), tensor(step.caches[0])
    plan = pages.CompactPagedPrefill(torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE))
    plan.plan(query.shape, torch.bfloat16, DEVICE, step.positions, step.regions.shape[1], step.scale, 16)
    metadata = plan.page_metadata(tensor(step.table), tensor(step.owners), pages.kv_page_stride(cache), 0, None)
    assert type(metadata) is pages.PagedPrefillMetadata
    pages.fill_prefill_pages(tensor(step.regions), metadata.block_table, metadata.owners, metadata.indptr,
                             metadata.indices, metadata.block_size, query, torch.empty_like(query),
                             metadata.page_stride)
    out = torch.empty_like(query)
    plan.finish(query, cache, out)
    assert_close(out.double().cpu().numpy(), None, engine.expected(step, 0), None, 4e-3)


def run_captured(pages, mode):
    """A layer in a CUDA graph, replayed on other inputs. Under `verify` it holds the module's own work alone."""
    made = [engine.make_step(seed) for seed in (5, 6)]
    step = made[0]
    query, cache, regions, table, owners = map(tensor, (step.queries[0], step.caches[0], step.regions, step.table,
                                                        step.owners))
    plan = pages.CompactPagedPrefill(torch.zeros(1 << 24, dtype=torch.uint8, device=DEVICE))
    arguments = (query.shape, torch.bfloat16, DEVICE, step.positions, regions.shape[1], step.scale, 16)
    plan.plan(*arguments, contiguous_query=False)
    out = torch.empty_like(query)

    def layer():
        plan.fixup_positions(positions)
        plan.prepare_chunk(0, query, cache, regions, table, owners)
        plan.finish(query, cache, out)

    positions = tensor(step.positions)
    layer()
    before = sum(vllm_plugin.status()["compared"].values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    assert sum(vllm_plugin.status()["compared"].values()) == before
    for step in reversed(made):
        for target, array in ((query, step.queries[0]), (cache, step.caches[0]), (regions, step.regions),
                              (table, step.table)):
            target.copy_(tensor(array))
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out.double().cpu().numpy(), None, engine.expected(step, 0), None, 4e-3)
    plan.plan(*arguments, contiguous_query=False)  # and comparing goes on
    layer()
    assert (sum(vllm_plugin.status()["compared"].values()) > before) == (mode == "verify")


def raised_in(error):
    """The top-level package whose code raised `error`."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]


def run_alone(pages):
    try:
        run_with_metadata(pages, engine.make_step(4))
    except Exception as error:
        if raised_in(error) != "flashinfer":
            raise
        version = getattr(sys.modules["flashinfer"], "__version__", "of no version")
        told = str(error).partition("\n")[0]
        print(f"FlashInfer {version} does not run vLLM's own module: {type(error).__name__}: {told}")
        sys.exit(FLASHINFER_FAULT)
    assert not any(name.partition(".")[0] == "octopage" for name in sys.modules)


def main():
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(sys.argv[1])
        if source.is_file():
            with zipfile.ZipFile(source) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("vllm/models/step5/")])
            source = pathlib.Path(folder)
        stand_for_the_rest(source)
        if MODE == "alone":
            return run_alone(importlib.import_module(MODULE))
        vllm_plugin.register()
        pages = importlib.import_module(MODULE)
        for kind in ({}, {"groups": 2}, {"cache_dtype": numpy.uint8}):
            for spare in (0, 9):
                run(pages, engine.make_step(3, **kind), spare)
        run_with_metadata(pages, engine.make_step(4))
        if "graph" in sys.argv[3:] and DEVICE.type == "cuda":
            run_captured(pages, MODE)
    status = vllm_plugin.status()
    assert status["replaced"] == ([] if MODE == "off" else [MODULE]), status
    print(MODE, DEVICE.type, sum(status["compared"].values()), len(status["compared"]))


if __name__ == "__main__":
    main()
