"""Workload files (docs/guide/workloads.md) as page tables, by the rules that the command uses."""

import json
import random
from dataclasses import dataclass, field

SEED = 1
# Bytes of elements.
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8e4m3": 1, "f8e5m2": 1}
# A latent key of 576 elements with its scales.
ROW_BYTES = 656
# A name describes so many requests and levels of a tree.
MOST_NAMED = 8
# What no peer computes. Without the check they would compute something else.
VARIANTS = ("sinks", "alibi", "distance_bias", "sigmoid", "rotary")


@dataclass
class Case:
    """One batch: heads, and for each request its query tokens, keys and pages."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kv_dtype: str
    page_size: int
    causal: bool
    window_left: int
    soft_cap: float
    scale: float
    latent: bool = False
    # Number of keys chosen for each query token; 0 if it attends to all.
    top_k: int = 0
    # Why no peer takes the case, or None.
    refused: str | None = None
    requests: list = field(default_factory=list)
    pool_pages: int = 0

    @property
    def q_lens(self):
        return [q_len for q_len, _, _ in self.requests]

    @property
    def kv_lens(self):
        return [kv_len for _, kv_len, _ in self.requests]

    @property
    def in_rows(self):
        """Whether keys are in rows of 656 bytes, with their scales."""
        return self.latent and self.kv_dtype == "f8e4m3" and (self.head_dim, self.head_dim_v) == (576, 512)

    @property
    def in_e4m3(self):
        """Whether keys and values of their own are in e4m3, for queries in 16 bits. Their scale is 1."""
        return not self.latent and self.kv_dtype == "f8e4m3" and self.dtype in ("bf16", "f16")

    @property
    def words(self):
        """The heads in words, as the command's results have them."""
        dims = f"{self.head_dim}" if self.head_dim_v == self.head_dim else f"{self.head_dim}/{self.head_dim_v}"
        latent = " latent" if self.latent else ""
        of_keys = "" if self.kv_dtype == self.dtype else f", KV {self.kv_dtype}"
        return f"{self.heads}/{self.kv_heads} × {dims}{latent} {self.dtype}{of_keys}"

    def visible(self, q_len, kv_len, index):
        """First and one past the last key that a query of a request sees."""
        position = kv_len - q_len + index
        end = min(position + 1, kv_len) if self.causal else kv_len
        begin = 0 if self.window_left < 0 else max(position - self.window_left, 0)
        return min(begin, end), end

    def chosen(self):
        """For each query token, its chosen keys as positions in its request: one of each of `top_k` equal ranges."""
        token = 0
        for q_len, kv_len, _ in self.requests:
            for index in range(q_len):
                _, end = self.visible(q_len, kv_len, index)
                yield [_pick(token, at, end, self.top_k) for at in range(self.top_k)] if end > self.top_k else range(end)
                token += 1

    def slots(self):
        """For each query token, the places of its chosen keys in the pool: `page × page_size + offset`."""
        owners = (pages for q_len, _, pages in self.requests for _ in range(q_len))
        for pages, keys in zip(owners, self.chosen(), strict=True):
            yield [pages[key // self.page_size] * self.page_size + key % self.page_size for key in keys]

    def key_bytes(self):
        """Bytes of a token's keys and values."""
        if self.in_rows:
            return ROW_BYTES
        values = 0 if self.latent else self.head_dim_v
        return (self.head_dim + values) * self.kv_heads * BYTES[self.kv_dtype]

    def work(self):
        """Bytes that must move, each key and value once, and operations on visible pairs."""
        pairs, tokens = self._chosen_work() if self.top_k else self._work()
        rows = sum(self.q_lens) * self.heads * (self.head_dim + self.head_dim_v) * BYTES[self.dtype]
        return rows + tokens * self.key_bytes(), pairs * 2 * (self.head_dim + self.head_dim_v) * self.heads

    def _work(self):
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
        return pairs, sum(read.values())

    def _chosen_work(self):
        pairs, read = 0, set()
        for slots in self.slots():
            pairs += len(slots)
            read.update(slots)
        return pairs, len(read)


def _pick(token, at, keys, top_k):
    """A key of the range `at` of `top_k` equal ranges of the first `keys` keys, the same in the command."""
    first, end = at * keys // top_k, (at + 1) * keys // top_k
    mixed = (token * top_k + at) * 2654435761 % (1 << 32) >> 8
    return first + mixed % (end - first)


def load(path):
    """The cases of a file."""
    with open(path, encoding="utf-8") as source:
        file = json.load(source)
    if not isinstance(file, dict):
        raise ValueError(f"{path} is not a workload file of docs/guide/workloads.md")
    return [_case(_merged(file, case)) for case in file.get("cases", [file])]


def _merged(file, case):
    """A case with the fields that it leaves out from the file, also within the variant."""
    variant = {**(file.get("variant") or {}), **(case.get("variant") or {})}
    return {**file, "name": None, **case, "variant": variant}


def _refused(fields, requests):
    """Why no peer takes a case, or None."""
    variant = fields["variant"]
    # A sigmoid's bias may be 0, which is not false.
    given = [f"variant.{name}" for name in VARIANTS if variant.get(name) is not None and variant[name] is not False]
    given += ["pages_by_head"] if fields.get("pages_by_head") else []
    given += [name for name in ("branches", "one_block_in") if any(request.get(name) for request in requests)]
    return f"no peer takes {', '.join(given)}" if given else None


def _counted(count, thing):
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _levels(numbers):
    words = [str(number) for number in numbers[:MOST_NAMED]]
    return ",".join(words + [f"{len(numbers) - MOST_NAMED} more"] * (len(numbers) > MOST_NAMED))


def _name(fields, requests):
    """The name that the command gives to a case without one: its lengths and heads."""
    words = []
    for request in requests[:MOST_NAMED]:
        count, q_len, kv_len = request.get("count", 1), request["q_len"], request["kv_len"]
        if request.get("branches"):
            words.append(f"{_counted(count, 'draft tree')} of {q_len} @ {kv_len}")
        elif request.get("one_block_in"):
            blocks = f"on one block in {request['one_block_in']}"
            words.append(f"{_counted(count, 'chunk')} of {q_len} @ {kv_len} {blocks}")
        elif q_len == 1:
            words.append(f"{_counted(count, 'decode')} × {kv_len}")
        else:
            words.append(f"{_counted(count, 'chunk')} of {q_len} @ {kv_len}")
    if len(requests) > MOST_NAMED:
        words.append(f"{len(requests) - MOST_NAMED} more")
    if tree := fields.get("tree"):
        nodes, tokens = (_levels(tree[of]) for of in ("nodes_per_level", "tokens_per_level"))
        words.append(f"tree {nodes} of {tokens} tokens")
    return f"{', '.join(words)} {fields['heads']}/{fields['kv_heads']}"


def _case(fields):
    variant = fields["variant"]
    requests = fields.get("requests") or []
    head_dim = fields["head_dim"]
    head_dim_v = fields.get("head_dim_v", head_dim)
    latent = fields.get("latent", False)
    dtype = fields.get("dtype", "bf16")
    # As in DeepSeek's models, whose keys have 128 elements besides those with positions before they are compressed.
    scaled_by = 128 + head_dim - head_dim_v if latent else head_dim
    case = Case(
        name=_name(fields, requests) if fields["name"] is None else fields["name"],
        heads=fields["heads"],
        kv_heads=fields["kv_heads"],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        kv_dtype=fields.get("kv_dtype") or dtype,
        page_size=fields.get("page_size", 16),
        causal=True if variant.get("causal") is None else variant["causal"],
        window_left=-1 if variant.get("window_left") is None else variant["window_left"],
        soft_cap=variant.get("logits_soft_cap") or 0.0,
        scale=variant.get("sm_scale") or scaled_by**-0.5,
        latent=latent,
        top_k=fields.get("top_k") or 0,
        refused=_refused(fields, requests),
    )
    for request in requests:
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
