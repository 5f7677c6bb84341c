"""Joining `.weight`, `.scales` and `.biases` with what config.json says about them."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.errors import CheckpointError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.quantized import assemble, canonical

PATH = "model.layers.3.mlp.down_proj"
N, K = 7, 192


def tensors(bits=4, group_size=64, path=PATH):
    draw = np.random.default_rng(bits * group_size)
    matrix = mx.array(draw.normal(size=(N, K)).astype(np.float32))
    codes, scales, biases = mx.quantize(matrix, group_size=group_size, bits=bits)
    parts = {f"{path}.weight": codes, f"{path}.scales": scales, f"{path}.biases": biases}
    return parts, mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)


def refused(arrays, quantization, *words, width=None):
    with pytest.raises(CheckpointError) as caught:
        assemble(arrays, quantization, lambda _: width, "the/config.json")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_global_bits_and_group_size_are_used(bits, group_size):
    arrays, dense = tensors(bits, group_size)
    weights = assemble(arrays, {"bits": bits, "group_size": group_size})
    weight = weights[f"{PATH}.weight"]
    assert list(weights) == [f"{PATH}.weight"]
    assert (weight.bits, weight.group_size, weight.mode) == (bits, group_size, "affine")
    assert np.allclose(np.asarray(dequantize_reference(weight)), np.asarray(dense), atol=1e-6)


@pytest.mark.parametrize(
    "key",
    [PATH, "layers.3.mlp.down_proj", f"language_model.{PATH}",
     "language_model.layers.3.mlp.down_proj", f"model.language_model.{PATH}"],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_override_counts_under_either_prefix(key, prefix):
    path = prefix + (PATH.removeprefix("model.") if prefix.startswith("model.") else PATH)
    arrays, _ = tensors(8, 32, path)  # bits x group = 256, the same as 4 x 64
    quantization = {"bits": 4, "group_size": 64, key: {"bits": 8, "group_size": 32}}
    weight = assemble(arrays, quantization)[f"{path}.weight"]
    assert (weight.bits, weight.group_size) == (8, 32)


def test_exact_path_wins_over_a_path_with_another_prefix():
    arrays, _ = tensors(8, 32)
    other = {"bits": 2, "group_size": 128}
    own = {"bits": 8, "group_size": 32}
    for quantization in ({PATH: own, "layers.3.mlp.down_proj": other},
                         {"layers.3.mlp.down_proj": other, PATH: own}):  # fmt: skip
        assert assemble(arrays, quantization)[f"{PATH}.weight"].bits == 8


@pytest.mark.parametrize(
    ("quantization", "bits", "group_size"),
    [(None, 4, 64), ({}, 4, 64), ({"bits": 8}, 8, 32), ({"group_size": 128}, 2, 128),
     ({"group_size": 64, PATH: {"bits": 2}}, 2, 128)],
)  # fmt: skip
def test_what_the_config_leaves_open_follows_from_the_shapes(quantization, bits, group_size):
    width = {64: K, 32: K // 2, 128: 2 * K}[group_size]
    arrays, _ = tensors(4, 64)  # product 256: 4 x 64, 8 x 32 or 2 x 128
    for width_known in (width, None):
        weight = assemble(arrays, quantization, lambda _, w=width_known: w)[f"{PATH}.weight"]
        assert (weight.bits, weight.group_size) == (bits, group_size)


def test_model_width_settles_what_shapes_leave_open():
    arrays, _ = tensors(8, 32)
    weight = assemble(arrays, None, {PATH: K}.get)[f"{PATH}.weight"]
    assert (weight.bits, weight.group_size) == (8, 32)


def test_tensor_without_an_entry_may_differ_from_the_global_values():
    common, _ = tensors(4, 64)
    router, _ = tensors(8, 64, "model.layers.3.router")
    weights = assemble(common | router, {"bits": 4, "group_size": 64}, lambda _: K)
    assert weights["model.layers.3.router.weight"].bits == 8
    assert weights[f"{PATH}.weight"].bits == 4


def test_contradictions_name_both_sides():
    arrays, _ = tensors(4, 64)
    refused(arrays, {"bits": 8, "group_size": 64}, PATH, "8 bits", "(7, 24)", "(7, 3)")
    refused(arrays, {"bits": 8, "group_size": 64}, PATH, "8 bits", "4 bits", width=K)
    own = {"bits": 4, "group_size": 64, PATH: {"bits": 3, "group_size": 64}}
    refused(arrays, own, PATH, "3 bits", "the/config.json")
    refused(arrays, {"bits": 8, "group_size": 32}, PATH, "width 192", width=K)
    refused(arrays, {"bits": 4, "mode": "mxfp4"}, PATH, "mxfp4")
    refused(arrays, {"bits": 4, "group_size": 64, PATH: False}, PATH, "not quantized")
    for odd in ([1], "int4", 4):
        refused(arrays, {"bits": 4, "group_size": 64, PATH: odd}, PATH, f"is {odd!r}, neither")


@pytest.mark.parametrize(
    "broken", [{"bits": 7}, {"bits": "4"}, {"bits": True}, {"group_size": 48}, {"mode": "nvfp4"}]
)
def test_values_that_are_not_implemented_are_refused_by_name(broken):
    arrays, _ = tensors()
    (name,) = broken
    refused(arrays, broken, name, repr(broken[name]))
    refused(arrays, {PATH: broken}, name, PATH)


def test_missing_and_misshapen_parts_are_named():
    arrays, _ = tensors()
    whole = {"bits": 4, "group_size": 64}
    for part in ("weight", "biases"):
        fewer = {name: array for name, array in arrays.items() if not name.endswith(part)}
        refused(fewer, whole, f"{PATH}.{part}")
    codes_only = {f"{PATH}.weight": arrays[f"{PATH}.weight"]}
    refused(codes_only, whole, f"{PATH}.weight", ".scales")
    for part in ("scales", "biases"):
        name = f"{PATH}.{part}"
        refused(arrays | {name: arrays[name][:-1]}, whole, PATH)
    floats = {f"{PATH}.weight": mx.zeros((N, K))}
    refused(arrays | floats, whole, f"{PATH}.weight", "uint32")
    for kind in (mx.int32, mx.float16):
        other = {f"{PATH}.biases": arrays[f"{PATH}.biases"].astype(kind)}
        refused(arrays | other, whole, f"{PATH}.biases", str(kind), "one float type")


def test_projection_bias_is_not_a_quantization_offset():
    arrays, _ = tensors()
    bias = mx.arange(N).astype(mx.float32)
    weights = assemble(arrays | {f"{PATH}.bias": bias, "model.norm.weight": mx.ones(5)}, None)
    assert isinstance(weights[f"{PATH}.weight"], QuantizedWeight)
    assert weights[f"{PATH}.bias"] is bias
    assert set(weights) == {f"{PATH}.weight", f"{PATH}.bias", "model.norm.weight"}


def test_mxfp4_is_known_by_its_scales():
    matrix = mx.array(np.random.default_rng(3).normal(size=(N, K)).astype(np.float32))
    codes, scales = mx.quantize(matrix, group_size=32, bits=4, mode="mxfp4")
    arrays = {f"{PATH}.weight": codes, f"{PATH}.scales": scales}
    for quantization in (None, {"bits": 4, "group_size": 32, "mode": "mxfp4"}):
        weight = assemble(arrays, quantization)[f"{PATH}.weight"]
        assert (weight.mode, weight.bits, weight.group_size) == ("mxfp4", 4, 32)
    refused(arrays, {"bits": 4, "group_size": 64}, PATH, "mxfp4")


def test_stacked_experts_are_joined():
    matrix = mx.array(np.random.default_rng(4).normal(size=(3, N, K)).astype(np.float32))
    codes, scales, biases = mx.quantize(matrix, group_size=64, bits=4)
    arrays = {f"{PATH}.weight": codes, f"{PATH}.scales": scales, f"{PATH}.biases": biases}
    assert assemble(arrays, None)[f"{PATH}.weight"].shape == (3, N, K)


def test_prefixes_of_wrappers_do_not_distinguish_paths():
    assert canonical("language_model.model.layers.0.mlp") == "layers.0.mlp"
    assert canonical("model.language_model.layers.0.mlp") == "layers.0.mlp"
    assert canonical("lm_head") == "lm_head"
