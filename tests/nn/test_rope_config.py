"""RoPE in both spellings of config.json."""

import numpy as np
import pytest

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.rope import rope_frequencies
from turbospark.nn.rope import read_rope

D, LONGEST = 24, 512
PLAIN = rope_frequencies("default", 10_000.0, D)[0]
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


def table(raw, **options):
    rope = read_rope(raw, D, LONGEST, **options)
    return rope.inv_freq, rope.magnitude


@pytest.mark.parametrize(
    "raw",
    [
        {}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": None},
        {"rope_parameters": {}}, {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default"}}, {"rope_theta": None},
        {"rope_theta": 10_000, "rope_scaling": {"rope_type": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e4},
        {"rope_scaling": {"type": "default", "finetuned": True}},
        {"rope_parameters": {"partial_rotary_factor": 1.0}},
    ],
)  # fmt: skip
def test_no_scaling_is_plain_however_it_is_written(raw):
    frequencies, magnitude = table(raw)
    assert np.array_equal(frequencies, PLAIN)
    assert magnitude == 1.0


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("linear", {"factor": 8.0}),
        ("yarn", YARN | {"beta_fast": 16, "truncate": False}),
        ("yarn", YARN | {"attention_factor": 1.5}),
        ("llama3", YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ],
)
def test_both_spellings_give_one_table(key, kind, numbers):
    expected = rope_frequencies(kind, 5e5, D, **numbers)
    flat = {"rope_theta": 5e5, "rope_scaling": {key: kind, **numbers}}
    newer = {"rope_parameters": {key: kind, "rope_theta": 5e5, **numbers}}
    for raw in (flat, newer, flat | newer):
        frequencies, magnitude = table(raw)
        assert np.array_equal(frequencies, expected[0])
        assert magnitude == pytest.approx(expected[1])
        assert not np.array_equal(frequencies, PLAIN)


def test_an_absent_original_length_is_the_trained_one():
    given = table({"rope_scaling": {"type": "yarn", "factor": 4.0}})[0]
    assert np.array_equal(
        given,
        rope_frequencies("yarn", 1e4, D, factor=4.0, original_max_position_embeddings=LONGEST)[0],
    )


NESTED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
}


def test_nested_parameters_are_read_per_layer_type():
    full = table(NESTED, layer_type="full_attention")[0]
    sliding = table(NESTED, layer_type="sliding_attention")[0]
    assert np.array_equal(full, rope_frequencies("linear", 1e6, D, factor=8.0)[0])
    assert np.array_equal(sliding, rope_frequencies("default", 2e4, D)[0])


def test_flat_keys_serve_layers_of_one_type_only():
    raw = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0},
           "rope_local_base_freq": 2e4}  # fmt: skip
    full = table(raw, layer_type="full_attention")[0]
    local = table(raw, layer_type="sliding_attention", flat_keys=("rope_local_base_freq",))[0]
    assert np.array_equal(full, rope_frequencies("linear", 1e6, D, factor=8.0)[0])
    assert np.array_equal(local, rope_frequencies("default", 2e4, D)[0])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk", ""])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_kind_is_refused_by_name(key, kind):
    with pytest.raises(UnsupportedError, match=f"RoPE kind '{kind}' is not implemented"):
        table({"rope_scaling": {key: kind, "factor": 2.0}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_theta": "1e4"}, "rope_theta='1e4' must be a number"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 is out of range"),
        ({"rope_theta": 1.0}, "rope_theta=1.0 is out of range"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object or null"),
        ({"rope_scaling": {"type": 3}}, "rope_type=3 must be a text"),
        ({"rope_scaling": {"type": ["yarn"]}}, "must be a text"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor='8' must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0 is out of range"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "needs high_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                              "high_freq_factor": 4.0}},
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "disagrees with itself"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is both",
        ),
        ({"rope_parameters": {"sliding": {}}}, "sliding"),
    ],
)  # fmt: skip
def test_a_damaged_description_is_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        table(raw)


@pytest.mark.parametrize(
    ("kind", "stranger"),
    [("linear", {"mrope_section": [2, 3]}), ("default", {"partial_rotary_factor": 0.5}),
     ("yarn", {"long_factor": [1.0]})],
)  # fmt: skip
def test_a_number_that_no_kind_knows_is_refused_by_name(kind, stranger):
    (name,) = stranger
    raw = {"rope_scaling": {"type": kind, "factor": 2.0, **stranger}}
    if kind == "default":
        del raw["rope_scaling"]["factor"]
    with pytest.raises(UnsupportedError, match=name):
        table(raw)


def test_layer_types_that_no_one_knows_are_refused():
    raw = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="one entry a layer type"):
        table(raw, layer_type="full_attention")
