"""Chains of delta nets and of sorted experts: calls wait for each other and share nothing."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.graphs import chained, counting
from benchmarks.test_gpu_models import BENCHMARKS

MODULES = ("gpu_mixers", "gpu_experts", "gpu_models", "gpu_shapes", "gpu_timing", "gpu_links")


@pytest.fixture
def mixers() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("gpu_mixers")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def chains(mixers: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What small benches would measure."""
    timing, found = sys.modules["gpu_timing"], list[Any]()
    monkeypatch.setattr(timing, "_target", lambda _: counting())
    monkeypatch.setattr(timing, "_copy_tb_s", lambda: 1.0)
    small = {
        "DELTA": {"small": (2, 4)},
        "HEAD_DIM": 32,
        "CALLS": 5,
        "ROWS": (1, 4),
        "LONG": (70,),
        "SORTED": (64,),
        "EXPERTS": {"small": (8, 2, 64, 128)},
    }
    for name, value in small.items():
        monkeypatch.setattr(mixers, name, value)

    def turns(chains: Sequence[Any], _rounds: int = 1) -> list[float]:
        found.extend(chains)
        return [1.0] * len(chains)

    monkeypatch.setattr(mixers, "turns", turns)
    monkeypatch.setattr(mixers.chain, "__defaults__", (5, 1))
    return found


@pytest.mark.parametrize(("part", "launched"), [("delta", {1}), ("scan", {1, 3}), ("sorted", {1})])
def test_calls_of_a_chain_wait_for_the_one_before(
    mixers: Any, chains: list[Any], part: str, launched: set[int], tmp_path: Path
) -> None:
    getattr(mixers.Bench(600.0), part)()
    found = set[int]()
    for chain in chains:
        calls = chain._count // chain._graphs
        (launches, longest), nodes = chained(chain, tmp_path)
        if nodes > launches:
            assert calls == 1  # MLX merges what calls of a graph have in common
        else:
            assert launches == longest
            assert calls > 1
        found |= {launches // calls} - {0}
    assert found == launched
