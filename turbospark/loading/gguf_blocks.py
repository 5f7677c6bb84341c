"""GGUF blocks to the affine layout, without re-quantizing: value = scale * code + bias.

Block layouts: ggml's `block_q*` structures (ggml-common.h in llama.cpp). A filler takes raw blocks
[rows, blocks, bytes] and writes codes, scales and biases of the same rows into views of the final
arrays, so that no second copy of a tensor exists.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from turbospark.loading.arrays import Array


@dataclass(frozen=True, slots=True)
class Target:
    """Views of some rows of the result.

    Attributes:
        codes: [rows, groups, group_size * bits / 8] uint8, the MLX bit stream of each group.
        scales: [rows, groups].
        biases: like scales; None where the layout has a zero code.
    """

    codes: Array
    scales: Array
    biases: Array | None


@dataclass(frozen=True, slots=True)
class Layout:
    """What a block type becomes.

    Attributes:
        bits: bits of a code.
        group_size: values that share a scale.
        scale_dtype: the numpy type that holds scales (and biases) exactly.
        zero: the code that stands for 0; None when biases are stored.
        fill: converts blocks [rows, blocks, bytes] into a Target.
    """

    bits: int
    group_size: int
    scale_dtype: type[np.float16] | type[np.float32]
    zero: int | None
    fill: Callable[[Array, Target], None]


def half(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def pack_nibbles(low_high: Array, out: Array) -> None:
    """Repack bytes whose low nibbles are one half of a group and whose high ones are the other.

    Args:
        low_high: [..., W] uint8; value j is the low nibble of byte j, value W + j its high nibble.
        out: [..., W] uint8; byte b gets values 2b (low nibble) and 2b + 1.
    """
    half_width = low_high.shape[-1] // 2
    even, odd = low_high[..., 0::2], low_high[..., 1::2]
    np.bitwise_or(even & 15, odd << 4, out=out[..., :half_width])
    np.bitwise_or(even >> 4, odd & 0xF0, out=out[..., half_width:])


def pack_bits(values: Array, bits: int, out: Array) -> None:
    """Squeeze uint8 codes of 5 or 6 bits into the MLX bit stream, low bits first.

    Args:
        values: [..., G] uint8, G a multiple of 8, contiguous; used as scratch.
        bits: bits of one code.
        out: [..., G * bits / 8] uint8.
    """
    words = values.view(np.uint64)  # 8 codes a word; three rounds close the gaps between them
    for width, gap in ((8, 8 - bits), (16, 2 * (8 - bits)), (32, 4 * (8 - bits))):
        used = (1 << (width - gap)) - 1
        low = sum(used << (2 * width * i) for i in range(64 // (2 * width)))
        high = (words >> np.uint64(gap)) & np.uint64(low << (width - gap))
        words &= np.uint64(low)
        words |= high
    stream = words.view(np.uint8).reshape(*words.shape, 8)[..., :bits]
    out[...] = stream.reshape(out.shape)


def k_scales(packed: Array) -> tuple[Array, Array]:
    """The 8 scales and 8 minima, 6 bits each, of Q4_K and Q5_K.

    Args:
        packed: [..., 12] uint8.

    Returns:
        Two [..., 8] uint8 arrays.
    """
    first, second, mixed = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (mixed & 15) | ((first >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([second & 63, (mixed >> 4) | ((second >> 2) & 0x30)], axis=-1)
    return scales, minima


def _q8_0(blocks: Array, to: Target) -> None:
    to.scales[...] = half(blocks, 0)
    np.bitwise_xor(blocks[..., 2:], 0x80, out=to.codes)  # int8 + 128


def _q4_0(blocks: Array, to: Target) -> None:
    to.scales[...] = half(blocks, 0)
    pack_nibbles(blocks[..., 2:], to.codes)


def _q4_1(blocks: Array, to: Target) -> None:
    assert to.biases is not None
    to.scales[...] = half(blocks, 0)
    to.biases[...] = half(blocks, 2)
    pack_nibbles(blocks[..., 4:], to.codes)


def _five_bit_codes(high_bits: Array, nibbles: Array) -> Array:
    codes = np.unpackbits(high_bits, axis=-1, bitorder="little")  # [..., 32]
    codes <<= 4
    codes[..., :16] |= nibbles & 15
    codes[..., 16:] |= nibbles >> 4
    return codes


def _q5_0(blocks: Array, to: Target) -> None:
    to.scales[...] = half(blocks, 0)
    pack_bits(_five_bit_codes(blocks[..., 2:6], blocks[..., 6:]), 5, to.codes)


def _q5_1(blocks: Array, to: Target) -> None:
    assert to.biases is not None
    to.scales[...] = half(blocks, 0)
    to.biases[...] = half(blocks, 2)
    pack_bits(_five_bit_codes(blocks[..., 4:8], blocks[..., 8:]), 5, to.codes)


def _k_offsets(blocks: Array, to: Target) -> None:
    assert to.biases is not None
    scales, minima = k_scales(blocks[..., 4:16])
    shape = to.scales.shape
    to.scales[...] = (half(blocks, 0).astype(np.float32)[..., None] * scales).reshape(shape)
    to.biases[...] = -(half(blocks, 2).astype(np.float32)[..., None] * minima).reshape(shape)


def _q4_k(blocks: Array, to: Target) -> None:
    _k_offsets(blocks, to)
    rows, count, _ = blocks.shape
    # 32 bytes hold two groups: their low and their high nibbles.
    pack_nibbles(
        blocks[..., 16:].reshape(rows, count * 4, 32), to.codes.reshape(rows, count * 4, 32)
    )


def _q5_k(blocks: Array, to: Target) -> None:
    _k_offsets(blocks, to)
    rows, count, _ = blocks.shape
    nibbles = blocks[..., 48:].reshape(rows, count, 4, 32)
    codes = np.empty((rows, count, 4, 2, 32), np.uint8)
    np.bitwise_and(nibbles, 15, out=codes[..., 0, :])
    np.right_shift(nibbles, 4, out=codes[..., 1, :])
    high = blocks[..., 16:48]  # bit g of byte l is the fifth bit of value l of group g
    for group in range(8):
        codes[:, :, group // 2, group % 2] |= ((high >> group) & 1) << 4
    pack_bits(codes.reshape(rows, count * 8, 32), 5, to.codes)


def _q6_k(blocks: Array, to: Target) -> None:
    rows, count, _ = blocks.shape
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    scales = half(blocks, 208).astype(np.float32)[..., None] * factors
    to.scales[...] = scales.reshape(to.scales.shape)
    low = blocks[..., :128].reshape(rows, count, 2, 2, 32)
    high = blocks[..., 128:192].reshape(rows, count, 2, 32)
    codes = np.empty((rows, count, 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=codes[:, :, :, :2])
    np.right_shift(low, 4, out=codes[:, :, :, 2:])
    for quarter in range(4):
        codes[:, :, :, quarter] |= ((high >> (2 * quarter)) & 3) << 4
    pack_bits(codes.reshape(rows, count * 16, 16), 6, to.codes)


LAYOUTS = {
    "Q4_0": Layout(4, 32, np.float16, 8, _q4_0),
    "Q4_1": Layout(4, 32, np.float16, None, _q4_1),
    "Q4_K": Layout(4, 32, np.float32, None, _q4_k),
    "Q5_0": Layout(5, 32, np.float16, 16, _q5_0),
    "Q5_1": Layout(5, 32, np.float16, None, _q5_1),
    "Q5_K": Layout(5, 32, np.float32, None, _q5_k),
    "Q6_K": Layout(6, 16, np.float32, 32, _q6_k),
    "Q8_0": Layout(8, 32, np.float16, 128, _q8_0),
}


def _expand_q2_k(blocks: Array) -> Array:
    """[rows, blocks, 84] to float32 [rows, blocks, 256]."""
    rows, count, _ = blocks.shape
    both = blocks[..., 0:16]
    scale = half(blocks, 80).astype(np.float32)[..., None] * (both & 15)
    minimum = half(blocks, 82).astype(np.float32)[..., None] * (both >> 4)
    packed = blocks[..., 16:80].reshape(rows, count, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    codes = ((packed >> shifts) & 3).reshape(rows, count, 16, 16)
    return (scale[..., None] * codes - minimum[..., None]).reshape(rows, count, 256)


def _expand_q3_k(blocks: Array) -> Array:
    """[rows, blocks, 110] to float32 [rows, blocks, 256]."""
    rows, count, _ = blocks.shape
    scale = half(blocks, 108).astype(np.float32)[..., None] * _q3_k_factors(blocks[..., 96:108])
    packed = blocks[..., 32:96].reshape(rows, count, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    low = (packed >> shifts) & 3
    bits = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    high = (blocks[..., :32].reshape(rows, count, 1, 1, 32) >> bits) & 1
    codes = (low | (high << 2)).astype(np.int8) - np.int8(4)
    return (scale[..., None] * codes.reshape(rows, count, 16, 16)).reshape(rows, count, 256)


def _q3_k_factors(packed: Array) -> Array:
    """[..., 12] uint8 to the 16 signed 6-bit scales: low nibbles first, then the top two bits."""
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    top = [(packed[..., 8:12] >> shift) & 3 for shift in (0, 2, 4, 6)]
    return (low | (np.concatenate(top, axis=-1) << 4)).astype(np.int8) - np.int8(32)


EXPANDERS: dict[str, Callable[[Array], Array]] = {"Q2_K": _expand_q2_k, "Q3_K": _expand_q3_k}
