"""Checkpoint names of latent attention's per-head matrices as the models' own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from turbospark.errors import CheckpointError
from turbospark.kernels.latent import LatentGeometry
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight, Weight

_KEYS, _VALUES = ".self_attn.embed_q.weight", ".self_attn.unembed_out.weight"


def latent_weights(weights: Mapping[str, Any], sizes: LatentGeometry) -> dict[str, Any]:
    """The matrices of all heads under `self_attn.kv_b_proj.weight`; idempotent.

    MLX stores some models' as two: `embed_q` [H, L, N] and `unembed_out` [H, V, L]. Quantized ones
    become the very numbers that they stand for, in float32: groups of `embed_q` run along N, those
    of one joined matrix would run along L.

    Args:
        weights: name to tensor, dense or quantized; other tensors stay as they are.
        sizes: of every layer.

    Raises:
        CheckpointError: the two matrices of a layer have other shapes.
    """
    found: dict[str, Any] = {}
    for name, value in weights.items():
        stem = name.removesuffix(_KEYS)
        if stem != name and stem + _VALUES in weights:
            joined = _joined(stem, value, weights[stem + _VALUES], sizes)
            found[f"{stem}.self_attn.kv_b_proj.weight"] = joined
        elif not name.endswith(_VALUES) or name.removesuffix(_VALUES) + _KEYS not in weights:
            found[name] = value
    return found


def _joined(stem: str, keys: Weight, values: Weight, sizes: LatentGeometry) -> mx.array:
    H, L = sizes.num_heads, sizes.latent_dim
    k = _dense(f"{stem}{_KEYS}", keys, (H, L, sizes.key_dim)).swapaxes(-1, -2)
    v = _dense(f"{stem}{_VALUES}", values, (H, sizes.value_dim, L))
    return mx.reshape(mx.concatenate([k, v], axis=1), (sizes.expanded, L))


def _dense(name: str, weight: Weight, shape: tuple[int, ...]) -> mx.array:
    if isinstance(weight, QuantizedWeight):
        weight = dequantize_reference(_refitted(weight, shape[-1]))
    if weight.shape != shape:
        raise CheckpointError(f"{name!r} is {weight.shape} where {shape} is needed")
    return weight


def _refitted(weight: QuantizedWeight, width: int) -> QuantizedWeight:
    """The weight with the bits and groups that its width needs.

    Shapes alone leave several choices, and nobody has told the reader of the file the width.
    """
    words, groups = weight.codes.shape[-1], weight.scales.shape[-1]
    if weight.shape[-1] == width or width % groups or words * 32 % width:
        return weight
    return replace(weight, bits=words * 32 // width, group_size=width // groups)
