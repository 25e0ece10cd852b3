"""Workload files (docs/guide/workloads.md) as page tables, by the rules that the command uses."""

import json
import random
from dataclasses import dataclass, field

SEED = 1


@dataclass
class Case:
    """One batch: heads, and for each request its query tokens, keys and pages."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    causal: bool
    window_left: int
    soft_cap: float
    scale: float
    requests: list = field(default_factory=list)
    pool_pages: int = 0

    @property
    def q_lens(self):
        return [q_len for q_len, _, _ in self.requests]

    @property
    def kv_lens(self):
        return [kv_len for _, kv_len, _ in self.requests]

    def visible(self, q_len, kv_len, index):
        """First and one past the last key that a query of a request sees."""
        position = kv_len - q_len + index
        end = min(position + 1, kv_len) if self.causal else kv_len
        begin = 0 if self.window_left < 0 else max(position - self.window_left, 0)
        return min(begin, end), end

    def work(self):
        """Bytes that must move, each key and value once, and operations on visible pairs."""
        element = {"bf16": 2, "f16": 2, "f32": 4}[self.dtype]
        read = {}
        pairs = 0
        for q_len, kv_len, pages in self.requests:
            for index in range(q_len):
                begin, end = self.visible(q_len, kv_len, index)
                pairs += end - begin
            first = self.visible(q_len, kv_len, 0)[0] // self.page_size if q_len else len(pages)
            for at in range(first, len(pages)):
                tokens = min(self.page_size, kv_len - at * self.page_size)
                read[pages[at]] = max(tokens, read.get(pages[at], 0))
        rows = 2 * sum(self.q_lens) * self.heads * self.head_dim * element
        keys = 2 * sum(read.values()) * self.kv_heads * self.head_dim * element
        return rows + keys, pairs * 4 * self.head_dim * self.heads


def load(path):
    """The cases of a file."""
    with open(path, encoding="utf-8") as source:
        file = json.load(source)
    if not isinstance(file, dict):
        raise ValueError(f"{path} is not a workload file of docs/guide/workloads.md")
    return [_case({**file, "name": None, **case}) for case in file.get("cases", [file])]


def _case(fields):
    variant = fields.get("variant") or {}
    head_dim = fields["head_dim"]
    if fields.get("head_dim_v", head_dim) != head_dim or fields.get("kv_dtype", None):
        raise ValueError(f"{fields['name']}: head_dim_v and kv_dtype are not supported by the peers")
    case = Case(
        name=fields["name"] or "unnamed",
        heads=fields["heads"],
        kv_heads=fields["kv_heads"],
        head_dim=head_dim,
        dtype=fields.get("dtype", "bf16"),
        page_size=fields.get("page_size", 16),
        causal=variant.get("causal", True),
        window_left=-1 if variant.get("window_left") is None else variant["window_left"],
        soft_cap=variant.get("logits_soft_cap") or 0.0,
        scale=variant.get("sm_scale") or head_dim**-0.5,
    )
    for request in fields.get("requests") or []:
        for _ in range(request.get("count", 1)):
            pages = _extend(case, [], request["kv_len"])
            case.requests.append((request["q_len"], request["kv_len"], pages))
    if fields.get("tree"):
        _grow(case, fields["tree"])
    shuffled = list(range(case.pool_pages))
    random.Random(SEED).shuffle(shuffled)
    case.requests = [(q, kv, [shuffled[page] for page in pages]) for q, kv, pages in case.requests]
    return case


def _extend(case, shared, length):
    more = -(-length // case.page_size) - len(shared)
    pages = shared + list(range(case.pool_pages, case.pool_pages + more))
    case.pool_pages += more
    return pages


def _grow(case, tree):
    levels = list(zip(tree["nodes_per_level"], tree["tokens_per_level"], strict=True))
    above, length = [[]], 0
    for level, (nodes, tokens) in enumerate(levels):
        length += tokens
        last = level + 1 == len(levels)
        shared = length if last else length - length % case.page_size
        above = [_extend(case, above[node * len(above) // nodes], shared) for node in range(nodes)]
    case.requests += [(1, length, pages) for pages in above]
