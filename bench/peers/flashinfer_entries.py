"""FlashInfer's other entry points that could serve a step, each with what it needs and why it may refuse.

`ENTRIES` maps a name to a function (step, flashinfer, module) -> call(out), where `module` is a planned and filled
TodaysModule: its page list is what they read. A refusal is an exception; the caller records it. They run in
processes of their own, since a kernel that faults takes its process along.
"""

import torch

from .todays_module import page_view

# What cannot serve the call by its interface, so that there is nothing to try.
NOT_APPLICABLE = {
    "VariableBlockSparseAttentionWrapper": "takes whole blocks of K and V in token order: no page table, and no cut inside "
                                           "a block, which the row's own region needs",
    "trtllm_batch_decode_with_kv_cache_mla": "one latent vector per token (MLA), no K and V of a head",
}


def paged_prefill_split(step, flashinfer, module):
    """BatchPrefillWithPagedKVCacheWrapper, FA2, free to split the work of a row."""
    return _paged_prefill(step, flashinfer, module, "fa2")


def paged_prefill_fa3(step, flashinfer, module):
    """The same wrapper with its FA3 kernels for Hopper."""
    return _paged_prefill(step, flashinfer, module, "fa3")


def _paged_prefill(step, flashinfer, module, backend):
    spec = step.spec
    pages, indptr, last = module.flat_list()
    workspace = torch.empty(384 << 20, dtype=torch.uint8, device=step.query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(torch.arange(spec.rows + 1, dtype=torch.int32), indptr.cpu(), pages, last, spec.heads_per_group, 1, spec.dim,
                 8, causal=False, sm_scale=step.scale, q_data_type=torch.bfloat16)
    kv = page_view(step.kv_cache, 0)
    return lambda out: wrapper.run(step.query, kv, out=out)


def paged_decode_tensor_cores(step, flashinfer, module):
    """BatchDecodeWithPagedKVCacheWrapper with tensor cores: every row a request of one token."""
    spec = step.spec
    pages, indptr, last = module.flat_list()
    workspace = torch.empty(384 << 20, dtype=torch.uint8, device=step.query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(indptr.cpu(), pages, last, spec.heads_per_group, 1, spec.dim, 8, sm_scale=step.scale,
                 q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    kv = page_view(step.kv_cache, 0)
    return lambda out: wrapper.run(step.query, kv, out=out)


def batch_attention(step, flashinfer, module):
    """BatchAttention, the persistent kernel over prefill and decode."""
    spec = step.spec
    pages, indptr, last = module.flat_list()
    counts = torch.from_numpy(step.rows.counts.astype("int32"))
    lengths = (counts - 1) * 8 + last
    wrapper = flashinfer.BatchAttention("NHD", device=str(step.query.device))
    wrapper.plan(torch.arange(spec.rows + 1, dtype=torch.int32).to(indptr.device), indptr, pages, lengths.to(indptr.device),
                 spec.heads_per_group, 1, spec.dim, spec.dim, 8, causal=False, sm_scale=step.scale)
    kv = page_view(step.kv_cache, 0)
    return lambda out: wrapper.run(step.query, kv, out=out)


def block_sparse(step, flashinfer, module):
    """BlockSparseAttentionWrapper with blocks of one row by one page over the cache as it lies; a mask cuts the row's
    own region."""
    spec = step.spec
    pages, indptr, last = module.flat_list()
    k, v = page_view(step.kv_cache, 0)
    tokens = k.shape[0] * 8
    mask = torch.ones(len(pages), 1, 8, dtype=torch.bool, device=pages.device)
    ends = indptr[1:].long() - 1
    mask[ends, 0] = torch.arange(8, device=pages.device)[None, :] < last.to(pages.device)[:, None]
    workspace = torch.empty(384 << 20, dtype=torch.uint8, device=step.query.device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace, backend="fa2")
    wrapper.plan(indptr, pages, spec.rows, tokens, 1, 8, spec.heads_per_group, 1, spec.dim, mask=mask, sm_scale=step.scale,
                 q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, o_data_type=torch.bfloat16)
    k, v = (part.as_strided((tokens, 1, spec.dim), (part.stride(1), spec.dim, 1), part.storage_offset()) for part in (k, v))
    return lambda out: wrapper.run(step.query, k, v, out=out)


def xqa(step, flashinfer, module):
    """xqa_batch_decode_with_kv_cache: every row a request of one token; a table of pages for each row."""
    spec = step.spec
    table, lengths = _page_table(step, module)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=step.query.device)
    call = flashinfer.decode.xqa_batch_decode_with_kv_cache
    kv = page_view(step.kv_cache, 0)
    return lambda out: call(step.query, kv, workspace, table, lengths, spec.region_count * 8, bmm1_scale=step.scale,
                            out=out)


def trtllm_context(step, flashinfer, module):
    """trtllm_batch_context_with_kv_cache."""
    spec = step.spec
    table, lengths = _page_table(step, module)
    rows = torch.arange(spec.rows + 1, dtype=torch.int32, device=table.device)
    ends = torch.zeros(spec.rows + 1, dtype=torch.int32, device=table.device)
    ends[1:] = lengths.cumsum(0)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=table.device)
    call = flashinfer.prefill.trtllm_batch_context_with_kv_cache
    kv = page_view(step.kv_cache, 0)
    return lambda out: call(step.query, kv, workspace, table, lengths, 1, spec.region_count * 8, step.scale, 1.0, spec.rows,
                            rows, ends, out=out, kv_layout="NHD")


def trtllm_decode(step, flashinfer, module):
    """trtllm_batch_decode_with_kv_cache with its trtllm-gen kernels."""
    spec = step.spec
    table, lengths = _page_table(step, module)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=table.device)
    call = flashinfer.decode.trtllm_batch_decode_with_kv_cache
    kv = page_view(step.kv_cache, 0)
    return lambda out: call(step.query, kv, workspace, table, lengths, spec.region_count * 8, bmm1_scale=step.scale,
                            bmm2_scale=1.0, out=out, kv_layout="NHD", backend="trtllm-gen")


def cudnn_prefill(step, flashinfer, module):
    """cudnn_batch_prefill_with_kv_cache over pages."""
    spec = step.spec
    table, lengths = _page_table(step, module)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=table.device)
    call = flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache
    k, v = (part.permute(0, 2, 1, 3) for part in page_view(step.kv_cache, 0))
    ones = torch.ones(spec.rows, 1, 1, 1, dtype=torch.int32, device=table.device)
    offsets = torch.arange(spec.rows + 1, dtype=torch.int32, device=table.device) * (spec.heads * spec.dim)
    return lambda out: call(step.query, k, v, step.scale, workspace, max_token_per_sequence=1,
                            max_sequence_kv=spec.region_count * 8, actual_seq_lens_q=ones,
                            actual_seq_lens_kv=lengths.view(-1, 1, 1, 1), block_tables=table, causal=False, return_lse=True,
                            batch_offsets_q=offsets, batch_offsets_o=offsets, out=out, is_cuda_graph_compatible=True)


def paged_prefill_f8(step, flashinfer, module):
    """FA2 straight from an f8 cache, scales folded in: what staging to bf16 avoids."""
    if not step.f8:
        raise ValueError("made for f8 caches")
    spec = step.spec
    pages, indptr, last = module.flat_list()
    # The module's list numbers staged blocks: this entry reads the cache itself.
    per_block = spec.block_size // 8
    pages = module.staged_blocks[(pages // per_block).long()] * per_block + pages % per_block
    workspace = torch.empty(384 << 20, dtype=torch.uint8, device=step.query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(torch.arange(spec.rows + 1, dtype=torch.int32), indptr.cpu(), pages.int(), last, spec.heads_per_group, 1,
                 spec.dim, 8, causal=False, sm_scale=step.scale * step.k_scale, q_data_type=torch.bfloat16,
                 kv_data_type=torch.float8_e4m3fn, disable_split_kv=True)
    kv = page_view(step.kv_cache, 0)
    return lambda out: wrapper.run(step.query, kv, out=out, v_scale=step.v_scale)


def _page_table(step, module):
    """[rows, region_count] i32 page table, and tokens of each row."""
    spec = step.spec
    pages, indptr, last = module.flat_list()
    counts = torch.from_numpy(step.rows.counts)
    table = torch.zeros(spec.rows, spec.region_count, dtype=torch.int32, device=pages.device)
    listed = (torch.arange(spec.region_count)[None, :] < counts[:, None]).to(pages.device)
    table[listed] = pages
    return table, ((counts - 1) * 8 + last).to(torch.int32).to(pages.device)


# In the order of what is worth knowing most; the first two need no kernels beyond those of today's module, and the last
# two look for their kernels on the network.
ENTRIES = {
    "BatchPrefillWithPagedKVCacheWrapper fa2, split allowed": paged_prefill_split,
    "BatchDecodeWithPagedKVCacheWrapper, tensor cores": paged_decode_tensor_cores,
    "BlockSparseAttentionWrapper, 1 x 8 blocks": block_sparse,
    "xqa_batch_decode_with_kv_cache": xqa,
    "BatchAttention": batch_attention,
    "BatchPrefillWithPagedKVCacheWrapper fa3": paged_prefill_fa3,
    "BatchPrefillWithPagedKVCacheWrapper fa2, f8 cache": paged_prefill_f8,
    "cudnn_batch_prefill_with_kv_cache": cudnn_prefill,
    "trtllm_batch_context_with_kv_cache": trtllm_context,
    "trtllm_batch_decode_with_kv_cache": trtllm_decode,
}


def build_kernels(flashinfer_name, dim):
    """Compiles, without touching the device, what an entry needs beyond today's module; returns whether it did."""
    from flashinfer.jit import attention as jit

    bf16, f8, i32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
    if flashinfer_name == "BatchAttention":
        spec = jit.gen_batch_attention_module(bf16, bf16, bf16, i32, dim, dim, 0, False, False)
    elif flashinfer_name.endswith("fa3"):
        spec = jit.gen_batch_prefill_module("fa3", bf16, bf16, bf16, i32, dim, dim, 0, False, False, False)
    elif flashinfer_name.endswith("f8 cache"):
        spec = jit.gen_batch_prefill_module("fa2", bf16, f8, bf16, i32, dim, dim, 0, False, False, False)
    elif flashinfer_name.startswith("BlockSparse"):  # its mask is packed by a module of its own
        from flashinfer.jit.quantization import gen_quantization_module

        spec = gen_quantization_module()
    elif flashinfer_name == "today":
        spec = jit.gen_batch_prefill_module("fa2", bf16, bf16, bf16, i32, dim, dim, 0, False, False, False)
    else:
        return False
    spec.build_and_load()
    return True
