"""What `transformers` computes around attention, for tests/cpu/step/fixtures.rs: python3 peers/step.py > tests/data/step.json

Rotary embeddings with each scaling and pairing, normalisation, activations, and which tokens the filters of sampling
leave. All in float32 on the CPU.
"""

import importlib
import json
import sys

import torch
import transformers
from transformers import GlmConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.generation import logits_process

POSITIONS = [0, 1, 17, 1000, 9000]


def numbers(tensor):
    return [float(f"{x:.7g}") for x in tensor.flatten().tolist()]


def rope(name, model, config, head_dim, pairing, description):
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    capital = {"llama": "Llama", "glm": "Glm"}[model]
    rotary = getattr(module, f"{capital}RotaryEmbedding")(config)
    dim = 2 * rotary.inv_freq.numel()
    heads = torch.randn(1, 1, len(POSITIONS), head_dim)
    heads = (heads * 1000).round() / 1000
    cos, sin = rotary(heads, torch.tensor([POSITIONS]))
    if model == "llama" and dim < head_dim:
        raise SystemExit("this model turns whole heads")
    turned, _ = module.apply_rotary_pos_emb(heads, heads, cos, sin)
    return {
        "name": name,
        "dim": dim,
        "head_dim": head_dim,
        "pairing": pairing,
        "rope": description,
        "magnitude": rotary.attention_scaling,
        "inverse_frequencies": numbers(rotary.inv_freq),
        "heads": numbers(heads),
        "turned": numbers(turned),
    }


def llama(name, head_dim, theta, scaling, longest=131072):
    parameters = {"rope_theta": theta, "rope_type": "default", **scaling}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=parameters,
    )
    return rope(name, "llama", config, head_dim, "HalfSplit", parameters)


def glm(name, head_dim, theta, part):
    parameters = {"rope_theta": theta, "rope_type": "default", "partial_rotary_factor": part}
    config = GlmConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        partial_rotary_factor=part,
        rope_parameters=parameters,
    )
    return rope(name, "glm", config, head_dim, "Interleaved", parameters)


def ropes():
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    deepseek = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    }
    oss = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return [
        llama("default", 64, 10000.0, {}),
        llama("linear", 64, 1000000.0, {"rope_type": "linear", "factor": 8.0}),
        llama("llama3", 128, 500000.0, llama3),
        llama("yarn", 128, 1000000.0, yarn),
        llama("yarn with two magnitudes", 64, 10000.0, deepseek),
        llama("yarn with a ramp between pairs", 64, 150000.0, oss),
        glm("neighbours, half of the head", 64, 10000.0, 0.5),
    ]


def norms():
    x = (torch.randn(3, 48) * 1000).round() / 1000
    weight = (torch.randn(48) * 1000).round() / 1000
    found = []
    for model, name, gemma in [("llama", "LlamaRMSNorm", False), ("gemma3", "Gemma3RMSNorm", True)]:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        norm = getattr(module, name)(48, eps=1e-5)
        norm.weight.data = weight
        found.append(
            {
                "name": name,
                "gemma": gemma,
                "eps": 1e-5,
                "x": numbers(x),
                "weight": numbers(weight),
                "out": numbers(norm(x).detach()),
            }
        )
    return found


def activations():
    x = torch.linspace(-12, 12, 97)
    names = {"Silu": "silu", "GeluTanh": "gelu_pytorch_tanh"}
    return [{"name": ours, "x": numbers(x), "out": numbers(ACT2FN[theirs](x))} for ours, theirs in names.items()]


def filters():
    logits = (torch.randn(1, 60) * 2000).round() / 1000
    found = []
    for temperature, top_k, top_p, min_p in [
        (1.0, 7, 1.0, 0.0),
        (0.7, 0, 0.8, 0.0),
        (1.5, 0, 1.0, 0.1),
        (0.9, 20, 0.9, 0.0),
        (1.2, 30, 0.95, 0.05),
    ]:
        kept = logits_process.TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            kept = logits_process.TopKLogitsWarper(top_k)(None, kept)
        if top_p < 1:
            kept = logits_process.TopPLogitsWarper(top_p)(None, kept)
        if min_p:
            kept = logits_process.MinPLogitsWarper(min_p)(None, kept)
        found.append(
            {
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "probabilities": numbers(kept.softmax(-1)),
            }
        )
    return {"logits": numbers(logits), "samplings": found}


torch.manual_seed(0)
json.dump(
    {
        "made with": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "positions": POSITIONS,
        "ropes": ropes(),
        "norms": norms(),
        "activations": activations(),
        "filters": filters(),
    },
    sys.stdout,
    separators=(",", ":"),
)
