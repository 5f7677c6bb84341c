"""Models that may not continue each other's sessions have different fingerprints."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import turbospark as ts
from turbospark.sessions.fingerprint import Fingerprint, differences, fingerprint
from turbospark.testing import ByteTokenizer, write_tiny_checkpoint


def of(folder: Path, **options: Any) -> Fingerprint:
    engine = ts.load(folder, kernels="reference", **options)
    return fingerprint(engine.model, engine.model_config, engine.tokenizer)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def parts(saved: Fingerprint, own: Fingerprint) -> list[str]:
    return [said.split(" (")[0] for said in differences(saved, own)]


def test_the_same_checkpoint_anywhere_is_the_same(tiny: Path, tmp_path: Path) -> None:
    elsewhere = write_tiny_checkpoint(
        tmp_path / "copy", transformers_version="9", _name_or_path="x"
    )
    assert differences(of(tiny), of(elsewhere)) == []


def test_a_fine_tune_of_one_matrix_differs_by_its_weights(tiny: Path, tmp_path: Path) -> None:
    tuned = write_tiny_checkpoint(tmp_path / "tuned")
    path = str(tuned / "model.safetensors")
    weights = mx.load(path)
    name = "model.layers.2.self_attn.v_proj.weight"
    weights[name] = weights[name] + mx.array([[0.001]])
    mx.eval(weights)
    mx.save_safetensors(path, weights)
    assert parts(of(tiny), of(tuned)) == ["weights"]


@pytest.mark.parametrize(
    ("values", "differing"),
    [
        ({"num_hidden_layers": 2}, ["configuration", "quantization", "weights"]),
        ({"rope_theta": 20000.0}, ["configuration"]),
        ({"model_type": "mistral"}, ["model type", "configuration"]),
    ],
)
def test_another_configuration_differs_by_name(
    tiny: Path, tmp_path: Path, values: dict[str, Any], differing: list[str]
) -> None:
    assert parts(of(write_tiny_checkpoint(tmp_path / "other", **values)), of(tiny)) == differing


def test_another_quantization_is_told_in_words(tiny: Path) -> None:
    found = differences(of(tiny, quantize="int8-g32"), of(tiny))
    assert found[0].startswith("quantization (")
    assert "8 bit g32, 19 x float in the file, 22 x float here)" in found[0]
    assert found[1:] == ["weights"]


def test_tokenizers_are_compared_by_content(tiny: Path) -> None:
    engine = ts.load(tiny, kernels="reference")
    own = of(tiny)
    assert fingerprint(engine.model, engine.model_config, ts.load(tiny).tokenizer) == own

    class Other(ByteTokenizer):
        def token_text(self, token: int) -> str:
            return "x" if token == 99 else super().token_text(token)

    class Ends(ByteTokenizer):
        eos_ids = frozenset({257})

    plain = fingerprint(None, {}, ByteTokenizer())
    for tokenizer in (Other(), Ends(), ByteTokenizer(chat=False)):
        assert differences(fingerprint(None, {}, tokenizer), plain) == ["tokenizer"]
    assert fingerprint(None, {}, ByteTokenizer()) == plain


def test_every_differing_part_is_told_once() -> None:
    saved, own = {"a": 1, "b": "x", "gone": "y"}, {"a": 2, "b": "x", "new": "f" * 64}
    assert differences(saved, own) == [
        "a (1 in the file, 2 here)",
        "new",
        "gone (y in the file, None here)",
    ]
