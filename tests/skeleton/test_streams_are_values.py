"""Layers change no array in place: kernels know by its array what a stream is the sum of."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = [path for room in ("families", "turbospark/nn") for path in (ROOT / room).rglob("*.py")]


def changes_in_place(source: str) -> list[int]:
    """Line numbers where `h`, or an argument that is an array, changes in place."""
    tree = ast.parse(source)
    arrays = {
        node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        and node.annotation
        and "mx.array" in ast.unparse(node.annotation).split(" | ")
    } | {"h"}
    lines: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Subscript)]
        else:
            continue
        for target in targets:
            owner = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(owner, ast.Name) and owner.id in arrays:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers_change_no_array_in_place(path: Path) -> None:
    assert changes_in_place(path.read_text()) == []


@pytest.mark.parametrize(
    "planted",
    [
        "h += v",
        "h[0] = v",
        "h[0] *= 2",
        "def f(x: mx.array): x += 1",
        "def f(x: mx.array | None): x[:] = 1",
    ],
)
def test_a_planted_change_is_found(planted: str) -> None:
    assert changes_in_place(planted) == [1]
    fine = "def f(a: dict[str, mx.array]): a[0] = 1"
    assert changes_in_place(f"h = h + v\nfor i in a: n += 1\nkept[i] = h\n{fine}") == []
