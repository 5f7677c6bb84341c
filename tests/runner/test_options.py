"""Keywords of a call, and the tables behind them."""

from typing import Any

import numpy as np
import pytest

from turbospark.errors import OptionError
from turbospark.runner.options import read_options
from turbospark.settings import (
    UNBUILT,
    GenerationConfig,
    LoadConfig,
    RunnerConfig,
    origins,
    refuse_unbuilt,
    resolve,
)


def test_keywords_are_sorted_and_none_means_not_given() -> None:
    read = read_options(
        {
            "temp": 0.5,
            "max_tokens": None,
            "stop": "x",
            "prefill_step_size": 3,
            "logit_bias": {1: 2.0},
        }
    )
    assert read.generation == GenerationConfig(temperature=0.5, stop=("x",))
    assert read.prefill_chunk == 3
    assert read.logit_bias == {1: 2.0}
    assert read_options({}).prefill_chunk is None


def test_a_call_never_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSPARK_TEMPERATURE", "1")
    monkeypatch.setenv("TURBOSPARK_SEED", "1")
    monkeypatch.setenv("TURBOSPARK_PREFILL_CHUNK", "9")
    assert read_options({}).generation == GenerationConfig()
    assert read_options({}).prefill_chunk is None


def test_a_refused_keyword_says_why() -> None:
    with pytest.raises(OptionError, match="stop: not on this path"):
        read_options({"stop": "x"}, refused={"stop": "not on this path"})
    read_options({"stop": None}, refused={"stop": "not on this path"})


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**64 - 1, str(2**64 - 1), np.int64(7)])
def test_seeds_are_exact(seed: Any) -> None:
    assert resolve(GenerationConfig, {"seed": seed}).seed == int(seed)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1.5), ("seed", True), ("seed", "1.5"), ("temperature", True), ("temperature", "hot"),
     ("stop", 3), ("stop", [""]), ("max_tokens", -2),
     ("max_tokens", float("nan")), ("max_tokens", float("inf"))],
)  # fmt: skip
def test_what_does_not_parse_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        resolve(GenerationConfig, {name: value})


@pytest.mark.parametrize("value", ["ab", ["ab"], ("ab",)])
def test_one_stop_string_is_not_a_list_of_letters(value: Any) -> None:
    assert resolve(GenerationConfig, {"stop": value}).stop == ("ab",)


def test_an_alias_beside_its_name_is_refused() -> None:
    with pytest.raises(OptionError, match="'prefill_chunk' is given twice"):
        resolve(RunnerConfig, {"prefill_chunk": 3, "prefill_step_size": 3})


def test_text_is_text() -> None:
    with pytest.raises(OptionError, match="quantize=4 is not text"):
        resolve(LoadConfig, {"quantize": 4})


def test_origins_follow_the_same_order_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSPARK_RING_SLACK", "5")
    monkeypatch.setenv("TURBOSPARK_MAX_CONTEXT", "9")
    found = origins(RunnerConfig, {"max_context": 7})
    assert found["ring_slack"] == "TURBOSPARK_RING_SLACK"
    assert found["max_context"] == "given"
    assert found["prefill_chunk"] == "default"


def test_options_not_built_yet_take_what_asks_for_nothing() -> None:
    nothing = {name: value for name, entry in UNBUILT.items() for value in (None, *entry.neutral)}
    assert refuse_unbuilt({**nothing, "seed": 3}) == {"seed": 3}
    with pytest.raises(OptionError, match=r"max_kv_size=64: .* max_context=N"):
        refuse_unbuilt({"max_kv_size": 64})
