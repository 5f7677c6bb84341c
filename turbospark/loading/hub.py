"""Downloads from the Hugging Face Hub; huggingface_hub is imported when first needed."""

import importlib
import logging
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbospark.errors import SourceError, TurbosparkError
from turbospark.loading.checkpoint import WeightFiles, read_checkpoint
from turbospark.loading.safetensors import Slot, read_slot

_LOG = logging.getLogger("turbospark")

SMALL = ("*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
PATTERNS = (*SMALL, "*.safetensors")
"""Files of a safetensors checkpoint; those in subfolders are other exports of the same model."""

_AT_ONCE = 8


def download(repo: str, file: str, revision: str | None, local_files_only: bool) -> Path:
    """Fetch the files a checkpoint needs; return the folder they are in.

    Args:
        repo: `owner/name`.
        file: one GGUF file of the repository, or "" for its safetensors checkpoint.
        revision: branch, tag or commit; None is the default branch.
        local_files_only: use only what was downloaded before.

    Raises:
        SourceError: the repository, revision or file does not exist, access needs a login, or
            there is no connection and no earlier download.
    """
    client = _Client(repo, file, revision, local_files_only)
    with client.explaining():
        if file:
            folder = client.snapshot((file,), local_files_only)
        elif local_files_only:
            folder = client.earlier()
        else:
            files = client.files()
            folder = client.earlier() if files is None else client.snapshot(_choose(repo, files))
    if file and not (folder / file).exists():
        raise SourceError(f"{repo} has no file {file!r} on the Hub")
    return folder


def headers(repo: str, revision: str | None) -> tuple[Path, dict[str, Slot] | None]:
    """Fetch a checkpoint's configuration and tokenizer, and only the headers of its weights.

    A GGUF file is fetched whole: it is one, of header, tokenizer and weights.

    Args:
        repo: `owner/name`.
        revision: branch, tag or commit; None is the default branch.

    Returns:
        The folder, and every tensor, whose file is named as one of the repository; None where the
        weights are in the folder, from now or an earlier download.

    Raises:
        SourceError: as for `download`.
        CheckpointError: a header is damaged, or a tensor's type is not implemented.
    """
    client = _Client(repo, "", revision)
    with client.explaining():
        files = client.files()
        if files is None:
            return client.earlier(), None
        patterns = _choose(repo, files)
        if patterns != PATTERNS:
            return client.snapshot(patterns), None
        folder = client.snapshot(SMALL)
        names = [name for name in files if "/" not in name]
        if all((folder / name).exists() for name in names if name.endswith(".safetensors")):
            return folder, None
        return folder, read_checkpoint(folder, WeightFiles(Path(repo), names, client.headers))


@dataclass(frozen=True, slots=True)
class _Client:
    """What is asked of huggingface_hub, of one repository at one revision."""

    repo: str
    file: str
    revision: str | None
    local_files_only: bool = False

    @contextmanager
    def explaining(self) -> Generator[None]:
        """Say in one sentence what the Hub refuses."""
        try:
            yield
        except TurbosparkError:
            raise
        except Exception as error:
            raise SourceError(
                _explain(self.repo, self.file, self.revision, self.local_files_only, error)
            ) from error

    def files(self) -> Sequence[str] | None:
        """The files of the repository, or None where the Hub cannot be reached."""
        try:
            return _hub().list_repo_files(self.repo, revision=self.revision)
        except Exception as error:
            if not _is_offline(error):
                raise
            _LOG.warning("turbospark: the Hub cannot be reached; looking for an earlier download")
            return None

    def earlier(self) -> Path:
        """The folder of an earlier download.

        Raises:
            SourceError: there was none of weights.
        """
        folder = self.snapshot(PATTERNS, local=True)
        if any(path.suffix in {".safetensors", ".gguf"} for path in folder.iterdir()):
            return folder
        way = "drop local_files_only once" if self.local_files_only else "connect"
        raise SourceError(
            f"of {self.repo} only the configuration was downloaded before, as plans and "
            f"inspections do, and no weights; {way}, or give the path of a folder or .gguf file"
        )

    def snapshot(self, patterns: Sequence[str], local: bool = False) -> Path:
        """The folder of files that match, fetched unless they are to be `local`."""
        folder: str = _hub().snapshot_download(
            self.repo,
            revision=self.revision,
            allow_patterns=list(patterns),
            ignore_patterns=None if self.file else ["*/*"],
            local_files_only=local,
        )
        return Path(folder)

    def headers(self, paths: Sequence[Path]) -> list[dict[str, Slot]]:
        """The tensors of safetensors files, of which only the headers are fetched."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._header, paths))

    def _header(self, path: Path) -> dict[str, Slot]:
        found = _hub().parse_safetensors_file_metadata(self.repo, path.name, revision=self.revision)
        return {
            name: read_slot(
                path,
                name,
                {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "data_offsets": list(tensor.data_offsets),
                },
                0,
            )
            for name, tensor in found.tensors.items()
        }


def _hub() -> Any:
    return importlib.import_module("huggingface_hub")


def _choose(repo: str, files: Sequence[str]) -> Sequence[str]:
    """The patterns to fetch from a repository with these files."""
    top = [name for name in files if "/" not in name]
    if any(name.endswith(".safetensors") for name in top):
        return PATTERNS
    gguf = sorted(
        name for name in files if name.lower().endswith(".gguf") and "mmproj" not in name.lower()
    )
    if len(gguf) == 1 and gguf[0] in top:
        return (gguf[0],)
    if gguf:
        raise SourceError(
            f"{repo} holds {len(gguf)} GGUF files; choose one, for example "
            f"hf://{repo}/{gguf[0]} (others: {', '.join(gguf[1:6])})"
        )
    raise SourceError(
        f"{repo} holds neither safetensors nor GGUF weights ({len(files)} files: "
        f"{', '.join(sorted(top)[:6])})"
    )


def _explain(
    repo: str, file: str, revision: str | None, local_files_only: bool, error: Exception
) -> str:
    """One sentence for what the Hub client reports; it has no stable tree of errors."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    name = f"{repo}/{file}" if file else repo
    at = "" if revision is None else f" at revision {revision!r}"
    if local_files_only:
        return (
            f"{name}{at} was not downloaded before, and local_files_only forbids asking the Hub; "
            "drop the option once, or give a local path"
        )
    if "GatedRepoError" in kinds:
        return f"{repo} is gated: accept its terms on huggingface.co/{repo}, then `hf auth login`"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"{repo!r} exists neither as a local path nor on the Hub (a private repository needs "
            "`hf auth login`)"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{repo} has no revision {revision!r}"
    if _is_offline(error):
        return (
            f"{name!r} is no local path, the Hub cannot be reached ({_short(error)}), and there is "
            "no earlier download; connect, or give the path of a folder or .gguf file"
        )
    if file and "EntryNotFoundError" in kinds:
        return f"{repo}{at} has no file {file!r} on the Hub"
    return f"{name}{at} cannot be fetched from the Hub: {_short(error)}"


def _is_offline(error: Exception) -> bool:
    words = ("OfflineMode", "LocalEntryNotFound", "Connect", "Timeout", "NetworkError", "Proxy")
    return any(word in kind.__name__ for kind in type(error).__mro__ for word in words)


def _short(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
