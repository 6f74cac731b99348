"""A synthetic step as torch tensors, its float64 reference on sampled rows, and its flat page list."""

import dataclasses

import numpy
import torch

from . import selections

# What the contract allows where the query, the cache or the output is bf16; a cache that was rounded to bf16 on
# the way (staging of f8) is further from the f8 values by that rounding.
BOUND = 4e-3
BOUND_ROUNDED_CACHE = 8e-3
# Triton's interpreter cuts where a GPU rounds to bf16.
BOUND_INTERPRETED = 2e-2


@dataclasses.dataclass
class Step:
    spec: selections.Spec
    rows: selections.Rows  # on the host
    work: dict
    query: torch.Tensor  # [rows, heads, dim] bf16
    kv_cache: torch.Tensor  # [blocks, groups, block_size, 2*dim] bf16 or f8_e4m3fn
    block_table: torch.Tensor  # [requests, columns] i32
    owners: torch.Tensor  # [rows] i32
    positions: torch.Tensor  # [rows] i64
    regions: torch.Tensor  # [rows, groups, region_count] i32
    scale: float
    k_scale: float  # 1 for a bf16 cache
    v_scale: float

    @property
    def f8(self):
        return self.spec.cache != "bf16"

    @property
    def lengths(self):
        return [self.spec.context] * self.spec.requests


def bits(cache):
    """The cache's codes as integers: indexing works on every type and device."""
    return cache.view(torch.uint8 if cache.element_size() == 1 else torch.int16)


def make_cache(spec, blocks, device):
    """Normal values in every slot."""
    shape = (blocks, spec.groups, spec.block_size, 2 * spec.dim)
    dtype = torch.bfloat16 if spec.cache == "bf16" else torch.float8_e4m3fn
    cache = torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(spec.seed)
    chunk = max(1, (1 << 28) // (shape[1] * shape[2] * shape[3]))
    for first in range(0, blocks, chunk):
        part = cache[first:first + chunk]
        part.copy_(torch.randn(part.shape, generator=generator, device=device, dtype=torch.float32))
    return cache


def make_step(spec, rows, work, device):
    """`rows` and `work` of selections.make_rows and selections.work. Blocks are scattered, a few belong to nobody and hold NaN."""
    request_blocks = -(-spec.context // spec.block_size)
    live = request_blocks * spec.requests
    blocks = live + max(2, live // 16)
    order = numpy.random.default_rng(spec.seed + 1).permutation(blocks).astype(numpy.int32)
    table = numpy.full((spec.requests, request_blocks + 1), -1, numpy.int32)
    table[:, :request_blocks] = order[:live].reshape(spec.requests, request_blocks)
    cache = make_cache(spec, blocks, device)
    codes, nan = bits(cache), 0x7F if spec.cache != "bf16" else 0x7FC0
    codes[torch.from_numpy(order[live:].astype(numpy.int64)).to(device)] = nan
    tail = spec.context % spec.block_size
    if tail:  # slots behind the context that nobody has written
        codes[torch.from_numpy(table[:, request_blocks - 1].astype(numpy.int64)).to(device), :, tail:] = nan
    generator = torch.Generator(device=device).manual_seed(spec.seed + 2)
    query = torch.randn(spec.rows, spec.heads, spec.dim, generator=generator, device=device).to(torch.bfloat16)
    f8 = spec.cache != "bf16"
    return Step(spec, rows, work, query, cache, torch.from_numpy(table).to(device),
                torch.from_numpy(rows.owners).to(device), torch.from_numpy(rows.positions).to(device),
                torch.from_numpy(rows.regions).to(device), spec.dim**-0.5, 0.37 if f8 else 1.0, 2.25 if f8 else 1.0)


def flat_pages(step):
    """Pages of the whole cache in the order of rows and groups, and their [rows*groups+1] ranges."""
    spec = step.spec
    per_block = spec.block_size // 8
    blocks = step.block_table[step.owners.long()[:, None, None], (step.regions // per_block).clamp(min=0).long()]
    group = torch.arange(spec.groups, device=blocks.device, dtype=torch.int32)[None, :, None]
    pages = (blocks * spec.groups + group) * per_block + step.regions % per_block
    counts = torch.from_numpy(numpy.repeat(step.rows.counts, spec.groups))
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    return pages[step.regions >= 0].to(torch.int32).contiguous(), indptr.to(pages.device)


def expected_row(step, row):
    """[heads, dim] in float64, from the stored values."""
    spec = step.spec
    out = []
    for group in range(spec.groups):
        regions = torch.from_numpy(step.rows.regions[row, group, :int(step.rows.counts[row])].astype(numpy.int64))
        tokens = (regions[:, None] * 8 + torch.arange(8)).flatten()
        tokens = tokens[tokens <= int(step.rows.positions[row])].to(step.query.device)
        blocks = step.block_table[int(step.rows.owners[row]), tokens // spec.block_size].long()
        kv = bits(step.kv_cache)[blocks, group, tokens % spec.block_size].view(step.kv_cache.dtype).to(torch.float64)
        heads = slice(group * spec.heads_per_group, (group + 1) * spec.heads_per_group)
        scores = step.scale * step.k_scale * (step.query[row, heads].double() @ kv[:, :spec.dim].T)
        out.append(step.v_scale * (torch.softmax(scores, -1) @ kv[:, spec.dim:]))
    return torch.cat(out)


def sample_rows(rows):
    return sorted({0, rows // 3, rows // 2 + 1 if rows > 2 else 0, rows - 1})


class Verifier:
    """The expected output of a step's sampled rows, computed once."""

    def __init__(self, step):
        self.expected = {row: expected_row(step, row) for row in sample_rows(step.spec.rows)}

    def check(self, out, bound):
        """Largest relative error of the sampled rows and heads; raises where it is over `bound`."""
        worst = 0.0
        for row, expected in self.expected.items():
            error = (out[row].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
            largest = error.max().item()
            if not largest <= bound:  # NaN is over, too
                raise AssertionError(f"row {row}, head {int(error.argmax())}: relative error {largest:.3g}, "
                                     f"bound {bound:.3g}")
            worst = max(worst, largest)
        return {"rows": len(self.expected), "worst_relative_error": worst, "bound": bound}
