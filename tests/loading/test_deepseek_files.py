"""Whole deepseek_v2 checkpoints, in every spelling that exporters give them."""

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import feed, float_weights, int4_weights, load_golden
from golden.spellings import alone, switched, wrapped
from golden.weights import draw_weights, quantize
from loading.files import write_folder
from loading.test_expert_files import folder_of, held_bytes
from mlx.utils import tree_flatten

from turbospark.errors import CheckpointError, ConfigError
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.build import load_model
from turbospark.loading.convert import convert
from turbospark.loading.inspect import inspect
from turbospark.loading.plan import plan
from turbospark.registry import resolve_family
from turbospark.settings import KernelPolicy

REFERENCE = KernelPolicy(kernels="reference")
WEIGHTS = {"full": float_weights, "int4": int4_weights}
NAMES = ["deepseek_v2", "deepseek_v2_lite", "deepseek_v2_plain"]
LITE = load_golden("deepseek_v2_lite")
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
NOPE, VALUE, LATENT = 48, 64, 128


def bare_routers(weights):
    """MLX's conversions: experts stacked, routers left in floats."""
    found = switched(weights)
    for name, value in found.items():
        if name.endswith("mlp.gate.weight") and isinstance(value, QuantizedWeight):
            found[name] = dequantize_reference(value)
    return found


def old_exports(weights):
    """With frequencies that the configuration determines."""
    stored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": mx.ones((16,)) for i in range(3)}
    return alone(weights) | stored


def split(weights):
    """The heads' matrix as two, as MLX stores it for newer models of the kind."""
    found = {}
    for name, value in switched(weights).items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = value
            continue
        heads = mx.reshape(dequantize_reference(value), (-1, NOPE + VALUE, LATENT))
        stem = name.removesuffix("kv_b_proj.weight")
        found[f"{stem}embed_q.weight"] = heads[:, :NOPE].swapaxes(1, 2)
        found[f"{stem}unembed_out.weight"] = heads[:, NOPE:]
    return found


@pytest.mark.parametrize("kind", ["full", "int4"])
@pytest.mark.parametrize("spelling", [dict, alone, switched, bare_routers, old_exports, split])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v2"])
def test_every_spelling_is_one_model(name, spelling, kind, tmp_path):
    golden = load_golden(name)
    folder = folder_of(tmp_path / "a", golden, spelling(WEIGHTS[kind](golden)))
    logits = feed(load_model(folder, policy=REFERENCE).model, golden.tokens, [40])
    assert golden.difference(logits, kind) < golden.tolerance


@pytest.mark.parametrize("spelling", [alone, wrapped])
def test_files_that_transformers_5_saves_are_the_same_model(spelling, tmp_path):
    for name in NAMES:
        golden = load_golden(name)
        tensors = {key: np.array(it) for key, it in spelling(float_weights(golden)).items()}
        folder = write_folder(tmp_path / name, tensors, golden.config_v5)
        logits = feed(load_model(folder, policy=REFERENCE).model, golden.tokens, [40])
        assert golden.difference(logits, "full") < golden.tolerance


@pytest.mark.parametrize("spelling", [alone, switched])
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 32), (4, 32), (2, 128), (6, 64)])
def test_the_heads_matrix_has_the_bits_of_its_own_shapes(spelling, bits, group, tmp_path):
    """The configuration speaks of 4 bits in groups of 64 only."""
    weights = int4_weights(LITE)
    dense = mx.array(LITE.weights[KV_B])
    weights[KV_B] = QuantizedWeight(*mx.quantize(dense, group, bits), bits, group)
    folder = folder_of(tmp_path / "a", LITE, spelling(weights))
    config = (folder / "config.json").read_text()
    start = config.index('"model.layers.1.self_attn.kv_b_proj"') if bits != 4 else -1
    if start > 0:  # nothing is said of it: only its shapes speak
        end = config.index("}", start) + 1
        config = config[:start] + config[end:].lstrip(", \n")
        (folder / "config.json").write_text(config)
    loaded = load_model(folder, policy=REFERENCE)
    weight = loaded.model.model.layers[1].self_attn.kv_b_proj.value
    assert (weight.bits, weight.group_size) == (bits, group)
    assert np.array_equal(weight.codes, weights[KV_B].codes)
    rounded = weights | {KV_B: dequantize_reference(weights[KV_B])}
    other = load_model(folder_of(tmp_path / "b", LITE, spelling(rounded)), policy=REFERENCE)
    one, two = (feed(each.model, LITE.tokens[:17], [17]) for each in (loaded, other))
    assert np.abs(one - two).max() < 1e-4


def quantized(path, value, bits, group):
    """The arrays of a quantized tensor by their names, and the numbers they stand for."""
    parts = [mx.array(part) for part in quantize(np.array(value), bits, group)]
    names = [f"{path}.{part}" for part in ("weight", "scales", "biases")]
    dense = dequantize_reference(QuantizedWeight(*parts, bits, group))
    return dict(zip(names, parts, strict=True)), dense


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32), (8, 32)])
def test_a_quantized_pair_becomes_what_it_stands_for(bits, group, tmp_path):
    """The configuration speaks of 4 bits in groups of 64 only, as the table is stored."""
    config = LITE.config | {"qk_nope_head_dim": 64}
    model = resolve_family("deepseek_v2").build(config)
    shapes = {name: list(value.shape) for name, value in tree_flatten(model.parameters())}
    weights = {name: mx.array(value) for name, value in draw_weights(shapes, 7).items()}
    table = "model.embed_tokens.weight"
    pairs, wholes = dict(weights), dict(weights)
    arrays, wholes[table] = quantized(table.removesuffix(".weight"), weights[table], 4, 64)
    pairs |= arrays
    for layer in range(3):
        stem = f"model.layers.{layer}.self_attn."
        heads = mx.reshape(pairs.pop(f"{stem}kv_b_proj.weight"), (3, 128, LATENT))
        keys, k = quantized(f"{stem}embed_q", heads[:, :64].swapaxes(1, 2), bits, group)
        values, v = quantized(f"{stem}unembed_out", heads[:, 64:], bits, group)
        pairs |= keys | values
        joined = mx.concatenate([k.swapaxes(1, 2), v], axis=1)
        wholes[f"{stem}kv_b_proj.weight"] = mx.reshape(joined, (3 * 128, LATENT))
    one, other = (
        write_folder(tmp_path / name, {k: np.array(v) for k, v in tensors.items()}, config | extra)
        for name, tensors, extra in (
            ("a", pairs, {"quantization": {"group_size": 64, "bits": 4}}),
            ("b", wholes, {}),
        )
    )
    loaded = [load_model(folder, policy=REFERENCE) for folder in (one, other)]
    assert plan(one, 50).weight_bytes == held_bytes(loaded[0].model)
    assert np.array_equal(*(feed(it.model, LITE.tokens[:17], [17]) for it in loaded))


@pytest.mark.parametrize("lost", ["embed_q", "unembed_out", "kv_b_proj"])
def test_a_lost_matrix_of_the_heads_is_named(lost, tmp_path):
    weights = (alone if lost == "kv_b_proj" else split)(float_weights(LITE))
    del weights[f"model.layers.2.self_attn.{lost}.weight"]
    folder = folder_of(tmp_path / "a", LITE, weights)
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.kv_b_proj\.weight"):
        load_model(folder, policy=REFERENCE)


def test_a_lost_expert_is_named(tmp_path):
    weights = alone(float_weights(LITE))
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"expert 5 of layer 1.*experts\.5\.up_proj\.weight"):
        load_model(folder_of(tmp_path / "a", LITE, weights), policy=REFERENCE)


@pytest.mark.parametrize("key", ["kv_lora_rank", "n_routed_experts", "qk_rope_head_dim"])
@pytest.mark.parametrize("value", [0, "3", None])
def test_a_wrong_key_is_named_with_its_file(key, value, tmp_path):
    folder = folder_of(tmp_path / "a", LITE, alone(float_weights(LITE)), **{key: value})
    with pytest.raises(ConfigError, match=rf"a/config\.json.*{key}={value!r}"):
        load_model(folder, policy=REFERENCE)


@pytest.mark.parametrize("quantize_to", [None, "int4-g32"])
@pytest.mark.parametrize("name", NAMES)
def test_plans_are_exact(name, quantize_to, tmp_path):
    golden = load_golden(name)
    folder = folder_of(tmp_path / "a", golden, alone(float_weights(golden)))
    loaded = load_model(folder, quantize=quantize_to, policy=REFERENCE)
    planned = plan(folder, 300, quantize=quantize_to)
    assert planned.weight_bytes == held_bytes(loaded.model)
    layers, rows = golden.config["num_hidden_layers"], 256 + 128
    assert planned.session_bytes == layers * rows * (LATENT + 32) * 4
    assert planned.state_bytes == 0


def test_working_memory_counts_queries_as_wide_as_latents(tmp_path):
    folder = folder_of(tmp_path / "a", LITE, alone(float_weights(LITE)))
    rows, hidden, queries = 50, 192, 3 * (LATENT + 32)
    assert plan(folder, rows).working_bytes == 4 * (rows * (3 * hidden + 2 * queries) + 2 * 320)


@pytest.mark.parametrize("name", NAMES)
def test_an_inspection_counts_active_parameters(name, tmp_path):
    golden = load_golden(name)
    found = inspect(folder_of(tmp_path / "a", golden, alone(float_weights(golden))))
    total = sum(value.size for value in golden.weights.values())
    routed = sum(value.size for key, value in golden.weights.items() if ".mlp.experts." in key)
    count = golden.config["n_routed_experts"]
    assert found.parameters == total
    assert found.active_parameters == total - routed * (count - 3) // count
    assert "heads, rows of 128 + " in repr(found)


def test_a_converted_checkpoint_loads_again(tmp_path):
    folder = folder_of(tmp_path / "a", LITE, alone(float_weights(LITE)))
    convert(folder, tmp_path / "b", quantize="int4", text=None)
    quantized = load_model(folder, quantize="int4", policy=REFERENCE)
    again = load_model(tmp_path / "b", policy=REFERENCE)
    assert again.model.model.layers[1].self_attn.kv_b_proj.value.bits == 4
    assert again.model.model.layers[1].mlp.gate.value.bits == 8
    one, other = (feed(it.model, LITE.tokens[:9], [9]) for it in (quantized, again))
    assert np.array_equal(one, other)
