"""config.json: broken files are named, wrappers unwrapped, stop ids united, code refused."""

import json

import pytest
from loading.files import LLAMA

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.loading import config as configs


def write(folder, name="config.json", value=None):
    content = value if isinstance(value, (str, bytes)) else json.dumps(value)
    raw = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(raw)
    return folder


def refused(folder, *words, kind=ConfigError):
    with pytest.raises(kind) as caught:
        configs.read_config(folder)
    for word in ("config.json", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "empty"), (" \n", "empty"), ("{", "not valid JSON"), ('{"a": }', "not valid JSON"),
        ("[1]", "list"), ("5", "int"), ("null", "NoneType"), (b"\xff{}", "UTF-8"),
        ("[" * 200_000, "not valid JSON"), ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)  # fmt: skip
def test_broken_files_are_named(tmp_path, content, word):
    refused(write(tmp_path, value=content), str(tmp_path), word)


def test_missing_file_is_named(tmp_path):
    refused(tmp_path, "cannot be read")


@pytest.mark.parametrize("value", [None, 5, "", ["llama"]])
def test_model_type_must_be_a_name(tmp_path, value):
    refused(write(tmp_path, value=LLAMA | {"model_type": value}), "model_type")


def test_absent_model_type_is_explained(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    refused(write(tmp_path, value=config), "model_type", "family")


def test_checkpoint_code_is_refused_and_not_executed(tmp_path):
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    write(tmp_path, value=LLAMA | {"model_file": "trap.py"})
    refused(tmp_path, "model_file", "trap.py", kind=UnsupportedError)
    auto_map = {"AutoModelForCausalLM": "trap.Model"}
    write(tmp_path, value={"model_type": "homemade", "auto_map": auto_map})
    refused(tmp_path, "homemade", "auto_map", "never executed", kind=UnsupportedError)
    assert not (tmp_path / "ran").exists()


def test_auto_map_of_a_known_family_does_not_matter(tmp_path):
    config = LLAMA | {"auto_map": {"AutoConfig": "configuration.Config"}}
    assert configs.read_config(write(tmp_path, value=config)) == config


def test_text_config_is_unwrapped_with_what_stands_only_outside(tmp_path):
    raw = {
        "model_type": "gemma3", "tie_word_embeddings": False, "eos_token_id": [1, 106],
        "quantization": {"bits": 4}, "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 9},
        "hidden_size": 1, "text_config": {"hidden_size": 64, "torch_dtype": "float32"},
    }  # fmt: skip
    assert configs.normalise(raw, tmp_path) == {
        "model_type": "gemma3", "tie_word_embeddings": False, "eos_token_id": [1, 106],
        "quantization": {"bits": 4}, "torch_dtype": "float32", "hidden_size": 64,
    }  # fmt: skip


def test_inner_model_type_wins_and_flat_configs_stay(tmp_path):
    raw = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    assert configs.normalise(raw, tmp_path)["model_type"] == "gemma3_text"
    assert configs.normalise(LLAMA, tmp_path) == LLAMA
    assert configs.normalise(LLAMA | {"text_config": None}, tmp_path) == LLAMA | {
        "text_config": None
    }
    with pytest.raises(ConfigError, match="text_config"):
        configs.normalise(LLAMA | {"text_config": [1]}, tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, {2}), ([2, 5], None, {2, 5}), (None, 7, {7}), (None, [7, 9], {7, 9}),
        (2, [7, 2], {2, 7}), (None, None, set()), ([], [], set()),
    ],
)  # fmt: skip
def test_stop_ids_are_the_union_of_both_files(tmp_path, config, generation, expected):
    raw = LLAMA | {"eos_token_id": config}
    write(tmp_path, value=raw)
    if generation is not None:
        write(tmp_path, "generation_config.json", {"eos_token_id": generation})
    assert configs.stop_ids(tmp_path, raw) == expected


def test_stop_ids_of_both_levels_count(tmp_path):
    raw = {"eos_token_id": 5, "text_config": {"eos_token_id": [6]}}
    assert configs.stop_ids(tmp_path, raw) == {5, 6}
    assert configs.stop_ids(tmp_path, {"text_config": {}}) == frozenset()


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], [-1], {"id": 2}])
def test_unusable_stop_ids_name_their_file(tmp_path, value):
    with pytest.raises(ConfigError, match=r"config\.json.*eos_token_id"):
        configs.stop_ids(tmp_path, LLAMA | {"eos_token_id": value})
    write(tmp_path, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"generation_config\.json.*eos_token_id"):
        configs.stop_ids(tmp_path, LLAMA)


def test_broken_generation_config_is_named(tmp_path):
    write(tmp_path, "generation_config.json", "{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        configs.stop_ids(tmp_path, LLAMA)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_other_quantization_methods_are_refused_by_name(tmp_path, method):
    config = LLAMA | {"quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(UnsupportedError, match=method) as caught:
        configs.quantization(config, tmp_path / "config.json")
    assert "config.json" in str(caught.value)


def test_mlx_quantization_is_read_under_both_names(tmp_path):
    given = {"bits": 4, "group_size": 64}
    for name in ("quantization", "quantization_config"):
        assert configs.quantization(LLAMA | {name: given}, tmp_path) == given
    assert configs.quantization(LLAMA, tmp_path) is None
    with pytest.raises(ConfigError, match="quantization"):
        configs.quantization(LLAMA | {"quantization": 4}, tmp_path)
