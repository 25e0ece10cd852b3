"""Peers: each turns a case and its tensors into a function that computes the outputs once.

A peer is a function `peer(case, tensors)`. It raises `Absent` where its package is not there and `Unsupported`
where it does not take the case. What it returns is a tensor, or a list of them for consecutive query tokens.
"""

import dataclasses
import importlib.util
import os
from types import SimpleNamespace

from common import (
    FA3_LIBRARY, FLASH_MLA_LIBRARY, VLLM_FA3_LIBRARY, Unsupported, flash_attention_3, flashinfer_package, one_length,
    own_keys_and_values, page_lists, table, tried, vllm_flash_attention_3, workspace,
)
from latent import LATENT_PEERS
from tensors import gathered, queries_in_e4m3


def _variant(case):
    return {"window_left": case.window_left, "logits_soft_cap": case.soft_cap, "sm_scale": case.scale}


def _scales(case):
    """The scales of keys and values for FlashInfer, if they are in 8 bits."""
    return {"k_scale": 1.0, "v_scale": 1.0} if case.in_e4m3 else {}


def flashinfer_prefill(backend):
    """FlashInfer's batch prefill, which takes decode steps as queries of one token.

    With keys in e4m3, fa2 takes the queries as they are, and fa3 takes queries in e4m3.
    """

    def peer(case, tensors):
        own_keys_and_values(case, eight_bits=True)
        flashinfer = flashinfer_package()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(tensors.q.device), "NHD", backend=backend)
        t = table(case, case.requests, tensors.q.device)
        q, scales, types = tensors.q, [], {}
        if case.in_e4m3 and backend == "fa3":
            q, scales = _queries_by_head(case, tensors)
            types = {"o_data_type": tensors.q.dtype}
        wrapper.plan(
            t.qo_indptr, t.kv_indptr, t.indices, t.last, case.heads, case.kv_heads, case.head_dim, case.page_size,
            causal=case.causal, q_data_type=q.dtype, kv_data_type=tensors.kv.dtype, **types, **_variant(case),
        )
        named = {} if scales else _scales(case)
        return lambda: wrapper.run(q, tensors.kv, *scales, **named)

    return peer


def _queries_by_head(case, tensors):
    """Queries in e4m3, and for each head the scale of queries, of keys and of values."""
    import torch

    q, of_queries = queries_in_e4m3(torch, tensors.q, [len(tensors.q)], case.heads)
    ones = torch.ones(case.kv_heads, device=q.device)
    return q, [of_queries[0], ones, ones]


def flashinfer_decode(case, tensors):
    """FlashInfer's batch decode on tensor cores."""
    own_keys_and_values(case, eight_bits=True)
    if any(q_len != 1 for q_len in case.q_lens):
        raise Unsupported("takes decode steps only")
    flashinfer = flashinfer_package()
    # Of the two backends, this one takes 16-bit queries with 8-bit keys. Some versions choose the other.
    chosen = {"backend": "fa2"} if case.in_e4m3 else {}
    memory = workspace(tensors.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "NHD", use_tensor_cores=True, **chosen)
    t = table(case, case.requests, tensors.q.device)
    wrapper.plan(
        t.kv_indptr, t.indices, t.last, case.heads, case.kv_heads, case.head_dim, case.page_size,
        q_data_type=tensors.q.dtype, kv_data_type=tensors.kv.dtype, **_variant(case),
    )
    return lambda: wrapper.run(tensors.q, tensors.kv, **_scales(case))


def _halves(case):
    """The chunks and the decode steps of a hybrid batch, and how many query tokens the chunks have."""
    chunks = [request for request in case.requests if request[0] > 1]
    decodes = [request for request in case.requests if request[0] == 1]
    if not chunks or not decodes or case.requests != chunks + decodes:
        raise Unsupported("takes chunks followed by decode steps")
    return chunks, decodes, sum(q_len for q_len, _, _ in chunks)


def flashinfer_pod(case, tensors):
    """FlashInfer's POD attention: chunks first, decode steps after them."""
    own_keys_and_values(case)
    chunks, decodes, split = _halves(case)
    if case.soft_cap or case.window_left >= 0:
        raise Unsupported("takes plain attention only")
    flashinfer = flashinfer_package()
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(tensors.q.device), "NHD")
    p, d = (table(case, half, tensors.q.device) for half in (chunks, decodes))
    wrapper.plan(
        p.qo_indptr, p.kv_indptr, p.indices, p.last, d.qo_indptr, d.kv_indptr, d.indices, d.last,
        case.heads, case.kv_heads, case.head_dim, case.page_size,
        q_data_type=tensors.q.dtype, kv_data_type=tensors.kv.dtype,
    )
    q_p, q_d = tensors.q[:split], tensors.q[split:]
    return lambda: list(wrapper.run(q_p, tensors.kv, q_d, tensors.kv, causal_p=case.causal))


def apart(prefill, decode, streams):
    """The chunks and the decode steps of a hybrid batch by calls of their own, on one stream or on two."""

    def peer(case, tensors):
        import torch

        chunks, decodes, split = _halves(case)
        run_chunks, run_decodes = (
            run(dataclasses.replace(case, requests=requests), SimpleNamespace(**{**vars(tensors), "q": q}))
            for run, requests, q in ((prefill, chunks, tensors.q[:split]), (decode, decodes, tensors.q[split:]))
        )
        if not streams:
            return lambda: [run_chunks(), run_decodes()]
        side = torch.cuda.Stream()

        def run():
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            out = run_chunks()
            with torch.cuda.stream(side):
                decoded = run_decodes()
            main.wait_stream(side)
            return [out, decoded]

        return run

    return peer


def _queries(case, tensors):
    """The queries for FlashAttention-3. With keys in e4m3 they are too, and there are scales by request and KV head."""
    if not case.in_e4m3:
        return tensors.q, {}
    import torch

    q, of_queries = queries_in_e4m3(torch, tensors.q, case.q_lens, case.kv_heads)
    ones = torch.ones_like(of_queries)
    return q, {"q_descale": of_queries, "k_descale": ones, "v_descale": ones}


def fa3(package):
    """FlashAttention-3 on a paged cache, ragged queries."""

    def peer(case, tensors):
        own_keys_and_values(case, one_dimension=False, eight_bits=True)
        forward = package()
        pages, lengths = page_lists(case, tensors.q.device)
        starts = table(case, case.requests, tensors.q.device).qo_indptr.to(tensors.q.device)
        window = (case.window_left, 0 if case.causal else -1) if case.window_left >= 0 else (-1, -1)
        q, scales = _queries(case, tensors)

        def run():
            return forward(
                q, tensors.k, tensors.v, cache_seqlens=lengths, page_table=pages,
                cu_seqlens_q=starts, max_seqlen_q=max(case.q_lens), softmax_scale=case.scale, causal=case.causal,
                window_size=window, softcap=case.soft_cap, **scales,
            )

        return tried(run) if case.in_e4m3 else run

    return peer


def fa3_dense(case, tensors):
    """FlashAttention-3 on keys and values without pages, requests of one length."""
    own_keys_and_values(case, one_dimension=False, eight_bits=True)
    forward = flash_attention_3()
    q_len, _ = one_length(case)
    if case.window_left >= 0:
        raise Unsupported("takes attention without a window")
    k, v = _dense(case, tensors)
    q, scales = _queries(case, tensors)
    q = q.view(len(case.requests), q_len, case.heads, case.head_dim)

    def run():
        return forward(
            q, k, v, cache_seqlens=None, page_table=None, softmax_scale=case.scale, causal=case.causal,
            window_size=(-1, -1), softcap=case.soft_cap, **scales,
        )

    return tried(run) if case.in_e4m3 else run


def _dense(case, tensors):
    """Keys and values of requests of one length: request, token, KV head, dimension."""
    import torch

    _, kv_len = one_length(case)
    ids = torch.tensor([pages for _, _, pages in case.requests], device=tensors.q.device)
    return (
        gathered(torch, pool, ids).reshape(len(ids), -1, case.kv_heads, pool.shape[-1])[:, :kv_len].contiguous()
        for pool in (tensors.k, tensors.v)
    )


def sdpa(backend_name, one_dimension):
    """PyTorch's scaled_dot_product_attention with one of its backends, on dense tensors."""

    def peer(case, tensors):
        own_keys_and_values(case, one_dimension)
        q_len, kv_len = one_length(case)
        if case.causal and q_len != kv_len:
            raise Unsupported("takes whole prompts")
        if case.soft_cap or case.window_left >= 0:
            raise Unsupported("takes plain attention only")
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = tensors.q.view(len(case.requests), q_len, case.heads, case.head_dim)
        q, k, v = (heads.transpose(1, 2).contiguous() for heads in (q, *_dense(case, tensors)))
        backend = getattr(SDPBackend, backend_name)

        def run():
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, scale=case.scale, enable_gqa=case.heads != case.kv_heads
                )
            return out.transpose(1, 2)

        return run

    return peer


FA3 = fa3(flash_attention_3)

PEERS = {
    "sdpa-cudnn": sdpa("CUDNN_ATTENTION", one_dimension=False),
    "sdpa-fa2": sdpa("FLASH_ATTENTION", one_dimension=True),
    "fa3": FA3,
    "fa3-dense": fa3_dense,
    "vfa3": fa3(vllm_flash_attention_3),
    "flashinfer-fa2": flashinfer_prefill("fa2"),
    "flashinfer-fa3": flashinfer_prefill("fa3"),
    "flashinfer-decode": flashinfer_decode,
    "flashinfer-pod": flashinfer_pod,
    "fa3-serial": apart(FA3, FA3, streams=False),
    "fa3-streams": apart(FA3, FA3, streams=True),
    "flashinfer-serial": apart(flashinfer_prefill("fa3"), flashinfer_decode, streams=False),
    "flashinfer-streams": apart(flashinfer_prefill("fa3"), flashinfer_decode, streams=True),
    **LATENT_PEERS,
}

# These multiply queries in e4m3 with keys in e4m3, or do so for the chunks of a batch.
IN_8_BITS = {
    "fa3", "fa3-dense", "vfa3", "fa3-serial", "fa3-streams", "flashinfer-fa3", "flashinfer-serial", "flashinfer-streams",
}


def computes_in_8_bits(name, case):
    """Whether a peer rounds the queries of a case to e4m3. It does so before a run."""
    return name in IN_8_BITS and case.in_e4m3


NEEDS = {
    "sdpa": "torch", "fa3": "flash_attn_interface", "vfa3": "vllm", "flashinfer": "flashinfer", "flashmla": "flash_mla",
}
# Other packages and libraries with the same.
INSTEAD = {"vfa3": "vllm_flash_attn"}
LIBRARIES = {"fa3": FA3_LIBRARY, "vfa3": VLLM_FA3_LIBRARY, "flashmla": FLASH_MLA_LIBRARY}


def missing(name):
    """The package that a peer waits for in vain, or None."""
    family = name.split("-")[0]
    package = NEEDS[family]
    packages = [package, INSTEAD.get(family, package)]
    if any(map(importlib.util.find_spec, packages)) or os.environ.get(LIBRARIES.get(family, "")):
        return None
    return package
