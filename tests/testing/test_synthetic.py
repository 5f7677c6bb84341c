"""Synthetic checkpoints load, talk, and are the same bytes every time."""

import json

import mlx.core as mx
import pytest

import turbospark as ts
from turbospark.errors import ConfigError, OptionError, UnsupportedError
from turbospark.loading.checkpoint import INDEX
from turbospark.loading.inspect import inspect
from turbospark.registry import known_types
from turbospark.testing import synthetic
from turbospark.testing.sizes import KINDS
from turbospark.testing.vocabulary import byte_level_tokenizer

CACHES = {
    "dense": ["KVCache"] * 6,
    "sliding": ["RingCache", "RingCache", "KVCache"] * 2,
    "moe": ["RingCache", "RingCache", "KVCache"] * 2,
    "streamed": ["RingCache", "RingCache", "KVCache"] * 2,
}


def reply(folder, prompt="the way of water", **options):
    engine = ts.load(folder, kernels="reference", draft="off", **options)
    parts = list(engine.stream(prompt, max_tokens=30, stop_token_ids=[]))
    return engine, parts


@pytest.mark.parametrize("quantize", ["int4", "int8-g32", None])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_and_streams_text(tmp_path, kind, quantize):
    engine, parts = reply(synthetic(tmp_path / "a", kind, quantize=quantize))
    assert [type(cache).__name__ for cache in engine.model.make_caches(64, 8)] == CACHES[kind]
    ids = [part.token for part in parts if part.token is not None]
    text = "".join(part.text for part in parts)
    assert len(set(ids)) > 2 or quantize is None
    assert text == engine.tokenizer.decode(ids)
    logits = engine.runner.prefill_chunk([1, 2, 3], engine.runner.session.position)
    assert mx.isfinite(logits).all()
    assert mx.std(logits) > 0.1
    matrices = inspect(tmp_path / "a").quantization
    if quantize is None:
        assert set(matrices) == {"BF16"}
    else:
        group = 32 if quantize.endswith("g32") else 64
        assert f"{quantize[3]} bits, groups of {group}" in matrices
        assert "BF16" not in matrices


@pytest.mark.parametrize("quantize", ["int4", None])
@pytest.mark.parametrize("model_type", known_types())
def test_every_registered_type_loads_and_talks(tmp_path, model_type, quantize):
    folder = synthetic(tmp_path / "a", model_type=model_type, quantize=quantize)
    engine, parts = reply(folder)
    assert engine.model_config["model_type"] == model_type
    assert parts[-1].finish_reason in {"length", "stop"}


@pytest.mark.parametrize("kind", ["moe", "streamed"])
def test_same_arguments_give_the_same_bytes(tmp_path, kind):
    folders = [synthetic(tmp_path / name, kind) for name in "ab"]
    first, second = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert first == second
    weights = {name for name in first if ".safetensors" in name}
    assert len(weights) == (1 if kind == "moe" else 8)
    assert set(first) - weights == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    other = synthetic(tmp_path / "c", kind, seed=1)
    for name in weights - {INDEX}:
        assert (other / name).read_bytes() != first[name]


def test_a_tensor_does_not_depend_on_what_else_there_is(tmp_path):
    few = mx.load(str(synthetic(tmp_path / "a", num_hidden_layers=2) / "model.safetensors"))
    more = mx.load(str(synthetic(tmp_path / "b", num_hidden_layers=5) / "model.safetensors"))
    assert len(few) < len(more)
    assert all(mx.array_equal(array, more[name]) for name, array in few.items())
    codes = [more[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)]
    assert not mx.array_equal(codes[0], codes[1])
    assert not mx.array_equal(codes[0], more["model.layers.0.mlp.gate_proj.weight"])
    scales = more["model.layers.0.mlp.up_proj.scales"]
    assert mx.any(scales > 0)
    assert mx.any(scales < 0)


def test_values_go_into_the_configuration(tmp_path):
    folder = synthetic(
        tmp_path / "a", "sliding", sliding_window=24, num_kv_shared_layers=3, vocab_size=777
    )
    config = json.loads((folder / "config.json").read_text())
    assert (config["sliding_window"], config["vocab_size"]) == (24, 777)
    engine, _ = reply(folder)
    assert len(engine.model.make_caches(64, 8)) == 3
    assert engine.model.vocab_size == engine.tokenizer.vocab_size == 777


def test_a_ring_wraps_and_a_conversation_is_reused(tmp_path):
    engine = ts.load(synthetic(tmp_path / "a", "sliding"), ring_slack=32, kernels="reference")
    chat = engine.session()
    chat.send("the way of water " * 9, max_tokens=5)
    again = chat.send("and so on", max_tokens=5)
    assert again.reused_tokens > 60
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2


def test_the_tokenizer_knows_bytes_words_and_marks(tmp_path):
    tokenizer = ts.load(synthetic(tmp_path / "a"), kernels="reference").tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, {257})
    for text in ("the way of water", "naïve 水 🙂", "  two\n\nlines\t"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(" the way of water", add_special_tokens=False)) == 4
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"


@pytest.mark.parametrize("size", [259, 260, 430, 512, 900])
def test_a_vocabulary_has_every_id_once(size):
    made = byte_level_tokenizer(size)
    vocabulary = made["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(size))
    assert all(vocabulary[mark["content"]] == mark["id"] for mark in made["added_tokens"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dens"}, "kind='dens' is not one of dense, sliding, moe, streamed"),
        ({"kind": "moe", "model_type": "llama"}, "give one of them"),
        ({"model_type": "lama"}, "model_type: .*'lama' is not implemented; the nearest is 'llama'"),
        ({"quantize": "int9"}, "quantize='int9' is unknown"),
        ({"quantize": "int4-g128", "hidden_size": 64, "head_dim": 16,
          "global_head_dim": 16}, "no matrix of"),
        ({"vocab_size": 100}, "vocab_size=100: every byte and 3 marks need 259 ids or more"),
        ({"hiden_size": 64}, "the family 'gemma4' does not know 'hiden_size'; did you mean 'hid"),
        ({"kind": ""}, "kind='' is not one of dense, sliding, moe, streamed"),
        ({"model_type": 5}, "model_type: .*'5' is not implemented"),
        ({"seed": -1}, "seed=-1 is not a whole number of 0 or more"),
        ({"seed": None}, "seed=None is not a whole number of 0 or more"),
        ({"dtype": {1, 2}}, "a value cannot be written to config.json: .*set"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_before_anything_is_written(tmp_path, arguments, message):
    with pytest.raises(OptionError, match=message):
        synthetic(tmp_path / "a", **arguments)
    assert not (tmp_path / "a").exists()


def test_what_the_family_refuses_is_refused_in_its_words(tmp_path):
    with pytest.raises(ConfigError, match="hidden_size='x' must be a whole number"):
        synthetic(tmp_path / "a", hidden_size="x")
    with pytest.raises(UnsupportedError, match="hidden_activation"):
        synthetic(tmp_path / "a", hidden_activation="relu6")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("quantize", ["int4", None])
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_a_prediction_head_that_is_announced_is_written(tmp_path, model_type, quantize):
    folder = synthetic(
        tmp_path / "a", model_type=model_type, quantize=quantize, mtp_num_hidden_layers=1
    )
    engine = ts.load(folder, kernels="reference", draft="mtp")
    drafted = engine.generate("Once upon a time", max_tokens=9)
    assert drafted.response.drafted > 0
    assert drafted == engine.generate("Once upon a time", max_tokens=9, draft="off")


def test_a_head_that_the_family_refuses_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers=3 is not implemented"):
        synthetic(tmp_path / "a", model_type="qwen4_exp", mtp_num_hidden_layers=3)
    assert not (tmp_path / "a").exists()


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="link is there already"):
        synthetic(tmp_path / "link")
    (tmp_path / "link").unlink()
    (tmp_path / "note").write_text("mine")
    with pytest.raises(OptionError, match="is there already"):
        synthetic(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
    (tmp_path / "note").unlink()
    assert synthetic(str(tmp_path)) == tmp_path
