"""octopage itself: one direct call, and its planned path, through the Python package."""

import torch


class Direct:
    """sparse_prefill with a workspace made once."""

    def __init__(self, step, octopage, backend):
        self._octopage, self._out = octopage, torch.empty_like(step.query)
        scales = {"k_scale": step.k_scale, "v_scale": step.v_scale} if step.f8 else {}
        self._inputs = (step.query, step.kv_cache, step.block_table, step.owners, step.positions, step.regions)
        self._options = {"scale": step.scale, "backend": backend, **scales}
        size = octopage.sparse_prefill_workspace_size(*self._inputs, out=self._out, **self._options)
        self._workspace = torch.empty(max(1, size), dtype=torch.uint8, device=step.query.device)
        self.workspace_bytes = size

    def layer(self, out):
        return self._octopage.sparse_prefill(*self._inputs, out=out, workspace=self._workspace, **self._options)


class Planned:
    """step5.CompactPagedPrefill: plan once per step; per layer and group fill, then finish."""

    def __init__(self, step, step5):
        self._step, self._step5, self._spec = step, step5, step.spec
        self._plan = step5.CompactPagedPrefill()
        self._copies_query = step.spec.groups > 1

    def plan(self):
        spec, step = self._spec, self._step
        self._plan.plan((spec.rows, spec.heads_per_group, spec.dim), torch.bfloat16, step.query.device, step.rows.positions,
                        spec.region_count, step.scale, spec.block_size, contiguous_query=not self._copies_query)
        self._pages, self._indptr = self._plan.pages, self._plan.indptr

    def fill(self, group):
        spec, step = self._spec, self._step
        heads = slice(group * spec.heads_per_group, (group + 1) * spec.heads_per_group)
        cache, regions = step.kv_cache[:, group:group + 1], step.regions[:, group]
        if self._copies_query:
            self._plan.prepare_chunk(0, step.query[:, heads], cache, regions, step.block_table, step.owners)
        else:
            self._step5.fill_prefill_pages(regions, step.block_table, step.owners, self._indptr, self._pages,
                                           spec.block_size, page_stride=self._step5.kv_page_stride(cache))

    def attend(self, group, out):
        spec, step = self._spec, self._step
        heads = slice(group * spec.heads_per_group, (group + 1) * spec.heads_per_group)
        scales = {"k_scale": step.k_scale, "v_scale": step.v_scale} if step.f8 else {}
        self._plan.finish(step.query[:, heads], step.kv_cache[:, group:group + 1], out[:, heads], **scales)

    def layer(self, out):
        for group in range(self._spec.groups):
            self.fill(group)
            self.attend(group, out)
        return out
