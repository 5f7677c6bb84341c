"""Checkpoint folders of a tiny Qwen 3.5 and its drafters, as published files store them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from golden.drafter_fixtures import load_drafter_golden

from turbospark.testing import write_tiny_checkpoint

Change = Callable[[str, np.ndarray], np.ndarray | None]
"""A tensor's name and value to what the file holds; None leaves it out."""


def write_qwen(
    folder: Path,
    name: str = "qwen3_5_mtp",
    *,
    change: Change = lambda _, value: value,
    bits: Callable[[str], int | None] = lambda _: None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A golden trunk with its head.

    Args:
        folder: made if it is not there.
        name: of the fixture.
        change: applied to every tensor.
        bits: of a matrix, by name; None leaves it float.
        config: goes into config.json.
    """
    golden = load_drafter_golden(name)
    write_tiny_checkpoint(folder)
    raw = dict(golden.config) | {"eos_token_id": 257, "bos_token_id": 256} | dict(config or {})
    (folder / "config.json").write_text(json.dumps(raw))
    kept = {key: change(key, value) for key, value in golden.weights.items()}
    save(folder, {key: value for key, value in kept.items() if value is not None}, bits)
    return folder


def converted(name: str, value: np.ndarray) -> np.ndarray:
    """As MLX conversions store a trunk and its head: norms as multiplied, filters turned."""
    if name.endswith("conv1d.weight"):
        return value.swapaxes(-1, -2)
    is_norm = value.ndim == 1 and "norm" in name and "linear_attn" not in name
    return value + 1 if is_norm else value


def write_head(folder: Path, *, prefix: str, baked: bool, name: str = "qwen3_5_mtp") -> Path:
    """A folder with the head alone."""
    folder.mkdir()
    weights = {
        prefix + key.removeprefix("mtp."): converted(key, value) if baked else value
        for key, value in load_drafter_golden(name).weights.items()
        if key.startswith("mtp.")
    }
    save(folder, weights)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp"}))
    return folder


def write_blocks(folder: Path, name: str = "dflash2", **config: Any) -> Path:
    """A folder with a block drafter."""
    golden = load_drafter_golden(name)
    folder.mkdir()
    nested = golden.config["dflash_config"] | config.pop("dflash_config", {})
    raw = golden.config | config | {"dflash_config": nested}
    (folder / "config.json").write_text(json.dumps(raw))
    save(folder, golden.weights)
    return folder


def save(
    folder: Path,
    weights: Mapping[str, np.ndarray],
    bits: Callable[[str], int | None] = lambda _: None,
) -> None:
    arrays: dict[str, mx.array] = {}
    for name, value in weights.items():
        width = bits(name) if value.ndim == 2 else None
        if width is None:
            arrays[name] = mx.array(value)
            continue
        codes, scales, biases = mx.quantize(mx.array(value), group_size=32, bits=width)
        stem = name.removesuffix(".weight")
        arrays |= {name: codes, f"{stem}.scales": scales, f"{stem}.biases": biases}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
