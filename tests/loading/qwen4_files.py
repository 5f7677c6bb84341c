"""Checkpoints of the fixture qwen4_exp as their exporters write them."""

import re

import numpy as np
from golden.fixtures import feed, int4_weights

from families.qwen4_exp import build
from turbospark.kernels.weights import QuantizedWeight
from turbospark.nn.weights import split_rows

TABLE = re.compile(r"(.+\.ple_embedding)\.ngram_embedding\.weight")
PARTS = 4


def published(golden):
    """Names and parts of the original release."""
    found = {}
    for name, value in golden.weights.items():
        name = name.replace("model.", "model.language_model.", 1)
        table = TABLE.fullmatch(name)
        if table:
            shards = np.array_split(value, PARTS)
            found |= {
                f"{table[1]}.ngram_embedding.shard_{i}.weight": x for i, x in enumerate(shards)
            }
        else:
            found[name] = value
    found["model.visual.merger.norm.weight"] = np.zeros(3, np.float32)
    found["mtp.fc_hidden.weight"] = np.zeros((2, 2), np.float32)
    return found


def numbers(golden):
    """The whole numbers that a release keeps beside its tables."""
    found = {}
    for i, layer in enumerate(build(golden.config).layers):
        if layer.ngrams is not None:
            hashing = layer.ngrams.ple_embedding.hashing
            at = f"model.language_model.layers.{i}.ple.ple_embedding."
            found[at + "layer_multipliers"] = np.array(hashing.multipliers, np.int64)
            found[at + "ngram_heads_vocab_sizes"] = np.array(hashing.primes, np.int64)
            found[at + "ngram_heads_offsets"] = np.array(hashing.offsets, np.int64)
    return found


def wrapped(golden, **extra):
    text = golden.config | {"model_type": "qwen4_exp_text"}
    return {
        "model_type": "qwen4_exp",
        "tie_word_embeddings": golden.config["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"depth": 2},
    } | extra


def converted(golden, *, baked, group_size=32, sharded=True):
    """Tensors and `quantization` of an MLX conversion."""
    tensors, quantization = {}, {"group_size": 64, "bits": 4, "mode": "affine"}
    for own, weight in int4_weights(golden).items():
        for name, value in mlx_names(own, weight, baked, sharded).items():
            if not isinstance(value, QuantizedWeight):
                tensors[name] = np.array(value)
                continue
            path = name.removesuffix(".weight")
            parts = {"weight": value.codes, "scales": value.scales, "biases": value.biases}
            tensors |= {f"{path}.{part}": np.array(array) for part, array in parts.items()}
            if (value.bits, value.group_size) != (4, 64):
                quantization[path] = {"group_size": value.group_size, "bits": value.bits}
    return tensors, quantization


def mlx_names(name, value, baked, sharded):
    name = f"language_model.{name}"
    table = TABLE.fullmatch(name)
    if table and sharded:
        parts = split_rows(name, value, 2)
        return {f"{table[1]}.ngram_embedding.shards.{i}.weight": x for i, x in enumerate(parts)}
    if name.endswith("experts.gate_up_proj.weight"):
        stem = name.replace("experts.gate_up_proj.weight", "switch_mlp")
        gate, up = split_rows(name, value)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if name.endswith("conv1d.weight"):
        value = value.swapaxes(1, 2)
    elif baked and "norm" in name and len(value.shape) == 1 and "linear_attn" not in name:
        value = value + 1
    return {name.replace("experts.down_proj", "switch_mlp.down_proj"): value}


def logits(loaded, golden, count=40, **how):
    return feed(loaded.model, golden.tokens[:count], [count], **how)
