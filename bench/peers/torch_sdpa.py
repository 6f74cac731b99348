"""The naive way: gather K and V of each row with torch, then scaled_dot_product_attention.

Rows go in chunks so that the gathered copies fit `CHUNK_BYTES`. The heads of a group are the queries of one
head that has the gathered tokens, which is how torch shares K and V between them without a copy.
"""

import torch

from .steps import bits

CHUNK_BYTES = 2 << 30


def attend(step, out, chunk_bytes=CHUNK_BYTES, compute=torch.bfloat16):
    """Fills `out` [rows, heads, dim]; K, V and the query are converted to `compute`."""
    spec = step.spec
    per_row = spec.region_count * 8 * 2 * spec.dim * compute.itemsize
    chunk = max(1, chunk_bytes // per_row)
    for group in range(spec.groups):
        heads = slice(group * spec.heads_per_group, (group + 1) * spec.heads_per_group)
        for first in range(0, spec.rows, chunk):
            rows = slice(first, min(first + chunk, spec.rows))
            out[rows, heads] = _attend_rows(step, rows, group, heads, compute)
    return out


def _attend_rows(step, rows, group, heads, compute):
    spec = step.spec
    regions = step.regions[rows, group].long()
    tokens = (regions[:, :, None] * 8 + torch.arange(8, device=regions.device)).flatten(1)
    seen = (tokens >= 0) & (tokens <= step.positions[rows].long()[:, None])
    tokens = tokens.clamp(min=0)
    blocks = step.block_table[step.owners[rows].long()[:, None], tokens // spec.block_size].long().clamp(min=0)
    flat = (blocks * spec.groups + group) * spec.block_size + tokens % spec.block_size
    kv = bits(step.kv_cache).view(-1, 2 * spec.dim)[flat].view(step.kv_cache.dtype)
    k, v = kv[..., :spec.dim].to(compute), kv[..., spec.dim:].to(compute)
    if spec.context % 8:  # the last region has slots that nobody wrote: NaN there passes a mask in P V
        k, v = k.masked_fill(~seen[:, :, None], 0.0), v.masked_fill(~seen[:, :, None], 0.0)
    result = torch.nn.functional.scaled_dot_product_attention(
        step.query[rows, heads][:, None].to(compute), k[:, None], v[:, None], attn_mask=seen[:, None, None, :],
        scale=step.scale * step.k_scale)
    result = result[:, 0].float() * step.v_scale if step.f8 else result[:, 0]
    return result.to(step.query.dtype)
