"""Who may read the environment, evaluate arrays and build kernels.

Ruff's bans are lifted for whole rooms at a time; what it then lets through is found here.
"""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVALUATING = ("runner", "sampling", "speculation", "loading", "experts")
KERNELS = ("kernels/host", "kernels/gpu")  # the latter try bodies out
ALLOWED = {
    "the environment": ("settings.py",),
    "evaluation": EVALUATING + KERNELS,
    "kernel bodies": ("kernels",),
}
NAMES = {
    "environ": "the environment", "environb": "the environment", "getenv": "the environment",
    "putenv": "the environment", "eval": "evaluation", "async_eval": "evaluation",
    "metal_kernel": "kernel bodies", "cuda_kernel": "kernel bodies",
}  # fmt: skip
MODULES = {"os", "mx", "core", "fast", "mlx.core", "mlx.core.fast"}


def uses(source: str) -> set[str]:
    """Which of the bans a file would break if it stood in a room that none is lifted for."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value
            if (owner.id if isinstance(owner, ast.Name) else owner) in MODULES:
                found.add(NAMES[node.attr])
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {NAMES[name.name] for name in node.names if name.name in NAMES}
    return found


def broken(path: str, source: str) -> set[str]:
    """The bans that a file of the library breaks."""
    inside = Path(path).relative_to("turbospark") if path.startswith("turbospark") else None
    return {
        what
        for what in uses(source)
        if inside is None or not any(inside.is_relative_to(room) for room in ALLOWED[what])
    }


FILES = [
    str(path.relative_to(ROOT))
    for package in ("turbospark", "families")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def test_no_file_breaks_a_ban() -> None:
    faults = {path: broken(path, (ROOT / path).read_text()) for path in FILES}
    assert {path: what for path, what in faults.items() if what} == {}
    users = {what for path in FILES for what in uses((ROOT / path).read_text())}
    assert users == set(ALLOWED)  # each ban has someone that it is lifted for


PLANTED = {
    "import os\n\nHOME = os.environ\n": "the environment",
    'import os\n\nHOME = os.getenv("HOME")\n': "the environment",
    "from os import environ\n\nHOME = environ\n": "the environment",
    "import mlx.core as mx\n\nmx.eval(mx.array(1))\n": "evaluation",
    "import mlx.core as mx\n\nmx.async_eval(mx.array(1))\n": "evaluation",
    "from mlx.core import eval as run\n\nrun()\n": "evaluation",
    "import mlx.core as mx\n\nBUILD = mx.fast.metal_kernel\n": "kernel bodies",
    "import mlx.core as mx\n\nBUILD = mx.fast.cuda_kernel\n": "kernel bodies",
    "from mlx.core.fast import metal_kernel\n\nBUILD = metal_kernel\n": "kernel bodies",
}


@pytest.mark.parametrize("source", PLANTED)
@pytest.mark.parametrize(
    "room",
    ["turbospark/api.py", "turbospark/nn/planted.py", "turbospark/kernels/planted.py",
     "turbospark/kernels/host/planted.py", "turbospark/loading/planted.py",
     "turbospark/runner/planted.py", "turbospark/cli/planted.py", "families/planted.py"],
)  # fmt: skip
def test_a_planted_use_is_found_except_where_it_is_allowed(room: str, source: str) -> None:
    what = PLANTED[source]
    inside = room.removeprefix("turbospark/")
    allowed = any(inside.startswith(place) for place in ALLOWED[what])
    assert broken(room, source) == (set() if allowed else {what})


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("source", PLANTED)
@pytest.mark.parametrize(
    "room", ["turbospark/nn", "turbospark/caches", "turbospark/cli", "turbospark", "families"]
)
def test_ruff_finds_a_planted_use(room: str, source: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251",
         "--stdin-filename", f"{room}/planted.py", "-"],
        cwd=ROOT, input=source, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shown.returncode == 1
    assert "TID251" in shown.stdout


LIMITS = {"set_wired_limit", "set_memory_limit", "set_cache_limit"}


def limits(source: str) -> set[str]:
    """Which of MLX's limits of the whole process a file sets."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        if isinstance(node, ast.ImportFrom):
            names |= {name.name for name in node.names}
    return names & LIMITS


def test_limits_of_the_process_belong_to_the_program_that_runs_in_it() -> None:
    # A wired limit near the size of the memory can bring a whole Mac down.
    assert {path for path in FILES if limits((ROOT / path).read_text())} == set()
    assert limits("import mlx.core as mx\nmx.metal.set_wired_limit(1)\n") == {"set_wired_limit"}
    assert limits("from mlx.core import set_cache_limit\n") == {"set_cache_limit"}
