"""Rooms that stay lazy never force an array: methods that ruff cannot ban are found here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAZY = ("families", "turbospark/nn", "turbospark/caches", "turbospark/kernels")
HOST = "turbospark/kernels/host"  # the host target runs at once, on the arrays' own memory
METHODS = {"item", "tolist"}
CALLS = {("np", "asarray"), ("np", "array"), ("numpy", "asarray"), ("numpy", "array")}


def forcing_calls(source: str) -> list[int]:
    """Line numbers of calls that would evaluate an array."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        name = owner.id if isinstance(owner, ast.Name) else ""
        if (node.func.attr in METHODS and not node.args) or (name, node.func.attr) in CALLS:
            lines.append(node.lineno)
    return lines


def lazy_files() -> list[Path]:
    return [
        path
        for room in LAZY
        for path in sorted((ROOT / room).rglob("*.py"))
        if not path.is_relative_to(ROOT / HOST)
    ]


@pytest.mark.parametrize("path", lazy_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_room_forces_no_array(path: Path) -> None:
    allowed = {
        number
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# host memory:" in line
    }
    assert [line for line in forcing_calls(path.read_text()) if line not in allowed] == []


@pytest.mark.parametrize(
    "planted", ["x.item()", "logits.tolist()", "np.asarray(x)", "import numpy\nnumpy.array(x)"]
)
def test_planted_call_is_found(planted: str) -> None:
    assert forcing_calls(planted)
