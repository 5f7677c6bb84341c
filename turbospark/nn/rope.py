"""Rotary embeddings as config.json describes them, in either of its spellings.

Older files hold a flat `rope_theta` and a `rope_scaling` (null, {}, or a kind under `rope_type`
or `type` with its numbers). Newer ones hold all of it in `rope_parameters`, for some families
one entry a layer type. Both may stand in one file as long as they agree.
"""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from turbospark.errors import ConfigError, UnsupportedError
from turbospark.kernels.rope import Rope, yarn_growth
from turbospark.nn.config import Length, Range, read_value

_Share = Annotated[float, Range(0.0, 1.0)]
_Base = Annotated[float, Range(1.001, 1e30)]
_Factor = Annotated[float, Range(1e-3, 1e6)]

# Keys of a kind beside rope_theta, with the type of each; True marks those that must be there.
_KEYS: Mapping[str, Mapping[str, tuple[Any, bool]]] = {
    "default": {},
    "linear": {"factor": (_Factor, True)},
    "llama3": {
        "factor": (_Factor, True),
        "low_freq_factor": (_Factor, True),
        "high_freq_factor": (_Factor, True),
        "original_max_position_embeddings": (Length, False),
    },
    "yarn": {
        "factor": (_Factor, True),
        "original_max_position_embeddings": (Length, False),
        "attention_factor": (_Factor, False),
        "beta_fast": (_Factor, False),
        "beta_slow": (_Factor, False),
        "mscale": (_Factor, False),
        "mscale_all_dim": (_Factor, False),
        "truncate": (bool, False),
    },
    "proportional": {"factor": (_Factor, False), "partial_rotary_factor": (_Share, False)},
}
_MEANINGLESS = {"finetuned"}  # written by some trainers, read by nobody


def read_rope(
    raw: Mapping[str, Any],
    head_dim: int,
    max_position: int,
    *,
    layer_type: str | None = None,
    theta: float = 10_000.0,
    flat_keys: tuple[str, ...] = ("rope_theta", "rope_scaling"),
    absent: Mapping[str, Any] | None = None,
    share: float | None = None,
) -> Rope:
    """The rotary embedding of a layer.

    Args:
        raw: config.json, or the text part of it.
        head_dim: dimensions of a head.
        max_position: the trained length, where a kind needs one and config.json is silent.
        layer_type: entry of `rope_parameters`, for families that nest one a layer type.
        theta: the base where config.json has none.
        flat_keys: where older files keep the base and, if the layer has any, the scaling.
        absent: the parameters where config.json describes no rotary embedding at all.
        share: of a head that rotates where config.json does not say; None where all of it does.

    Raises:
        ConfigError: the two spellings disagree, or a value is missing or malformed.
        UnsupportedError: the kind, or a key of it, is not implemented.
    """
    parameters = _merged(_nested(raw, layer_type), _flat(raw, flat_keys))
    parameters = {"rope_theta": theta, **(parameters or absent or {})}
    if share is not None:
        parameters = _merged(parameters, _given(raw, "partial_rotary_factor"))
        share = parameters.pop("partial_rotary_factor", share)
        share = read_value("config.json: partial_rotary_factor", share, _Share)
    kind = read_value("config.json: rope_type", parameters.pop("rope_type", "default"), str)
    if kind not in _KEYS:
        raise UnsupportedError(
            f"config.json: RoPE kind {kind!r} is not implemented; known: {', '.join(_KEYS)}"
        )
    base = read_value("config.json: rope_theta", parameters.pop("rope_theta"), _Base)
    checked = _checked(kind, parameters, max_position)
    if share is None:
        return Rope.build(kind, base, head_dim, **checked)
    dims = int(head_dim * share)
    if dims < 2 or dims % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor={share} of a head of {head_dim} is {dims} "
            "dimensions, which are no pairs"
        )
    return Rope.build(kind, base, head_dim, partial_rotary_factor=share, **checked)


def without_axes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose RoPE does not say how the axes of an image's position share it.

    Images have three position axes, which share the frequencies among them (`mrope_*`); the three
    positions of a text token are equal, so the sharing does not matter.

    Args:
        raw: config.json, or the text part of it.
    """
    plain = dict(raw)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), Mapping):
            given = cast("Mapping[str, Any]", raw[key])
            kept = {name: value for name, value in given.items() if not name.startswith("mrope_")}
            plain[key] = {
                name: "default" if name in ("type", "rope_type") and value == "mrope" else value
                for name, value in kept.items()
            }
    return plain


def yarn_score_scale(raw: Mapping[str, Any]) -> float:
    """The factor of attention scores that comes with `mscale_all_dim`; 1 without it.

    Args:
        raw: config.json, or the text part of it, that `read_rope` has read without complaint.
    """
    parameters = _merged(_nested(raw, None), _flat(raw, ("rope_theta", "rope_scaling")))
    return yarn_growth(parameters.get("factor", 1.0), parameters.get("mscale_all_dim", 0.0)) ** 2


def _nested(raw: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    found = _object(raw, "rope_parameters")
    if layer_type is None or not found:
        return _one_kind(found)
    strangers = set(found) - {"full_attention", "sliding_attention"}
    if strangers:
        raise ConfigError(
            f"config.json: rope_parameters needs one entry a layer type, not {sorted(strangers)}"
        )
    return _one_kind(_object(found, layer_type))


def _flat(raw: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in keys[1:]:
        found.update(_one_kind(_object(raw, key)))
    theta = raw.get(keys[0])
    return found if theta is None else _merged(found, {"rope_theta": theta})


def _given(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    return {} if value is None else {key: value}


def _object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {key}={value!r} must be an object or null")
    found = cast("Mapping[str, Any]", value)
    return {name: item for name, item in found.items() if name not in _MEANINGLESS}


def _one_kind(parameters: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls and the older name `type` of the kind."""
    known = {name: value for name, value in parameters.items() if value is not None}
    older = known.pop("type", None)
    return _merged(known, {} if older is None else {"rope_type": older})


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for name in one.keys() & other.keys():
        if one[name] != other[name]:
            raise ConfigError(
                f"config.json describes RoPE twice and disagrees with itself: {name} is both "
                f"{one[name]!r} and {other[name]!r}"
            )
    return {**other, **one}


def _checked(kind: str, parameters: dict[str, Any], max_position: int) -> dict[str, Any]:
    keys = _KEYS[kind]
    if "partial_rotary_factor" not in keys and parameters.get("partial_rotary_factor") == 1:
        del parameters["partial_rotary_factor"]
    strangers = sorted(set(parameters) - set(keys))
    if strangers:
        raise UnsupportedError(
            f"config.json: RoPE kind {kind!r} with {strangers[0]}="
            f"{parameters[strangers[0]]!r} is not implemented"
        )
    for name, (hint, needed) in keys.items():
        if name in parameters:
            parameters[name] = read_value(f"config.json: RoPE's {name}", parameters[name], hint)
        elif needed:
            raise ConfigError(f"config.json: RoPE kind {kind!r} needs {name}")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise ConfigError("config.json: RoPE's high_freq_factor must be above low_freq_factor")
    if "original_max_position_embeddings" in keys:
        parameters.setdefault("original_max_position_embeddings", max_position)
    return parameters
