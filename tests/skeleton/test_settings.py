"""The option table: values, environment, refusals."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from turbospark.errors import OptionError, SourceError
from turbospark.settings import (
    KernelPolicy,
    RunnerConfig,
    cache_folder,
    let_graphs_grow,
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


def test_the_size_of_cuda_graphs_is_the_users_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "7")
    let_graphs_grow()
    assert os.environ["MLX_MAX_MB_PER_BUFFER"] == "7"
    monkeypatch.delenv("MLX_MAX_MB_PER_BUFFER")
    let_graphs_grow()
    assert int(os.environ["MLX_MAX_MB_PER_BUFFER"]) > 10_000
    monkeypatch.delenv("MLX_MAX_MB_PER_BUFFER")


def test_import_leaves_mlx_alone_without_an_nvidia_gpu() -> None:
    code = "import os, turbospark; print(os.environ.get('MLX_MAX_MB_PER_BUFFER'))"
    environment = {k: v for k, v in os.environ.items() if k != "MLX_MAX_MB_PER_BUFFER"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip() == "None") is not mx.cuda.is_available()
