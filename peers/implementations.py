"""Peers: each turns a case and its tensors into a function that computes the outputs once.

A peer is a function `peer(case, tensors)`. It raises `Absent` where its package is not there and `Unsupported`
where it does not take the case. What it returns is a tensor, or a list of them for consecutive query tokens.
"""

import dataclasses
import importlib.util
import os
from types import SimpleNamespace


class Absent(Exception):
    """The package is not there."""


class Unsupported(Exception):
    """The peer does not take this case."""


WORKSPACE_BYTES = 384 << 20


def _flashinfer():
    try:
        import flashinfer
    except Exception as error:  # a broken installation raises more than ImportError
        raise Absent(f"flashinfer does not import: {error}") from error
    return flashinfer


def _workspace():
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def table(case, requests):
    """FlashInfer's arrays for some of the requests, in host memory as its plan functions want them."""
    import torch

    def running(lengths):
        sums = [0]
        for length in lengths:
            sums.append(sums[-1] + length)
        return torch.tensor(sums, dtype=torch.int32)

    return SimpleNamespace(
        qo_indptr=running([q for q, _, _ in requests]),
        kv_indptr=running([len(pages) for _, _, pages in requests]),
        indices=torch.tensor([p for _, _, pages in requests for p in pages], dtype=torch.int32, device="cuda"),
        last=torch.tensor([(kv - 1) % case.page_size + 1 for _, kv, _ in requests], dtype=torch.int32),
    )


def _variant(case):
    return {"window_left": case.window_left, "logits_soft_cap": case.soft_cap, "sm_scale": case.scale}


def flashinfer_prefill(backend):
    """FlashInfer's batch prefill, which takes decode steps as queries of one token."""

    def peer(case, tensors):
        flashinfer = _flashinfer()
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
        t = table(case, case.requests)
        wrapper.plan(
            t.qo_indptr, t.kv_indptr, t.indices, t.last, case.heads, case.kv_heads, case.head_dim, case.page_size,
            causal=case.causal, q_data_type=tensors.q.dtype, kv_data_type=tensors.kv.dtype, **_variant(case),
        )
        return lambda: wrapper.run(tensors.q, tensors.kv)

    return peer


def flashinfer_decode(case, tensors):
    """FlashInfer's batch decode on tensor cores."""
    if any(q_len != 1 for q_len in case.q_lens):
        raise Unsupported("takes decode steps only")
    flashinfer = _flashinfer()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=True)
    t = table(case, case.requests)
    wrapper.plan(
        t.kv_indptr, t.indices, t.last, case.heads, case.kv_heads, case.head_dim, case.page_size,
        q_data_type=tensors.q.dtype, kv_data_type=tensors.kv.dtype, **_variant(case),
    )
    return lambda: wrapper.run(tensors.q, tensors.kv)


def _halves(case):
    """The chunks and the decode steps of a hybrid batch, and how many query tokens the chunks have."""
    chunks = [request for request in case.requests if request[0] > 1]
    decodes = [request for request in case.requests if request[0] == 1]
    if not chunks or not decodes or case.requests != chunks + decodes:
        raise Unsupported("takes chunks followed by decode steps")
    return chunks, decodes, sum(q_len for q_len, _, _ in chunks)


def flashinfer_pod(case, tensors):
    """FlashInfer's POD attention: chunks first, decode steps after them."""
    chunks, decodes, split = _halves(case)
    if case.soft_cap or case.window_left >= 0:
        raise Unsupported("takes plain attention only")
    flashinfer = _flashinfer()
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(_workspace(), "NHD")
    p, d = table(case, chunks), table(case, decodes)
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
            run(dataclasses.replace(case, requests=requests), SimpleNamespace(q=q, kv=tensors.kv))
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


# Where FlashAttention-3's Python module is not there, but a library with its operators is.
FA3_LIBRARY = "FLASH_ATTN_3_LIBRARY"


def _flash_attention_3():
    """The forward function of a ragged batch on pages, by keywords."""
    import torch

    library = os.environ.get(FA3_LIBRARY)
    if not library:
        try:
            import flash_attn_interface
        except Exception as error:
            raise Absent(f"flash_attn_interface does not import: {error}") from error
        return flash_attn_interface.flash_attn_with_kvcache
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise Absent(f"{library} does not load: {error}") from error
    operator = torch.ops.flash_attn_3.fwd.default
    known = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    nothing = {argument.name: None for argument in known}

    def call(q, k, v, *, cache_seqlens, page_table, window_size, causal, **others):
        return operator(**{
            **nothing, **defaults, **others, "q": q, "k": k, "v": v, "seqused_k": cache_seqlens,
            "page_table": page_table, "is_causal": causal,
            "window_size_left": window_size[0], "window_size_right": window_size[1],
        })

    return call


def fa3(case, tensors):
    """FlashAttention-3 on a paged cache, ragged queries."""
    import torch

    forward = _flash_attention_3()
    longest = max(len(pages) for _, _, pages in case.requests)
    pages = torch.zeros(len(case.requests), longest, dtype=torch.int32)
    for row, (_, _, ids) in enumerate(case.requests):
        pages[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    pages = pages.cuda()
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device="cuda")
    starts = table(case, case.requests).qo_indptr.cuda()
    window = (case.window_left, 0 if case.causal else -1) if case.window_left >= 0 else (-1, -1)
    return lambda: forward(
        tensors.q, tensors.kv[:, 0], tensors.kv[:, 1], cache_seqlens=lengths, page_table=pages,
        cu_seqlens_q=starts, max_seqlen_q=max(case.q_lens), softmax_scale=case.scale, causal=case.causal,
        window_size=window, softcap=case.soft_cap,
    )


def fa3_dense(case, tensors):
    """FlashAttention-3 on keys and values without pages, requests of one length."""
    import torch

    forward = _flash_attention_3()
    (q_len, kv_len, _), *rest = case.requests
    if any((q, kv) != (q_len, kv_len) for q, kv, _ in rest):
        raise Unsupported("takes requests of one length")
    if case.window_left >= 0:
        raise Unsupported("takes attention without a window")
    ids = torch.tensor([pages for _, _, pages in case.requests], device="cuda")
    k, v = (
        tensors.kv[ids, which].reshape(len(ids), -1, case.kv_heads, case.head_dim)[:, :kv_len].contiguous()
        for which in (0, 1)
    )
    q = tensors.q.view(len(ids), q_len, case.heads, case.head_dim)
    return lambda: forward(
        q, k, v, cache_seqlens=None, page_table=None, softmax_scale=case.scale, causal=case.causal,
        window_size=(-1, -1), softcap=case.soft_cap,
    )


def sdpa(backend_name):
    """PyTorch's scaled_dot_product_attention with one of its backends, on dense tensors."""

    def peer(case, tensors):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        (q_len, kv_len, _), *rest = case.requests
        if any((q, kv) != (q_len, kv_len) for q, kv, _ in rest) or (case.causal and q_len != kv_len):
            raise Unsupported("takes whole prompts of one length")
        if case.soft_cap or case.window_left >= 0:
            raise Unsupported("takes plain attention only")
        ids = torch.tensor([pages for _, _, pages in case.requests], device="cuda")
        batch = len(case.requests)

        def dense(which):
            rows = tensors.kv[ids, which].reshape(batch, -1, case.kv_heads, case.head_dim)[:, :kv_len]
            return rows.transpose(1, 2).contiguous()

        k, v = dense(0), dense(1)
        q = tensors.q.view(batch, q_len, case.heads, case.head_dim).transpose(1, 2).contiguous()
        backend = getattr(SDPBackend, backend_name)

        def run():
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, scale=case.scale, enable_gqa=case.heads != case.kv_heads
                )
            return out.transpose(1, 2)

        return run

    return peer


PEERS = {
    "sdpa-cudnn": sdpa("CUDNN_ATTENTION"),
    "sdpa-fa2": sdpa("FLASH_ATTENTION"),
    "fa3": fa3,
    "fa3-dense": fa3_dense,
    "flashinfer-fa2": flashinfer_prefill("fa2"),
    "flashinfer-fa3": flashinfer_prefill("fa3"),
    "flashinfer-decode": flashinfer_decode,
    "flashinfer-pod": flashinfer_pod,
    "fa3-serial": apart(fa3, fa3, streams=False),
    "fa3-streams": apart(fa3, fa3, streams=True),
    "flashinfer-serial": apart(flashinfer_prefill("fa3"), flashinfer_decode, streams=False),
    "flashinfer-streams": apart(flashinfer_prefill("fa3"), flashinfer_decode, streams=True),
}

NEEDS = {"sdpa": "torch", "fa3": "flash_attn_interface", "flashinfer": "flashinfer"}


def missing(name):
    """The package that a peer waits for in vain, or None."""
    family = name.split("-")[0]
    package = NEEDS[family]
    if importlib.util.find_spec(package) or (family == "fa3" and os.environ.get(FA3_LIBRARY)):
        return None
    return package
