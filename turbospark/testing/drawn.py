"""Weights drawn from a seed, written as a checkpoint holds them.

Every tensor has numbers of its own, whatever else the model has, and every number is exact in
bfloat16, so that no machine rounds it in its own way.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from turbospark.loading.install import Slot
from turbospark.loading.quantize import Quantization, quantization_for
from turbospark.loading.shards import write_shards
from turbospark.testing.aligned import write_aligned


def write_drawn_weights(
    folder: Path, groups: Sequence[Mapping[str, Slot]], wish: Quantization | None, seed: int
) -> dict[str, Quantization]:
    """Write a model's parameters, under its own names.

    Args:
        folder: gets the files of weights, and an index where there are several.
        groups: the parameters of a model with unset weights, by file.
        wish: how matrices are stored; None is bfloat16.
        seed: of all numbers.

    Returns:
        the paths of the matrices that are quantized, and how.
    """
    layouts: dict[str, Quantization] = {}
    every = {name: slot for slots in groups for name, slot in slots.items()}

    def tensors(name: str) -> Iterator[tuple[str, mx.array]]:
        path, slot = name.removesuffix(".weight"), every[name]
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        chosen = None
        if wish is not None and slot.is_matrix:
            chosen = quantization_for(path, slot.shape[-1], wish)
        if chosen is None:
            yield name, _floats(slot, rng)
            return
        layouts[path] = chosen
        for part, array in _quantized(slot.shape, chosen, rng).items():
            yield f"{path}.{part}", array

    write_shards(folder, groups, tensors, write_aligned)
    return layouts


def _floats(slot: Slot, rng: np.random.Generator) -> mx.array:
    if slot.is_matrix:
        values = rng.integers(-64, 65, slot.shape) / 64 * _spread(slot.shape[-1])
    else:
        values = _initial(slot) + rng.integers(-16, 17, slot.shape) / 128
    return mx.array(values.astype(np.float32)).astype(mx.bfloat16)


def _quantized(
    shape: tuple[int, ...], layout: Quantization, rng: np.random.Generator
) -> dict[str, mx.array]:
    """Codes, and scales of either sign, as published files have them."""
    *outer, width = shape
    words = rng.integers(0, 2**32, (*outer, width * layout.bits // 32), dtype=np.uint32)
    groups = (*outer, width // layout.group_size)
    sizes = rng.integers(4, 8, groups) * rng.choice([-1, 1], groups)
    middle = 2 ** (layout.bits - 1)
    scales = sizes * (_spread(width) / 8 / middle)
    parts = {"scales": scales, "biases": -middle * scales}
    return {"weight": mx.array(words)} | {
        name: mx.array(values.astype(np.float32)).astype(mx.bfloat16)
        for name, values in parts.items()
    }


def _spread(width: int) -> float:
    """A power of two near that of weights which keep the size of what they multiply."""
    return 2.0 ** round(np.log2(1.7 * width**-0.5))


def _initial(slot: Slot) -> NDArray[np.float32]:
    value = cast("mx.array", getattr(slot.module, slot.attribute))
    return np.array(value.astype(mx.float32), dtype=np.float32)
