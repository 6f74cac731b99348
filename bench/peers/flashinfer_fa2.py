"""The peer of the planned path: FlashInfer's FA2 kernel with page size 8, one row per request.

Purpose: the time of today's attention over a flat page list at the Step-5 shape.
Rules: CUDA events around one run() after warm-up, planning not counted (it is printed apart); the
result is checked against a float32 computation of sample rows before timing. Writes JSON.
"""

import argparse
import json
import time

import torch


def select(rows, context, regions, keep, seed):
    """Own region last, a fraction `keep` of the others carried over from the row before."""
    generator = torch.Generator().manual_seed(seed)
    pages, before = [], None
    for row in range(rows):
        own = (context - rows + row) // 8
        chosen = torch.zeros(own + 1, dtype=torch.bool)
        if before is not None:
            chosen[before[torch.rand(len(before), generator=generator) < keep]] = True
        chosen[own] = False
        missing = regions - 1 - int(chosen.sum())
        if missing < 0:
            drop = torch.nonzero(chosen).flatten()
            chosen[drop[torch.randperm(len(drop), generator=generator)[:-missing]]] = False
        elif missing > 0:
            free = torch.nonzero(~chosen[:own]).flatten()
            chosen[free[torch.randperm(len(free), generator=generator)[:missing]]] = True
        before = torch.nonzero(chosen).flatten()
        pages.append(torch.cat([before, torch.tensor([own])]))
    return torch.stack(pages).to(torch.int32)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--regions", type=int, default=512)
    parser.add_argument("--keep", type=float, default=0.95)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    import flashinfer

    heads, dim, rows = 16, 192, args.rows
    torch.manual_seed(0)
    cache = torch.randn(args.context // 8, 8, 1, 2 * dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    pages = select(rows, args.context, args.regions, args.keep, 0)
    positions = torch.arange(args.context - rows, args.context)
    indptr = torch.arange(rows + 1, dtype=torch.int32) * args.regions
    last = (positions % 8 + 1).to(torch.int32)
    scale = dim**-0.5
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")

    def plan():
        wrapper.plan(
            torch.arange(rows + 1, dtype=torch.int32), indptr, pages.flatten().cuda(), last,
            heads, 1, dim, 8, causal=False, sm_scale=scale, q_data_type=torch.bfloat16,
        )

    plan()
    begin = time.perf_counter()
    plan()
    torch.cuda.synchronize()
    plan_ms = (time.perf_counter() - begin) * 1e3
    k, v = cache[..., :dim], cache[..., dim:]
    out = wrapper.run(query, (k, v))
    for row in (0, rows // 2, rows - 1):
        tokens = cache[pages[row].long().cuda()].reshape(-1, 2 * dim)[: (args.regions - 1) * 8 + int(last[row])].float()
        scores = (query[row].float() @ tokens[:, :dim].T) * scale
        expected = torch.softmax(scores, -1) @ tokens[:, dim:]
        error = ((out[row].float() - expected).norm() / expected.norm()).item()
        assert error < 4e-3, f"row {row}: error {error}"
    times = []
    for _ in range(5):
        wrapper.run(query, (k, v))
    for _ in range(30):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        wrapper.run(query, (k, v), out=out)
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    times.sort()
    result = {
        "peer": f"flashinfer {flashinfer.__version__} fa2, page size 8",
        "rows": rows, "context": args.context, "regions": args.regions, "keep": args.keep,
        "attention_ms_median": times[len(times) // 2], "attention_ms_p10": times[3], "attention_ms_p90": times[-4],
        "plan_ms": plan_ms, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
    }
    with open(args.out, "w") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
