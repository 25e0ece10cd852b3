"""Peers for latent attention (MLA): one pool, whose keys' first elements are the values."""

from collections import defaultdict

from common import (
    Unsupported, flash_attention_3, flash_mla_package, flashinfer_package, latent_keys, one_length, page_lists, table,
    vllm_flash_attention_3, workspace,
)
from tensors import BLOCK

# Numbers of query heads for which FlashMLA's decode kernel for rows of 656 bytes was compiled.
HEADS_OF_ROWS = (64, 128)


def _sixteen_bits(case):
    """Refuses what peers for latent keys in 16 bits do not take."""
    latent_keys(case)
    if case.kv_dtype != case.dtype or case.top_k:
        raise Unsupported("takes whole contexts of keys in the queries' type")


def _split(case, tensors):
    """The queries and the pool, each without and with positions."""
    dim = case.head_dim_v
    return tensors.q[..., :dim], tensors.q[..., dim:], tensors.latent[..., :dim], tensors.latent[..., dim:]


def flash_mla(case, tensors):
    """FlashMLA: keys in 16 bits on pages, or rows of 656 bytes by indices; all visible keys if none are chosen."""
    latent_keys(case)
    q_lens = set(case.q_lens)
    if len(q_lens) > 1:
        raise Unsupported("takes requests of one number of query tokens")
    (q_len,) = q_lens
    if case.in_rows and case.heads not in HEADS_OF_ROWS:
        raise Unsupported(f"takes 64 or 128 query heads with rows of 656 bytes, not {case.heads}")
    package = flash_mla_package()
    q = tensors.q.view(len(case.requests), q_len, case.heads, case.head_dim)
    if case.in_rows:
        return _flash_mla_by_indices(package, case, tensors, q)
    _sixteen_bits(case)
    if case.page_size != BLOCK:
        raise Unsupported(f"takes pages of {BLOCK} tokens")
    pages, lengths = page_lists(case, q.device)
    cache = tensors.latent[:, :, None]
    metadata, splits = package.get_mla_metadata(lengths, q_len * case.heads, 1)
    return lambda: package.flash_mla_with_kvcache(
        q, cache, pages, lengths, case.head_dim_v, metadata, splits, softmax_scale=case.scale, causal=case.causal,
    )


def _flash_mla_by_indices(package, case, tensors, q):
    import torch

    batch, q_len = q.shape[:2]
    slots = list(case.slots()) if case.top_k else _visible_slots(case)
    # Kernels read blocks of indices; −1 is none.
    width = -(-max(map(len, slots)) // BLOCK) * BLOCK
    indices = torch.full((len(slots), width), -1, dtype=torch.int32)
    for row, places in enumerate(slots):
        indices[row, : len(places)] = torch.tensor(places, dtype=torch.int32)
    indices = indices.view(batch, q_len, width).to(q.device)
    rows = tensors.rows.view(torch.float8_e4m3fn).view(-1, BLOCK, 1, tensors.rows.shape[-1])
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device=q.device)
    # Older versions want a table of pages, which they do not read.
    pages = torch.zeros(batch, 1, dtype=torch.int32, device=q.device)
    metadata, splits = package.get_mla_metadata(lengths, q_len * case.heads, 1, case.heads, True, width)
    return lambda: package.flash_mla_with_kvcache(
        q, rows, pages, lengths, case.head_dim_v, metadata, splits, softmax_scale=case.scale, causal=False,
        is_fp8_kvcache=True, indices=indices,
    )


def _visible_slots(case):
    """For each query token, the places of all keys that it sees."""
    slots = []
    for q_len, kv_len, pages in case.requests:
        places = [page * case.page_size + offset for page in pages for offset in range(case.page_size)]
        slots += [places[slice(*case.visible(q_len, kv_len, index))] for index in range(q_len)]
    return slots


def flashinfer_mla(backend):
    """FlashInfer's attention for latent keys on pages."""

    def peer(case, tensors):
        _sixteen_bits(case)
        wrapper = flashinfer_package().mla.BatchMLAPagedAttentionWrapper(workspace(tensors.q.device), backend=backend)
        t = table(case, case.requests, tensors.q.device)
        wrapper.plan(
            t.qo_indptr, t.kv_indptr, t.indices, t.kv_lens, case.heads, case.head_dim_v,
            case.head_dim - case.head_dim_v, case.page_size, case.causal, case.scale, tensors.q.dtype,
            tensors.latent.dtype,
        )
        q, q_rope, keys, rope = _split(case, tensors)
        return lambda: wrapper.run(q, q_rope, keys, rope)

    return peer


def fa3_mla(package):
    """FlashAttention-3: keys are the elements with positions, and the rest is multiplied with the values (`qv`)."""

    def peer(case, tensors):
        _sixteen_bits(case)
        forward = package()
        pages, lengths = page_lists(case, tensors.q.device)
        starts = table(case, case.requests, tensors.q.device).qo_indptr.to(tensors.q.device)
        q, q_rope, keys, rope = _split(case, tensors)
        return lambda: forward(
            q_rope, rope[:, :, None], keys[:, :, None], qv=q, cache_seqlens=lengths, page_table=pages, cu_seqlens_q=starts,
            max_seqlen_q=max(case.q_lens), softmax_scale=case.scale, causal=case.causal, window_size=(-1, -1), softcap=0.0,
        )

    return peer


def sdpa_mla(case, tensors):
    """PyTorch's scaled_dot_product_attention on gathered keys, one call for all requests of one length.

    Gathering, and converting rows of 656 bytes to 16 bits, is not part of a run.
    """
    latent_keys(case)
    if case.kv_dtype != case.dtype and not case.in_rows:
        raise Unsupported(f"takes no latent keys in {case.kv_dtype} without scales")
    import torch

    calls = [_gathered(torch, case, tensors, lengths, which) for lengths, which in _alike(case).items()]
    attention = torch.nn.functional.scaled_dot_product_attention

    def run():
        out = torch.empty(*tensors.q.shape[:2], case.head_dim_v, dtype=tensors.q.dtype, device=tensors.q.device)
        for tokens, q, keys, mask in calls:
            part = attention(q, keys, keys[..., : case.head_dim_v], attn_mask=mask, scale=case.scale)
            out[tokens] = part.reshape(-1, case.heads, case.head_dim_v)
        return out

    return run


def _alike(case):
    """Requests by their lengths: for each, its first query token and its pages."""
    alike, token = defaultdict(list), 0
    for q_len, kv_len, pages in case.requests:
        alike[q_len, kv_len].append((token, pages))
        token += q_len
    return alike


def _gathered(torch, case, tensors, lengths, requests):
    """Requests of one length as one call: their tokens, queries, keys and mask.

    The heads of a query token are rows of one head, as they share the keys. Chosen keys differ between query tokens, which
    are then requests of their own.
    """
    (q_len, kv_len), device = lengths, tensors.q.device
    tokens = [first + index for first, _ in requests for index in range(q_len)]
    at = torch.tensor(tokens, device=device)
    pages = torch.tensor([ids for _, ids in requests], device=device)
    keys = tensors.latent[pages].reshape(len(requests), -1, case.head_dim)[:, :kv_len]
    seen = [range(*case.visible(q_len, kv_len, index)) for index in range(q_len)]
    if case.top_k:
        of_all = list(case.chosen())
        lists = [list(of_all[token]) for token in tokens]
        width = max(map(len, lists))
        places = torch.tensor([keys_of + [0] * (width - len(keys_of)) for keys_of in lists], device=device)
        owner = torch.arange(len(requests), device=device).repeat_interleave(q_len)
        keys = keys[owner[:, None], places]
        rows, count = case.heads, len(tokens)
        mask = torch.tensor([[n < len(keys_of) for n in range(width)] for keys_of in lists], device=device)[:, None, None]
    else:
        keys = keys.contiguous()
        rows, count = q_len * case.heads, len(requests)
        mask = torch.zeros(q_len, kv_len, dtype=torch.bool)
        for row, visible in enumerate(seen):
            mask[row, visible.start : visible.stop] = True
        mask = mask.repeat_interleave(case.heads, dim=0)[None, None].to(device)
    # Without a mask more of PyTorch's kernels are possible.
    mask = None if mask.all() else mask
    q = tensors.q[at].reshape(count, 1, rows, case.head_dim)
    return at, q, keys[:, None], mask


LATENT_PEERS = {
    "flashmla": flash_mla,
    "flashinfer-mla": flashinfer_mla("fa3"),
    "fa3-mla": fa3_mla(flash_attention_3),
    "vfa3-mla": fa3_mla(vllm_flash_attention_3),
    "sdpa-mla": sdpa_mla,
}
