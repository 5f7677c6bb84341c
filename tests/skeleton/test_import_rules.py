"""The import rules hold, and each of them can fail: a planted violation breaks its contract."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed"
)

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
