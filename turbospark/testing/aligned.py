"""Safetensors files whose tensors begin where a reader of parts of them wants them to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.loading.safetensors import DTYPES

PAGE = 4096

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_aligned(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """Write one safetensors file; its bytes follow from the tensors alone, whatever their order.

    Data begin at a multiple of PAGE, for which the header is padded. Between tensors the format
    allows no padding, so they go by the power of two in their bytes, the largest first: each
    begins at a multiple of its own, or of PAGE where that is less.

    Args:
        path: the file.
        tensors: by their names.
    """
    order = sorted(tensors, key=lambda name: (-_power_of_two(tensors[name].nbytes), name))
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name in order:
        array, start = tensors[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.array(tensors[name].reshape(-1).view(mx.uint8)).data)


def _power_of_two(count: int) -> int:
    """The largest that divides a count."""
    return count & -count
