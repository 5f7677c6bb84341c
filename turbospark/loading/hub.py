"""Downloads from the Hugging Face Hub; huggingface_hub is imported when first needed."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from turbospark.errors import CheckpointError, SourceError
from turbospark.loading.safetensors import DTYPES

_LOG = logging.getLogger("turbospark")

PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
"""Files of a safetensors checkpoint; those in subfolders are other exports of the same model."""


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
    import huggingface_hub

    client: Any = huggingface_hub

    def snapshot(patterns: Sequence[str], local: bool) -> Path:
        folder: str = client.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=None if file else ["*/*"],
            local_files_only=local,
        )
        return Path(folder)

    try:
        if file or local_files_only:
            folder = snapshot((file,) if file else PATTERNS, local_files_only)
        else:
            files = _list(client, repo, revision)
            folder = (
                snapshot(PATTERNS, True) if files is None else snapshot(_choose(repo, files), False)
            )
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(_explain(repo, file, revision, local_files_only, error)) from error
    if file and not (folder / file).exists():
        raise SourceError(f"{repo} has no file {file!r} on the Hub")
    return folder


def _list(client: Any, repo: str, revision: str | None) -> Sequence[str] | None:
    """The files of a repository, or None where the Hub cannot be reached."""
    try:
        return client.list_repo_files(repo, revision=revision)
    except Exception as error:
        if not _is_offline(error):
            raise
        _LOG.warning("turbospark: the Hub cannot be reached; looking for an earlier download")
        return None


def headers(
    repo: str, revision: str | None
) -> tuple[Path, dict[str, tuple[mx.Dtype, tuple[int, ...]]]]:
    """Fetch config.json, and type and shape of every tensor by reading headers only.

    Returns:
        The local config.json, and tensor name to (type, shape).

    Raises:
        SourceError: the repository cannot be reached or has no safetensors weights.
    """
    import huggingface_hub

    client: Any = huggingface_hub
    try:
        config = Path(client.hf_hub_download(repo, "config.json", revision=revision))
        found = client.get_safetensors_metadata(repo, revision=revision)
    except Exception as error:
        raise SourceError(_explain(repo, "", revision, False, error)) from error
    table: dict[str, tuple[mx.Dtype, tuple[int, ...]]] = {}
    for file in found.files_metadata.values():
        for name, tensor in file.tensors.items():
            if tensor.dtype not in DTYPES:
                raise CheckpointError(
                    f"{repo}: tensor {name!r} has type {tensor.dtype!r}, which is not implemented"
                )
            table[name] = (DTYPES[tensor.dtype], tuple(tensor.shape))
    return config, table


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
    if "EntryNotFoundError" in kinds:
        return f"{repo}{at} has no file {file!r} on the Hub"
    return f"{name}{at} cannot be fetched from the Hub: {_short(error)}"


def _is_offline(error: Exception) -> bool:
    words = ("OfflineMode", "LocalEntryNotFound", "Connect", "Timeout", "NetworkError", "Proxy")
    return any(word in kind.__name__ for kind in type(error).__mro__ for word in words)


def _short(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
