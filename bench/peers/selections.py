"""Synthetic selections by the rule of src/step/synthetic.cpp, and what they cost; numpy only.

The rule is the same, the random numbers are not: figures are comparable, steps are not equal.
"""

import dataclasses

import numpy

PAGE = 8  # tokens of a region


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a step is made from. Rows are the last tokens of their requests, shared out evenly."""

    rows: int = 4096
    context: int = 131072  # tokens of each request
    keep: float = 0.95  # fraction of a row's other regions carried over from the row before
    cache: str = "bf16"  # or f8_e4m3fn
    groups: int = 1
    heads_per_group: int = 16
    dim: int = 192
    region_count: int = 512
    requests: int = 1
    block_size: int = 64
    sink_regions: int = 1
    local_regions: int = 8
    seed: int = 1

    @property
    def heads(self):
        return self.groups * self.heads_per_group

    @property
    def page_bytes(self):
        """K and V of eight tokens of one group."""
        return PAGE * 2 * self.dim * (2 if self.cache == "bf16" else 1)


class Selector:
    """Selects regions row after row, for one request and group."""

    def __init__(self, spec, random):
        self._spec, self._random = spec, random
        self._taken = numpy.zeros((spec.context - 1) // PAGE + 1, bool)
        self._before = numpy.zeros(0, numpy.int32)

    def select(self, position):
        """Ascending [min(position / 8 + 1, region_count)]."""
        own = position // PAGE
        count = min(own + 1, self._spec.region_count)
        if count == own + 1:
            self._before = numpy.arange(count, dtype=numpy.int32)
        else:
            self._before = self._choose(own, count)
        return self._before

    def _choose(self, own, count):
        spec, random, taken = self._spec, self._random, self._taken
        sink = numpy.arange(min(spec.sink_regions, own))
        local = numpy.arange(own - 1, max(own - spec.local_regions, 0) - 1, -1)
        fixed = numpy.concatenate([[own], sink, local[local >= len(sink)]])[:count]
        taken[fixed] = True
        pool = self._before[~taken[self._before]]
        others = count - len(fixed)
        carried = min(int(spec.keep * others + random.random()), others, len(pool))
        pool = random.permutation(pool)
        chosen = numpy.concatenate([fixed, pool[:carried]])
        taken[pool] = True  # also what was dropped: new regions are not among it
        chosen = numpy.concatenate([chosen, self._new(own, others - carried, pool[carried:])])
        taken[chosen] = False
        taken[pool] = False
        return numpy.sort(chosen).astype(numpy.int32)

    def _new(self, own, missing, dropped):
        """`missing` regions that are not taken; from `dropped` where the others do not suffice."""
        if missing == 0:
            return numpy.zeros(0, numpy.int64)
        if own + 1 > 4 * (self._spec.region_count + len(self._before)):  # most are free: draw until enough
            found = numpy.zeros(0, numpy.int64)
            while len(found) < missing:
                drawn = self._random.integers(0, own + 1, 2 * missing + 8)
                found = numpy.concatenate([found, drawn[~self._taken[drawn]]])
                _, first = numpy.unique(found, return_index=True)
                found = found[numpy.sort(first)]
            return found[:missing]
        free = self._random.permutation(numpy.flatnonzero(~self._taken[:own + 1]))
        return numpy.concatenate([free[:missing], self._random.permutation(dropped)[:max(0, missing - len(free))]])


@dataclasses.dataclass
class Rows:
    owners: numpy.ndarray  # [rows] i32
    positions: numpy.ndarray  # [rows] i64
    regions: numpy.ndarray  # [rows, groups, region_count] i32, -1 behind the counted entries
    counts: numpy.ndarray  # [rows] entries that count


def make_rows(spec):
    random = numpy.random.default_rng(spec.seed)
    owners = numpy.zeros(spec.rows, numpy.int32)
    positions = numpy.zeros(spec.rows, numpy.int64)
    regions = numpy.full((spec.rows, spec.groups, spec.region_count), -1, numpy.int32)
    row = 0
    for request in range(spec.requests):
        count = spec.rows // spec.requests + (request < spec.rows % spec.requests)
        selectors = [Selector(spec, random) for _ in range(spec.groups)]
        for i in range(count):
            owners[row], positions[row] = request, spec.context - count + i
            for group, selector in enumerate(selectors):
                chosen = selector.select(int(positions[row]))
                regions[row, group, :len(chosen)] = chosen
            row += 1
    counts = numpy.minimum(positions // PAGE + 1, spec.region_count)
    return Rows(owners, positions, regions, counts)


def visible_tokens(rows):
    """Tokens that the rows attend to, for one group: the own region is cut at the row."""
    return int(((rows.counts - 1) * PAGE + rows.positions % PAGE + 1).sum())


def union_factor(spec, rows, height):
    """Distinct regions of tiles of `height` neighbouring rows of a request, over those of one row."""
    distinct = 0
    for begin in range(0, spec.rows, height):
        tile = slice(begin, min(begin + height, spec.rows))
        for owner in numpy.unique(rows.owners[tile]):
            mine = rows.regions[tile][rows.owners[tile] == owner]
            for group in range(spec.groups):
                listed = mine[:, group]
                distinct += len(numpy.unique(listed[listed >= 0]))
    return distinct * height / max(1, int(rows.counts.sum()) * spec.groups)


def distinct_regions(spec, rows):
    """Regions that any row of the step selects, over requests and groups."""
    total = 0
    for request in range(spec.requests):
        mine = rows.regions[rows.owners == request]
        for group in range(spec.groups):
            listed = mine[:, group]
            total += len(numpy.unique(listed[listed >= 0]))
    return total


def sharing(spec, rows):
    """How rows share pages, which is what is slow to count; the same for every type of cache."""
    return {"unions": {height: union_factor(spec, rows, height) for height in (4, 8)},
            "distinct_regions": distinct_regions(spec, rows)}


def work(spec, rows, shared=None):
    """What a step costs: operations and bytes, valid tokens and entries only. `shared` is what `sharing` says."""
    shared = shared or sharing(spec, rows)
    flops = 4 * spec.dim * spec.heads * visible_tokens(rows)
    entries = int(rows.counts.sum()) * spec.groups
    query_and_output = 2 * spec.rows * spec.heads * spec.dim * 2
    unions = shared["unions"]
    return {
        "useful_flops": flops,
        "selected_pages": entries,
        "row_by_row_bytes": entries * spec.page_bytes,
        "union_factor": {str(height): factor for height, factor in unions.items()},
        "union_of_8_bytes": int(entries * spec.page_bytes * unions[8] / 8),
        "compulsory_bytes": shared["distinct_regions"] * spec.page_bytes + query_and_output + entries * 4,
    }
