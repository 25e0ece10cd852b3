#!/usr/bin/env python3
"""Writes a workload file of random prompts and chunks, for comparisons that no suite was tuned for.

  python3 peers/random_prompts.py --seed 20261201 random.json
  python3 peers/run.py random.json --peers fa3,fa3-dense,vfa3 --tandem target/release/tandem
"""

import argparse
import json
import random
import sys

HEADS = [(28, 4), (32, 8), (40, 8), (64, 8)]
HEAD_DIMS = [64, 128, 256]
SOFT_CAPS = [30, 50]
# Query tokens of a case, and keys of a request.
MOST_TOKENS = 20000
MOST_KEYS = 16384


class Draw:
    """Random numbers of a seed. Only `random()` is the same in all versions of Python."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def below(self, count):
        return int(self.random() * count)

    def of(self, choices):
        return choices[self.below(len(choices))]

    def one_in(self, count):
        return self.below(count) == 0

    def length(self, least, most):
        """A length: each factor of two is as likely as any other."""
        return min(int(least * (most / least) ** self.random()), most)


def case(draw, index):
    """One case: whole prompts of one length, ragged ones, or chunks behind earlier keys."""
    heads, kv_heads = draw.of(HEADS)
    head_dim = draw.of(HEAD_DIMS)
    form = draw.of(["whole", "whole", "ragged", "chunk"])
    q_len = draw.length(256, 10000)
    count = draw.length(1, max(MOST_TOKENS // q_len, 1))
    if form == "ragged":
        count = max(count, 2)
        least = max(q_len // 8, 16)
        lengths = [least + draw.below(q_len - least + 1) for _ in range(count)]
        requests = [{"q_len": length, "kv_len": length} for length in lengths]
        words = f"{count} ragged of {min(lengths)} to {max(lengths)}"
    else:
        kv_len = q_len if form == "whole" else draw.length(q_len, MOST_KEYS)
        requests = [{"q_len": q_len, "kv_len": kv_len, "count": count}]
        words = f"{count} x {q_len}" if kv_len == q_len else f"{count} x {q_len} @ {kv_len}"
    words += f" {heads}/{kv_heads} d{head_dim}"
    variant = {}
    # Windows as models have them: before the query, and shorter than the keys.
    if draw.one_in(4):
        longest = max(request["kv_len"] for request in requests)
        variant["window_left"] = draw.length(64, max(longest // 2, 64)) - 1
        words += f" window {variant['window_left'] + 1}"
    elif draw.one_in(5):
        variant["causal"] = False
        words += " full"
    if draw.one_in(4):
        variant["logits_soft_cap"] = draw.of(SOFT_CAPS)
        words += f" cap {variant['logits_soft_cap']}"
    return {
        "name": f"{index:03} {words}", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "variant": variant,
        "requests": requests,
    }


def workload(seed, count):
    """The file of a seed."""
    draw = Draw(seed)
    return {
        "description": f"{count} random shapes of prompts: peers/random_prompts.py --seed {seed} --count {count}",
        "dtype": "bf16", "page_size": 16,
        "cases": [case(draw, index) for index in range(count)],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="the workload file to write (docs/guide/workloads.md)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same file; without one, any")
    parser.add_argument("--count", type=int, default=40, help="number of shapes (40)")
    args = parser.parse_args()
    if not 1 <= args.count <= 1000:
        parser.error("--count: give 1 to 1000")
    seed = random.SystemRandom().randrange(10**8) if args.seed is None else args.seed
    with open(args.output, "x", encoding="utf-8") as file:
        file.write(json.dumps(workload(seed, args.count), indent=1) + "\n")
    print(f"seed {seed}: {args.count} shapes in {args.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
