"""Renaming and regrouping checkpoint tensors, dense or quantized."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from turbospark.errors import CheckpointError
from turbospark.kernels.weights import QuantizedWeight, Weight

_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def text_weights(
    weights: Mapping[str, Any], skipped: Iterable[str] = (), *, tied: bool
) -> dict[str, Any]:
    """The text model's tensors under `model.` and `lm_head.`, however a wrapper names them.

    Args:
        weights: checkpoint name to tensor.
        skipped: modules beside the text model that are left out, such as `vision_tower`.
        tied: the head is the table, so a head in the file is a second copy and is left out.
    """
    strangers = tuple(
        prefix + name + "." for name in skipped for prefix in ("", "model.", "language_model.")
    )
    text: dict[str, Any] = {}
    for name, value in weights.items():
        # Old exports keep RoPE's frequencies, which the configuration determines.
        if name.startswith(strangers) or name.endswith("rotary_emb.inv_freq"):
            continue
        prefix = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), "")
        text[_TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = value
    if tied:
        text.pop("lm_head.weight", None)
    return text


def split_rows(name: str, weight: Weight, parts: int = 2) -> list[Weight]:
    """Cut a matrix [..., N, K] into equal blocks of rows.

    Args:
        name: the tensor, for the message.
        weight: dense or quantized.
        parts: number of blocks.

    Raises:
        CheckpointError: the rows do not divide.
    """
    rows = weight.shape[-2]
    if rows % parts:
        raise CheckpointError(f"{name} has {rows} rows, which do not make {parts} equal parts")
    step = rows // parts
    return [rows_of(weight, start, start + step) for start in range(0, rows, step)]


def rows_of(weight: Weight, start: int, end: int) -> Weight:
    """Rows [start, end) of a matrix [..., N, K]."""

    def cut(part: mx.array) -> mx.array:
        return mx.contiguous(part[..., start:end, :])

    if not isinstance(weight, QuantizedWeight):
        return cut(weight)
    return QuantizedWeight(
        cut(weight.codes),
        cut(weight.scales),
        None if weight.biases is None else cut(weight.biases),
        bits=weight.bits,
        group_size=weight.group_size,
        zero=weight.zero,
        mode=weight.mode,
    )
