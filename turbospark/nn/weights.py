"""Renaming and regrouping checkpoint tensors, dense or quantized."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, cast

import mlx.core as mx

from turbospark.errors import CheckpointError
from turbospark.kernels.weights import QuantizedWeight, Weight

_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}

WITHOUT_OFFSET = 0.5
"""Norm vectors that average below it hold weight - 1: trained factors lie around 1 or above."""


def text_weights(
    weights: Mapping[str, Any], skipped: Iterable[str] = (), *, tied: bool
) -> dict[str, Any]:
    """The text model's tensors under `model.` and `lm_head.`, however a wrapper names them.

    Args:
        weights: checkpoint name to tensor.
        skipped: modules beside the text model that are left out, such as `vision_tower`.
        tied: the head is the table, so a head in the file is a second copy and is left out.

    Raises:
        CheckpointError: two names lead to one tensor.
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
        add_once(text, _TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix), value)
    if tied:
        text.pop("lm_head.weight", None)
    return text


def add_once(found: dict[str, Any], name: str, value: Any) -> None:
    """Add a tensor under the model's name.

    Raises:
        CheckpointError: another one is there, which the files hold under another spelling.
    """
    if name in found:
        raise CheckpointError(f"the checkpoint holds {name!r} twice, in two spellings of its name")
    found[name] = value


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
    return _by_parts([weight], lambda parts: mx.contiguous(parts[0][..., start:end, :]))


def alternate_rows(name: str, weight: Weight) -> list[Weight]:
    """Cut a matrix [..., N, K] whose rows belong in turn to two matrices: [..., N / 2, K] each.

    Args:
        name: the tensor, for the message.
        weight: dense or quantized.

    Raises:
        CheckpointError: their number is odd.
    """
    if weight.shape[-2] % 2:
        raise CheckpointError(f"{name} has {weight.shape[-2]} rows, which are not two matrices'")

    def side(start: int) -> Weight:
        return _by_parts([weight], lambda parts: mx.contiguous(parts[0][..., start::2, :]))

    return [side(0), side(1)]


def average_of_norms(norms: Iterable[mx.array]) -> float:
    """The median of what norm vectors average; 1 where there are none.

    Below `WITHOUT_OFFSET` they hold weight - 1.
    """
    means = [norm.astype(mx.float32).mean().item() for norm in norms]  # host memory: once a load
    return median(cast("list[float]", means)) if means else 1.0


def with_offset(norm: mx.array) -> mx.array:
    """A norm's factors from what was trained: 1 + weight, in float32."""
    return norm.astype(mx.float32) + 1


def gates_apart(weights: Mapping[str, Any], num_heads: int, head_dim: int) -> dict[str, Any]:
    """Queries apart from the gates that a checkpoint keeps in their projections; idempotent.

    Args:
        weights: by name; `...q_proj.weight` [2 * Hq * D, K] has a head's gate behind its query.
        num_heads: Hq.
        head_dim: D.
    """
    found: dict[str, Any] = {}
    for name, value in weights.items():
        both = (
            name.endswith("self_attn.q_proj.weight") and value.shape[0] == 2 * num_heads * head_dim
        )
        if both:
            found[name], found[name.replace("q_proj", "gate_proj")] = split_heads(
                name, value, num_heads
            )
        else:
            found[name] = value
    return found


def split_heads(name: str, weight: Weight, num_heads: int) -> list[Weight]:
    """Cut a matrix [N, K] whose rows are pairs of equal blocks, one pair a head, into two.

    Args:
        name: the tensor, for the message.
        weight: dense or quantized.
        num_heads: number of pairs.

    Returns:
        The first blocks of all pairs [N / 2, K], and the second ones.

    Raises:
        CheckpointError: the rows do not divide.
    """
    rows = weight.shape[0]
    if rows % (2 * num_heads):
        raise CheckpointError(f"{name} has {rows} rows, which are not two blocks for each head")

    def side(index: int) -> Weight:
        def cut(parts: list[mx.array]) -> mx.array:
            pairs = parts[0].reshape(num_heads, 2, -1, parts[0].shape[-1])
            return mx.contiguous(pairs[:, index].reshape(rows // 2, -1))

        return _by_parts([weight], cut)

    return [side(0), side(1)]


def stack_matrices(name: str, weights: Sequence[Weight]) -> Weight:
    """Matrices [N, K] of one shape and layout as one [E, N, K].

    Args:
        name: the tensor, for the message.
        weights: all dense, or all quantized alike.

    Raises:
        CheckpointError: they differ.
    """
    if len({_layout(weight) for weight in weights}) > 1:
        raise CheckpointError(f"the matrices of {name} differ in shape or layout from each other")
    return _by_parts(weights, mx.stack)


def join_rows(name: str, weights: Sequence[Weight]) -> Weight:
    """Matrices [N_i, K] of one layout below one another: [N, K].

    Args:
        name: the tensor, for the message.
        weights: all dense, or all quantized alike.

    Raises:
        CheckpointError: they differ in more than their rows.
    """
    if len({(weight.shape[1:], *_layout(weight)[1:]) for weight in weights}) > 1:
        raise CheckpointError(f"the parts of {name} differ in width or layout from each other")
    return _by_parts(weights, mx.concatenate)


def _layout(weight: Weight) -> tuple[Any, ...]:
    if not isinstance(weight, QuantizedWeight):
        return weight.shape, weight.dtype
    dtype = weight.scales.dtype
    return weight.shape, dtype, weight.bits, weight.group_size, weight.zero, weight.mode


def _by_parts(weights: Sequence[Weight], join: Callable[[list[mx.array]], mx.array]) -> Weight:
    """Make one weight of several of one layout: each of its arrays from theirs."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return join([weight for weight in weights if not isinstance(weight, QuantizedWeight)])
    weight = quantized[0]
    biases = [item.biases for item in quantized if item.biases is not None]
    return QuantizedWeight(
        join([item.codes for item in quantized]),
        join([item.scales for item in quantized]),
        join(biases) if biases else None,
        bits=weight.bits,
        group_size=weight.group_size,
        zero=weight.zero,
        mode=weight.mode,
    )
