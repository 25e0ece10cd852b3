#!/usr/bin/env python3
"""Runs workload files on other implementations and writes results as `tandem bench --json` does.

  python3 peers/run.py cli/suites/decode.json --json decode-peers.json
  python3 peers/run.py cli/suites/pod.json --case 1024 --tandem target/release/tandem
  python3 peers/run.py cli/suites/prefill.json --kv-dtype f8e4m3
"""

import argparse
import dataclasses
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import workload
from common import FA3_LIBRARY, FLASH_MLA_LIBRARY, VLLM_FA3_LIBRARY, Absent, Unsupported
from implementations import PEERS, computes_in_8_bits, missing
from tensors import errors, random_tensors

# Packages of peers: their module, their name in results, and how they are installed.
PACKAGES = [
    ("flashinfer", "FlashInfer", ["flashinfer-python"]),
    ("flash_mla", "FlashMLA", ["flash_mla"]),
    ("flash_attn_interface", "FlashAttention-3", ["flash_attn_3", "flash-attn-3"]),
    ("vllm", "vLLM", ["vllm"]),
    ("vllm_flash_attn", "vllm-flash-attn", ["vllm-flash-attn"]),
]
# Variables with libraries that stand in for packages, and their name in results.
NAMED = [
    (FA3_LIBRARY, "FlashAttention-3"), (VLLM_FA3_LIBRARY, "vLLM's FlashAttention-3"), (FLASH_MLA_LIBRARY, "FlashMLA"),
]

FLUSH_BYTES = 256 << 20
FEWEST_RUNS = 7
# The fastest run counts, which longer measurements hardly change.
CEILING_SECONDS = 0.5


def quartiles(times_us):
    """The same summary as the command's."""
    times_us = sorted(times_us)

    def at(quantile):
        place = quantile * (len(times_us) - 1)
        low = int(place)
        high = min(low + 1, len(times_us) - 1)
        return times_us[low] + (times_us[high] - times_us[low]) * (place - low)

    return {
        "median_us": at(0.5), "q1_us": at(0.25), "q3_us": at(0.75), "min_us": times_us[0], "runs": len(times_us),
    }


def versions():
    """Names and versions of the packages that peers have imported."""
    found = []
    for module, name, distributions in PACKAGES:
        package = sys.modules.get(module)
        if package is not None:
            version = getattr(package, "__version__", None) or installed_version(distributions)
            found.append(f"{name} {version or 'of unknown version'}")
    for variable, name in NAMED:
        path = os.environ.get(variable)
        if path and os.path.exists(path):
            # Such a library has no version, so its bytes say which it is.
            with open(path, "rb") as file:
                digest = hashlib.sha256(file.read()).hexdigest()
            found.append(f"{name} of {os.path.basename(path)} (sha256 {digest[:12]})")
    return found


def installed_version(distributions):
    """The version of the first of these distributions that is installed."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


class Gpu:
    """Timing on the first GPU."""

    def __init__(self, seconds):
        import torch

        self.torch, self.seconds = torch, seconds
        self.flush_memory = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.not_captured, self.in_8_bits = set(), set()

    def machine(self):
        torch = self.torch
        details = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
        for version in versions():
            details += f"; {version}"
        if self.not_captured:
            details += f"; without CUDA graph: {', '.join(sorted(self.not_captured))}"
        if self.in_8_bits:
            details += f"; queries rounded to e4m3 before the run: {', '.join(sorted(self.in_8_bits))}"
        return {"backend": "gpu", "name": torch.cuda.get_device_name(0), "details": details}

    def captured(self, name, run):
        """The call as a graph, or as it is where it cannot be captured."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except Exception:
            self.not_captured.add(name)
            torch.cuda.synchronize()
            return run
        return graph.replay

    def time(self, run, flush, most_seconds=math.inf):
        torch = self.torch
        for _ in range(3):
            run()
        times = []
        over = time.monotonic() + min(self.seconds, most_seconds)
        while len(times) < FEWEST_RUNS or time.monotonic() < over:
            if flush:
                self.flush_memory.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return quartiles(times)

    def ceilings(self):
        torch = self.torch
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
        target = torch.empty_like(source)
        floats = source.view(torch.int32)
        copy = self.time(lambda: target.copy_(source), False, CEILING_SECONDS)["min_us"]
        read = self.time(lambda: torch.max(floats), False, CEILING_SECONDS)["min_us"]
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        product = self.time(lambda: a @ a, False, CEILING_SECONDS)["min_us"]
        return {
            "read_bytes_per_s": source.numel() / read * 1e6,
            "copy_bytes_per_s": 2 * source.numel() / copy * 1e6,
            "flops_per_s": 2 * 8192**3 / product * 1e6,
        }


def empty_result(case, name):
    bytes_, flops = case.work()
    return {
        "case": case.name, "implementation": name,
        "heads": case.words,
        "page_size": case.page_size, "requests": len(case.requests), "query_tokens": sum(case.q_lens),
        "bytes": bytes_, "flops": flops,
        "plan": None, "flushed": None, "warm": None, "errors": None, "skipped": None,
    }


def run_peer(gpu, case, tensors, name):
    result = empty_result(case, name)
    try:
        if case.refused:
            raise Unsupported(case.refused)
        run = PEERS[name](case, tensors)
        in_8_bits = computes_in_8_bits(name, case)
        result["errors"] = errors(gpu.torch, case, tensors, run(), in_8_bits)
        gpu.in_8_bits |= {name} if in_8_bits else set()
        run = gpu.captured(name, run)
        result["flushed"] = gpu.time(run, True)
        result["warm"] = gpu.time(run, False)
    except (Absent, Unsupported) as reason:
        result["skipped"] = str(reason)
    except Exception as error:  # a peer that fails is a result too
        result["skipped"] = f"failed: {error!r}"[:200]
    return result


def run_tandem(program, path, case, more):
    """The case on tandem-attn, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "out.json")
        command = [program, "bench", path, "--case", case.name, "--backend", "gpu", "--json", out]
        command += more
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not os.path.exists(out):
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return {**empty_result(case, "tandem"), "skipped": lines[-1][:200]}
        with open(out, encoding="utf-8") as file:
            results = json.load(file)["results"]
    return next(result for result in results if result["case"] == case.name)


def present(names):
    """The peers whose packages are there; the others are named."""
    there = []
    for name in names:
        package = missing(name)
        if package:
            print(f"absent: {name} (no Python package {package})", file=sys.stderr)
        else:
            there.append(name)
    return there


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", help="a workload file (docs/guide/workloads.md)")
    parser.add_argument("--case", default="", help="only cases whose name has this in it")
    parser.add_argument(
        "--kv-dtype", choices=sorted(workload.BYTES), help="this type for keys and values instead of the workload's",
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="names, separated by commas")
    # A GPU that is kept busy for longer has a lower clock, so all implementations get the same time.
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each way to measure, tandem-attn's too")
    parser.add_argument("--tandem", metavar="PROGRAM", help="run this program on each case too")
    parser.add_argument("--bench", default="", metavar="FLAGS", help="more flags for it: '--check 4'")
    parser.add_argument("--json", metavar="FILE", help="where to write results; else to standard output")
    parser.add_argument("--list", action="store_true", help="say which peers are there")
    args = parser.parse_args()
    args.peers = args.peers.split(",")
    unknown = [name for name in args.peers if name not in PEERS]
    if unknown:
        parser.error(f"unknown peers {unknown}: known are {', '.join(PEERS)}")
    if "--seconds" in args.bench:
        parser.error("--bench: give --seconds to this program, for all implementations")
    if "--kv-dtype" in args.bench:
        parser.error("--bench: give --kv-dtype to this program, for all implementations")
    if not 0 <= args.seconds <= 3600:
        parser.error("--seconds: give 0 to 3600")
    if not args.list and not args.workload:
        parser.error("a workload file is needed")
    return args


def chosen(args):
    """The cases to run, with the type of keys and values that is asked for."""
    cases = [case for case in workload.load(args.workload) if args.case in case.name]
    return [dataclasses.replace(case, kv_dtype=args.kv_dtype or case.kv_dtype) for case in cases]


def write(path, text):
    """Whole or not at all."""
    if path is None:
        print(text)
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def main():
    args = arguments()
    peers = present(args.peers)
    if args.list:
        print("\n".join(peers))
        return 0
    cases = chosen(args)
    if not cases:
        print(f"no case of {args.workload} has {args.case!r} in its name", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print("no PyTorch: pip install torch", file=sys.stderr)
        return 3
    import torch

    if not torch.cuda.is_available():
        print("PyTorch sees no GPU", file=sys.stderr)
        return 3
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    gpu = Gpu(args.seconds)
    ceilings = gpu.ceilings()
    results = []
    for case in cases:
        tensors = random_tensors(torch, case)
        for name in peers:
            result = run_peer(gpu, case, tensors, name)
            results.append(result)
            times = result["flushed"]
            said = f"{times['median_us']:.1f} µs" if times else result["skipped"]
            print(f"{case.name} [{name}]: {said}", file=sys.stderr)
        del tensors
        torch.cuda.empty_cache()
        if args.tandem:
            more = [f"--seconds={args.seconds}", *shlex.split(args.bench)]
            more += ["--kv-dtype", args.kv_dtype] if args.kv_dtype else []
            results.append(run_tandem(args.tandem, args.workload, case, more))
    measured = [result["flushed"]["median_us"] for result in results if result["flushed"]]
    if measured:
        print(f"{len(measured)} measured, median {statistics.median(measured):.1f} µs", file=sys.stderr)
    file = {
        "format": "tandem-results-1", "program": "tandem peers", "date": date, "machine": gpu.machine(),
        "ceilings": ceilings, "options": [f"--kv-dtype {args.kv_dtype}"] if args.kv_dtype else [], "results": results,
    }
    write(args.json, json.dumps(file, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
