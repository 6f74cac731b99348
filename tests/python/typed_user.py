"""A user's module as type checkers read it (test_types.py); it is never run. A line with `wrong:` must be refused, for
that reason; every other one must be accepted."""

from typing import Optional

import numpy as np
import octopage
from octopage import step5, vllm_plugin

query = np.zeros((6, 4, 64), np.float16)
cache = np.zeros((8, 1, 16, 128), np.float16)
table = np.zeros((1, 3), np.int32)
regions = np.zeros((6, 3), np.int32)
owners, positions = octopage.rows_from_query_start_loc([0, 6], [40])
rows: int = owners.shape[0]

out = octopage.sparse_prefill(query, cache, table, owners, positions, regions, scale=0.125, k_scale=1.0, v_scale=None,
                              out=None, out_dtype="f32", lse=None, workspace=None, backend="cpu", strict=True,
                              status=None, batch_invariant=False)
size: int = octopage.sparse_prefill_workspace_size(query, cache, table, owners, positions, regions, scale=1, out=out)
octopage.sparse_prefill(query, cache, table, owners, positions, regions, scale="big")  # wrong: arg-type
octopage.sparse_prefill(query, cache, table, owners, positions, regions)  # wrong: call-arg
octopage.sparse_prefill(query, cache, table, owners, positions, regions, scale=1.0, backends="cpu")  # wrong: call-arg

names: list[str] = [backend["name"] for backend in octopage.backends()]
folders: tuple[str, str] = (octopage.get_include(), octopage.get_cmake_dir())
version: str = octopage.__version__
octopage.get_include("cuda")  # wrong: call-arg

plan = step5.CompactPagedPrefill()
plan.plan((6, 4, 64), np.float16, "cpu", positions, 3, 0.125, 16, contiguous_query=False)
plan.plan((6, 4, 64), np.float16, "cpu", positions, "3", 0.125, 16)  # wrong: arg-type
plan.fixup_positions(positions, status=None)
plan.prepare_chunk(0, query, cache, regions, table, owners, status=None, strict=False)
plan.finish(None, cache, out, lse=None, k_scale=None, v_scale=None, backend=None)
shape: tuple[int, int, int] = plan.query_shape
numbers: tuple[int, int] = (plan.region_count, plan.block_size)
buffers = (plan.pages, plan.indptr, plan.last_page_len, plan.query_buffer)
plan.regions  # wrong: attr-defined
metadata: Optional[step5.PagedPrefillMetadata] = plan.page_metadata(table, owners, step5.kv_page_stride(cache), 0, None)
metadata.indices  # wrong: union-attr
if metadata is not None:
    step5.fill_prefill_pages(regions, metadata.block_table, metadata.owners, metadata.indptr, metadata.indices,
                             metadata.block_size, query, query, metadata.page_stride)
staged: step5.StagedPrefillPages = step5.plan_staged_prefill_pages(table, [40], 16)
copied = step5.stage_prefill_pages(cache, staged, np.float16, 1.0, None)
k, v = step5.view_sparse_kv_pages(cache)
indptr, last_page_len = step5.compact_page_metadata([1, 2], 3)

vllm_plugin.register()
mode = vllm_plugin.status()["mode"]
vllm_plugin.disable()

try:
    pass
except (octopage.ArgumentTypeError, octopage.InvalidEntry, octopage.Unsupported, octopage.WrongState) as error:
    base: octopage.OctopageError = error
