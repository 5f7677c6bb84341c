"""The option table: values, environment, refusals."""

import pytest

from turbospark.errors import OptionError
from turbospark.settings import KernelPolicy, RunnerConfig, cache_folder, resolve


def test_given_value_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSPARK_PREFILL_CHUNK", "7")
    assert resolve(RunnerConfig).prefill_chunk == 7
    assert resolve(RunnerConfig, {"prefill_chunk": 9}).prefill_chunk == 9
    assert resolve(RunnerConfig, {"prefill_chunk": None}).prefill_chunk == 7


def test_empty_environment_value_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSPARK_KERNELS", "")
    assert resolve(KernelPolicy).kernels == "auto"


@pytest.mark.parametrize(
    ("name", "text"),
    [("KERNELS", "gpu"), ("THREADS", "two"), ("THREADS", "-1"), ("ACTIVATIONS", "fp8")],
)
def test_bad_environment_value_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(f"TURBOSPARK_{name}", text)
    with pytest.raises(OptionError, match=f"TURBOSPARK_{name}='{text}'"):
        resolve(KernelPolicy)


@pytest.mark.parametrize(("text", "value"), [("on", True), ("0", False), ("False", False)])
def test_switches_take_words(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("TURBOSPARK_PREFIX_REUSE", text)
    assert resolve(RunnerConfig).prefix_reuse is value


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="'prefil_chunk'; did you mean 'prefill_chunk'"):
        resolve(RunnerConfig, {"prefil_chunk": 3})


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSPARK_CACHE", "/somewhere/else")
    assert str(cache_folder()) == "/somewhere/else"
