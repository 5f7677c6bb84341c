"""The import rules hold, and each of them can fail: a planted violation breaks its contract."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed"
)

CONTRACTS: dict[str, dict[str, Any]] = {
    contract["name"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}
LAYERS = [
    re.findall(r"turbospark\.(\w+)", layer)
    for layer in CONTRACTS["Rooms import only what is below them"]["layers"]
]
FOR_FAMILIES = {"nn", "caches", "kernels", "protocols", "errors"}
ROOMS = {path.stem for path in (ROOT / "turbospark").glob("[!_]*") if path.suffix in {"", ".py"}}
ROOMS -= {"version"}  # one constant
VIOLATIONS = {
    "a room imports one above it": ("turbospark/kernels/planted.py", "import turbospark.api\n"),
    "siblings import each other": (
        "turbospark/sampling/planted.py",
        "import turbospark.tokenizer\n",
    ),
    "errors import settings": ("turbospark/errors.py", "import turbospark.settings\n"),
    "the library imports a family": ("turbospark/nn/planted.py", "import families.llama\n"),
    "a family imports the runner": ("families/planted.py", "import turbospark.runner\n"),
    "a family imports another": ("families/gemma3.py", "import families.llama\n"),
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("turbospark", "families"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_rules_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("case", VIOLATIONS, ids=str)
def test_planted_violation_breaks_a_rule(copy: Path, case: str) -> None:
    name, line = VIOLATIONS[case]
    path = copy / name
    before = path.read_text() if path.exists() else None
    try:
        path.write_text((before or "") + "\n" + line)
        assert lint(copy).returncode != 0
    finally:
        path.unlink() if before is None else path.write_text(before)


def plant(copy: Path, room: str, lines: str) -> None:
    place = copy / "turbospark" / room
    path = place / "planted.py" if place.is_dir() else place.with_suffix(".py")
    with path.open("a") as file:
        file.write(f"\n{lines}\n")


def test_every_room_has_a_layer_and_every_family_stands_alone() -> None:
    layered = {room for layer in LAYERS for room in layer}
    assert layered - ROOMS <= {"speculation", "experts", "observe"}  # rooms of later features
    assert layered >= ROOMS
    forbidden = CONTRACTS["A family imports only what families may"]["forbidden_modules"]
    assert {name.removeprefix("turbospark.") for name in forbidden} == ROOMS - FOR_FAMILIES
    families = {
        path.stem for path in (ROOT / "families").glob("[!_]*") if path.suffix in {"", ".py"}
    }
    alone = CONTRACTS["No family imports another"]["modules"]
    assert {name.removeprefix("families.") for name in alone} == families


def test_each_room_is_kept_from_those_above_and_beside_it(copy: Path, tmp_path: Path) -> None:
    planted = shutil.copytree(copy, tmp_path / "planted")
    expected: set[str] = set()
    here = [[room for room in layer if room in ROOMS] for layer in LAYERS]
    for upper, layer in itertools.pairwise(here):
        for room in layer:
            forbidden = [*upper, *(other for other in layer if other != room)]
            plant(planted, room, "\n".join(f"import turbospark.{name}" for name in forbidden))
            expected |= {f"turbospark.{room} -> turbospark.{name}" for name in forbidden}
    shown = lint(planted).stdout.replace(".planted", "").replace(".__init__", "")
    assert [line for line in sorted(expected) if f"{line} (l." not in shown] == []


def test_a_family_is_kept_from_each_forbidden_room(copy: Path, tmp_path: Path) -> None:
    planted = shutil.copytree(copy, tmp_path / "planted")
    forbidden = sorted(ROOMS - FOR_FAMILIES)
    lines = "\n".join(f"import turbospark.{name}" for name in forbidden)
    (planted / "families" / "planted.py").write_text(lines + "\n")
    shown = lint(planted).stdout
    missed = [name for name in forbidden if f"families.planted -> turbospark.{name} (" not in shown]
    assert missed == []
