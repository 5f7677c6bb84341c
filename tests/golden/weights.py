"""Weights of the golden checkpoints, drawn with numpy alone so that every platform draws the same.

A value is a whole number times a power of two, from a counter hashed with splitmix64; no float
enters before the last step, which is exact. The kind of a tensor, read off its checkpoint name,
decides how large its values are: large enough for every branch of a model to matter.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

_SPREAD = 37837.2  # standard deviation of the sum of four uniform 16-bit numbers


def draw_weights(
    shapes: Mapping[str, Sequence[int]],
    seed: int,
    *,
    centred_norms: bool = False,
    embedding_spread: float = 1.0,
    gate_spread: float | None = None,
    plain_norms: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Draw every tensor of a checkpoint.

    Args:
        shapes: checkpoint name to shape.
        seed: another seed, other weights.
        centred_norms: norms are stored as weight - 1 (Gemma 3).
        embedding_spread: standard deviation of the embedding tables' values.
        gate_spread: that of the experts' gate and up matrices, where another one is wanted.
        plain_norms: norms that are stored as they multiply although the others are not.

    Returns:
        Name to float32 array.
    """
    weights: dict[str, np.ndarray] = {}
    for name, shape in sorted(shapes.items()):
        spread, centre = _size(name, shape)
        # Qwen 3.5's norm of a recurrent layer's heads is stored as it multiplies.
        is_plain = "linear_attn" in name or name in plain_norms
        if "norm" in name and centred_norms and not is_plain:
            centre = 0.0
        if "embed_tokens" in name or name.endswith(".embedding.weight"):
            spread = embedding_spread
        if name.endswith(".experts.gate_up_proj"):
            spread = gate_spread or spread
        weights[name] = _draw(name, shape, seed, spread=spread, centre=centre)
    return weights


def fingerprint(weights: Mapping[str, np.ndarray]) -> str:
    """A sha256 over the names and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value, dtype="<f4").tobytes())
    return digest.hexdigest()


def draw_tokens(count: int, vocab_size: int, seed: int) -> np.ndarray:
    """Token ids [count] int32, none below 3."""
    numbers = _hashed("tokens", count, seed)
    return (3 + numbers % np.uint64(vocab_size - 3)).astype(np.int32)


def quantize(
    weight: np.ndarray, bits: int, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round to the affine layout: value = scale * code + bias, per group of the last axis.

    Every other group counts down from its maximum, so that negative scales occur.

    Returns:
        codes [..., K * bits / 32] uint32, low bits first; scales and biases
        [..., K / group_size] float32.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    down = np.arange(groups.shape[-2]) % 2 == 1
    start, end = np.where(down, high, low), np.where(down, low, high)
    scales = ((end - start) / np.float32(2**bits - 1)).astype(np.float32)
    scales = np.where(scales == 0, np.float32(1), scales)
    codes = np.rint((groups - start[..., None]) / scales[..., None]).astype(np.uint32)
    per_word = codes.reshape(*weight.shape[:-1], -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    packed = np.bitwise_or.reduce(per_word << shifts, axis=-1)
    return packed, scales, start.astype(np.float32)


def dequantize(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """The float32 values [..., K] that packed codes stand for."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = (codes[..., None] >> shifts) & np.uint32(2**bits - 1)
    groups = fields.reshape(*scales.shape, -1).astype(np.float32)
    values = scales[..., None] * groups + biases[..., None]
    return values.reshape(*codes.shape[:-1], -1).astype(np.float32)


MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def quantize_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round to four-bit floats, 32 of them to a power of two along the last axis.

    Returns:
        blocks [..., K / 32, 16] uint8, the even code in the low nibble; scales [..., K / 32]
        uint8, exponents with 127 added.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    _, exponent = np.frexp(np.abs(groups).max(axis=-1))
    exponent = exponent - 3  # the largest value lands between 4 and 8
    scaled = np.ldexp(groups, -exponent[..., None])
    codes = np.abs(np.abs(scaled)[..., None] - MXFP4_VALUES).argmin(axis=-1).astype(np.uint8)
    codes |= (scaled < 0).astype(np.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The float32 values [..., K] that blocks and scales stand for."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = MXFP4_VALUES[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


def int4_layout(name: str, shape: Sequence[int]) -> tuple[int, int] | None:
    """Bits and group size of a tensor in the INT4 checkpoint of the same model; None for float.

    As MLX checkpoints have it: matrices, tables and experts in 4 bit, routers in 8 bit, norms,
    biases, scalars and gates of heads not at all. Rows of n-grams have groups of 32.
    """
    if "ngram_embedding" in name:
        return 4, 32  # rows of 160 numbers as published do not divide into groups of 64
    if len(shape) < 2 or shape[-1] % 64 or name.endswith(("_bias", ".g_proj.weight")):
        return None
    is_router = "router" in name or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
    return (8 if is_router else 4), 64


def _draw(
    name: str, shape: Sequence[int], seed: int, *, spread: float, centre: float
) -> np.ndarray:
    hashed = _hashed(name, math.prod(shape), seed)
    fields = hashed[:, None] >> np.array([0, 16, 32, 48], np.uint64)
    sums = (fields & np.uint64(0xFFFF)).astype(np.int64).sum(axis=1) - 2 * 0xFFFF
    exponent = round(math.log2(spread / _SPREAD))
    values = np.ldexp(sums.astype(np.float32), exponent) + np.float32(centre)
    return values.reshape(shape).astype(np.float32)


def _size(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Standard deviation (met within a factor of 1.5) and centre of a tensor's values."""
    leaf = name.rpartition(".")[2]
    if "ngram_embedding" in name:
        return 1.0, 0.0
    if leaf == "sinks":
        return 1.5, 0.0
    if leaf.endswith("_proj_bias"):
        return 0.25, 0.0
    if leaf == "layer_scalar":
        return 0.1, 0.8125
    if leaf == "per_expert_scale":
        return 0.25, 1.0
    if name.endswith("router.scale"):
        return 0.25, 4.0
    if "norm" in name and len(shape) == 1:
        return 0.25, 1.0
    if len(shape) == 1:
        return 0.25, 0.0
    if "router" in name or "lm_head" in name:
        return 2.0 / shape[-1] ** 0.5, 0.0
    return 1.0 / shape[-1] ** 0.5, 0.0


def _hashed(name: str, count: int, seed: int) -> np.ndarray:
    """`count` uint64 numbers of splitmix64, started from the name."""
    start = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
    counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = counter + np.frombuffer(start, dtype="<u8")
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
