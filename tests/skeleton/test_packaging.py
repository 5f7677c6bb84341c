"""Guards of the layout: entry points, version, typed markers."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import families
import turbospark
from turbospark import registry
from turbospark.errors import UnsupportedError
from turbospark.protocols import Family

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def family_modules() -> set[str]:
    folder = ROOT / "families"
    found = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    return found | {path.parent.name for path in folder.glob("*/__init__.py")}


def registered_modules(group: str) -> set[str]:
    values = PROJECT["project"]["entry-points"][group].values()
    return {value.split(":")[0].removeprefix("families.") for value in values}


def test_every_family_is_registered_and_every_entry_exists() -> None:
    assert registered_modules(registry.GROUP) == family_modules()
    assert registered_modules(registry.GGUF_GROUP) <= family_modules()


def test_both_packages_share_a_folder() -> None:
    folders = {Path(str(module.__file__)).parents[1] for module in (turbospark, families)}
    assert len(folders) == 1


@pytest.mark.parametrize("model_type", sorted(PROJECT["project"]["entry-points"][registry.GROUP]))
def test_registered_type_resolves_to_a_family(model_type: str) -> None:
    assert isinstance(registry.resolve_family(model_type), Family)


def test_unknown_type_names_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match=r"'gemma5'.*nearest is 'gemma"):
        registry.resolve_family("gemma5")


def test_two_owners_of_one_type_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("llama", f"{owner}:FAMILY", registry.GROUP)
        for owner in ("families.llama", "other.llama")
    ]
    monkeypatch.setattr(registry, "entry_points", lambda **_: points)
    with pytest.raises(UnsupportedError, match=r"registered 2 times.*other\.llama"):
        registry.resolve_family("llama")


def test_import_error_of_a_family_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("llama", "families.absent:FAMILY", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(ModuleNotFoundError, match=r"families\.absent"):
        registry.resolve_family("llama")


def test_changelog_names_the_version() -> None:
    version = turbospark.__version__
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_demo_package_is_pinned() -> None:
    (demo,) = PROJECT["project"]["optional-dependencies"]["demo"]
    assert "==" in demo
