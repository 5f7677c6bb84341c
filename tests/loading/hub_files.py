"""A Hub of one repository, kept in a folder: what is asked of it, and what of it is fetched."""

import fnmatch
import json
import shutil
from dataclasses import dataclass

import huggingface_hub

REPO = "owner/name"


@dataclass(frozen=True)
class Tensor:
    """What huggingface_hub says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class FileMetadata:
    """What huggingface_hub says of a file."""

    tensors: dict[str, Tensor]


class Hub:
    """A repository.

    Attributes:
        folder: what it holds.
        cache: what was fetched of it.
        asked: every question, as a tuple of its kind and what it was about.
        offline: an error that every question over the network fails with.
    """

    def __init__(self, folder, cache):
        self.folder, self.cache, self.asked, self.offline = folder, cache, [], None

    def list_repo_files(self, repo, revision=None):
        self._ask("list", repo, revision)
        return self._names(self.folder)

    def snapshot_download(self, repo, local_files_only=False, **options):
        if local_files_only:
            self.asked.append(("look up", repo, options))
        else:
            self._ask("download", repo, options)
            for name in self._names(self.folder):
                wanted = any(fnmatch.fnmatch(name, one) for one in options["allow_patterns"])
                left = options["ignore_patterns"] or []
                if wanted and not any(fnmatch.fnmatch(name, one) for one in left):
                    (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(self.folder / name, self.cache / name)
        if not self.cache.exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing of it is here")
        return str(self.cache)

    def parse_safetensors_file_metadata(self, repo, filename, revision=None):
        self._ask("header", repo, filename)
        with (self.folder / filename).open("rb") as file:
            entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        entries.pop("__metadata__", None)
        return FileMetadata(
            {
                name: Tensor(entry["dtype"], entry["shape"], tuple(entry["data_offsets"]))
                for name, entry in entries.items()
            }
        )

    def fetched(self):
        """The names of all files that were fetched."""
        return self._names(self.cache)

    def _ask(self, kind, repo, what):
        self.asked.append((kind, repo, what))
        if self.offline is not None:
            raise self.offline

    @staticmethod
    def _names(folder):
        paths = (path for path in folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(folder)) for path in paths)


def serve_hub(tmp_path, monkeypatch):
    """Put an empty Hub in the place of the real one, and stand beside its folder."""
    hub = Hub(tmp_path / "hub", tmp_path / "cache")
    hub.folder.mkdir()
    for name in ("list_repo_files", "snapshot_download", "parse_safetensors_file_metadata"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    monkeypatch.chdir(tmp_path)
    return hub
