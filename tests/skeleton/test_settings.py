"""The option table: values, environment, refusals."""

from pathlib import Path

import pytest

from turbospark.errors import OptionError, SourceError
from turbospark.settings import (
    KernelPolicy,
    RunnerConfig,
    cache_folder,
    resolve,
)


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


def test_a_count_has_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(KernelPolicy, {"threads": "1024"}).threads == 1024
    with pytest.raises(OptionError, match="threads=1025 is more than 1024"):
        resolve(KernelPolicy, {"threads": 1025})
    monkeypatch.setenv("TURBOSPARK_THREADS", "1000000")
    with pytest.raises(OptionError, match="TURBOSPARK_THREADS='1000000' is more than 1024"):
        resolve(KernelPolicy)


def test_without_a_home_the_cache_folder_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("TURBOSPARK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SourceError, match="TURBOSPARK_CACHE"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/turbospark")


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="'prefil_chunk'; did you mean 'prefill_chunk'"):
        resolve(RunnerConfig, {"prefil_chunk": 3})


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSPARK_CACHE", "/somewhere/else")
    assert str(cache_folder()) == "/somewhere/else"
