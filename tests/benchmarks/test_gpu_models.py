"""The shapes of gpu_decode.py: both engines build them over the same arrays, and agree."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOKENS = mx.array([3, 250, 7, 7, 91, 12, 5, 181, 64, 33, 2], mx.int32)

MOE = {"moe_intermediate_size": 192}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 64}
SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-1B": (2, {}),
    "llama-8B": (2, {}),
    "qwen3_5-4B": (4, DELTA),
    "qwen3_5-27B": (4, DELTA),
    "qwen3_5-35B-A3B": (
        4,
        DELTA | MOE | {"num_experts": 16, "shared_expert_intermediate_size": 320},
    ),
    "gemma4-26B-A4B": (
        6,
        MOE | {"num_experts": 16, "sliding_window": 8, "head_dim": 64, "global_head_dim": 128},
    ),
    "qwen3-30B-A3B": (2, MOE | {"num_experts": 16, "head_dim": 64}),
    "gpt-oss-20B": (2, {"sliding_window": 8, "intermediate_size": 192, "num_local_experts": 8}),
    "deepseek-v2-lite": (
        3,
        MOE
        | {"n_routed_experts": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64}
        | {"qk_rope_head_dim": 32, "v_head_dim": 64},
    ),
    "spark2_5-4B": (4, {"sliding_window": 8, "head_dim": 64}),
    "muse-glimmer-30B": (4, {"sliding_window": 8, "head_dim": 64}),
}
"""Of each shape: layers, so that every kind is among them, and what is narrower."""


@pytest.fixture(scope="module")
def models() -> Iterator[Any]:
    """The module under test; it imports others of its folder."""
    names = ("gpu_models", "gpu_shapes")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            sys.modules.pop(name, None)


def narrowed(shapes: Any, name: str, layers: int = 0) -> dict[str, Any]:
    few, sizes = SMALL[name]
    config = shapes.shrunk(shapes.SHAPES[name], layers or few, vocab_size=300)
    text = config.get("text_config", config)
    heads = 16 if text["num_attention_heads"] == text.get("num_key_value_heads") else 8
    text |= {"hidden_size": 256, "intermediate_size": 448, "num_attention_heads": heads} | sizes
    text["num_key_value_heads"] = heads if heads == 16 else 2
    return config


def test_every_shape_is_tried(models: Any) -> None:
    assert set(SMALL) == set(models[1].SHAPES)


@pytest.mark.parametrize("name", SMALL)
def test_logits_of_both_engines_agree(models: Any, name: str) -> None:
    module, shapes = models
    config = narrowed(shapes, name)
    if config["model_type"] == "gpt_oss":  # mlx-lm rounds the ramp whatever the file says
        config["rope_scaling"] = config["rope_scaling"] | {"truncate": True}
    pair = module.build_pair(config, mx.float32)
    pair.bind(KernelPolicy(kernels="reference"))
    caches = pair.ours.make_caches(64, 16)
    ours = pair.ours(TOKENS, caches, phase=Phase.PREFILL, logits="all").logits
    theirs = pair.theirs(TOKENS[None])[0]
    bound = mx.max(mx.abs(theirs)).item()
    assert bound > 0.05  # the arrays move the logits, and they stay finite
    assert mx.max(mx.abs(ours - theirs)).item() < 2e-4 * bound


def test_a_cut_keeps_the_last_layer(models: Any) -> None:
    module, shapes = models
    layers, _ = SMALL["gemma4-26B-A4B"]
    config = narrowed(shapes, "gemma4-26B-A4B", layers + 2)
    assert config["text_config"]["layer_types"] == [
        *["sliding_attention"] * 5, "full_attention", "sliding_attention", "full_attention",
    ]  # fmt: skip
    pair = module.build_pair(config)
    assert pair.ours.num_layers == layers + 2
    assert not any("layers.7.self_attn.v_proj" in path for path in pair.arrays)


@pytest.mark.parametrize("name", ["gpt-oss-20B", "deepseek-v2-lite", "qwen3_5-35B-A3B"])
def test_a_token_reads_few_experts(models: Any, name: str) -> None:
    module, shapes = models
    config = narrowed(shapes, name)
    arrays = module.build_pair(config).arrays
    every = sum(array.nbytes for path, array in arrays.items() if ".embed" not in path)
    experts = sum(
        array.nbytes
        for path, array in arrays.items()
        if ".switch_mlp." in path or ".mlp.experts." in path
    )
    share = {"gpt-oss-20B": 4 / 8, "deepseek-v2-lite": 6 / 8, "qwen3_5-35B-A3B": 8 / 16}[name]
    assert 0 < experts < every
    read = module.active_bytes(arrays, config)
    assert read == pytest.approx(every - experts + share * experts, rel=1e-9)
