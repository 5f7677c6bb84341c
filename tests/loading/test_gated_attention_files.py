"""Whole checkpoints of muse_glimmer and spark2_5, in the spellings that exporters give them."""

import numpy as np
import pytest
from golden.fixtures import feed, float_weights, int4_weights, load_golden
from loading.files import write_folder

from turbospark.errors import CheckpointError, ConfigError
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
NAMES = ["muse_glimmer", "muse_glimmer_lists", "spark2_5", "spark2_5_untied"]
HEADS = {"muse_glimmer": "lm_head.weight", "spark2_5_untied": "lm_head.weight"}


def as_released(name):
    return name


def as_mlx(name):
    """Names of MLX conversions; those of spark2_5 keep their own but for the table."""
    if "vision" in name or name.startswith("lm_head"):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "language_model.model.").replace(
        "model.embedding.", "model.embed_tokens."
    )


def folder_of(path, golden, weights, spelling=as_released, config=None):
    tensors, quantization = {}, {"group_size": 64, "bits": 4}
    for own, value in weights.items():
        name = spelling(own)
        if not isinstance(value, QuantizedWeight):
            tensors[name] = np.array(value)
            continue
        stem = name.removesuffix(".weight")
        for part, array in zip(("weight", "scales", "biases"), parts_of(value), strict=True):
            tensors[f"{stem}.{part}"] = np.array(array)
    extra = {"quantization": quantization} if any(n.endswith(".scales") for n in tensors) else {}
    return write_folder(path, tensors, (config or golden.config) | extra)


def difference(folder, golden, kind):
    loaded = load_model(folder, policy=REFERENCE)
    return golden.difference(feed(loaded.model, golden.tokens, [len(golden.tokens)]), kind)


@pytest.mark.parametrize("kind", sorted(WEIGHTS))
@pytest.mark.parametrize("spelling", [as_released, as_mlx])
@pytest.mark.parametrize("name", NAMES)
def test_every_spelling_is_one_model(name, spelling, kind, tmp_path):
    golden = load_golden(name)
    folder = folder_of(tmp_path / "a", golden, WEIGHTS[kind](golden), spelling)
    assert difference(folder, golden, kind) < golden.tolerance


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_saved_again_by_transformers_is_the_same_model(name, tmp_path):
    golden = load_golden(name)
    folder = folder_of(tmp_path / "a", golden, float_weights(golden), config=golden.config_v5)
    assert difference(folder, golden, "full") < golden.tolerance


@pytest.mark.parametrize("name", sorted(HEADS))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_heads_tied_and_untied(name, tied, has_head, tmp_path):
    golden = load_golden(name)
    weights = float_weights(golden)
    if not has_head:
        del weights[HEADS[name]]
    config = dict(golden.config)
    text = config["text_config"] = dict(config["text_config"]) if "text_config" in config else {}
    (text if text else config)["tie_word_embeddings"] = tied
    if not text:
        del config["text_config"]
    folder = folder_of(tmp_path / "a", golden, weights, config=config)
    if not tied and not has_head:
        with pytest.raises(CheckpointError, match=r"missing \('lm_head\.weight'\)"):
            load_model(folder, policy=REFERENCE)
        return
    assert (difference(folder, golden, "full") < golden.tolerance) == (not tied)


@pytest.mark.parametrize(
    ("name", "lost"),
    [("muse_glimmer", "layers.3.self_attn.gate_proj"), ("spark2_5", "layers.1.self_attn.g_proj"),
     ("spark2_5", "layers.2.self_attn.q_k_v_proj"), ("muse_glimmer", "language_model.norm")],
)  # fmt: skip
def test_a_lost_tensor_is_named(name, lost, tmp_path):
    golden = load_golden(name)
    weights = {
        key: value for key, value in float_weights(golden).items() if f"{lost}.weight" not in key
    }
    assert len(weights) == len(golden.weights) - 1
    with pytest.raises(CheckpointError, match="missing"):
        load_model(folder_of(tmp_path / "a", golden, weights), policy=REFERENCE)


def test_a_wrong_key_is_named_with_its_file(tmp_path):
    golden = load_golden("spark2_5")
    config = golden.config | {"sliding_window": None}
    folder = folder_of(tmp_path / "a", golden, float_weights(golden), config=config)
    with pytest.raises(ConfigError, match=r"a/config\.json.*sliding_window=None"):
        load_model(folder, policy=REFERENCE)


def test_quantizing_while_loading_keeps_the_gates_of_heads_at_eight_bits(tmp_path):
    golden = load_golden("spark2_5")
    folder = folder_of(tmp_path / "a", golden, float_weights(golden))
    loaded = load_model(folder, quantize="int4", policy=REFERENCE)
    attention = loaded.model.model.layers[0].self_attn
    assert attention.g_proj.value.bits == 8
    assert attention.q_proj.value.bits == loaded.model.model.embed_tokens.value.bits == 4
    assert difference(folder, golden, "full") < golden.tolerance
    convert(folder, tmp_path / "b", quantize="int4", text=None)
    again = load_model(tmp_path / "b", policy=REFERENCE)
    one, other = (feed(model.model, golden.tokens[:9], [9]) for model in (loaded, again))
    assert np.array_equal(one, other)


def held_bytes(model):
    total = 0
    for slot in parameter_slots(model).values():
        whole = isinstance(slot.module, Matrix) and slot.attribute == "weight"
        value = slot.module.value if whole else slot.module[slot.attribute]
        total += sum(part.nbytes for part in parts_of(value))
    return total


@pytest.mark.parametrize("kind", sorted(WEIGHTS))
@pytest.mark.parametrize("name", NAMES)
def test_plans_are_exact(name, kind, tmp_path):
    golden = load_golden(name)
    folder = folder_of(tmp_path / "a", golden, WEIGHTS[kind](golden))
    loaded, planned = load_model(folder, policy=REFERENCE), plan(folder, 50)
    assert planned.weight_bytes == held_bytes(loaded.model)
    assert planned.active_bytes == planned.weight_bytes


@pytest.mark.parametrize("name", NAMES)
def test_an_inspection_says_what_is_there(name, tmp_path):
    golden = load_golden(name)
    found = inspect(folder_of(tmp_path / "a", golden, float_weights(golden)))
    assert found.implemented
    assert found.model_type == golden.config["model_type"]
    text = {key: value for key, value in golden.weights.items() if "vision" not in key}
    assert found.parameters == sum(value.size for value in text.values())


@pytest.mark.parametrize(("name", "full"), list(zip(NAMES, (2, 2, 1, 2), strict=True)))
def test_only_full_layers_grow_with_the_context(name, full, tmp_path):
    golden = load_golden(name)
    folder = folder_of(tmp_path / "a", golden, float_weights(golden))
    shorter, longer = (plan(folder, context).session_bytes for context in (1024, 1536))
    row = 2 * 2 * 64 * 4  # keys and values of two heads in float32
    assert longer - shorter == full * 512 * row
