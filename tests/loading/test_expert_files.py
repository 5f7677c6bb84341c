"""Whole checkpoints with routed experts, in every spelling that exporters give them."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import build_model, feed, float_weights, int4_weights, load_golden
from golden.spellings import alone, apart, sparse_block, switched, switched_block, wrapped
from golden.weights import dequantize_mxfp4, int4_layout, quantize, quantize_mxfp4
from loading.files import bfloat16, write_folder

from turbospark.errors import CheckpointError, ConfigError, OptionError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.build import load_model
from turbospark.loading.convert import convert
from turbospark.loading.inspect import inspect
from turbospark.loading.install import parameter_slots, parts_of
from turbospark.loading.plan import plan
from turbospark.nn.linear import Matrix
from turbospark.settings import KernelPolicy

REFERENCE = KernelPolicy(kernels="reference")
WEIGHTS = {"full": float_weights, "int4": int4_weights}


def files_of(weights):
    """Tensors as files hold them, and MLX's `quantization` for those that are quantized."""
    tensors, quantization = {}, {"group_size": 64, "bits": 4, "mode": "affine"}
    for name, value in weights.items():
        if not isinstance(value, QuantizedWeight):
            tensors[name] = np.array(value)
            continue
        path = name.removesuffix(".weight")
        for part, array in zip(("weight", "scales", "biases"), parts_of(value), strict=False):
            tensors[f"{path}.{part}"] = np.array(array)
        if value.mode == "mxfp4":
            quantization[path] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        elif value.bits != 4:
            quantization[path] = {"group_size": value.group_size, "bits": value.bits}
    return tensors, quantization


def folder_of(path, golden, weights, **changes):
    tensors, quantization = files_of(weights)
    extra = {"quantization": quantization} if any(n.endswith(".scales") for n in tensors) else {}
    return write_folder(path, tensors, golden.config | extra | changes)


FLOW = [
    *(("mixtral", spelling) for spelling in (sparse_block, switched_block, alone, dict, switched)),
    ("mixtral_swa", sparse_block),
    *(("qwen3_moe", spelling) for spelling in (alone, switched, dict, wrapped)),
    ("qwen3_moe_yarn_swa", alone),
    *(("qwen4_exp", spelling) for spelling in (alone, switched, dict, wrapped)),
    ("qwen4_exp_tied", switched),
]


@pytest.mark.parametrize("kind", ["full", "int4"])
@pytest.mark.parametrize(("name", "spelling"), FLOW)
def test_every_spelling_of_the_flow_is_one_model(name, spelling, kind, tmp_path):
    golden = load_golden(name)
    folder = folder_of(tmp_path / "a", golden, spelling(WEIGHTS[kind](golden)))
    loaded = load_model(folder, policy=REFERENCE)
    logits = feed(loaded.model, golden.tokens, [len(golden.tokens)])
    assert golden.difference(logits, kind) < golden.tolerance


def test_routers_have_the_width_their_file_has(tmp_path):
    golden = load_golden("mixtral")
    for bits in (4, 8):
        weights = int4_weights(golden)
        for layer in range(3):
            name = f"model.layers.{layer}.mlp.gate.weight"
            parts = (mx.array(part) for part in quantize(golden.weights[name], bits, 64))
            weights[name] = QuantizedWeight(*parts, bits, 64)
        folder = folder_of(tmp_path / f"{bits}", golden, switched_block(weights))
        loaded = load_model(folder, policy=REFERENCE)
        assert loaded.model.model.layers[1].mlp.gate.value.bits == bits
        one, other = (
            feed(model, golden.tokens[:9], [9])
            for model in (loaded.model, build_model(golden.config, weights))
        )
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen4_exp", "gpt_oss"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_heads_tied_and_untied(name, tied, has_head, tmp_path):
    golden = load_golden(name)
    weights = float_weights(golden)
    if not has_head:
        del weights["lm_head.weight"]
    folder = folder_of(tmp_path / "a", golden, weights, tie_word_embeddings=tied)
    if not tied and not has_head:
        with pytest.raises(CheckpointError, match=r"missing \('lm_head\.weight'\)"):
            load_model(folder, policy=REFERENCE)
        return
    loaded = load_model(folder, policy=REFERENCE)
    logits = feed(loaded.model, golden.tokens, [len(golden.tokens)])
    assert (golden.difference(logits, "full") < golden.tolerance) == (not tied)


@pytest.mark.parametrize(("spelling", "leaf"), [(alone, "down_proj"), (sparse_block, "w2")])
def test_a_lost_expert_is_named_with_its_file(spelling, leaf, tmp_path):
    golden = load_golden("mixtral")
    tensors, _ = files_of(spelling(float_weights(golden)))
    lost = f".experts.5.{leaf}.weight"
    tensors = {
        name: value
        for name, value in tensors.items()
        if not (".layers.1." in name and name.endswith(lost))
    }
    shown = f"expert 5 of layer 1 is not whole: its 'model.layers.1.mlp.experts.5.{leaf}.weight'"
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2],
              "model-00002-of-00002.safetensors": names[1::2]}  # fmt: skip
    one = write_folder(tmp_path / "one", tensors, golden.config)
    two = write_folder(tmp_path / "two", tensors, golden.config, shards)
    for folder, where in (
        (one, f"{one}/model.safetensors: "),
        (two, f"{two} (2 files of model.safetensors.index.json): "),
    ):
        for ask in (load_model, plan):
            with pytest.raises(CheckpointError) as caught:
                ask(folder)
            assert str(caught.value).startswith(where + shown)
            assert "is missing, while 7 of 8 experts have theirs" in str(caught.value)
        assert shown in inspect(folder).refused


def test_experts_beyond_those_of_the_configuration_are_named(tmp_path):
    golden = load_golden("mixtral")
    weights = alone(float_weights(golden))
    folder = folder_of(tmp_path / "a", golden, weights, num_local_experts=7)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.7\.\w+.* 0 to 6"):
        load_model(folder, policy=REFERENCE)


@pytest.mark.parametrize("other", [alone, switched, wrapped])
def test_experts_in_two_spellings_are_refused(other, tmp_path):
    golden = load_golden("qwen3_moe")
    weights = float_weights(golden)
    folder = folder_of(tmp_path / "a", golden, other(weights) | weights)
    with pytest.raises(CheckpointError, match="twice, in two spellings of its name"):
        load_model(folder, policy=REFERENCE)


def test_experts_of_different_layouts_are_refused_by_name(tmp_path):
    golden = load_golden("qwen3_moe")
    weights = alone(int4_weights(golden))
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    value = np.array(dequantize_reference(weights[name]))
    weights[name] = QuantizedWeight(*(mx.array(part) for part in quantize(value, 8, 64)), 8, 64)
    folder = folder_of(tmp_path / "a", golden, weights)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.up_proj.*differ"):
        load_model(folder, policy=REFERENCE)


GPT_OSS = load_golden("gpt_oss")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def rounded(name, value):
    """What INT4 makes of a tensor, as floats."""
    layout = int4_layout(name, value.shape)
    if layout is None or value.ndim == 3:
        return mx.array(value)
    parts = (mx.array(part) for part in quantize(value, *layout))
    return dequantize_reference(QuantizedWeight(*parts, *layout))


def as_released():
    """Experts in blocks, everything else in floats."""
    found = {}
    for name, value in int4_weights(GPT_OSS).items():
        is_quantized = isinstance(value, QuantizedWeight)
        found[name] = dequantize_reference(value) if is_quantized else value
    return found


def as_dequantized():
    """Experts as floats, in transformers' own layout; bfloat16 holds them exactly."""
    found = {}
    for name, value in GPT_OSS.weights.items():
        found[name] = rounded(name, value)
        if value.ndim == 3:
            dense = dequantize_mxfp4(*quantize_mxfp4(value.swapaxes(1, 2))).swapaxes(1, 2)
            found[name] = bfloat16(dense)
    return found


def as_mlx():
    """Stacked experts of MLX conversions, gate and up apart, biases under `.bias`."""
    found = {}
    for name, value in int4_weights(GPT_OSS).items():
        stem, marker, leaf = name.rpartition(".experts.")
        stem += marker
        if leaf == "gate_up_proj_bias":
            found |= {f"{stem}gate_proj.bias": value[:, ::2], f"{stem}up_proj.bias": value[:, 1::2]}
        elif leaf == "down_proj_bias":
            found[f"{stem}down_proj.bias"] = value
        elif leaf == "down_proj_blocks":
            found[f"{stem}down_proj.weight"] = packed(value, found_scales(name))
        elif leaf == "gate_up_proj_blocks":
            scales = found_scales(name)
            for side, own in enumerate(("gate", "up")):
                found[f"{stem}{own}_proj.weight"] = packed(
                    value[:, side::2], scales[:, side::2]
                )  # fmt: skip
        elif not leaf.endswith("_scales"):
            found[name] = value
    return found


def found_scales(name):
    return int4_weights(GPT_OSS)[name.replace("_blocks", "_scales")]


def packed(blocks, scales):
    words = np.ascontiguousarray(np.array(blocks)).reshape(*scales.shape[:-1], -1).view("<u4")
    return QuantizedWeight(mx.array(words), mx.contiguous(scales), None, 4, 32, mode="mxfp4")


SPELLINGS = {
    "released": (as_released, "int4"),
    "dequantized": (as_dequantized, "int4"),
    "mlx": (as_mlx, "int4"),
    "floats": (lambda: float_weights(GPT_OSS), "full"),
    "mlx floats": (lambda: apart(float_weights(GPT_OSS)), "full"),
}


def gpt_oss_folder(path, spelling, **changes):
    extra = {"quantization_config": MXFP4} if spelling == "released" else {}
    return folder_of(path, GPT_OSS, SPELLINGS[spelling][0](), **extra, **changes)


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_every_spelling_of_gpt_oss_is_one_model(spelling, tmp_path):
    loaded = load_model(gpt_oss_folder(tmp_path / "a", spelling), policy=REFERENCE)
    logits = feed(loaded.model, GPT_OSS.tokens, [len(GPT_OSS.tokens)])
    assert GPT_OSS.difference(logits, SPELLINGS[spelling][1]) < GPT_OSS.tolerance


@pytest.mark.parametrize("spelling", ["released", "mlx"])
def test_mxfp4_experts_stay_what_their_file_holds(spelling, tmp_path):
    loaded = load_model(gpt_oss_folder(tmp_path / "a", spelling), policy=REFERENCE)
    mlp = loaded.model.model.layers[2].mlp
    blocks = int4_weights(GPT_OSS)["model.layers.2.mlp.experts.gate_up_proj_blocks"]
    for side, module in enumerate((mlp.experts.gate_proj, mlp.experts.up_proj)):
        weight = module.value
        assert (weight.mode, weight.bits, weight.group_size) == ("mxfp4", 4, 32)
        assert np.array_equal(np.array(weight.codes).view(np.uint8).reshape(-1),
                              np.array(blocks[:, side::2]).reshape(-1))  # fmt: skip
    if spelling == "mlx":
        assert mlp.router.value.bits == 8


def test_quantizing_mxfp4_again_is_refused(tmp_path):
    folder = gpt_oss_folder(tmp_path / "a", "released")
    with pytest.raises(OptionError, match="quantized already"):
        load_model(folder, quantize="int4", policy=REFERENCE)
    with pytest.raises(OptionError, match="quantized already"):
        convert(folder, tmp_path / "b", text=None)


def test_a_float_gpt_oss_converts_and_loads_again(tmp_path):
    folder = gpt_oss_folder(tmp_path / "a", "floats")
    convert(folder, tmp_path / "b", quantize="int4-g32", text=None)
    quantized = load_model(folder, quantize="int4-g32", policy=REFERENCE)
    again = load_model(tmp_path / "b", policy=REFERENCE)
    assert again.model.model.layers[0].mlp.router.value.bits == 8
    one, other = (feed(it.model, GPT_OSS.tokens[:9], [9]) for it in (quantized, again))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_mxfp4_without_its_other_half_is_named(part, tmp_path):
    weights = as_released()
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    del weights[name]
    other = name.replace(part, "scales" if part == "blocks" else "blocks")
    folder = folder_of(tmp_path / "a", GPT_OSS, weights, quantization_config=MXFP4)
    with pytest.raises(CheckpointError, match=other):
        load_model(folder, policy=REFERENCE)


def test_mxfp4_of_another_shape_is_named(tmp_path):
    weights = as_released()
    name = "model.layers.1.mlp.experts.down_proj_scales"
    weights[name] = weights[name][:, :, :2]
    folder = folder_of(tmp_path / "a", GPT_OSS, weights, quantization_config=MXFP4)
    with pytest.raises(CheckpointError, match=r"down_proj_blocks.*do not belong together"):
        load_model(folder, policy=REFERENCE)


@pytest.mark.parametrize("key", ["num_experts_per_tok", "num_local_experts"])
@pytest.mark.parametrize("value", [0, "3", None])
def test_a_wrong_key_is_named_with_its_file(key, value, tmp_path):
    folder = gpt_oss_folder(tmp_path / "a", "floats", **{key: value})
    with pytest.raises(ConfigError, match=rf"a/config\.json: {key}={value!r}"):
        load_model(folder, policy=REFERENCE)


def held_bytes(model):
    total = 0
    for slot in parameter_slots(model).values():
        whole = isinstance(slot.module, Matrix) and slot.attribute == "weight"
        value = slot.module.value if whole else slot.module[slot.attribute]
        total += sum(part.nbytes for part in parts_of(value))
    return total


@pytest.mark.parametrize("spelling", ["released", "mlx", "floats"])
def test_plans_of_experts_are_exact(spelling, tmp_path):
    folder = gpt_oss_folder(tmp_path / "a", spelling)
    loaded, planned = load_model(folder, policy=REFERENCE), plan(folder, 50)
    assert planned.weight_bytes == held_bytes(loaded.model)
    experts = sum(held_bytes(layer.mlp.experts) for layer in loaded.model.model.layers)
    assert planned.active_bytes == planned.weight_bytes - experts * 5 // 8  # 3 of 8 are used
    assert "for one token" in repr(planned)


def test_working_memory_holds_the_hidden_layers_of_every_expert_of_a_row(tmp_path):
    heads, inner = 6 * 64, 96
    few, many = (
        plan(gpt_oss_folder(tmp_path / f"{k}", "floats", num_experts_per_tok=k), 50).working_bytes
        for k in (1, 8)
    )
    assert many - few == 4 * 50 * 2 * (8 * inner - heads)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_an_inspection_counts_active_parameters(name, tmp_path):
    golden = load_golden(name)
    found = inspect(folder_of(tmp_path / "a", golden, float_weights(golden)))
    total = sum(value.size for value in golden.weights.values())
    experts = sum(value.size for key, value in golden.weights.items() if ".experts." in key)
    used = golden.config["num_experts_per_tok"]
    assert found.parameters == total
    assert found.active_parameters == total - experts * (8 - used) // 8
    assert f"{total:,}, {found.active_parameters:,} active" in repr(found)


def test_an_inspection_names_mxfp4(tmp_path):
    released = inspect(gpt_oss_folder(tmp_path / "a", "released"))
    assert released.quantization["mxfp4"] == 2 * 3
    converted = inspect(gpt_oss_folder(tmp_path / "b", "mlx"))
    assert converted.quantization["mxfp4"] == 3 * 3
    assert converted.quantization["8 bits, groups of 64"] == 3
    assert "active" in repr(converted)


def test_a_model_without_experts_is_all_active(tmp_path):
    folder = write_folder(tmp_path / "a")
    found, planned = inspect(folder), plan(folder, 50)
    assert found.active_parameters == found.parameters
    assert planned.active_bytes == planned.weight_bytes
    assert "active" not in repr(found)
    assert "for one token" not in repr(planned)
