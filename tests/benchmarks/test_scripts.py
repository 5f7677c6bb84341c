"""Every script of benchmarks/ starts here, GPU or not, and their chains count what they should."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from benchmarks.test_gpu_models import BENCHMARKS

SCRIPTS = sorted(
    path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text("utf-8")
)


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("gpu_timing")
    sys.modules.pop("gpu_timing")


def test_there_are_scripts() -> None:
    assert "gpu_products.py" in SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts(name: str) -> None:
    call = [sys.executable, str(BENCHMARKS / name), "--help"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}")


@pytest.mark.parametrize("start", [mx.zeros((3,)), [mx.zeros((3,)), mx.ones((2,))]])
def test_calls_of_a_chain_are_given_what_the_one_before_gave(timing: Any, start: Any) -> None:
    seen: list[tuple[int, Any]] = []

    def call(link: Any, number: int) -> Any:
        seen.append((number, link))
        return [x + 1 for x in link] if isinstance(link, list) else link + 1

    chain = timing.Chain(call, start, 3, graphs=2, is_compiled=False)
    del seen[:]
    times = chain.times()
    assert [number for number, _ in seen] == [0, 1, 2, 0, 1, 2]
    last = seen[-1][1]
    assert (last[0] if isinstance(last, list) else last).tolist()[0] == 5
    assert times.us >= times.host_us > 0


def test_chains_take_turns_and_give_medians(timing: Any) -> None:
    order: list[str] = []

    class Fixed:
        def __init__(self, name: str, *values: float) -> None:
            self._name, self._values = name, iter(values)

        def times(self, busy: object) -> Any:
            order.append(self._name)
            value = next(self._values)
            return timing.Times(value, 10 * value)

    one, other = timing.medians([Fixed("a", 3, 1, 2), Fixed("b", 7, 9, 8)], rounds=3)
    assert order == ["a", "b"] * 3
    assert (one, other) == ((2, 20), (8, 80))
