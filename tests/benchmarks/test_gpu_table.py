"""What gpu_decode.py prints: figures as they come, and one table of all parts."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_table() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_table", BENCHMARKS / "gpu_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_table"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def part() -> Any:
    table = load_table()
    part = table.Part(
        shape="llama-9B",
        device="GPU",
        date="2026-01-02",
        command="python benchmarks/gpu_decode.py llama-9B",
        versions={"mlx": "1.2"},
        environment={"MLX_X": "3"},
        bandwidth=4.0,
        bodies={},
        verdict="32 greedy tokens equal",
    )
    for values in (
        ("decode", 1, 16, 2.0, 7.0, 4.0),
        ("verify", 4, 16, 2.5, 50.0, 4.0),
        ("decode", 1, 2048, 4.0, 8.0, 5.0),
        ("prefill", 512, 0, 20.0, 90.0),
    ):
        part.add(table.Rate(*values))
    return part


def test_a_row_has_rates_ratio_bandwidth_and_costs(part: Any) -> None:
    lines = load_table().markdown([part]).splitlines()
    assert "2026-01-02, GPU, mlx 1.2, MLX_X=3." in lines
    assert "    python benchmarks/gpu_decode.py llama-9B" in lines
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| llama")]
    first, second = ([cell.strip() for cell in row] for row in rows)
    assert first == [
        "llama-9B", "16", "500.0", "142.9", "3.50x", "2.00", "50", "1.25",
        "512: 25600 tok/s, 4.50x", "32 greedy tokens equal",
    ]  # fmt: skip
    assert second[:7] == ["llama-9B", "2048", "250.0", "125.0", "2.00x", "1.25", "31"]


def test_a_figure_is_printed_when_it_is_there(part: Any, capsys: pytest.CaptureFixture) -> None:
    part.add(load_table().Rate("verify", 8, 16, 3.0, 60.0, 4.0))
    line = capsys.readouterr().out
    assert "verify 8 @16" in line
    assert "20.00x" in line
    assert "1.50x of one row" in line


def test_parts_survive_their_file(part: Any, tmp_path: Path) -> None:
    part.stopped = "stopped after 9 s"
    part.write(tmp_path)
    table = load_table()
    again = table.Part.read(tmp_path / "llama-9B.json")
    assert table.markdown([again]) == table.markdown([part])
    assert "- llama-9B: stopped after 9 s" in table.markdown([again])


@pytest.mark.slow
def test_the_script_runs_from_figures_to_table(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(BENCHMARKS / "gpu_decode.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    parts = str(tmp_path / "parts")
    shape = ("tiny", "--contexts", "16", "--prefill", "8", "--repeats", "1")
    printed = run(*shape, "--out", parts)
    assert printed.index("decode 1 @16") < printed.index("verify 8 @16")
    assert printed.index("verify 8 @16") < printed.index("prefill 8")
    row = next(line for line in run("--merge", parts).splitlines() if line.startswith("| tiny"))
    assert row.count("|") == 11
    assert re.search("not begun|stopped after", run(*shape, "--budget", "0.001"))
