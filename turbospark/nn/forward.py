"""The parts of a forward pass that every family has: its layers in order, and its logits."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from turbospark.errors import OptionError
from turbospark.nn.projections import OutputHead
from turbospark.protocols import ForwardOutput, LogitRows, Phase

Layer = Callable[[mx.array, Any, Phase], mx.array]
"""h [T, C], cache, phase -> h [T, C]."""


def run_layers(
    h: mx.array,
    layers: Sequence[Layer],
    caches: Sequence[Any],
    *,
    phase: Phase,
    taps: Sequence[int] = (),
) -> tuple[mx.array, dict[int, mx.array]]:
    """Pass the residual stream through every layer.

    Args:
        h: [T, C].
        layers: in order.
        caches: one a layer, advanced in place.
        phase: prefill or decode.
        taps: layers after which the stream is kept.

    Returns:
        The stream [T, C] after the last layer, and those asked for.

    Raises:
        OptionError: a tap names no layer; no cache has moved.
    """
    check_taps(taps, len(layers))
    kept: dict[int, mx.array] = {}
    for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        h = layer(h, cache, phase)
        if i in taps:
            kept[i] = h
    return h, kept


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Refuse taps that name no layer.

    Raises:
        OptionError: one is negative or too large.
    """
    for tap in taps:
        if not 0 <= tap < num_layers:
            raise OptionError(f"tap {tap} names no layer: the model has 0 to {num_layers - 1}")


def finish(
    h: mx.array, head: OutputHead, rows: LogitRows, phase: Phase, taps: dict[int, mx.array]
) -> ForwardOutput:
    """Apply the output head to the rows that are wanted."""
    if rows == "none":
        return ForwardOutput(None, taps)
    return ForwardOutput(head(h[-1:] if rows == "last" else h, phase), taps)
