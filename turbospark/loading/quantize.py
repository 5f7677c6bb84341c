"""Quantizing float weights while they are loaded."""

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from turbospark.errors import OptionError
from turbospark.kernels.weights import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Quantization:
    """How wide codes are, and how many values share a scale."""

    bits: int
    group_size: int

    @property
    def name(self) -> str:
        """Its spelling in the table."""
        return f"int{self.bits}-g{self.group_size}"


_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_DEFAULT_GROUP = 64

QUANTIZATIONS = {
    **{f"int{bits}": Quantization(bits, _DEFAULT_GROUP) for bits in _BITS},
    **{f"int{bits}-g{size}": Quantization(bits, size) for bits in _BITS for size in _GROUP_SIZES},
}
"""Every spelling of the option `quantize`."""

CAREFUL_BITS = 8
_ROUTERS = ("gate", "router", "router.proj", "shared_expert_gate", "g_proj")


def parse_quantize(value: str | None) -> Quantization | None:
    """The quantization that an option names.

    Raises:
        OptionError: the spelling is unknown.
    """
    if value is None:
        return None
    if value not in QUANTIZATIONS:
        raise OptionError(
            f"quantize={value!r} is unknown; known: int2, int3, int4, int5, int6, int8, each with "
            "-g32, -g64 (the default) or -g128 behind it, such as int4-g32"
        )
    return QUANTIZATIONS[value]


def quantization_for(path: str, width: int, wish: Quantization) -> Quantization | None:
    """What a matrix gets, or None where its width does not divide into groups.

    Routers, gates of heads and Gemma's per-layer tables get 8 bits: they are small and lose most.

    Args:
        path: the module's path.
        width: its input dimension.
        wish: what was asked for.
    """
    if width % wish.group_size:
        # Rows of n-grams are short: those of published tables have 160 numbers.
        is_table = "ngram_embedding" in path and width % min(_GROUP_SIZES) == 0
        return Quantization(wish.bits, min(_GROUP_SIZES)) if is_table else None
    if is_careful(path):
        return Quantization(max(CAREFUL_BITS, wish.bits), wish.group_size)
    return wish


def require_divisible(widths: Iterable[int], wish: Quantization, where: str) -> None:
    """Refuse to quantize a model no matrix of which divides into groups.

    Raises:
        OptionError: nothing would be quantized.
    """
    found = sorted(set(widths))
    if not any(width % wish.group_size == 0 for width in found):
        raise OptionError(
            f"quantize={wish.name!r}: no matrix of {where} has rows that divide into groups of "
            f"{wish.group_size} (they have {', '.join(map(str, found[:6]))} numbers), so nothing "
            "would be quantized; choose smaller groups, such as int4-g32, or leave it out"
        )


def is_careful(path: str) -> bool:
    """Whether a module keeps 8 bits whatever the wish."""
    parts = path.split(".")
    return (
        path.endswith(tuple(f".{name}" for name in _ROUTERS))
        or path in _ROUTERS
        or any(part.startswith("per_layer_") or part.endswith("_per_layer") for part in parts)
    )


def quantize_weight(weight: mx.array, to: Quantization) -> QuantizedWeight:
    """Quantize a matrix [..., N, K] as MLX does; scales keep its float type; lazy.

    Raises:
        ShapeError: K does not divide into groups.
    """
    codes, scales, biases = mx.quantize(weight, group_size=to.group_size, bits=to.bits)
    return QuantizedWeight(codes, scales, biases, to.bits, to.group_size)
