"""From `draft=` to a drafter: which one, over which weights, and why none."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from golden.drafter_fixtures import load_drafter_golden
from loading.drafter_files import converted, save, write_blocks, write_head, write_qwen
from mlx.utils import tree_flatten

from turbospark.errors import CheckpointError, ConfigError, OptionError, SourceError
from turbospark.loading.build import load_model
from turbospark.loading.drafters import load_drafter
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy
from turbospark.speculation.dflash import DFlashDrafter
from turbospark.speculation.model import ModelDrafter
from turbospark.speculation.mtp import MTPDrafter
from turbospark.speculation.ngram import NgramDrafter
from turbospark.speculation.off import NoDrafter
from turbospark.testing import write_tiny_checkpoint

REFERENCE = KernelPolicy(kernels="reference")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return load(write_qwen(tmp_path_factory.mktemp("raw")))


def load(folder):
    return load_model(folder, policy=REFERENCE)


def without_head(name, value):
    return None if name.startswith("mtp.") else value


def first_row(drafter, name="qwen3_5_mtp"):
    """Largest distance of the head's first drafted row from the golden one."""
    arrays = load_drafter_golden(name).arrays
    following = np.append(arrays["ids"][1:], arrays["anchor"]).astype(np.int32)
    y = drafter.head(
        mx.array(following), mx.array(arrays["hidden"]), drafter.head.make_caches(40), Phase.PREFILL
    )
    return float(np.abs(np.array(y) - arrays["batch"]).max())


def test_auto_takes_the_head_of_the_checkpoint(raw):
    drafter = load_drafter("auto", raw)
    assert isinstance(drafter, MTPDrafter)
    assert first_row(drafter) < 2e-5
    assert drafter.head.norms.holds == "weight - 1"
    assert "as trained" in drafter.head.norms.reason


def test_a_head_of_experts_is_read(tmp_path):
    target = load(write_qwen(tmp_path / "moe", "qwen3_5_moe_mtp"))
    assert first_row(load_drafter("mtp", target), "qwen3_5_moe_mtp") < 2e-5


def test_a_converted_checkpoint_that_kept_its_head_is_read(tmp_path):
    target = load(write_qwen(tmp_path / "mlx", change=converted))
    drafter = load_drafter("mtp", target)
    assert drafter.head.norms.holds == "weight"
    assert first_row(drafter) < 2e-5


def test_a_head_left_as_trained_beside_a_converted_trunk_is_told_by_its_norms(tmp_path):
    def change(name, value):
        return value if name.startswith("mtp.") else converted(name, value)

    drafter = load_drafter("mtp", load(write_qwen(tmp_path / "mixed", change=change)))
    assert drafter.head.norms.holds == "weight - 1"
    assert "average" in drafter.head.norms.reason
    assert first_row(drafter) < 2e-5


@pytest.mark.parametrize(("prefix", "baked"), [("mtp.", False), ("mtp.", True), ("", True)])
def test_a_head_in_a_folder_of_its_own_is_read(tmp_path, prefix, baked):
    target = load(write_qwen(tmp_path / "trunk", change=without_head))
    drafter = load_drafter(write_head(tmp_path / "head", prefix=prefix, baked=baked), target)
    assert drafter.head.norms.holds == ("weight" if baked else "weight - 1")
    assert first_row(drafter) < 2e-5


def test_a_head_in_a_file_of_its_own_is_read(tmp_path):
    trunk = write_qwen(tmp_path / "trunk", change=without_head, config={"mtp_num_hidden_layers": 0})
    file = write_head(tmp_path / "head", prefix="", baked=True) / "model.safetensors"
    assert first_row(load_drafter(file, load(trunk))) < 2e-5


def test_a_folder_of_a_head_needs_no_config(raw, tmp_path):
    folder = write_head(tmp_path / "head", prefix="mtp.", baked=False)
    (folder / "config.json").unlink()
    assert first_row(load_drafter(folder, raw)) < 2e-5


def test_a_file_that_is_no_head_is_refused_by_its_tensors(raw, tmp_path):
    file = write_blocks(tmp_path / "blocks") / "model.safetensors"
    with pytest.raises(CheckpointError, match="are not those of the model"):
        load_drafter(file, raw)


def test_sanitizing_a_head_twice_is_sanitizing_it_once(raw):
    head = load_drafter("mtp", raw).head
    arrays = load_drafter_golden("qwen3_5_mtp").weights
    once = head.sanitize({name: mx.array(value) for name, value in arrays.items()})
    twice = head.sanitize(once)
    assert once.keys() == twice.keys() == dict(tree_flatten(head.parameters())).keys()
    assert all(once[name] is twice[name] for name in once)


def test_an_announced_head_without_tensors_is_off_with_the_reason(tmp_path):
    target = load(write_qwen(tmp_path / "trunk", change=without_head))
    drafter = load_drafter("auto", target)
    assert isinstance(drafter, NoDrafter)
    assert "announces a prediction head, but the checkpoint holds no mtp.* tensors" in (
        drafter.reason
    )
    with pytest.raises(OptionError, match=r"draft='mtp' cannot be had: .*no mtp\.\* tensors"):
        load_drafter("mtp", target)


def test_an_unannounced_head_is_off_with_the_reason(tmp_path):
    target = load(write_qwen(tmp_path / "trunk", config={"mtp_num_hidden_layers": 0}))
    assert "announces no prediction head" in load_drafter("auto", target).reason


def test_a_head_of_two_layers_is_refused_by_name(tmp_path):
    target = load(write_qwen(tmp_path / "trunk", config={"mtp_num_hidden_layers": 2}))
    assert "mtp_num_hidden_layers=2 is not implemented" in load_drafter("auto", target).reason
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers=2"):
        load_drafter("mtp", target)


@pytest.mark.parametrize("lost", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_norm.weight"])
def test_missing_tensors_of_a_head_are_named(tmp_path, lost):
    def change(name, value):
        return None if name == lost else value

    target = load(write_qwen(tmp_path / "trunk", change=change))
    with pytest.raises(CheckpointError, match=f"1 tensors are missing .*{lost[4:]}"):
        load_drafter("mtp", target)
    assert lost[4:] in load_drafter("auto", target).reason


def test_extra_tensors_of_a_head_are_named(tmp_path):
    folder = write_qwen(tmp_path / "trunk")
    weights = dict(load_drafter_golden("qwen3_5_mtp").weights)
    weights["mtp.layers.1.self_attn.k_norm.weight"] = np.ones(24, np.float32)
    save(folder, weights)
    with pytest.raises(CheckpointError, match=r"left over .*layers\.1\.self_attn\.k_norm"):
        load_drafter("mtp", load(folder))


@pytest.mark.parametrize(("body", "head"), [(4, 8), (8, 4), (4, None), (None, 8)])
def test_a_head_may_have_other_bits_than_the_body(tmp_path, body, head):
    def bits(name):
        if value_width(name) % 32:
            return None
        return head if name.startswith("mtp.") else body

    quantization = {"group_size": 32, "bits": body or head}
    folder = write_qwen(tmp_path / "mixed", bits=bits, config={"quantization": quantization})
    drafter = load_drafter("mtp", load(folder))
    layout = drafter.head.fc._layout
    assert (layout and layout["bits"]) == head
    assert first_row(drafter) < (0.05 if (body, head) == (None, 8) else 1.0)


def value_width(name):
    shape = load_drafter_golden("qwen3_5_mtp").weights[name].shape
    return shape[-1] if "conv1d" not in name else 1


def test_a_head_is_quantized_as_wished(raw):
    drafter = load_drafter("mtp", raw, quantize="int8")
    assert drafter.head.fc._layout["bits"] == 8
    assert 0 < first_row(drafter) < 0.05


def test_weights_are_bound_as_the_trunks_are(tmp_path):
    folder = write_qwen(tmp_path / "trunk")
    for policy in (REFERENCE, KernelPolicy(kernels="host")):
        target = load_model(folder, policy=policy)
        head = load_drafter("mtp", target).head
        assert head.join.body == head.head.body == target.kernels.name


def test_the_trunks_own_table_and_output_head_are_used(raw):
    head = load_drafter("mtp", raw).head
    assert "embed_tokens" not in str(dict(tree_flatten(head.parameters())).keys())
    arrays = load_drafter_golden("qwen3_5_mtp").arrays
    logits = np.array(head.logits(mx.array(arrays["chain_hidden"]), Phase.DECODE))
    assert np.abs(logits - arrays["chain_logits"]).max() < 5e-4


def test_off_and_ngram_need_no_weights(raw):
    assert load_drafter("off", raw).reason == "drafting is off"
    assert isinstance(load_drafter("ngram", raw), NgramDrafter)


def test_a_family_without_heads_says_so(tmp_path):
    target = load(write_tiny_checkpoint(tmp_path / "llama"))
    assert load_drafter("auto", target).reason == (
        "no model of the family llama drafts with a prediction head"
    )
    with pytest.raises(OptionError, match="family llama drafts with a block drafter"):
        load_drafter(write_blocks(tmp_path / "blocks"), target)


@pytest.mark.parametrize("name", ["dflash2", "dflash1"])
def test_a_path_leads_to_a_block_drafter(raw, tmp_path, name):
    drafter = load_drafter(write_blocks(tmp_path / "blocks", name), raw)
    assert isinstance(drafter, DFlashDrafter)
    golden = load_drafter_golden(name)
    caches = drafter.module.make_caches(40, 3)
    drafter.module.write(mx.array(golden.arrays["aux1"]), caches, Phase.PREFILL)
    proposals, _ = drafter.module.propose(int(golden.arrays["anchor1"]), caches)
    assert np.array(proposals).tolist() == golden.arrays["proposals1"].tolist()


def test_dflash_alone_asks_for_its_path(raw):
    with pytest.raises(OptionError, match="give the path"):
        load_drafter("dflash", raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden_size=128, the model has 96"),
        ({"vocab_size": 300}, "vocab_size=300, the model has 331"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "target layer 4, the model has 4"),
        ({"dflash_config": {"mask_token_id": 331}}, "mask_token_id=331"),
        ({"dflash_config": {"num_target_layers": 5}}, "num_target_layers=5, the model has 4"),
        ({"dflash_config": {"runtime_block_size": 6}}, "block of 6 rows"),
        ({"dflash_config": {"draft_window_size": 4}}, "draft_window_size=4"),
        ({"dflash_config": {"conv_group_size": 36}}, "conv_group_size=36"),
        ({"dflash_config": {"selector_rank": None}}, "belong together"),
        ({"dflash_config": {"tree_width": 3}}, "tree_width=3"),
        ({"dflash_config": {"block_size": True}}, "block_size"),
        ({"layer_types": ["sliding_attention"] * 2}, "lists 2 layers"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_a_block_drafter_that_does_not_suit_is_refused_by_name(raw, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_drafter(write_blocks(tmp_path / "blocks", **changes), raw)


def test_tensors_of_a_block_drafter_that_are_missing_are_named(raw, tmp_path):
    folder = write_blocks(tmp_path / "blocks")
    weights = dict(load_drafter_golden("dflash2").weights)
    del weights["layers.1.mlp_conv.base_kernel"]
    save(folder, weights)
    with pytest.raises(CheckpointError, match=r"missing .*layers\.1\.mlp_conv\.base_kernel"):
        load_drafter(folder, raw)


def test_optional_numbers_of_a_block_drafter_count(raw, tmp_path):
    arrays = load_drafter_golden("dflash2").arrays

    def logits(**nested):
        folder = write_blocks(tmp_path / str(sorted(nested.items())), dflash_config=nested)
        module = load_drafter(folder, raw).module
        caches = module.make_caches(40, 3)
        module.write(mx.array(arrays["aux1"]), caches, Phase.PREFILL)
        masks = [320] * (module.rows - 1)
        tokens = mx.array([int(arrays["anchor1"]), *masks])
        return np.array(module.logits(module.hidden(tokens, caches, Phase.DECODE), Phase.DECODE))

    plain = logits()
    np.testing.assert_allclose(plain, arrays["logits1"], atol=5e-4)
    np.testing.assert_allclose(logits(output_multiplier=0.5), plain / 2, atol=1e-4)
    capped = logits(output_multiplier=0.5, final_logit_softcapping=3.0)
    np.testing.assert_allclose(capped, 3 * np.tanh(plain / 6), atol=1e-4)
    assert np.abs(logits(input_embedding_scale=2.0) - plain).max() > 0.05
    assert np.abs(logits(causal=True) - plain).max() > 0.05
    assert np.array_equal(logits(causal=False), plain)
    assert logits(runtime_block_size=3).shape == (3, 331)


def test_a_path_leads_to_a_draft_model(tmp_path):
    target = load(write_tiny_checkpoint(tmp_path / "large"))
    drafter = load_drafter(write_tiny_checkpoint(tmp_path / "small", num_hidden_layers=1), target)
    assert isinstance(drafter, ModelDrafter)
    assert drafter.vocab_size == 259
    assert drafter.model.num_layers == 1


def test_a_draft_model_with_other_tokens_is_refused(raw, tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "small")
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(described))
    with pytest.raises(OptionError, match=r"token \d+ is '[ab]', the model's is '[ab]'"):
        load_drafter(folder, raw)


def test_a_draft_model_without_rows_for_its_tokens_is_refused(raw, tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "small", vocab_size=200)
    with pytest.raises(OptionError, match="has 200 rows for the 259 tokens"):
        load_drafter(folder, raw)


def test_a_path_that_leads_nowhere_is_refused(raw, tmp_path):
    with pytest.raises(SourceError, match="no such file or folder"):
        load_drafter(tmp_path / "nothing", raw)


def test_a_gguf_models_head_is_off_with_the_reason(raw, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "GGUF" in load_drafter("auto", replace(raw, source=file)).reason
