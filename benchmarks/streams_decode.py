"""How long a token of qwen4_exp takes, cut to a few layers of its real widths.

    python benchmarks/streams_decode.py --layers 8 --experts 64

Weights are random 4-bit codes, routers and shared gates in 8 bits, and the table of n-grams is a
small one in memory. The next token is chosen on the device, so that the host runs one step ahead.
Decoding is measured where attention reads all rows and where it reads chosen blocks of them.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from turbospark.kernels.select import choose_kernels
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.quantize import is_careful
from turbospark.nn.linear import Matrix
from turbospark.nn.unit import bind_units
from turbospark.protocols import CausalModel, Phase
from turbospark.registry import resolve_family
from turbospark.runner.step import compiled_steps
from turbospark.settings import KernelPolicy

CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "output_gate_type": "sigmoid",
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "eos_token_id": 248_044,
    "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def random_model(layers: int, experts: int) -> CausalModel:
    """A bound model of random weights."""
    model = resolve_family("qwen4_exp").build(
        CONFIG | {"num_hidden_layers": layers, "num_experts": experts}
    )
    module = cast("nn.Module", model)
    module.set_dtype(mx.bfloat16)
    for path, part in cast("list[tuple[str, Any]]", module.named_modules()):
        if isinstance(part, Matrix):
            part.assign(random_weight(path, tuple(part.value.shape)))
    mx.eval(module.parameters())
    print(bind_units(module, choose_kernels(KernelPolicy())))
    return model


def random_weight(path: str, shape: tuple[int, ...]) -> QuantizedWeight:
    """Codes whose values spread as those of a trained matrix do."""
    bits, group_size = 8 if is_careful(path) else 4, 64 if shape[-1] % 64 == 0 else 32
    *outer, width = shape
    # Few random words, repeated: what they say does not matter to the time.
    words = mx.random.randint(0, 2**31 - 1, (min(outer[-1], 64), width * bits // 32))
    codes = mx.broadcast_to(
        mx.tile(words.astype(mx.uint32), (-(-outer[-1] // words.shape[0]), 1))[: outer[-1]],
        (*outer, words.shape[1]),
    )
    spread = 2 * width**-0.5 / (1 << bits)
    scales = mx.full((*outer, width // group_size), spread, mx.bfloat16)
    biases = mx.full(scales.shape, -spread * (1 << (bits - 1)), mx.bfloat16)
    return QuantizedWeight(mx.contiguous(codes), scales, biases, bits, group_size)


def states(caches: Sequence[Any]) -> list[mx.array]:
    """Every array that a pass leaves behind."""
    return [
        array
        for cache in caches
        for array in (cache.state if cache.recurrent else cache.tail_arrays)
    ]


def prefill(model: CausalModel, caches: Sequence[Any], count: int, chunk: int) -> float:
    """Feed tokens; milliseconds a token."""
    start = time.perf_counter()
    for at in range(0, count, chunk):
        tokens = np.random.default_rng(at).integers(0, 240_000, min(chunk, count - at))
        fed = mx.array(tokens.astype(np.int32))
        model(fed, caches, phase=Phase.PREFILL, logits="none")
        mx.eval(states(caches))
    return (time.perf_counter() - start) / count * 1e3


def decode(model: CausalModel, caches: Sequence[Any], count: int) -> tuple[float, float]:
    """Milliseconds a token, and those of them that the host takes to launch it."""
    steps, token, host = compiled_steps(model), mx.array([7], mx.int32), 0.0
    start = time.perf_counter()
    for _ in range(count):
        began = time.perf_counter()
        logits = steps(token, caches, phase=Phase.DECODE).logits
        assert logits is not None
        previous, token = token, mx.argmax(logits, axis=-1).astype(mx.int32)
        mx.async_eval(token)
        host += time.perf_counter() - began
        mx.eval(previous)
    mx.eval(token, states(caches))
    return (time.perf_counter() - start) / count * 1e3, host / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    model = random_model(options.layers, options.experts)
    caches = model.make_caches(8192, 128)
    for upto in (512, 3072):
        count = upto - caches[0].offset
        spent = prefill(model, caches, count, 512)
        decode(model, caches, 8)
        whole, host = decode(model, caches, options.tokens)
        print(
            f"{caches[0].offset:5} tokens: prefill {spent:.3f} ms a token, decode {whole:.2f} ms "
            f"a token, of which the host takes {host:.2f}; {1e3 / whole:.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
