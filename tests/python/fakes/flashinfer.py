"""Stands in for FlashInfer in tests without a GPU: the same calls as two of its wrappers, computed by torch."""

import torch

__version__ = "stand-in"


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace, layout="NHD", backend="auto"):
        assert layout == "NHD"
        if backend == "fa3":
            raise RuntimeError("the stand-in has no fa3 kernels")

    def plan(self, qo_indptr, indptr, pages, last_page_len, heads, kv_heads, dim, page_size, *, causal, sm_scale, q_data_type,
             kv_data_type=None, disable_split_kv=False):
        assert (len(qo_indptr) - 1, kv_heads, page_size, causal) == (len(last_page_len), 1, 8, False)
        self._plan = (indptr.tolist(), pages, last_page_len.tolist(), sm_scale)

    def run(self, query, kv, out, v_scale=1.0):
        k, v = kv
        indptr, pages, last, scale = self._plan
        for row in range(query.shape[0]):
            listed = pages[indptr[row]:indptr[row + 1]].long()
            tokens = (len(listed) - 1) * 8 + last[row]
            keys, values = (part[listed].reshape(-1, part.shape[3])[:tokens].float() for part in (k, v))
            weights = torch.softmax(scale * query[row].float() @ keys.T, -1)
            out[row] = (v_scale * weights @ values).to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, layout, use_tensor_cores):
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, layout)

    def plan(self, indptr, pages, last_page_len, heads, kv_heads, dim, page_size, *, sm_scale, q_data_type, kv_data_type):
        self._prefill.plan(torch.arange(len(indptr)), indptr, pages, last_page_len, heads, kv_heads, dim, page_size,
                           causal=False, sm_scale=sm_scale, q_data_type=q_data_type)

    def run(self, query, kv, out):
        out.zero_()  # a wrong result on purpose: the harness must not time it
        return out
