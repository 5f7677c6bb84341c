"""Reading config.json into the frozen dataclass that a family declares.

Field names are config.json's own. A field without default must be there; other keys of the file
are none of the family's business. A value of another type, or out of its range, is an error: no
value is bent into shape.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.weights import Activation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number in a config, both included."""

    low: float
    high: float


# Every size is bounded, so that a damaged file is refused before anything is built from it.
Size = Annotated[int, Range(1, 2**24)]
"""A dimension."""
Count = Annotated[int, Range(0, 2**24)]
"""A number of things, perhaps none."""
Depth = Annotated[int, Range(1, 4096)]
"""A number of layers."""
Length = Annotated[int, Range(1, 2**31 - 1)]
"""A number of tokens."""
Positive = Annotated[float, Range(1e-30, 1e30)]
"""A factor, a base, an epsilon."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
}


def read_config(cls: type[C], raw: Mapping[str, Any]) -> C:
    """Pick the fields that `cls` declares out of a configuration.

    Args:
        cls: a frozen dataclass; its fields may be bool, int, float, str, tuples and mappings of
            these, `Annotated` with a `Range`, or unions with None.
        raw: config.json, or the text part of it.

    Raises:
        ConfigError: a field is missing, of another type, or out of range.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if item.name in raw:
            label = f"config.json: {item.name}"
            values[item.name] = read_value(label, raw[item.name], hints[item.name])
        elif item.default is dataclasses.MISSING:
            raise ConfigError(f"config.json lacks {item.name}, which {cls.__name__} needs")
    return cls(**values)


def read_value(name: str, value: Any, hint: Any) -> Any:
    """Check one value against a type hint; lists become tuples, whole numbers may be floats.

    Raises:
        ConfigError: the value is of another type, or out of range; `name` says where it stands.
    """
    limits = next((item for item in _options(hint)[1] if isinstance(item, Range)), None)
    for kind in _options(hint)[0]:
        if _fits(value, kind):
            if limits and value is not None and not limits.low <= value <= limits.high:
                raise ConfigError(
                    f"{name}={value!r} is out of range; "
                    f"it must be from {limits.low} to {limits.high}"
                )
            return _converted(name, value, kind)
    wish = " or ".join(_KINDS.get(kind, "a list or an object") for kind in _options(hint)[0])
    raise ConfigError(f"{name}={value!r} must be {wish}")


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse head counts that no attention layer can have.

    Raises:
        ConfigError: query heads are no multiple of key/value heads, or the head is odd or huge.
    """
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim={head_dim} is odd, but RoPE rotates pairs")
    if num_heads * head_dim > 2**24:
        raise ConfigError(
            f"config.json: {num_heads} heads of {head_dim} make a layer too wide to be real"
        )


def split_head_dim(hidden_size: int, num_heads: int) -> int:
    """The head dimension where config.json does not give it.

    Raises:
        ConfigError: the heads do not divide the hidden size.
    """
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}, and there is no head_dim"
        )
    return hidden_size // num_heads


def read_activation(key: str, value: str) -> Activation:
    """The activation that config.json names.

    Raises:
        UnsupportedError: it is not implemented.
    """
    if value not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedError(f"config.json: {key}={value!r} is not implemented; known: {known}")
    return _ACTIVATIONS[value]


def layer_schedule(
    num_layers: int, layer_types: Sequence[str] | None, pattern: int
) -> tuple[LayerType, ...]:
    """Which layers attend to everything and which to a window.

    Args:
        num_layers: length of the schedule.
        layer_types: as config.json lists them; None where it does not.
        pattern: without `layer_types`, layer i is full where (i + 1) % pattern == 0.

    Raises:
        ConfigError: the list has another length.
        UnsupportedError: a type is neither full_attention nor sliding_attention.
    """
    if layer_types is None:
        full = [(i + 1) % pattern == 0 for i in range(num_layers)]
        return tuple("full_attention" if flag else "sliding_attention" for flag in full)
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types lists {len(layer_types)} layers, "
            f"but num_hidden_layers={num_layers}"
        )
    schedule: list[LayerType] = []
    for i, kind in enumerate(layer_types):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(f"config.json: layer_types[{i}]={kind!r} is not implemented")
        schedule.append(kind)
    return tuple(schedule)


def expert_count(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its number of experts under `num_local_experts`.

    transformers writes `num_local_experts` where some published files say `num_experts`.

    Raises:
        ConfigError: both are there and differ.
    """
    found = dict(raw)
    if "num_experts" in found:
        count = found.pop("num_experts")
        if found.setdefault("num_local_experts", count) != count:
            raise ConfigError(
                f"config.json: num_experts={count!r} and "
                f"num_local_experts={found['num_local_experts']!r} disagree"
            )
    return found


def refuse(raw: Mapping[str, Any], name: str, *allowed: Any, why: str) -> None:
    """Refuse a value that the family does not implement; an absent key and null always pass.

    Raises:
        UnsupportedError: `raw[name]` is none of `allowed`.
    """
    value = raw.get(name)
    if value is not None and value not in allowed:
        raise UnsupportedError(f"config.json: {name}={value!r} is not implemented: {why}")


def _options(hint: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The plain types that a hint allows, and its annotations."""
    if typing.get_origin(hint) is Annotated:
        plain, *notes = typing.get_args(hint)
        return _options(plain)[0], tuple(notes)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [_options(part) for part in typing.get_args(hint)]
        return (
            tuple(kind for kinds, _ in parts for kind in kinds),
            tuple(note for _, notes in parts for note in notes),
        )
    return (hint,), ()


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is tuple:
        return isinstance(value, (list, tuple))
    if origin is not None:
        return isinstance(value, Mapping)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        # An int may be too large for math.isfinite, never for a comparison.
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, kind)


def _converted(name: str, value: Any, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        return tuple(read_value(f"{name}[{i}]", item, inner) for i, item in enumerate(value))
    if origin is not None:
        inner = typing.get_args(kind)[1]
        if inner is Any:
            return dict(value)
        return {key: read_value(f"{name}.{key}", item, inner) for key, item in value.items()}
    return float(value) if kind is float else value
