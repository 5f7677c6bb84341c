"""Where a checkpoint is: a local folder, a GGUF file, the demo model, or a Hub id."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turbospark.errors import SourceError, TurbosparkError, UnsupportedError
from turbospark.loading import hub
from turbospark.loading.checkpoint import read_checkpoint
from turbospark.loading.demo import Progress, demo_file
from turbospark.loading.safetensors import Slot

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_LONGEST_SHOWN = 200
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".zip")


@dataclass(frozen=True, slots=True)
class HubHeaders:
    """Weights that stayed on the Hub.

    Attributes:
        repo: `owner/name`.
        slots: every tensor of it; their files are not on this machine.
    """

    repo: str
    slots: Mapping[str, Slot]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on this machine.

    Attributes:
        kind: what its weights are stored as.
        path: the folder (safetensors) or the file (gguf).
        remote: its weights where they are not there.
    """

    kind: Literal["safetensors", "gguf"]
    path: Path
    remote: HubHeaders | None = None

    @property
    def name(self) -> str:
        """What it is called: its path, or the repository that its weights stayed in."""
        return str(self.path) if self.remote is None else self.remote.repo

    def slots(self) -> dict[str, Slot]:
        """Every tensor of a folder; only headers are read.

        Raises:
            CheckpointError: as for `read_checkpoint`.
        """
        if self.remote is not None:
            return dict(self.remote.slots)
        return read_checkpoint(self.path)


def resolve_source(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: Progress | None = None,
) -> Source:
    """Find a checkpoint, downloading it from the Hub where a Hub id was given.

    Args:
        path_or_repo: a folder with config.json and safetensors; a .gguf file or a folder with one;
            "demo"; a Hub id `owner/name`, or `hf://owner/name[/file.gguf]` where a local folder
            has the owner's name or one GGUF file is wanted.
        revision: branch, tag or commit on the Hub.
        local_files_only: use only what was downloaded before.
        progress: called with bytes done and in all while the demo model is joined.

    Raises:
        SourceError: it leads to no checkpoint. What looks like a path is never sent to the Hub.
    """
    if isinstance(path_or_repo, str):
        if path_or_repo == "demo":
            _refuse_revision(path_or_repo, revision)
            return Source("gguf", demo_file(progress))
        if path_or_repo == "embedded":
            raise SourceError("no model is embedded in this version; use 'demo' or a path")
        if path_or_repo.startswith("hf://"):
            return _from_hub(path_or_repo.removeprefix("hf://"), revision, local_files_only)
    path, there = _look_up(path_or_repo)
    if there:
        _refuse_revision(str(path_or_repo), revision)
        return _readable_source(path)
    if not isinstance(path_or_repo, str) or looks_like_path(path_or_repo):
        raise SourceError(_not_there(str(path_or_repo), path))
    return _from_hub(path_or_repo, revision, local_files_only)


def resolve_headers(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Source:
    """Find a checkpoint as `resolve_source` does; the weights of a Hub id stay on the Hub.

    Of a repository of safetensors the configuration, the tokenizer and the headers of the weights
    are fetched; of one with a GGUF file that file.

    Raises:
        SourceError: it leads to no checkpoint.
        CheckpointError: a header on the Hub is damaged.
    """
    repo = None if local_files_only else as_hub_id(path_or_repo)
    if repo is None:
        return resolve_source(path_or_repo, revision=revision, local_files_only=local_files_only)
    folder, slots = hub.headers(repo, revision)
    if slots is None:
        return local_source(folder)
    if not (folder / "config.json").exists():
        raise SourceError(f"{repo} {_what_is_missing(folder, True)}")
    return Source("safetensors", folder, HubHeaders(repo, slots))


def as_hub_id(path_or_repo: str | os.PathLike[str]) -> str | None:
    """The Hub id `owner/name` of a whole repository, where that is what was given."""
    if not isinstance(path_or_repo, str):
        return None
    name = path_or_repo.removeprefix("hf://")
    if name == path_or_repo and (_look_up(name)[1] or looks_like_path(name)):
        return None
    return name if _HUB_ID.fullmatch(name) else None


def looks_like_path(text: str) -> bool:
    """Whether a text that names nothing on this machine was meant as a path.

    Only `owner/name` is a Hub id, and only where no local folder `owner` stands there.
    """
    return (
        _HUB_ID.fullmatch(text) is None
        or text.lower().endswith(_FILE_ENDINGS)
        or Path(text.split("/", maxsplit=1)[0]).is_dir()
    )


def _look_up(path_or_repo: Any) -> tuple[Path, bool]:
    """What was given as a path, and whether something is there."""
    if isinstance(path_or_repo, str) and not path_or_repo.strip():
        raise SourceError("the model has an empty name: give a folder, a .gguf file or a Hub id")
    try:
        path = Path(path_or_repo).expanduser()
        return path, path.exists()
    except TypeError:
        raise SourceError(
            f"a model of type {type(path_or_repo).__name__}: give a path or a Hub id"
        ) from None
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{_cut(str(path_or_repo))} cannot be looked up: {reason}") from error


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def _readable_source(path: Path) -> Source:
    try:
        return local_source(path)
    except TurbosparkError:
        raise
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def local_source(path: Path) -> Source:
    """The checkpoint of an existing file or folder.

    Raises:
        SourceError: it holds none, or several.
        UnsupportedError: it is one part of a split GGUF file.
    """
    if path.is_dir():
        return _folder_source(path)
    if not path.is_file():  # reading a pipe could take forever
        raise SourceError(f"{path} is neither a folder nor a regular file")
    if path.suffix.lower() == ".gguf":
        _refuse_part(path, [path.name])
        return Source("gguf", path)
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return Source("gguf", path)
    if path.suffix in {".safetensors", ".json"}:
        raise SourceError(
            f"{path} is a file; a safetensors checkpoint is a folder: give {path.parent}"
        )
    raise SourceError(f"{path} is neither a folder nor a GGUF file")


def _folder_source(folder: Path) -> Source:
    files = sorted(
        path
        for path in folder.iterdir()
        # An mmproj file holds the vision tower that belongs to the text model beside it.
        if path.suffix.lower() == ".gguf" and not path.name.lower().startswith("mmproj")
    )
    weights = any(folder.glob("*.safetensors"))
    if (folder / "config.json").exists() and (weights or not files):
        return Source("safetensors", folder)
    names = [path.name for path in files]
    if files:
        _refuse_part(folder, names)
    if len(files) == 1:
        return Source("gguf", files[0])
    if files:
        raise SourceError(
            f"{folder} holds {len(files)} GGUF files ({', '.join(names[:6])}): give one of them"
        )
    raise SourceError(f"{folder} {_what_is_missing(folder, weights)}")


def _what_is_missing(folder: Path, weights: bool) -> str:
    if (folder / "adapter_config.json").exists():
        return "holds a LoRA adapter, not a model: adapters are not implemented"
    if weights:
        return "holds safetensors but no config.json, so the family of its model is unknown"
    inside = [path.parent.name for path in sorted(folder.glob("*/config.json"))][:4]
    if inside:
        return f"holds no checkpoint itself; its folders do: {', '.join(inside)}"
    return "holds neither config.json with safetensors nor a .gguf file"


def _refuse_part(where: Path, names: list[str]) -> None:
    """Refuse a split GGUF file, naming the parts that are there."""
    parts = [match for name in names if (match := _SPLIT.fullmatch(name))]
    if not parts or len(parts) < len(names):
        return
    total, stem = int(parts[0][3]), parts[0][1]
    folder = where if where.is_dir() else where.parent
    there = [part for part in range(1, total + 1) if (folder / _part(stem, part, total)).exists()]
    missing = [_part(stem, part, total) for part in range(1, min(total, 10_000) + 1)
               if part not in there]  # fmt: skip
    lost = f"; missing: {', '.join(missing[:4])}" if missing else ""
    raise UnsupportedError(
        f"{where} is a GGUF file split into {total} parts, {len(there)} of which are there{lost}; "
        f"join them with llama.cpp's `llama-gguf-split --merge {_part(stem, 1, total)} {stem}.gguf`"
    )


def _part(stem: str, part: int, total: int) -> str:
    return f"{stem}-{part:05d}-of-{total:05d}.gguf"


def _from_hub(name: str, revision: str | None, local_files_only: bool) -> Source:
    owner_and_name, _, file = _split_repo(name)
    folder = hub.download(owner_and_name, file, revision, local_files_only)
    return local_source(folder / file if file else folder)


def _split_repo(name: str) -> tuple[str, str, str]:
    parts = name.split("/", 2)
    repo = "/".join(parts[:2])
    file = parts[2] if len(parts) == 3 else ""
    if _HUB_ID.fullmatch(repo) is None or (file and not file.lower().endswith(".gguf")):
        raise SourceError(
            f"{name!r} is no Hub id: owner/name, or hf://owner/name/file.gguf for one GGUF file"
        )
    return repo, "/", file


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise SourceError(f"revision={revision!r} belongs to a Hub id, but {name!r} is local")


def _not_there(text: str, path: Path) -> str:
    message = f"no such file or folder: {text}"
    if path.is_absolute():
        parent = next(parent for parent in path.parents if parent.exists())
    else:
        message += f" (from {Path.cwd()})"
        parent = next((parent for parent in path.parents if parent.exists()), Path())
    if parent != path.parent and str(parent) not in {"", "."}:
        message += f"; the last folder of it that exists is {parent}"
    if _HUB_ID.fullmatch(text) and not text.lower().endswith(_FILE_ENDINGS):
        return message + f"; if you mean the Hub, write hf://{text}"
    return message + "; a Hub id has the form owner/name"
