"""What peers share: how they are refused, how their packages are found, and the tables of a batch."""

import importlib
import os
from types import SimpleNamespace


class Absent(Exception):
    """The package is not there."""


class Unsupported(Exception):
    """The peer does not take this case."""


WORKSPACE_BYTES = 384 << 20


def flashinfer_package():
    """FlashInfer."""
    try:
        import flashinfer
    except Exception as error:  # a broken installation raises more than ImportError
        raise Absent(f"flashinfer does not import: {error}") from error
    return flashinfer


def workspace(device):
    """Memory for FlashInfer's partial results."""
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


# Where FlashMLA's Python module is not there, but sgl-kernel's library with its operators is.
FLASH_MLA_LIBRARY = "FLASH_MLA_LIBRARY"


def flash_mla_package():
    """FlashMLA, or a library's operators with the two functions of its module that peers call."""
    library = os.environ.get(FLASH_MLA_LIBRARY)
    if library:
        import torch

        _load(torch, library)
        return FlashMlaOperators(torch.ops.sgl_kernel)
    try:
        import flash_mla
    except Exception as error:
        raise Absent(f"flash_mla does not import: {error}") from error
    return flash_mla


class FlashMlaOperators:
    """FlashMLA's functions on the operators of sgl-kernel's library."""

    def __init__(self, operators):
        self.operators = operators

    @staticmethod
    def get_mla_metadata(*_):
        """The first call computes the schedule, and later ones take it from here."""
        return SimpleNamespace(schedule=(None, None)), None

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, _splits, *, softmax_scale, causal,
        is_fp8_kvcache=False, indices=None,
    ):
        if is_fp8_kvcache:
            # Without lengths of the lists, sinks, and a second cache with its indices and lengths.
            found = self.operators.sparse_decode_fwd(
                q, k_cache, indices, None, None, *metadata.schedule, None, None, None, head_dim_v, softmax_scale,
            )
        else:
            found = self.operators.dense_decode_fwd(
                q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal, *metadata.schedule,
            )
        out, lse, *metadata.schedule = found
        return out, lse


# Where FlashAttention-3's Python module is not there, but a library with its operators is.
FA3_LIBRARY = "FLASH_ATTN_3_LIBRARY"
# The same for vLLM's build, and where else it is.
VLLM_FA3_LIBRARY = "VLLM_FLASH_ATTN_3_LIBRARY"
VLLM_MODULES = ("vllm.vllm_flash_attn", "vllm_flash_attn")
# What vLLM's operator needs, but whose schema has no defaults.
VLLM_DEFAULTS = {"is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


def flash_attention_3():
    """The forward function of a ragged batch on pages, by keywords.

    `qv` is the part of the queries that is multiplied with the values, for latent attention.
    """
    import torch

    library = os.environ.get(FA3_LIBRARY)
    if not library:
        try:
            import flash_attn_interface
        except Exception as error:
            raise Absent(f"flash_attn_interface does not import: {error}") from error
        return flash_attn_interface.flash_attn_with_kvcache
    _load(torch, library)
    operator = torch.ops.flash_attn_3.fwd.default
    return by_keywords(operator, operator._schema.arguments)


def vllm_flash_attention_3():
    """vLLM's build of FlashAttention-3, with the keywords of `flash_attn_with_kvcache`."""
    import torch

    library = os.environ.get(VLLM_FA3_LIBRARY)
    if library:
        _load(torch, library)
        operator = torch.ops._vllm_fa3_C.fwd.default
        return by_keywords(operator, operator._schema.arguments, VLLM_DEFAULTS)
    reasons = []
    for name in VLLM_MODULES:
        try:
            return of_vllm(importlib.import_module(name).flash_attn_varlen_func)
        except Exception as error:  # vLLM looks for devices when it is imported
            reasons.append(f"{name} does not import: {error}")
    raise Absent("; ".join(reasons))


def of_vllm(function):
    """vLLM's `flash_attn_varlen_func` with the keywords of `flash_attn_with_kvcache`."""

    def call(q, k_cache, v_cache, *, cache_seqlens, page_table, window_size, qv=None, **others):
        if qv is not None:
            others["q_v"] = qv
        # Pages bound the number of keys, as in the other build.
        return function(
            q, k_cache, v_cache, seqused_k=cache_seqlens, block_table=page_table, window_size=list(window_size),
            max_seqlen_k=page_table.shape[1] * k_cache.shape[1], fa_version=3, **others,
        )

    return call


def _load(torch, library):
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise Absent(f"{library} does not load: {error}") from error


def by_keywords(operator, known, more=None):
    """The operator with the keywords of `flash_attn_with_kvcache`.

    `known` are the arguments of its schema, and `more` are values for those that have no default.
    """
    nothing = {argument.name: None for argument in known}
    defaults = {name: value for name, value in (more or {}).items() if name in nothing}
    defaults |= {argument.name: argument.default_value for argument in known if argument.has_default_value()}

    def call(q, k_cache, v_cache, *, cache_seqlens, page_table, window_size, causal, qv=None, **others):
        if qv is not None:
            if "q_v" not in nothing:
                raise Unsupported("the library of FlashAttention-3 has no q_v")
            others["q_v"] = qv
        found = operator(**{
            **nothing, **defaults, **others, "q": q, "k": k_cache, "v": v_cache, "seqused_k": cache_seqlens,
            "page_table": page_table, "is_causal": causal,
            "window_size_left": window_size[0], "window_size_right": window_size[1],
        })
        # Outputs come first, then LSEs and memory. vLLM's operator returns a list, which is not a list of outputs.
        return found[0] if isinstance(found, (list, tuple)) else found

    return call


def table(case, requests, device):
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
        indices=torch.tensor([p for _, _, pages in requests for p in pages], dtype=torch.int32, device=device),
        last=torch.tensor([(kv - 1) % case.page_size + 1 for _, kv, _ in requests], dtype=torch.int32),
        kv_lens=torch.tensor([kv for _, kv, _ in requests], dtype=torch.int32),
    )


def page_lists(case, device):
    """The pages of each request as rows of one width, and the number of its keys."""
    import torch

    longest = max(len(pages) for _, _, pages in case.requests)
    rows = torch.zeros(len(case.requests), longest, dtype=torch.int32)
    for row, (_, _, ids) in enumerate(case.requests):
        rows[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return rows.to(device), torch.tensor(case.kv_lens, dtype=torch.int32, device=device)


def one_length(case):
    """The query tokens and the keys of each request, if these are the same for all."""
    (q_len, kv_len, _), *rest = case.requests
    if any((q, kv) != (q_len, kv_len) for q, kv, _ in rest):
        raise Unsupported("takes requests of one length")
    return q_len, kv_len


def own_keys_and_values(case, one_dimension=True, eight_bits=False):
    """Refuses what peers for keys and values of their own do not take. With `eight_bits` they take e4m3."""
    if case.latent:
        raise Unsupported("takes no latent keys")
    if case.kv_dtype != case.dtype and not (eight_bits and case.in_e4m3):
        raise Unsupported(f"takes keys of the queries' type, not {case.kv_dtype} with {case.dtype}")
    if one_dimension and case.head_dim_v != case.head_dim:
        raise Unsupported(f"takes keys and values of one dimension, not {case.head_dim} and {case.head_dim_v}")


def tried(run):
    """The run, after one call in which a build without 8 bits says so."""
    try:
        run()
    except RuntimeError as error:
        says = str(error).strip().split("\n")[0]
        if "fp8" not in says.lower():
            raise
        raise Unsupported(says) from error
    return run


def latent_keys(case):
    """Refuses what peers for latent keys do not take."""
    if not case.latent:
        raise Unsupported("takes latent keys only")
    if case.soft_cap or case.window_left >= 0:
        raise Unsupported("takes plain attention only")
