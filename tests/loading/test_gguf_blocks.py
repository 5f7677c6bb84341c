"""GGUF blocks keep every value when they become codes, scales and biases."""

import mlx.core as mx
import numpy as np
import pytest
from gguf import constants, quants
from loading.files import gguf_bytes

from turbospark.errors import UnsupportedError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading import gguf as gguf_module
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_blocks import EXPANDERS, LAYOUTS, pack_bits, pack_nibbles
from turbospark.loading.gguf_types import DENSE, TYPES

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108],
}  # fmt: skip
ROWS = 7


def random_blocks(name, columns=3, seed=1):
    """[ROWS, columns, bytes] blocks whose scales are ordinary numbers, some of them negative."""
    draw = np.random.default_rng(seed)
    kind = TYPES[NUMBERS[name]]
    blocks = draw.integers(0, 256, (ROWS, columns, kind.block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        scales = draw.normal(size=(ROWS, columns, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks


def read(path, name, blocks, dequantize=False):
    width = blocks.shape[1] * TYPES[NUMBERS[name]].values
    tensors = {"w.weight": (NUMBERS[name], (blocks.shape[0], width), blocks.tobytes())}
    path.write_bytes(gguf_bytes({"general.architecture": "toy"}, tensors))
    return GGUFFile(path).read("w.weight", dequantize)


def values(weight):
    return np.asarray(dequantize_reference(weight))


@pytest.mark.parametrize("name", LAYOUTS)
def test_quantized_values_equal_those_of_the_gguf_package(tmp_path, name):
    blocks = random_blocks(name)
    weight = read(tmp_path / "a.gguf", name, blocks)
    expected = quants.dequantize(blocks.reshape(ROWS, -1), constants.GGMLQuantizationType[name])
    assert isinstance(weight, QuantizedWeight)
    assert np.array_equal(values(weight), expected)


@pytest.mark.parametrize("name", EXPANDERS)
def test_dequantized_values_equal_those_of_the_gguf_package(tmp_path, name):
    blocks = random_blocks(name)
    weight = read(tmp_path / "a.gguf", name, blocks, dequantize=True)
    expected = quants.dequantize(blocks.reshape(ROWS, -1), constants.GGMLQuantizationType[name])
    assert weight.dtype == mx.float32
    assert np.array_equal(np.asarray(weight), expected)


@pytest.mark.parametrize("name", [*LAYOUTS, *EXPANDERS])
def test_small_slabs_give_the_same_values_as_one(tmp_path, monkeypatch, name):
    blocks = random_blocks(name, seed=2)
    whole = values(read(tmp_path / "a.gguf", name, blocks, dequantize=True))
    monkeypatch.setattr(gguf_module, "SLAB_BYTES", 2 * blocks[0].nbytes + 1)
    assert np.array_equal(values(read(tmp_path / "b.gguf", name, blocks, True)), whole)


@pytest.mark.parametrize("name", [*LAYOUTS, *EXPANDERS])
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_kept_as_they_are(tmp_path, name, scale):
    blocks = random_blocks(name)
    for at in HALVES[name]:
        blocks[3, 1, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    found = read(tmp_path / "a.gguf", name, blocks, dequantize=True)
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(np.asarray(found) if isinstance(found, mx.array) else values(found))
    assert bad[3].any()
    assert not np.delete(bad, 3, axis=0).any()


def half(value):
    return np.array([value], np.float16).tobytes()


def row(weight):
    return values(weight)[0].tolist()


def one_block(path, name, raw):
    return read(path, name, np.frombuffer(raw, np.uint8).reshape(1, 1, -1).copy())


def test_q4_0_block_made_by_hand(tmp_path):
    # Byte j: low nibble is value j, high nibble value 16 + j; a value is scale * (nibble - 8).
    raw = half(0.5) + bytes(j | (15 - j) << 4 for j in range(16))
    weight = one_block(tmp_path / "a.gguf", "Q4_0", raw)
    expected = [0.5 * (j - 8) for j in range(16)] + [0.5 * (7 - j) for j in range(16)]
    assert row(weight) == expected
    assert (weight.bits, weight.group_size, weight.zero) == (4, 32, 8)
    assert weight.scales.dtype == mx.float16
    assert weight.biases is None


def test_q8_0_block_made_by_hand(tmp_path):
    codes = np.arange(-128, 128, 8, dtype=np.int8)
    weight = one_block(tmp_path / "a.gguf", "Q8_0", half(-0.25) + codes.tobytes())
    assert row(weight) == [-0.25 * int(code) for code in codes]
    assert (weight.bits, weight.group_size, weight.zero) == (8, 32, 128)


def test_q5_0_block_made_by_hand(tmp_path):
    # Bit i of the 32-bit word is the fifth bit of value i.
    raw = half(2) + (0xAAAAAAAA).to_bytes(4, "little") + bytes([0x31] * 16)
    weight = one_block(tmp_path / "a.gguf", "Q5_0", raw)
    low, high = [1, 17] * 8, [3, 19] * 8
    assert row(weight) == [2.0 * (code - 16) for code in low + high]
    assert (weight.bits, weight.group_size, weight.zero) == (5, 32, 16)


def test_q4_k_block_made_by_hand(tmp_path):
    # 6-bit scales and minima: groups 0-3 in the low six bits of bytes 0-3 and 4-7; groups 4-7 have
    # their low nibbles in bytes 8-11 and their top two bits in bits 6-7 of bytes 0-7.
    packed = [1 | 2 << 6, 2, 3, 4, 5 | 3 << 6, 6, 7, 8, 0x21, 0x43, 0x65, 0x87]
    raw = half(0.5) + half(0.25) + bytes(packed) + bytes([0xF0] * 128)
    weight = one_block(tmp_path / "a.gguf", "Q4_K", raw)
    scales = [1, 2, 3, 4, 1 + 32, 3, 5, 7]
    minima = [5, 6, 7, 8, 2 + 48, 4, 6, 8]
    expected = [
        0.5 * scales[group] * (15 if group % 2 else 0) - 0.25 * minima[group]
        for group in range(8)
        for _ in range(32)
    ]
    assert row(weight) == expected
    assert weight.scales.dtype == mx.float32


def test_q6_k_block_made_by_hand(tmp_path):
    # The first 32 values: low nibbles of ql[0:32] and bits 0-1 of qh[0:32].
    low, high = bytes([0x5A] * 128), bytes([0b11_10_01_00] * 64)
    scales = np.arange(-8, 8, dtype=np.int8).tobytes()
    weight = one_block(tmp_path / "a.gguf", "Q6_K", low + high + scales + half(1))
    codes = [10, 10 + 16, 5 + 32, 5 + 48] * 2  # per 32 values
    expected = [(group - 8) * (codes[group // 2] - 32) for group in range(16) for _ in range(16)]
    assert row(weight) == expected
    assert (weight.bits, weight.group_size, weight.zero) == (6, 16, 32)


@pytest.mark.parametrize("bits", [5, 6])
def test_packed_bits_are_a_little_endian_stream(bits):
    draw = np.random.default_rng(bits)
    codes = draw.integers(0, 1 << bits, (3, 5, 32), dtype=np.uint8)
    out = np.zeros((3, 5, 4 * bits), np.uint8)
    pack_bits(codes.copy(), bits, out)
    stream = np.unpackbits(out, axis=-1, bitorder="little").reshape(3, 5, 32, bits)
    assert np.array_equal((stream << np.arange(bits, dtype=np.uint8)).sum(-1), codes)


def test_packed_nibbles_put_even_values_low():
    both = np.array([[0x21, 0x43, 0x65, 0x87]], np.uint8)
    out = np.zeros((1, 4), np.uint8)
    pack_nibbles(both, out)
    assert out.tolist() == [[0x31, 0x75, 0x42, 0x86]]


@pytest.mark.parametrize("name", DENSE)
def test_dense_types_keep_their_bits(tmp_path, name):
    size = TYPES[NUMBERS[name]].block_bytes
    raw = np.arange(3 * 5 * size, dtype=np.uint8)
    tensors = {"w.weight": (NUMBERS[name], (3, 5), raw.tobytes())}
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({}, tensors))
    array = GGUFFile(tmp_path / "a.gguf").read("w.weight")
    plain = {"F32": mx.uint32, "F16": mx.uint16, "BF16": mx.uint16}[name]
    assert array.shape == (3, 5)
    assert np.asarray(array.view(plain)).tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ4_NL", "TQ1_0", "Q8_1", "I8", "F64", "MXFP4"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_types_without_a_layout_are_refused_by_name(tmp_path, name, dequantize):
    kind = TYPES[NUMBERS[name]]
    tensors = {"w.weight": (NUMBERS[name], (2, kind.values), bytes(2 * kind.block_bytes))}
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({}, tensors))
    with pytest.raises(UnsupportedError, match=name) as caught:
        GGUFFile(tmp_path / "a.gguf").read("w.weight", dequantize)
    assert "a.gguf" in str(caught.value)


@pytest.mark.parametrize("name", EXPANDERS)
def test_k_quants_without_a_layout_want_an_explicit_wish(tmp_path, name):
    with pytest.raises(UnsupportedError, match="dequantize=True"):
        read(tmp_path / "a.gguf", name, random_blocks(name))


def test_stacked_experts_keep_their_three_dimensions(tmp_path):
    blocks = random_blocks("Q4_K", columns=1)
    stacked = np.concatenate([blocks, blocks[:5]])  # 12 rows as 3 experts of 4
    tensors = {"w.weight": (NUMBERS["Q4_K"], (3, 4, 256), stacked.tobytes())}
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({}, tensors))
    weight = GGUFFile(tmp_path / "a.gguf").read("w.weight")
    flat = values(read(tmp_path / "b.gguf", "Q4_K", stacked))
    assert weight.shape == (3, 4, 256)
    assert np.array_equal(values(weight), flat.reshape(3, 4, 256))
