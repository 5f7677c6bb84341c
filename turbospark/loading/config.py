"""config.json and generation_config.json: read, checked, and brought to one form."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.registry import known_types

MAX_CONFIG_BYTES = 64 << 20

# What wrappers keep beside `text_config` although the text model needs it.
_OUTER_FIELDS = (
    "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization",
    "quantization_config", "tie_word_embeddings", "torch_dtype",
)  # fmt: skip


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Add the file to a ConfigError of the code below, which knows the fields but not the file."""
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        # Families, which do not know the folder, begin with the file's bare name.
        raise type(error)(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: the file is missing, empty, no JSON, or no object; the message names it.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES >> 20} MiB: no config")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty ({len(text)} characters): download it again")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__} where an object is needed")
    return cast("dict[str, Any]", value)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json as it stands there, after the checks every family needs.

    Raises:
        ConfigError: the file is damaged or has no usable model_type.
        UnsupportedError: it asks for Python code of the checkpoint.
    """
    path = folder / "config.json"
    raw = read_json(path)
    model_type(raw, path)
    refuse_code(raw, path)
    return raw


def model_type(raw: Mapping[str, Any], path: Path) -> str:
    """The `model_type` that names the family.

    Raises:
        ConfigError: it is missing or no text.
    """
    if "model_type" not in raw:
        raise ConfigError(f"{path} has no model_type, so its family is unknown")
    value = raw["model_type"]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: model_type is {value!r}, not the name of a family")
    return value


def refuse_code(raw: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint that wants its own Python run; nothing of it is ever executed.

    `auto_map` only offers such code, so it matters only where no family knows the model_type.

    Raises:
        UnsupportedError: naming the field.
    """
    if raw.get("model_file") is not None:
        raise UnsupportedError(
            f"{path}: model_file={raw['model_file']!r} wants Python code of the checkpoint run, "
            "which turbospark never does; register a family for it in a package of your own"
        )
    if raw.get("auto_map") is not None and raw["model_type"] not in known_types():
        raise UnsupportedError(
            f"{path}: model type {raw['model_type']!r} is not implemented, and the Python code "
            "that auto_map offers is never executed; register a family for it in a package of "
            "your own"
        )


def normalise(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The text model's configuration: `text_config` unwrapped, with what stands only outside it.

    Raises:
        ConfigError: `text_config` is no object.
    """
    inner = raw.get("text_config")
    if inner is None:
        return dict(raw)
    if not isinstance(inner, dict):
        raise ConfigError(f"{path}: text_config is a {type(inner).__name__}, not an object")
    config = {name: raw[name] for name in _OUTER_FIELDS if name in raw}
    config["model_type"] = raw["model_type"]
    config.update(cast("dict[str, Any]", inner))
    return config


def generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or nothing where the checkpoint has none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def token_ids(value: Any, where: str) -> frozenset[int]:
    """The ids of an `eos_token_id` field: a number, a list of numbers, or null.

    Raises:
        ConfigError: it is anything else.
    """
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    if value is None:
        return frozenset()
    for item in items:
        if type(item) is not int or item < 0:
            raise ConfigError(f"{where}: eos_token_id holds {item!r}, not a token id")
    return frozenset(items)


def stop_ids(folder: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """Every end-of-text id of config.json (either level) and generation_config.json.

    Raises:
        ConfigError: one of the fields holds no token ids.
    """
    where = str(folder / "config.json")
    inner = raw.get("text_config")
    nested = cast("dict[str, Any]", inner).get("eos_token_id") if isinstance(inner, dict) else None
    return (
        token_ids(raw.get("eos_token_id"), where)
        | token_ids(nested, where)
        | token_ids(
            generation_config(folder).get("eos_token_id"),
            str(folder / "generation_config.json"),
        )
    )


def quantization(config: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """MLX's `quantization` of a normalised config, or None where it names none.

    MXFP4 as transformers stores it needs none: its tensors are `_blocks` and `_scales`, which the
    families that have them join.

    Raises:
        ConfigError: it is no object.
        UnsupportedError: another tool quantized the weights.
    """
    for name in ("quantization", "quantization_config", "compression_config"):
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {name} is a {type(value).__name__}, not an object")
        found = cast("dict[str, Any]", value)
        method = found.get("quant_method", "compressed-tensors" if "compr" in name else None)
        if method == "mxfp4":
            return None
        if method is not None:
            raise UnsupportedError(
                f"{path}: the weights are quantized by {method!r} ({name}), which is not "
                "implemented; use an MLX, GGUF or unquantized (bfloat16) release of the model"
            )
        return found
    return None
