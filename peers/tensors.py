"""Random tensors of a case, and how outputs are compared with attention in f64."""

import functools
import itertools
import sys
from types import SimpleNamespace

from workload import ROW_BYTES

CHECKED_TOKENS = 16
# Scales of the four groups of a row of 656 bytes: powers of two, so that keys in bf16 are exact.
ROW_SCALES = (1.0, 0.5, 1.0, 0.25)
# FlashMLA reads rows in blocks of this many tokens.
BLOCK = 64
# The command's random numbers repeat after so many.
PERIOD = 1_048_573
SEED = 7
# The largest number of e4m3.
LARGEST_E4M3 = 448


def random_tensors(torch, case, device="cuda"):
    """Queries and a pool of the case.

    Keys and values of one dimension are behind each other in each page of `kv`, of which `k` and `v` are views.
    Of latent keys there is `latent`, and `rows` if they are stored in rows of 656 bytes; `latent` is then what these hold.
    """
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
    if case.in_e4m3:
        return tensors_in_e4m3(torch, case, dtype, device)
    generator = torch.Generator(device=device).manual_seed(7)

    def uniform(largest, *shape):
        values = torch.empty(*shape, device=device, dtype=dtype)
        return values.uniform_(-largest, largest, generator=generator)

    q = uniform(4, sum(case.q_lens), case.heads, case.head_dim)
    place = (case.pool_pages, case.page_size)
    if case.latent and not case.in_rows:
        return SimpleNamespace(q=q, latent=uniform(1, *place, case.head_dim), rows=None)
    if case.latent:
        tokens = case.pool_pages * case.page_size
        rows, latent = random_rows(torch, -(-tokens // BLOCK) * BLOCK, dtype, generator, device)
        return SimpleNamespace(q=q, latent=latent[:tokens].view(*place, case.head_dim), rows=rows)
    if case.head_dim_v != case.head_dim:
        k = uniform(1, *place, case.kv_heads, case.head_dim)
        return SimpleNamespace(q=q, kv=None, k=k, v=uniform(1, *place, case.kv_heads, case.head_dim_v))
    kv = uniform(1, case.pool_pages, 2, case.page_size, case.kv_heads, case.head_dim)
    return SimpleNamespace(q=q, kv=kv, k=kv[:, 0], v=kv[:, 1])


def tensors_in_e4m3(torch, case, dtype, device):
    """Queries, keys and values with the bytes that `tandem bench` gives to them. The scales are 1."""

    def filled(seed, largest, dtype, *shape):
        size = torch.Size(shape).numel()
        drawn = command_numbers(min(size, PERIOD), seed, largest).to(dtype)
        # PyTorch does not repeat and copy numbers of 8 bits everywhere, but it does so with bytes.
        drawn = drawn.view(torch.uint8).to(device)
        size *= dtype.itemsize
        return drawn.repeat(-(-size // drawn.numel()))[:size].view(dtype).view(shape)

    q = filled(SEED, 4, dtype, sum(case.q_lens), case.heads, case.head_dim)
    place = (case.pool_pages, case.page_size, case.kv_heads)
    k, v = (
        filled(SEED + 1 + at, 1, torch.float8_e4m3fn, *place, dim) for at, dim in enumerate((case.head_dim, case.head_dim_v))
    )
    if case.head_dim_v != case.head_dim:
        return SimpleNamespace(q=q, kv=None, k=k, v=v)
    kv = torch.stack([k.view(torch.uint8), v.view(torch.uint8)], dim=1).view(torch.float8_e4m3fn)
    return SimpleNamespace(q=q, kv=kv, k=kv[:, 0], v=kv[:, 1])


@functools.lru_cache(maxsize=4)
def command_numbers(count, seed, largest):
    """The first random numbers of the command, from −`largest` to `largest`: wyrand, whose words become fractions."""
    import torch

    word, parts = (1 << 64) - 1, []
    state, left = seed, count
    while left:
        drawn = []
        for _ in range(left):
            state = (state + 0x2D358DCCAA6C78A5) & word
            product = state * (state ^ 0x8BB84B93962EACC9)
            drawn.append(((product ^ product >> 64) & word) >> 1)
        fractions = torch.tensor(drawn, dtype=torch.int64).to(torch.float32) * 2.0**-63
        # 1 can only come from rounding. The command draws again then.
        parts.append(fractions[fractions < 1])
        left -= parts[-1].numel()
    return largest * (2 * torch.cat(parts) - 1)


def queries_in_e4m3(torch, q, q_lens, parts):
    """Queries as numbers in e4m3, and their scales: one for each request and each of `parts` equal groups of heads.

    The largest query of each becomes the largest number.
    """
    owners = torch.tensor(list(itertools.chain.from_iterable([r] * n for r, n in enumerate(q_lens))), device=q.device)
    grouped = q.float().reshape(len(q), parts, -1)
    largest = torch.zeros(len(q_lens), parts, device=q.device)
    largest.scatter_reduce_(0, owners[:, None].expand(-1, parts), grouped.abs().amax(-1), "amax")
    scales = largest.clamp(min=1e-6) / LARGEST_E4M3
    numbers = (grouped / scales[owners][..., None]).to(torch.float8_e4m3fn)
    return numbers.view(q.shape), scales


def gathered(torch, pool, ids):
    """Pages of a pool, in any type."""
    if pool.dtype.itemsize > 1:
        return pool[ids]
    # PyTorch does not index numbers of 8 bits everywhere.
    return pool.view(torch.uint8)[ids].view(pool.dtype)


def random_rows(torch, tokens, dtype, generator, device):
    """Rows of 656 bytes: 512 numbers in e4m3, 4 scales in f32, 64 elements in bf16. And the keys that they hold."""
    numbers = torch.empty(tokens, 512, device=device, dtype=torch.float32)
    numbers = numbers.uniform_(-1, 1, generator=generator).to(torch.float8_e4m3fn)
    rest = torch.empty(tokens, 64, device=device, dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)
    scales = torch.tensor(ROW_SCALES, dtype=torch.float32, device=device)
    rows = torch.empty(tokens, ROW_BYTES, dtype=torch.uint8, device=device)
    rows[:, :512] = numbers.view(torch.uint8)
    rows[:, 512:528] = scales.view(torch.uint8)
    rows[:, 528:] = rest.view(torch.uint8)
    keys = numbers.float().view(tokens, 4, 128) * scales[:, None]
    return rows, torch.cat([keys.view(tokens, 512).to(dtype), rest.to(dtype)], dim=1)


def keys_and_values(torch, case, tensors, token, request, index):
    """The keys and the values that a query token attends to, in f64: token, KV head, dimension."""
    q_len, kv_len, pages = case.requests[request]
    begin, end = case.visible(q_len, kv_len, index)
    ids = torch.tensor(pages, device=tensors.q.device)
    if not case.latent:
        pools = (tensors.k, tensors.v)
        pages = (gathered(torch, pool, ids).float().double() for pool in pools)
        return tuple(part.reshape(-1, case.kv_heads, part.shape[-1])[begin:end] for part in pages)
    rows = tensors.latent[ids].reshape(-1, case.head_dim)
    if case.top_k:
        chosen = next(keys for at, keys in enumerate(case.chosen()) if at == token)
        rows = rows[torch.tensor(list(chosen), device=rows.device)]
    else:
        rows = rows[begin:end]
    rows = rows.double()[:, None]
    return rows, rows[..., : case.head_dim_v]


def errors(torch, case, tensors, out, in_8_bits=False):
    """The largest errors of sampled query tokens against attention in f64.

    Products in 8 bits may have the errors that the command allows for them (`--compute f8`).
    """
    parts = out if isinstance(out, list) else [out]
    # Some return log-sums too.
    parts = [part[0] if isinstance(part, tuple) else part for part in parts]
    out = torch.cat([part.reshape(-1, case.heads, case.head_dim_v) for part in parts])
    owners = [(r, i) for r, q_len in enumerate(case.q_lens) for i in range(q_len)]
    count = min(CHECKED_TOKENS, len(owners))
    picks = sorted({n * (len(owners) - 1) // max(count - 1, 1) for n in range(count)})
    unit = 1 / 16 if in_8_bits else {"bf16": 1 / 256, "f16": 1 / 2048}.get(case.dtype, 1e-5)
    worst, of_bound = 0.0, 0.0
    for token in picks:
        k, v = (
            part.repeat_interleave(case.heads // case.kv_heads, dim=1)
            for part in keys_and_values(torch, case, tensors, token, *owners[token])
        )
        logits = torch.einsum("hd,khd->hk", tensors.q[token].double(), k) * case.scale
        if case.soft_cap:
            logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
        right = torch.einsum("hk,khd->hd", torch.softmax(logits, dim=-1), v)
        off = torch.nan_to_num((out[token].double() - right).abs(), nan=sys.float_info.max)
        worst = max(worst, off.max().item())
        of_bound = max(of_bound, (off / (unit * (1.5 * right.abs() + 0.5))).max().item())
    of_bound = min(of_bound, sys.float_info.max)  # JSON has no infinity
    found = {"tokens": len(picks), "out": worst, "out_of_bound": of_bound, "lse": None}
    return {**found, "in_8_bits": True} if in_8_bits else found
