"""Rotary position embeddings: tables of inverse frequencies, and the rotation itself.

The formulas and their float32 order of evaluation are those of transformers'
`modeling_rope_utils`, so that angles agree far into a long context.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from turbospark.errors import UnsupportedError

Table = NDArray[np.float32]


class _Memo:
    """The rotation computed last, in the forms that were asked for; shared by all layers."""

    __slots__ = ("arrays", "tables")

    def __init__(self) -> None:
        self.tables: tuple[tuple[int, int], Table, Table] | None = None
        self.arrays: tuple[tuple[int, int], mx.array, mx.array] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotary embedding of the first 2P dimensions of a head.

    Attributes:
        inv_freq: [P] radians a position of each pair; a pair of frequency 0 passes through.
        head_dim: dimensions of a head, at least 2P; those behind 2P pass through.
        magnitude: factor of every cos and sin.
        traditional: pairs are (2i, 2i + 1) instead of (i, i + P).
    """

    inv_freq: Table
    head_dim: int
    magnitude: float = 1.0
    traditional: bool = False
    _memo: _Memo = field(default_factory=_Memo, init=False, repr=False)

    @classmethod
    def build(
        cls, kind: str, theta: float, head_dim: int, *, traditional: bool = False, **values: Any
    ) -> Self:
        """A rotary embedding of a kind that config.json names.

        Args:
            kind: default, linear, llama3, yarn or proportional.
            theta: the base of the frequencies.
            head_dim: dimensions of a head.
            traditional: pairs are neighbours.
            values: the kind's numbers under config.json's names.

        Raises:
            UnsupportedError: there is no such kind.
        """
        inv_freq, magnitude = rope_frequencies(kind, theta, head_dim, **values)
        return cls(inv_freq, head_dim, magnitude, traditional)

    @classmethod
    def still(cls, head_dim: int) -> Self:
        """No rotation, for layers that do not know positions: every pair's frequency is 0."""
        return cls(np.zeros(head_dim // 2, np.float32), head_dim)

    def rotation(self, offset: int, count: int) -> tuple[Table, Table]:
        """Cos and sin [count, P] of positions offset .. offset + count - 1, times magnitude."""
        memo, key = self._memo.tables, (offset, count)
        if memo is None or memo[0] != key:
            memo = (key, *rotation_table(self.inv_freq, self.magnitude, offset, count))
            self._memo.tables = memo
        return memo[1], memo[2]

    def rotation_arrays(self, offset: int | mx.array, count: int) -> tuple[mx.array, mx.array]:
        """The same as MLX arrays; computed on the device where `offset` is an int32 scalar."""
        if isinstance(offset, mx.array):
            positions = (offset + mx.arange(count)).astype(mx.float32)
            angles = positions[:, None] * mx.array(self.inv_freq)[None]
            return mx.cos(angles) * self.magnitude, mx.sin(angles) * self.magnitude
        memo, key = self._memo.arrays, (offset, count)
        if memo is None or memo[0] != key:
            cos, sin = self.rotation(offset, count)
            memo = (key, mx.array(cos), mx.array(sin))
            self._memo.arrays = memo
        return memo[1], memo[2]


def rotation_table(
    inv_freq: Table, magnitude: float, offset: int, count: int
) -> tuple[Table, Table]:
    """Cos and sin [count, P] of some positions.

    The angle is a float32 product, as models were trained; its cosine is computed in float64 and
    rounded, so that a row does not depend on the rows beside it.
    """
    positions = np.arange(offset, offset + count, dtype=np.float32)
    angles = (positions[:, None] * inv_freq[None]).astype(np.float64)
    factor = np.float32(magnitude)
    return np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor


def rope_reference(x: mx.array, rope: Rope, offset: int | mx.array) -> mx.array:
    """Rotate rows that stand at consecutive positions.

    Args:
        x: [T, H, D].
        rope: the embedding; its head_dim is D.
        offset: position of the first row, an int32 scalar inside a compiled step.

    Returns:
        [T, H, D] in the dtype of `x`, computed in float32.
    """
    cos, sin = (t[:, None] for t in rope.rotation_arrays(offset, x.shape[0]))  # [T, 1, P]
    P = cos.shape[-1]
    rotated, passed = x[..., : 2 * P].astype(mx.float32), x[..., 2 * P :]
    if rope.traditional:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        pairs = mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        out = mx.reshape(pairs, rotated.shape)
    else:
        a, b = rotated[..., :P], rotated[..., P:]
        out = mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return mx.concatenate([out.astype(x.dtype), passed], axis=-1)


def rope_frequencies(kind: str, theta: float, head_dim: int, **values: Any) -> tuple[Table, float]:
    """Inverse frequencies [P] and the magnitude of a kind that config.json names.

    Args:
        kind: default, linear, llama3, yarn or proportional.
        theta: the base of the frequencies.
        head_dim: dimensions of a head.
        values: the kind's numbers under config.json's names; `partial_rotary_factor` is the share
            of a head that rotates.

    Raises:
        UnsupportedError: there is no such kind.
    """
    builder = _KINDS.get(kind)
    if builder is None:
        known = ", ".join(_KINDS)
        raise UnsupportedError(f"RoPE kind {kind!r} is not implemented; known: {known}")
    if kind == "proportional":
        return builder(theta, head_dim, **values)
    dims = int(head_dim * values.pop("partial_rotary_factor", 1.0))
    return builder(theta, dims, **values)


def _powers(theta: float, dims: int, divisor: int) -> Table:
    # In float32 steps, each rounded correctly: theta ** (2i / divisor).
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(divisor)
    return (float(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)


def _plain(theta: float, dims: int) -> Table:
    return np.float32(1) / _powers(theta, dims, dims)


def _default(theta: float, dims: int) -> tuple[Table, float]:
    return _plain(theta, dims), 1.0


def _linear(theta: float, dims: int, *, factor: float) -> tuple[Table, float]:
    return _plain(theta, dims) / np.float32(factor), 1.0


def _proportional(
    theta: float, head_dim: int, *, partial_rotary_factor: float = 1.0, factor: float = 1.0
) -> tuple[Table, float]:
    """Gemma 4's full layers: whole-head frequencies, of which only the first pairs rotate."""
    rotated = int(partial_rotary_factor * head_dim // 2)
    table = np.zeros(head_dim // 2, dtype=np.float32)
    table[:rotated] = np.float32(1) / _powers(theta, 2 * rotated, head_dim)
    return table / np.float32(factor), 1.0


def _llama3(
    theta: float,
    dims: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> tuple[Table, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    plain, context = _plain(theta, dims), np.float32(original_max_position_embeddings)
    low, high, stretch = (
        np.float32(low_freq_factor),
        np.float32(high_freq_factor),
        np.float32(factor),
    )
    wavelength = np.float32(2 * math.pi) / plain
    blend = (context / wavelength - low) / (high - low)
    blended = (np.float32(1) - blend) * plain / stretch + blend * plain
    table = np.where(wavelength > context / low, plain / stretch, blended)
    return np.where(wavelength < context / high, plain, table).astype(np.float32), 1.0


def _yarn(
    theta: float,
    dims: int,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    truncate: bool = True,
    **magnitude: float | None,
) -> tuple[Table, float]:
    """YaRN (arXiv 2309.00071): a ramp over the pairs between kept and stretched frequencies."""
    one, powers = np.float32(1), _powers(theta, dims, dims)
    turns = partial(_pair_of_turns, theta, dims, original_max_position_embeddings)
    low, high = turns(beta_fast or 32.0), turns(beta_slow or 1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / width, 0, 1)
    kept = one - ramp
    table = one / (np.float32(factor) * powers) * (one - kept) + one / powers * kept
    return table.astype(np.float32), _yarn_magnitude(factor, **magnitude)


def _pair_of_turns(theta: float, dims: int, context: int, turns: float) -> float:
    """The (fractional) pair whose wavelength fits `turns` times into the context."""
    return dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_magnitude(
    factor: float,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> float:
    if attention_factor is not None:
        return float(attention_factor)
    if mscale and mscale_all_dim:
        return yarn_growth(factor, mscale) / yarn_growth(factor, mscale_all_dim)
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, scale: float) -> float:
    """How YaRN's magnitude grows with the stretch of the context; `scale` says how much of it."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_KINDS: dict[str, Callable[..., tuple[Table, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
