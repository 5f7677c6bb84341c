"""Reading config.json into a family's dataclass."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.nn.config import (
    Positive,
    Size,
    check_heads,
    layer_schedule,
    read_activation,
    read_config,
    read_value,
    refuse,
    split_head_dim,
)


@dataclass(frozen=True, slots=True)
class ToyConfig:
    hidden_size: Size
    eps: Positive = 1e-6
    tied: bool = True
    act: str = "silu"
    window: Size | None = 7
    kinds: tuple[str, ...] | None = None
    widths: Mapping[str, Size] | None = None


def test_fields_are_picked_and_others_left_alone():
    config = read_config(ToyConfig, {"hidden_size": 5, "torch_dtype": "bfloat16"})
    assert config == ToyConfig(5)


def test_a_field_without_default_is_needed():
    with pytest.raises(ConfigError, match=r"lacks hidden_size, which ToyConfig needs"):
        read_config(ToyConfig, {})


def test_null_is_a_value_only_where_it_means_something():
    assert read_config(ToyConfig, {"hidden_size": 5, "window": None}).window is None
    with pytest.raises(ConfigError, match=r"tied=None must be true or false"):
        read_config(ToyConfig, {"hidden_size": 5, "tied": None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "5"), ("hidden_size", 5.0), ("hidden_size", True), ("hidden_size", [5]),
        ("hidden_size", 0), ("hidden_size", -3), ("hidden_size", 2**40), ("eps", "1e-6"),
        ("eps", float("nan")), ("eps", float("inf")), ("eps", -1e-6), ("eps", 0), ("tied", 1),
        ("tied", "true"), ("act", 3), ("window", 0), ("kinds", "full"), ("kinds", [1]),
        ("kinds", {"a": 1}), ("widths", [3]), ("widths", {"0": "3"}), ("eps", 10**400),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=rf"config\.json: {key}"):
        read_config(ToyConfig, {"hidden_size": 5, key: value})


@pytest.mark.parametrize(
    ("hint", "value", "bounds"),
    [(Size, 0, "from 1 to 16777216"), (Positive, -1.0, "1e-30 to 1e+30")],
)
def test_bounds_are_shown_to_their_digits(hint, value, bounds):
    with pytest.raises(ConfigError, match=re.escape(bounds)):
        read_value("size", value, hint)


def test_whole_numbers_may_stand_for_floats_and_lists_become_tuples():
    raw = {"hidden_size": 5, "eps": 1, "kinds": ["a", "b"], "widths": {"0": 3}}
    config = read_config(ToyConfig, raw)
    assert config.eps == 1.0
    assert isinstance(config.eps, float)
    assert config.kinds == ("a", "b")
    assert config.widths == {"0": 3}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*ToyConfig.__slots__, "other"]), JSON))
def test_any_json_is_read_or_refused(raw):
    try:
        config = read_config(ToyConfig, raw)
    except ConfigError:
        return
    for key in ToyConfig.__slots__:
        if key in raw and not isinstance(raw[key], (list, dict)):
            assert getattr(config, key) == raw[key]


def test_heads_that_do_not_fit_are_refused():
    check_heads(6, 3, 10)
    with pytest.raises(ConfigError, match="num_attention_heads=7 is not a multiple"):
        check_heads(7, 3, 10)
    with pytest.raises(ConfigError, match="head_dim=9 is odd"):
        check_heads(6, 3, 9)
    with pytest.raises(ConfigError, match="too wide"):
        check_heads(2**20, 1, 2**10)


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    assert split_head_dim(24, 6) == 4
    with pytest.raises(ConfigError, match="hidden_size=25 is not a multiple"):
        split_head_dim(25, 6)


def test_the_schedule_comes_from_the_pattern_or_the_list():
    full, sliding = "full_attention", "sliding_attention"
    assert layer_schedule(5, None, 2) == (sliding, full, sliding, full, sliding)
    assert layer_schedule(2, [full, sliding], 2) == (full, sliding)
    with pytest.raises(ConfigError, match="layer_types lists 1 layers, but num_hidden_layers=2"):
        layer_schedule(2, [full], 2)
    with pytest.raises(UnsupportedError, match=r"layer_types\[1\]='chunked_attention'"):
        layer_schedule(2, [full, "chunked_attention"], 2)


def test_an_unknown_activation_is_refused_by_name():
    assert read_activation("hidden_act", "swish") == "silu"
    assert read_activation("hidden_act", "gelu_pytorch_tanh") == "gelu_tanh"
    with pytest.raises(UnsupportedError, match="hidden_act='relu2' is not implemented"):
        read_activation("hidden_act", "relu2")


def test_refuse_lets_null_and_allowed_values_pass():
    refuse({}, "cap", why="no cap")
    refuse({"cap": None}, "cap", why="no cap")
    refuse({"cap": "vision"}, "cap", "vision", why="no cap")
    with pytest.raises(UnsupportedError, match=r"cap=50\.0 is not implemented: no cap"):
        refuse({"cap": 50.0}, "cap", why="no cap")
