"""Random models of real shapes, each built twice over the same arrays: ours and mlx-lm's."""

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from turbospark.kernels.select import choose_kernels
from turbospark.kernels.target import KernelSet
from turbospark.loading.config import normalise
from turbospark.loading.install import Handling, install_weights
from turbospark.loading.opened import build_model, sanitized
from turbospark.nn.unit import bind_units
from turbospark.protocols import CausalModel
from turbospark.registry import resolve_family
from turbospark.settings import KernelPolicy

GROUP_SIZE = 64
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
_PATH = Path("config.json")
_EXPERTS = (".experts.", ".switch_mlp.", ".switch_glu.")
_WIDE = ("mlp.gate", "shared_expert_gate", "router.proj", "router")


@dataclass
class Pair:
    """Both engines' models over the same weights."""

    ours: CausalModel
    theirs: Any
    arrays: dict[str, mx.array]
    """Every weight by mlx-lm's name."""

    def bind(self, policy: KernelPolicy | None = None) -> tuple[KernelSet, dict[str, int]]:
        """Give our model its kernels; a GPU compiles them here."""
        kernels = choose_kernels(policy or KernelPolicy())
        return kernels, bind_units(cast("nn.Module", self.ours), kernels)


def build_pair(
    config: Mapping[str, Any], dtype: mx.Dtype = mx.bfloat16, *, widened: bool = False
) -> Pair:
    """Draw weights in the layout of MLX's 4-bit checkpoints and give them to both.

    Args:
        config: of one of the shapes.
        dtype: of everything that is not a code.
        widened: whether what was drawn in that dtype is then kept in float32.
    """
    theirs, arrays, quantization = _mlx_lm_model(config, dtype, widened=widened)
    family = resolve_family(config["model_type"])
    ours = build_model(family, normalise(dict(config), _PATH), _PATH)
    where = "random weights"
    weights = sanitized(ours, dict(arrays), quantization, _PATH, where)
    install_weights(ours, weights, where, Handling(False))
    return Pair(cast("CausalModel", ours), theirs, arrays)


def active_bytes(arrays: Mapping[str, mx.array], config: Mapping[str, Any]) -> int:
    """Weight bytes that one token reads."""
    text = config.get("text_config", config)
    counts = (text.get(f"num_{word}experts") for word in ("", "local_"))
    experts = next((count for count in counts if count), None) or text.get("n_routed_experts")
    top_k = text.get("num_experts_per_tok") or text.get("top_k_experts")
    total = 0
    for path, array in arrays.items():
        if ".embed" in path and not config.get("tie_word_embeddings"):
            continue
        is_expert = any(part in path for part in _EXPERTS)
        total += array.nbytes * top_k // experts if is_expert else array.nbytes
    return total


def _mlx_lm_model(
    config: Mapping[str, Any], dtype: mx.Dtype, *, widened: bool
) -> tuple[Any, dict[str, mx.array], dict[str, Any]]:
    kind = config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    wrapped = dict(config)
    if kind.startswith("qwen3_5"):
        wrapped = {"model_type": kind, "text_config": dict(config)}
    model = module.Model(module.ModelArgs.from_dict(wrapped))
    predicate: Callable[[str, Any], Any] = getattr(model, "quant_predicate", None) or _always
    overrides: dict[str, Any] = {}

    def quantized(path: str, layer: Any) -> Any:
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % GROUP_SIZE:
            return False
        wish = MXFP4 if kind == "gpt_oss" and ".experts." in path else predicate(path, layer)
        if isinstance(wish, dict):
            overrides[path] = wish
        return wish

    nn.quantize(model, GROUP_SIZE, 4, class_predicate=quantized)
    draw = _Draw(dtype)
    arrays: dict[str, mx.array] = {}
    for name, array in tree_flatten(model.parameters()):
        drawn = draw(name, array)
        is_wide = widened and mx.issubdtype(drawn.dtype, mx.floating)
        arrays[name] = drawn.astype(mx.float32) if is_wide else drawn
        mx.eval(arrays[name])  # one by one, so that few temporaries live at a time
    model.load_weights(list(arrays.items()))
    model.eval()
    return model, arrays, {"group_size": GROUP_SIZE, "bits": 4, **overrides}


def _always(_path: str, _layer: Any) -> bool:
    return True


class _Draw:
    """Values that keep a deep random stack finite and its logits apart, drawn as they are stored.

    Codes are uniform. Their deviation times the scale gives rows of unit gain, or half of it.
    """

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._count = 0

    def __call__(self, name: str, like: mx.array) -> mx.array:
        shape, leaf = like.shape, name.rsplit(".", 1)[-1]
        if like.dtype == mx.uint32:
            return self._bits(shape)
        if like.dtype == mx.uint8:
            # Of values with a deviation of 2.93, each times two to the power of scale - 127.
            power = round(math.log2(0.5 / 2.93 / (shape[-1] * MXFP4["group_size"]) ** 0.5))
            return mx.full(shape, 127 + power, mx.uint8)
        values = self._floats(name, leaf, shape)
        return values.astype(mx.float32 if leaf == "A_log" else self._dtype)

    def _floats(self, name: str, leaf: str, shape: tuple[int, ...]) -> mx.array:
        if leaf == "scales":
            return self._between(0.9, 1.1, shape) * _scale(shape, name)
        if leaf == "biases":
            return mx.full(shape, -(255 if _is_wide(name) else 15) / 2 * _scale(shape, name))
        if leaf == "A_log":
            return mx.log(self._between(1.0, 16.0, shape))
        if leaf == "layer_scalar":
            return mx.ones(shape)
        if "norm" in name or leaf in {"scale", "per_expert_scale"}:
            return self._between(0.9, 1.1, shape)
        bound = 0.5 if len(shape) != 2 else 2 * shape[-1] ** -0.5
        return self._between(-bound, bound, shape)

    def _between(self, low: float, high: float, shape: tuple[int, ...]) -> mx.array:
        return low + (high - low) / 2**32 * self._bits(shape).astype(mx.float32)

    def _bits(self, shape: tuple[int, ...]) -> mx.array:
        self._count += 1
        places = mx.arange(math.prod(shape), dtype=mx.uint32)
        return _mixer()(mx.array(self._count, mx.uint32), places).reshape(shape)


@functools.cache
def _mixer() -> Callable[[mx.array, mx.array], mx.array]:
    """32 bits a place: a multiplicative hash, as good as random for codes and far quicker.

    One graph for all sizes, so that a GPU compiles it once.
    """
    factors = [mx.array(value, mx.uint32) for value in (2654435761, 374761393)]
    rounds = [(15, mx.array(2246822519, mx.uint32)), (13, mx.array(3266489917, mx.uint32))]

    def mixed(seed: mx.array, places: mx.array) -> mx.array:
        bits = places * factors[0] + seed * factors[1]
        for shift, factor in rounds:
            bits = (bits ^ (bits >> shift)) * factor
        return bits ^ (bits >> 16)

    return cast("Callable[[mx.array, mx.array], mx.array]", mx.compile(mixed, shapeless=True))


def _is_wide(name: str) -> bool:
    return name.rsplit(".", 1)[0].endswith(_WIDE)


def _scale(shape: tuple[int, ...], name: str) -> float:
    width = shape[-1] * GROUP_SIZE
    deviation = (256 if _is_wide(name) else 16) / 12**0.5
    gain = 1.0 if ".embed" in name else 0.5
    return gain / deviation / width**0.5
