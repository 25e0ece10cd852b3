"""Tests that need no GPU: python3 -m unittest discover peers

Without PyTorch the tests of page tables and refusals run. With it (for the CPU is enough) so do peers, on stand-ins for
packages that compute what these document.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import common
import implementations
import random_prompts
import run
import workload
from common import Absent, Unsupported

SUITES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli", "suites")
MLA = {"heads": 4, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
WITH_TORCH = importlib.util.find_spec("torch") is not None


def cases(**fields):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(fields, file)
        file.flush()
        return workload.load(file.name)


def one(**fields):
    (case,) = cases(**fields)
    return case


def refusal(name, case):
    """Why a peer refuses a case. It says so before it looks for its package or at tensors."""
    try:
        implementations.PEERS[name](case, SimpleNamespace(q=SimpleNamespace(device="cpu")))
    except Unsupported as reason:
        return str(reason)
    except (Absent, ImportError, AttributeError):
        pass
    return None


class RandomPrompts(unittest.TestCase):
    def test_a_seed_gives_the_same_shapes_of_every_kind(self):
        self.assertEqual(random_prompts.workload(7, 40), random_prompts.workload(7, 40))
        self.assertNotEqual(random_prompts.workload(7, 40)["cases"], random_prompts.workload(8, 40)["cases"])
        for seed in range(20):
            found = cases(**random_prompts.workload(seed, 40))
            self.assertEqual(len({case.name for case in found}), 40)
            self.assertTrue(all(case.refused is None for case in found))
            self.assertLessEqual(max(sum(case.q_lens) for case in found), 20000)
            self.assertLessEqual(max(max(case.kv_lens) for case in found), 16384)
            self.assertTrue(all(q <= kv for case in found for q, kv in zip(case.q_lens, case.kv_lens)))
            self.assertEqual({(case.heads, case.kv_heads) for case in found}, set(random_prompts.HEADS))
            self.assertEqual({case.head_dim for case in found}, {64, 128, 256})
            for has in [
                lambda case: case.window_left >= 0,
                lambda case: case.soft_cap,
                lambda case: not case.causal,
                lambda case: case.q_lens != case.kv_lens,
                lambda case: len(set(case.q_lens)) > 1,
            ]:
                self.assertTrue(any(map(has, found)) and not all(map(has, found)))

    def test_the_seed_is_printed_and_stands_in_the_file(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "random.json")
            says = io.StringIO()
            with mock.patch.object(sys, "argv", ["random_prompts.py", path]), contextlib.redirect_stderr(says):
                random_prompts.main()
            seed = int(says.getvalue().split()[1].rstrip(":"))
            with open(path, encoding="utf-8") as file:
                self.assertEqual(json.load(file), random_prompts.workload(seed, 40))


class Workloads(unittest.TestCase):
    def test_every_suite_is_read(self):
        for name in sorted(os.listdir(SUITES)):
            found = workload.load(os.path.join(SUITES, name))
            self.assertEqual(len(found), len({case.name for case in found}), name)

    def test_latent_keys_are_read_once(self):
        case = one(**MLA, page_size=64, requests=[{"q_len": 1, "kv_len": 100, "count": 2}])
        rows = 2 * 4 * (576 + 512) * 2
        self.assertEqual(case.work(), (rows + 200 * 576 * 2, 200 * 2 * (576 + 512) * 4))
        self.assertEqual(case.scale, 192**-0.5)
        self.assertEqual(case.words, "4/1 × 576/512 latent bf16")
        in_rows = one(**MLA, kv_dtype="f8e4m3", requests=[{"q_len": 1, "kv_len": 100, "count": 2}])
        self.assertEqual(in_rows.work()[0], rows + 200 * 656)

    def test_values_may_be_shorter_than_keys(self):
        case = one(heads=4, kv_heads=2, head_dim=192, head_dim_v=128, requests=[{"q_len": 3, "kv_len": 3}])
        self.assertEqual(case.work(), (3 * (4 + 2) * 320 * 2, 6 * 2 * 320 * 4))

    def test_variants_of_a_file_are_those_of_its_cases(self):
        (case,) = cases(
            heads=2, kv_heads=1, head_dim=64, variant={"causal": False, "window_left": 7},
            cases=[{"variant": {"window_left": None}, "requests": [{"q_len": 1, "kv_len": 9}]}],
        )
        self.assertEqual((case.causal, case.window_left), (False, -1))

    def test_what_no_peer_computes_is_refused(self):
        few = {"heads": 2, "kv_heads": 1, "head_dim": 64}
        plain = {"q_len": 5, "kv_len": 9}
        self.assertIsNone(one(**few, requests=[plain]).refused)
        for fields, says in [
            ({"variant": {"sinks": True}, "requests": [plain]}, "variant.sinks"),
            ({"variant": {"sinks": False, "sigmoid": 0.0}, "requests": [plain]}, "variant.sigmoid"),
            ({"variant": {"distance_bias": 9}, "requests": [plain]}, "variant.distance_bias"),
            ({"variant": {"rotary": {"theta": 1e4}}, "requests": [plain]}, "variant.rotary"),
            ({"requests": [{**plain, "branches": 2}]}, "branches"),
            ({"requests": [{**plain, "one_block_in": 2}]}, "one_block_in"),
            ({"pages_by_head": 2, "requests": [plain]}, "pages_by_head"),
        ]:
            self.assertIn(says, one(**few, **fields).refused)

    def test_another_type_of_keys_is_used(self):
        suite = os.path.join(SUITES, "prefill.json")
        args = ["run.py", suite, "--kv-dtype", "f8e4m3"]
        with mock.patch.object(sys, "argv", args):
            found = run.chosen(run.arguments())
        self.assertTrue(all(case.in_e4m3 for case in found))
        self.assertIn("KV f8e4m3", found[0].words)
        plain = workload.load(suite)[0]
        halves = plain.key_bytes() * sum(plain.kv_lens) // 2
        self.assertEqual(found[0].work(), (plain.work()[0] - halves, plain.work()[1]))
        says = io.StringIO()
        with mock.patch.object(sys, "argv", [*args, "--bench", "--kv-dtype bf16"]), contextlib.redirect_stderr(says):
            with self.assertRaises(SystemExit):
                run.arguments()
        self.assertIn("give --kv-dtype to this program", says.getvalue())

    def test_chosen_keys_are_visible_and_different(self):
        requests = [{"q_len": 2, "kv_len": 30}, {"q_len": 1, "kv_len": 5}]
        case = one(**MLA, kv_dtype="f8e4m3", top_k=8, page_size=4, requests=requests)
        first, second, short = (list(keys) for keys in case.chosen())
        for keys, end in ((first, 29), (second, 30)):
            self.assertEqual(len(set(keys)), 8)
            self.assertTrue(all(0 <= key < end for key in keys))
        self.assertEqual(short, [0, 1, 2, 3, 4])
        pages = case.requests[0][2]
        self.assertEqual(next(iter(case.slots()))[3], pages[first[3] // 4] * 4 + first[3] % 4)


class Versions(unittest.TestCase):
    def setUp(self):
        variables = mock.patch.dict(os.environ)
        variables.start()
        self.addCleanup(variables.stop)
        for variable, _ in run.NAMED:
            os.environ.pop(variable, None)

    def test_results_name_the_versions_of_imported_packages(self):
        packages = {
            "flashinfer": SimpleNamespace(__version__="0.6.1"), "flash_mla": SimpleNamespace(__version__="1.0.0"),
            "flash_attn_interface": SimpleNamespace(), "vllm": SimpleNamespace(__version__="0.12.0"),
        }
        with (
            mock.patch.dict(sys.modules, packages),
            mock.patch.object(run.importlib.metadata, "version", side_effect=installed({"flash_attn_3": "3.0.0"})),
        ):
            found = run.versions()
        self.assertEqual(found, ["FlashInfer 0.6.1", "FlashMLA 1.0.0", "FlashAttention-3 3.0.0", "vLLM 0.12.0"])

    def test_a_package_without_a_version_is_named_too(self):
        packages = {**dict.fromkeys(module for module, _, _ in run.PACKAGES), "flash_mla": SimpleNamespace()}
        with (
            mock.patch.dict(sys.modules, packages),
            mock.patch.object(run.importlib.metadata, "version", side_effect=installed({})),
        ):
            self.assertEqual(run.versions(), ["FlashMLA of unknown version"])

    def test_a_library_of_operators_is_named(self):
        absent = dict.fromkeys(module for module, _, _ in run.PACKAGES)
        with tempfile.NamedTemporaryFile(suffix="_C.so") as file:
            file.write(b"code")
            file.flush()
            for variable, name in run.NAMED:
                with mock.patch.dict(sys.modules, absent), mock.patch.dict(os.environ, {variable: file.name}):
                    (found,) = run.versions()
                self.assertEqual(found, f"{name} of {os.path.basename(file.name)} (sha256 5694d08a2e53)")


def installed(known):
    """Stands in for `importlib.metadata.version`."""

    def version(name):
        if name not in known:
            raise run.importlib.metadata.PackageNotFoundError(name)
        return known[name]

    return version


class Refusals(unittest.TestCase):
    def test_peers_take_the_keys_that_they_read(self):
        latent = one(**MLA, page_size=64, requests=[{"q_len": 1, "kv_len": 100}])
        other = one(heads=4, kv_heads=2, head_dim=64, requests=[{"q_len": 1, "kv_len": 1}])
        of_latent = {"flashmla", "flashinfer-mla", "fa3-mla", "vfa3-mla", "sdpa-mla"}
        for name in implementations.PEERS:
            if name.endswith(("-serial", "-streams", "-pod")):
                continue
            refusing, taken = (other, latent) if name in of_latent else (latent, other)
            with self.subTest(name):
                self.assertIn("latent", refusal(name, refusing) or "")
                self.assertIsNone(refusal(name, taken))

    def test_reasons_name_what_is_taken(self):
        decode = [{"q_len": 1, "kv_len": 100}]
        chosen = one(**MLA, kv_dtype="f8e4m3", top_k=9, requests=decode)
        self.assertIn("whole contexts", refusal("fa3-mla", chosen))
        self.assertIn("whole contexts", refusal("flashinfer-mla", chosen))
        wide = {"heads": 4, "kv_heads": 4, "head_dim": 192, "head_dim_v": 128, "requests": [{"q_len": 9, "kv_len": 9}]}
        self.assertIn("192 and 128", refusal("sdpa-fa2", one(**wide)))
        self.assertIn("192 and 128", refusal("flashinfer-fa3", one(**wide)))
        self.assertIsNone(refusal("fa3-dense", one(**wide)))

    def test_eight_bits_are_taken_by_some(self):
        few = {"heads": 4, "kv_heads": 4, "head_dim": 64}
        takes = {"fa3", "fa3-dense", "vfa3", "flashinfer-fa2", "flashinfer-fa3", "flashinfer-decode"}
        e4m3 = one(**few, kv_dtype="f8e4m3", requests=[{"q_len": 1, "kv_len": 1}])
        hybrid = one(**few, kv_dtype="f8e4m3", requests=[{"q_len": 3, "kv_len": 9}, {"q_len": 1, "kv_len": 5}])
        e5m2 = one(**few, kv_dtype="f8e5m2", requests=[{"q_len": 1, "kv_len": 1}])
        of_f32 = one(**few, dtype="f32", kv_dtype="f8e4m3", requests=[{"q_len": 1, "kv_len": 1}])
        for name in ("sdpa-cudnn", "sdpa-fa2", *takes):
            with self.subTest(name):
                self.assertIn("f8e5m2", refusal(name, e5m2))
                self.assertIn("f8e4m3 with f32", refusal(name, of_f32))
                if name in takes:
                    self.assertIsNone(refusal(name, e4m3))
                else:
                    self.assertIn("f8e4m3", refusal(name, e4m3))
        self.assertIn("f8e4m3", refusal("flashinfer-pod", hybrid))

    def test_builds_without_eight_bits_say_so(self):
        def fails(says):
            def run():
                raise RuntimeError(says)

            return run

        with self.assertRaisesRegex(Unsupported, "^This flash attention build does not support FP8[.]$"):
            common.tried(fails("This flash attention build does not support FP8.\nException raised from here"))
        with self.assertRaisesRegex(RuntimeError, "another"):
            common.tried(fails("another reason"))

    def test_flash_mla_reads_rows_for_64_or_128_heads(self):
        decode = [{"q_len": 1, "kv_len": 100}]
        for heads, top_k in ((16, None), (32, 9), (96, 9)):
            case = one(**{**MLA, "heads": heads}, kv_dtype="f8e4m3", requests=decode, **({"top_k": top_k} if top_k else {}))
            self.assertIn(f"64 or 128 query heads with rows of 656 bytes, not {heads}", refusal("flashmla", case) or "")
        for heads in (64, 128):
            case = one(**{**MLA, "heads": heads}, kv_dtype="f8e4m3", requests=decode)
            self.assertIsNone(refusal("flashmla", case))
        self.assertIsNone(refusal("flashmla", one(**{**MLA, "heads": 16}, page_size=64, requests=decode)))

    def test_absent_packages_are_named(self):
        with mock.patch.dict(sys.modules, {"flash_mla": None, "flashinfer": None, "flash_attn_interface": None}):
            for find in (common.flash_mla_package, common.flashinfer_package):
                with self.assertRaises(Absent):
                    find()
        with mock.patch.object(importlib.util, "find_spec", lambda _: None), mock.patch.dict(os.environ) as given:
            given.pop(common.VLLM_FA3_LIBRARY, None)
            self.assertEqual(implementations.missing("vfa3"), "vllm")
            given.pop(common.FLASH_MLA_LIBRARY, None)
            self.assertEqual(implementations.missing("flashmla"), "flash_mla")
            given[common.VLLM_FA3_LIBRARY] = given[common.FLASH_MLA_LIBRARY] = "a.so"
            for name in ("vfa3", "vfa3-mla", "flashmla"):
                self.assertIsNone(implementations.missing(name))

    def test_flash_mla_operators_are_the_functions_of_its_module(self):
        given = []

        def operator(*arguments):
            given.append(arguments)
            return "out", "lse", "tiles", "splits"

        package = common.FlashMlaOperators(SimpleNamespace(dense_decode_fwd=operator, sparse_decode_fwd=operator))
        metadata, splits = package.get_mla_metadata("lengths", 16, 1)
        latent = ("q", "cache", "pages", "lengths", 512, metadata, splits)
        for _ in range(2):
            found = package.flash_mla_with_kvcache(*latent, softmax_scale=0.5, causal=True)
            self.assertEqual(found, ("out", "lse"))
        dense = ("q", "cache", 512, "lengths", "pages", 0.5, True)
        self.assertEqual(given, [(*dense, None, None), (*dense, "tiles", "splits")])
        given.clear()
        metadata, splits = package.get_mla_metadata("lengths", 64, 1, 64, True, 128)
        latent = ("q", "cache", "pages", "lengths", 512, metadata, splits)
        package.flash_mla_with_kvcache(*latent, softmax_scale=0.5, causal=False, is_fp8_kvcache=True, indices="indices")
        self.assertEqual(given, [("q", "cache", "indices", *[None] * 7, 512, 0.5)])

    def test_operators_get_the_keywords_of_the_function(self):
        given = {}

        def argument(name, default=None):
            return SimpleNamespace(name=name, default_value=default, has_default_value=lambda: True)

        names = ["q", "k", "v", "q_v", "seqused_k", "page_table", "is_causal", "softcap"]
        names += ["window_size_left", "window_size_right"]
        known = [argument(name) for name in names]
        call = common.by_keywords(lambda **values: given.update(values), known)
        rest = {"cache_seqlens": 4, "page_table": 5, "window_size": (-1, 0), "causal": True}
        call(1, 2, 3, qv=6, softcap=0.0, **rest)
        self.assertEqual(set(given), set(names))
        self.assertEqual((given["k"], given["q_v"], given["seqused_k"], given["is_causal"]), (2, 6, 4, True))
        for found in (["out", "lse"], ("out", "lse"), "out"):
            self.assertEqual(common.by_keywords(lambda found=found, **_: found, [])(1, 2, 3, **rest), "out")
        old = common.by_keywords(lambda **_: None, [one for one in known if one.name != "q_v"])
        with self.assertRaises(Unsupported):
            old(1, 2, 3, qv=6, **rest)
        # A schema without defaults gets what the caller knows of it, and no argument that it lacks.
        bare = [SimpleNamespace(name=name, has_default_value=lambda: False) for name in [*names, "num_splits"]]
        given.clear()
        common.by_keywords(lambda **values: given.update(values), bare, {"num_splits": 0, "unknown": 1})(1, 2, 3, **rest)
        self.assertEqual(set(given), {*names, "num_splits"})
        self.assertEqual((given["num_splits"], given["q_v"]), (0, None))


def attention(q, k, v, scale, end):
    """What packages document: queries of one request on its first keys, by query token. q is token, head, dimension."""
    import torch

    out = []
    for row, seen in zip(q.double(), end, strict=True):
        weights = torch.softmax(row @ k[:seen].double().T * scale, dim=-1)
        out.append(weights @ v[:seen].double())
    return torch.stack(out)


def by_head(q, k, v, scale, end):
    """The same of keys and values for each KV head: q, k and v are token, head, dimension."""
    import torch

    group = q.shape[1] // k.shape[1]
    parts = [
        attention(q[:, head * group : (head + 1) * group], k[:, head], v[:, head], scale, end) for head in range(k.shape[1])
    ]
    return torch.cat(parts, dim=1)


def ends(q_len, kv_len, causal):
    return [kv_len - q_len + index + 1 if causal else kv_len for index in range(q_len)]


class StandIns:
    """Stand-ins for the packages, as their documentation describes the calls."""

    @staticmethod
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal, window_size, softcap, qv=None,
        cu_seqlens_q=None, max_seqlen_q=None, q_descale=None, k_descale=None, v_descale=None,
    ):
        import torch

        assert window_size == (-1, -1) and not softcap
        if qv is None:
            descales = (q_descale, k_descale, v_descale)
            return StandIns.fa3_by_head(
                q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, descales,
            )
        out = []
        for request, (first, last) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], strict=True)):
            assert last - first <= max_seqlen_q
            kv_len = cache_seqlens[request]
            k, v = (pool[page_table[request]].reshape(-1, pool.shape[-1])[:kv_len] for pool in (k_cache, v_cache))
            whole, keys = torch.cat([qv, q], dim=-1)[first:last], torch.cat([v, k], dim=-1)
            out.append(attention(whole, keys, v, softmax_scale, ends(int(last - first), int(kv_len), causal)))
        return torch.cat(out).to(q.dtype)

    @staticmethod
    def fa3_by_head(q, k_cache, v_cache, lengths, pages, starts, max_seqlen_q, scale, causal, descales):
        import torch

        assert q.dtype == k_cache.dtype == v_cache.dtype
        of_8_bits = q.dtype == torch.float8_e4m3fn
        dense = pages is None
        count = len(q) if dense else len(pages)
        out = []
        for request in range(count):
            if dense:
                tokens, (k, v) = q[request], (k_cache[request].float(), v_cache[request].float())
            else:
                tokens = q[starts[request] : starts[request + 1]]
                k, v = (
                    pool.float()[pages[request]].flatten(0, 1)[: int(lengths[request])] for pool in (k_cache, v_cache)
                )
                assert len(tokens) <= max_seqlen_q
            tokens = tokens.float()
            if of_8_bits:
                assert all(one.shape == (count, k.shape[1]) and one.dtype == torch.float32 for one in descales)
                of_q, of_k, of_v = (one[request][:, None] for one in descales)
                tokens = tokens * of_q.repeat_interleave(tokens.shape[1] // k.shape[1], dim=0)
                k, v = k * of_k, v * of_v
            out.append(by_head(tokens, k, v, scale, ends(len(tokens), len(k), causal)))
        return (torch.stack(out) if dense else torch.cat(out)).to(torch.bfloat16 if of_8_bits else q.dtype)

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=None, softmax_scale=None, causal=False,
        window_size=None, softcap=0.0, block_table=None, q_descale=None, k_descale=None, v_descale=None, fa_version=2,
    ):
        assert fa_version == 3 and window_size == [-1, -1] and not softcap and seqused_k.max() <= max_seqlen_k
        descales = (q_descale, k_descale, v_descale)
        return StandIns.fa3_by_head(
            q, k, v, seqused_k, block_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, descales,
        )

    class Paged:
        """What FlashInfer's wrappers for decode steps and for prompts have in common."""

        def compute(self, q, kv, of_q=1.0, of_k=1.0, of_v=1.0):
            import torch

            plan = self.planned
            assert (q.dtype, kv.dtype) == (plan["q_data_type"], plan["kv_data_type"])
            assert kv.shape[1:] == (2, plan["page_size"], plan["kv_heads"], plan["head_dim"])
            starts, firsts = plan["starts"], plan["firsts"]
            q, kv, out = q.float() * of_q, kv.float(), []
            for request, last in enumerate(plan["last"].tolist()):
                ids = plan["pages"][firsts[request] : firsts[request + 1]]
                kv_len = (len(ids) - 1) * plan["page_size"] + last
                k, v = (kv[ids, which].flatten(0, 1)[:kv_len] * of for which, of in ((0, of_k), (1, of_v)))
                tokens = q[starts[request] : starts[request + 1]]
                out.append(by_head(tokens, k, v, plan["sm_scale"], ends(len(tokens), kv_len, plan["causal"])))
            return torch.cat(out).to(plan["o_data_type"])

        def keep(self, starts, firsts, pages, last, heads, kv_heads, head_dim, page_size, causal, **types):
            types["o_data_type"] = types["o_data_type"] or types["q_data_type"]
            self.planned = {
                "starts": starts, "firsts": firsts, "pages": pages, "last": last, "kv_heads": kv_heads,
                "head_dim": head_dim, "page_size": page_size, "causal": causal, **types,
            }

    class BatchPrefillWithPagedKVCacheWrapper(Paged):
        def __init__(self, workspace, layout, backend):
            assert layout == "NHD" and backend in ("fa2", "fa3")
            self.backend = backend

        def plan(
            self, qo_indptr, kv_indptr, indices, last, heads, kv_heads, head_dim, page_size, causal, q_data_type,
            kv_data_type, window_left, logits_soft_cap, sm_scale, o_data_type=None,
        ):
            assert window_left < 0 and not logits_soft_cap
            # The kernels of fa3 multiply numbers of one type.
            assert self.backend == "fa2" or q_data_type == kv_data_type
            self.keep(
                qo_indptr, kv_indptr, indices, last, heads, kv_heads, head_dim, page_size, causal, sm_scale=sm_scale,
                q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
            )

        def run(self, q, kv, *scales, k_scale=1.0, v_scale=1.0):
            if not scales:
                return self.compute(q, kv, 1.0, k_scale, v_scale)
            assert q.dtype == kv.dtype and (k_scale, v_scale) == (1.0, 1.0)
            assert [len(one) for one in scales] == [q.shape[1], kv.shape[3], kv.shape[3]]
            return self.compute(q, kv, *(one[:, None] for one in scales))

    class BatchDecodeWithPagedKVCacheWrapper(Paged):
        def __init__(self, workspace, layout, use_tensor_cores, backend="auto"):
            assert layout == "NHD" and use_tensor_cores
            self.backend = backend

        def plan(
            self, kv_indptr, indices, last, heads, kv_heads, head_dim, page_size, q_data_type, kv_data_type, window_left,
            logits_soft_cap, sm_scale, o_data_type=None,
        ):
            assert window_left < 0 and not logits_soft_cap
            assert self.backend == "fa2" or q_data_type == kv_data_type
            self.keep(
                range(len(last) + 1), kv_indptr, indices, last, heads, kv_heads, head_dim, page_size, False,
                sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
            )

        def run(self, q, kv, k_scale=1.0, v_scale=1.0):
            return self.compute(q, kv, 1.0, k_scale, v_scale)

    @staticmethod
    def get_mla_metadata(cache_seqlens, rows, kv_heads, heads=None, is_fp8=False, topk=None):
        assert kv_heads == 1 and rows >= 1
        return SimpleNamespace(topk=topk), None

    @staticmethod
    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, splits, softmax_scale=None, causal=False,
        is_fp8_kvcache=False, indices=None,
    ):
        import torch

        if is_fp8_kvcache:
            assert q.shape[2] in (64, 128), "the kernel takes no other number of heads"
            assert not causal and k_cache.shape[1:] == (64, 1, 656) and metadata.topk == indices.shape[-1]
            rows = k_cache.view(torch.uint8).reshape(-1, 656)
            scales = rows[:, 512:528].contiguous().view(torch.float32)
            numbers = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(-1, 4, 128)
            rest = rows[:, 528:].contiguous().view(torch.bfloat16).float()
            pool = torch.cat([(numbers * scales[..., None]).view(-1, 512), rest], dim=1)
            lists = [[i for i in row.tolist() if i >= 0] for row in indices.flatten(0, 1)]
            found = [
                attention(one[None], pool[keys], pool[keys][:, :head_dim_v], softmax_scale, [len(keys)])
                for one, keys in zip(q.flatten(0, 1), lists, strict=True)
            ]
            return torch.cat(found).to(q.dtype).view(*q.shape[:3], head_dim_v), None
        assert k_cache.shape[1:] == (64, 1, 576)
        found = []
        for request, one in enumerate(q):
            kv_len = int(cache_seqlens[request])
            keys = k_cache[block_table[request]].reshape(-1, 576)[:kv_len]
            found.append(attention(one, keys, keys[:, :head_dim_v], softmax_scale, ends(len(one), kv_len, causal)))
        return torch.stack(found).to(q.dtype), None

    class BatchMLAPagedAttentionWrapper:
        def __init__(self, workspace, backend):
            assert backend == "fa3"

        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
            sm_scale, q_data_type, kv_data_type,
        ):
            assert (head_dim_ckv, head_dim_kpe) == (512, 64)
            self.planned = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size, causal, sm_scale)

        def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
            import torch

            starts, firsts, pages, lengths, page_size, causal, scale = self.planned
            assert ckv_cache.shape[1] == page_size
            out = []
            for request in range(len(lengths)):
                ids, kv_len = pages[firsts[request] : firsts[request + 1]], int(lengths[request])
                v, rope = (pool[ids].reshape(-1, pool.shape[-1])[:kv_len] for pool in (ckv_cache, kpe_cache))
                tokens = slice(starts[request], starts[request + 1])
                q = torch.cat([q_nope[tokens], q_pe[tokens]], dim=-1)
                out.append(attention(q, torch.cat([v, rope], dim=-1), v, scale, ends(len(q), kv_len, causal)))
            return torch.cat(out).to(q_nope.dtype)


@unittest.skipUnless(WITH_TORCH, "no PyTorch")
class Results(unittest.TestCase):
    """Peers give right results, or rather get the arguments with which their packages would."""

    def check(self, name, exact_queries=True, **fields):
        import torch

        from tensors import errors, random_tensors

        case = one(**fields)
        tensors = random_tensors(torch, case, "cpu")
        in_8_bits = implementations.computes_in_8_bits(name, case)
        if in_8_bits and exact_queries:
            # Queries that e4m3 holds, with a scale that is a power of two. Products of stand-ins are exact, too.
            tensors.q = tensors.q.clamp(-3.5, 3.5).to(torch.float8_e4m3fn).to(tensors.q.dtype)
            tensors.q[..., 0] = 3.5
        flashinfer = SimpleNamespace(mla=StandIns, **vars(StandIns))
        modules = {
            "flash_mla": StandIns, "flashinfer": flashinfer, "flash_attn_interface": StandIns, "vllm_flash_attn": StandIns,
        }
        with mock.patch.dict(sys.modules, modules), mock.patch.object(common, "WORKSPACE_BYTES", 16):
            out = implementations.PEERS[name](case, tensors)()
        found = errors(torch, case, tensors, out, in_8_bits)
        self.assertLess(found["out_of_bound"], 1, (name, fields))
        self.assertEqual(found.get("in_8_bits", False), in_8_bits)
        if exact_queries:
            self.assertLess(errors(torch, case, tensors, out)["out_of_bound"], 1, (name, fields))
        # The comparison notices a wrong scale.
        case.scale *= 1.5
        self.assertGreater(errors(torch, case, tensors, out, in_8_bits)["out_of_bound"], 1, (name, fields))

    def test_latent_decodes(self):
        decodes = [{"q_len": 1, "kv_len": 100, "count": 2}, {"q_len": 1, "kv_len": 7}]
        for name in ("flashmla", "flashinfer-mla", "fa3-mla", "vfa3-mla", "sdpa-mla"):
            self.check(name, **MLA, page_size=64, requests=decodes)

    def test_latent_chunks(self):
        for name in ("flashmla", "flashinfer-mla", "fa3-mla", "vfa3-mla", "sdpa-mla"):
            self.check(name, **MLA, page_size=64, requests=[{"q_len": 3, "kv_len": 70, "count": 2}])

    def test_shared_prefixes(self):
        tree = {"nodes_per_level": [1, 3], "tokens_per_level": [64, 9]}
        for name in ("flashinfer-mla", "fa3-mla", "vfa3-mla", "sdpa-mla"):
            self.check(name, **MLA, page_size=16, tree=tree)

    def test_rows_with_scales(self):
        for name, heads in (("flashmla", 64), ("flashmla", 128), ("sdpa-mla", 4)):
            self.check(name, **{**MLA, "heads": heads}, kv_dtype="f8e4m3", page_size=16, requests=[{"q_len": 2, "kv_len": 70, "count": 2}])

    def test_chosen_keys(self):
        requests = [{"q_len": 1, "kv_len": 70, "count": 3}, {"q_len": 1, "kv_len": 7}]
        for name, heads in (("flashmla", 64), ("sdpa-mla", 4)):
            self.check(name, **{**MLA, "heads": heads}, kv_dtype="f8e4m3", page_size=64, top_k=20, requests=requests)

    def test_keys_and_values_in_both_types(self):
        few = {"heads": 6, "kv_heads": 2, "head_dim": 32, "page_size": 4}
        decodes = [{"q_len": 1, "kv_len": 37, "count": 2}, {"q_len": 1, "kv_len": 6}]
        alike = [{"q_len": 5, "kv_len": 20, "count": 2}]
        chunks = [{"q_len": 5, "kv_len": 20}, {"q_len": 3, "kv_len": 3}]
        hybrid = [{"q_len": 5, "kv_len": 20}, *decodes]
        any_batch = (decodes, alike, chunks, hybrid)
        for name, batches in {
            "fa3": any_batch, "vfa3": any_batch, "flashinfer-fa2": any_batch, "flashinfer-fa3": any_batch,
            "fa3-dense": (alike,), "flashinfer-decode": (decodes,), "fa3-serial": (hybrid,), "flashinfer-serial": (hybrid,),
        }.items():
            for kv_dtype in ("bf16", "f8e4m3"):
                for requests in batches:
                    with self.subTest(f"{name} {kv_dtype} {requests}"):
                        self.check(name, **few, kv_dtype=kv_dtype, requests=requests)
        self.check("fa3", **{**few, "head_dim_v": 16}, kv_dtype="f8e4m3", requests=chunks)

    def test_rounded_queries_are_within_the_bound_of_8_bits(self):
        for name in ("fa3", "flashinfer-fa3"):
            requests = [{"q_len": 3, "kv_len": 90}, {"q_len": 1, "kv_len": 60, "count": 5}]
            self.check(name, False, heads=4, kv_heads=2, head_dim=64, kv_dtype="f8e4m3", requests=requests)

    def test_tensors_have_the_bytes_of_the_command(self):
        import torch

        from tensors import PERIOD, command_numbers, random_tensors

        def sum_of_bits(count, seed, largest):
            total = 0
            for bits in command_numbers(count, seed, largest).view(torch.int32).tolist():
                total = (total * 31 + bits % (1 << 32)) % (1 << 64)
            return total

        # From the command's generator.
        self.assertEqual(sum_of_bits(PERIOD, 8, 1), 17075064551933880259)
        self.assertEqual(command_numbers(6, 7, 4).view(torch.int32).tolist()[:2], [1074526388, 3222148690 - (1 << 32)])
        case = one(heads=4, kv_heads=2, head_dim=64, kv_dtype="f8e4m3", requests=[{"q_len": 1, "kv_len": 4200, "count": 3}])
        tensors = random_tensors(torch, case, "cpu")
        for pool, seed in ((tensors.k, 8), (tensors.v, 9)):
            bytes_ = pool.contiguous().view(torch.uint8).flatten()
            right = command_numbers(PERIOD, seed, 1).to(torch.float8_e4m3fn).view(torch.uint8)
            self.assertTrue(torch.equal(bytes_[:PERIOD], right))
            self.assertTrue(torch.equal(bytes_[PERIOD:], right[: len(bytes_) - PERIOD]))
        self.assertEqual(tensors.q.dtype, torch.bfloat16)
        self.assertTrue(torch.equal(tensors.q.flatten()[:6], command_numbers(6, 7, 4).to(torch.bfloat16)))

    def test_rows_hold_the_keys_that_are_compared(self):
        import torch

        from tensors import random_tensors

        case = one(**MLA, kv_dtype="f8e4m3", requests=[{"q_len": 1, "kv_len": 40}])
        tensors = random_tensors(torch, case, "cpu")
        self.assertEqual(tensors.rows.shape, (64, 656))
        self.assertEqual(tensors.latent.shape, (3, 16, 576))
        self.assertTrue(math.isclose(tensors.latent[..., 512:].abs().max().item(), 1, abs_tol=0.1))

    def test_long_keys_with_short_values(self):
        import torch

        from tensors import errors, random_tensors

        # cuDNN needs a GPU, so the kernel is PyTorch's own.
        peer = implementations.sdpa("MATH", one_dimension=False)
        case = one(heads=4, kv_heads=4, head_dim=192, head_dim_v=128, requests=[{"q_len": 20, "kv_len": 20, "count": 2}])
        tensors = random_tensors(torch, case, "cpu")
        self.assertLess(errors(torch, case, tensors, peer(case, tensors)())["out_of_bound"], 1)


if __name__ == "__main__":
    unittest.main()
