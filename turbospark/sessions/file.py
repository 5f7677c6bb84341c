"""One file of arrays and values that is written whole or not at all, and read only if whole.

It is a safetensors file. Its metadata holds the values as JSON, and a digest of everything else.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np

from turbospark.errors import CheckpointError, OptionError, SourceError

FORMAT = "turbospark session"
VERSION = 1
_DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "BOOL": mx.bool_, "U8": mx.uint8,
    "I32": mx.int32, "U32": mx.uint32, "I64": mx.int64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


def write_file(
    path: str | os.PathLike[str], values: Mapping[str, Any], arrays: Mapping[str, mx.array]
) -> Path:
    """Write a file under a temporary name beside its place, then rename it.

    Args:
        path: a file that stands there is replaced once the new one is whole; a link stays, and
            leads to it.
        values: what JSON can hold.
        arrays: evaluated here.

    Returns:
        the path.

    Raises:
        OptionError: it is no path, the place cannot be written, or a value is nothing that JSON
            can hold. What stood there still does.
    """
    target = _path(path)
    try:
        state = json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{target} cannot hold this session: {error}") from error
    raw = {name: _bytes_of(array) for name, array in arrays.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "state": state}
    entries: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        span = [end, end := end + array.nbytes]
        entries[name] = {
            "dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": span,
        }  # fmt: skip
    digest = _digest(metadata, entries)
    for part in raw.values():
        digest.update(part)
    metadata["digest"] = digest.hexdigest()
    header = json.dumps({"__metadata__": metadata, **entries}, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)

    def write(file: BinaryIO) -> None:
        file.write(len(header).to_bytes(8, "little") + header)
        for part in raw.values():
            file.write(part)

    _write_whole(target, write)
    return target


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Read what `write_file` wrote.

    Returns:
        the values, and the arrays, evaluated.

    Raises:
        OptionError: it is no path.
        SourceError: no file is there, or it cannot be opened.
        CheckpointError: it is no session file, one of another version, cut short or damaged.
    """
    source = _path(path)
    with _opened(source) as file:
        try:
            return _read(source, file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise SourceError(f"no session can be read from {source}: {_why(error)}") from error


def check_file(path: str | os.PathLike[str]) -> None:
    """Say now what `read_file` would say of a file that cannot be opened.

    Raises:
        SourceError: no file is there, or it cannot be opened.
    """
    _opened(_path(path)).close()


def _opened(source: Path) -> BinaryIO:
    try:
        if source.exists() and not source.is_file():  # reading a pipe could take forever
            raise ValueError("it is no regular file")
        return source.open("rb")
    except (OSError, ValueError) as error:
        raise SourceError(f"no session can be read from {source}: {_why(error)}") from error


def _read(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, mx.array]]:
    entries, start = _header(path, file, size)
    metadata: Any = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict) or cast("Any", metadata).get("format") != FORMAT:
        raise CheckpointError(f"{path} is no session file: it does not say {FORMAT!r}")
    facts = cast("dict[str, Any]", metadata)
    if facts.get("version") != str(VERSION):
        raise CheckpointError(
            f"{path} is a session file of version {facts.get('version')!r}, and this turbospark "
            f"reads version {VERSION}; save the session again"
        )
    try:
        return _contents(file, size - start, facts, entries)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise CheckpointError(f"{path} is damaged, or was cut short: {error}") from error


def _contents(
    file: BinaryIO, size: int, facts: dict[str, Any], entries: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != end:
        raise ValueError(f"{size} bytes follow its header, which speaks of {end}")
    wanted = facts.pop("digest")
    digest = _digest(facts, entries)
    arrays: dict[str, mx.array] = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        raw = np.empty(end - begin, np.uint8)
        file.readinto(raw)  # type: ignore[attr-defined]
        digest.update(raw)
        arrays[name] = mx.array(raw).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if digest.hexdigest() != wanted:
        raise ValueError("its content is not what was written")
    return json.loads(facts["state"]), arrays


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} ({size} bytes) is no session file, or was cut short")
    try:
        entries = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no session file, or is damaged: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is no session file: its header is no JSON object")
    return cast("dict[str, Any]", entries), 8 + length


def _digest(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Any:
    return hashlib.sha256(json.dumps([metadata, entries]).encode())


def _bytes_of(array: mx.array) -> memoryview:
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    return np.asarray(flat).data


def _write_whole(target: Path, write: Callable[[BinaryIO], None]) -> None:
    try:
        place = target.resolve()
        if place.exists() and not place.is_file():
            raise ValueError("it is no regular file")
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise OptionError(f"a session cannot be saved as {target}: {_why(error)}") from error


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"a session's file of type {type(path).__name__}: give a path")
    return Path(cast("str | os.PathLike[str]", path))


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
