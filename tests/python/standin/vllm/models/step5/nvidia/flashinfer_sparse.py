"""Binds the plan class by name."""

from .ops.sparse_prefill_pages import CompactPagedPrefill


class Adapter:
    def __init__(self, workspace):
        self.workspace = workspace
        self.plans, self.index = [None, None], 0

    def prepare_prefill_attention(self, query_shape, dtype, positions, region_count, scale, block_size, *,
                                  contiguous_query=True):
        self.index ^= 1  # two objects in turn
        if self.plans[self.index] is None:
            self.plans[self.index] = CompactPagedPrefill(self.workspace)
        plan = self.plans[self.index]
        plan.plan(query_shape, dtype, "cpu", positions, region_count, scale, block_size,
                  contiguous_query=contiguous_query)
        return plan
