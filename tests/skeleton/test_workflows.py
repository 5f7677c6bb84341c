"""The workflow for an Apple GPU says what this repository has: commands, marker, a machine."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def job() -> dict[str, Any]:
    text = (ROOT / ".github/workflows/macos.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["jobs"]["metal"]


def commands() -> list[str]:
    return [step["run"] for step in job()["steps"] if "run" in step]


def test_it_runs_on_apple_silicon() -> None:
    version = re.fullmatch(r"macos-(\d+)", job()["runs-on"])
    assert version is not None
    assert int(version[1]) >= 14  # the first whose runners are arm64


def test_its_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    made = [command.split()[1] for command in commands() if command.startswith("make ")]
    assert made == ["check", "test"]
    assert set(made) <= set(targets)


def test_its_marker_is_one_of_the_suite() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = [m.split(":")[0] for m in settings["tool"]["pytest"]["ini_options"]["markers"]]
    marked = [re.search(r"pytest -m (\w+)$", command) for command in commands()]
    assert [match[1] for match in marked if match] == ["metal"]
    assert "metal" in markers
