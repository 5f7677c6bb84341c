"""Quantized tensors of MLX checkpoints: `.weight`, `.scales`, `.biases` become one value."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from turbospark.errors import CheckpointError, ShapeError
from turbospark.kernels.weights import BITS, GROUP_SIZES, QuantizedWeight, Weight

WidthOf = Callable[[str], int | None]
"""A module path of the checkpoint to its input width in the model, where it is known."""

_SHARD = re.compile(r"\.(?:shard_|shards\.)\d+$")
_PREFIXES = ("language_model.", "model.")
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Spec:
    """Bits, group size and mode of a tensor; None is what the config leaves open."""

    bits: int | None
    group_size: int | None
    mode: str | None

    def __str__(self) -> str:
        mode = f", mode {self.mode}" if self.mode else ""
        return f"{self.bits or '?'} bits, groups of {self.group_size or '?'}{mode}"


def canonical(path: str) -> str:
    """A module path without the prefixes that wrappers add."""
    while path.startswith(_PREFIXES):
        path = path.split(".", 1)[1]
    return path


def matrix_path(path: str) -> str:
    """The canonical path of the matrix that a tensor holds, or holds some rows of."""
    return _SHARD.sub("", canonical(path))


def assemble(
    arrays: Mapping[str, mx.array],
    quantization: Mapping[str, Any] | None,
    width_of: WidthOf = lambda _: None,
    where: str = "config.json",
) -> dict[str, Weight]:
    """Join quantized tensors; dense ones pass through.

    Args:
        arrays: checkpoint names to arrays, evaluated or not.
        quantization: MLX's `quantization` of config.json: global values and per-path overrides,
            under a path with or without `language_model.` and `model.`; of a matrix in several
            tensors under theirs or its own.
        width_of: the model's own input width of a path, to settle what the config leaves open.
        where: the config file, for messages.

    Raises:
        CheckpointError: config and shapes contradict each other, or a part is missing.
    """
    overrides = _Overrides(quantization or {}, where)
    paths = [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]
    joined: dict[str, QuantizedWeight] = {}
    common, strays = 0, list[_Parts]()
    for path in paths:
        parts, width = _Parts.of(path, arrays), width_of(path)
        spec, is_own = overrides.of(path)
        solved = _solve(parts, spec, width)
        if not is_own:
            common += 1
            if solved is None:  # the global values are others'; only the shapes speak of this one
                strays.append(parts)
                solved = _solve(parts, Spec(None, None, spec.mode), width)
        if solved is None:
            raise _contradiction(parts, spec, where, width)
        joined[path] = parts.join(*solved)
    if strays and len(strays) == common:
        raise _contradiction(strays[0], overrides.default, where, width_of(strays[0].path))
    weights = _dense(arrays, joined)
    return weights | {f"{path}.weight": weight for path, weight in joined.items()}


def _dense(arrays: Mapping[str, mx.array], joined: Mapping[str, Any]) -> dict[str, Weight]:
    """The tensors that are no part of a quantized one."""
    weights: dict[str, Weight] = {}
    for name, array in arrays.items():
        path, _, kind = name.rpartition(".")
        if path in joined and kind in {"weight", "scales", "biases"}:
            continue
        if kind == "weight" and array.dtype == mx.uint32:
            raise CheckpointError(f"{name!r} holds quantized codes but has no .scales beside it")
        weights[name] = array
    return weights


class _Overrides:
    """What config.json says about each path."""

    def __init__(self, quantization: Mapping[str, Any], where: str) -> None:
        self._where = where
        self.default = self._spec("quantization", quantization)
        self._exact: dict[str, Any] = {
            path: value
            for path, value in quantization.items()
            if isinstance(value, dict) or value is False
        }
        for path, value in quantization.items():
            if "." in path and not isinstance(value, dict | bool | None):
                raise CheckpointError(
                    f"{where}: the quantization of {path!r} is {value!r}, neither an object with "
                    "bits and group_size nor false"
                )
        self._canonical = {canonical(path): value for path, value in self._exact.items()}

    def of(self, path: str) -> tuple[Spec, bool]:
        """The spec of a path, and whether the path has an entry of its own."""
        value = self._exact.get(path)
        if value is None:
            value = self._canonical.get(canonical(path))
        if value is None:  # rows of a matrix that has one entry for all of them
            value = self._canonical.get(matrix_path(path))
        if value is None:
            return self.default, False
        if value is False:
            raise CheckpointError(
                f"{self._where} says that {path!r} is not quantized, but the checkpoint holds "
                f"{path + '.scales'!r}"
            )
        return self._spec(path, value), True

    def _spec(self, path: str, values: Mapping[str, Any]) -> Spec:
        bits, group_size = values.get("bits"), values.get("group_size")
        mode = values.get("mode")
        for name, value, allowed in (
            ("bits", bits, BITS),
            ("group_size", group_size, GROUP_SIZES),
            ("mode", mode, ("affine", "mxfp4")),
        ):
            if value is not None and (type(value) is bool or value not in allowed):
                raise CheckpointError(
                    f"{self._where}: {name}={value!r} of {path!r} is not implemented; known: "
                    f"{', '.join(map(str, allowed))}"
                )
        return Spec(bits, group_size, mode)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The arrays of one quantized tensor."""

    path: str
    codes: mx.array
    scales: mx.array
    biases: mx.array | None

    @staticmethod
    def of(path: str, arrays: Mapping[str, mx.array]) -> "_Parts":
        codes, scales = arrays.get(f"{path}.weight"), arrays[f"{path}.scales"]
        biases = arrays.get(f"{path}.biases")
        if codes is None:
            raise CheckpointError(f"{path + '.scales'!r} has no {path + '.weight'!r} beside it")
        if codes.dtype != mx.uint32:
            raise CheckpointError(
                f"{path + '.weight'!r} is {codes.dtype} but has .scales beside it: quantized codes "
                "are uint32"
            )
        if codes.ndim < 2 or codes.shape[:-1] != scales.shape[:-1]:
            raise CheckpointError(
                f"{path!r}: codes {codes.shape} and scales {scales.shape} do not belong together"
            )
        if biases is not None and biases.shape != scales.shape:
            raise CheckpointError(
                f"{path!r}: scales {scales.shape} and biases {biases.shape} differ in shape"
            )
        if biases is not None and scales.dtype not in _FLOATS:
            raise CheckpointError(f"{path + '.scales'!r} is {scales.dtype}: scales are floats")
        if biases is not None and biases.dtype != scales.dtype:
            raise CheckpointError(
                f"{path + '.biases'!r} is {biases.dtype} and {path + '.scales'!r} {scales.dtype}: "
                "both are of one float type"
            )
        if biases is None and scales.dtype != mx.uint8:
            raise CheckpointError(f"{path + '.biases'!r} is missing")
        return _Parts(path, codes, scales, biases)

    @property
    def mode(self) -> Literal["affine", "mxfp4"]:
        return "mxfp4" if self.scales.dtype == mx.uint8 else "affine"

    def join(self, bits: int, group_size: int) -> QuantizedWeight:
        try:
            return QuantizedWeight(
                self.codes, self.scales, self.biases, bits, group_size, mode=self.mode
            )
        except ShapeError as error:
            raise CheckpointError(f"{self.path!r}: {error}") from error


def _solve(parts: _Parts, spec: Spec, width: int | None) -> tuple[int, int] | None:
    """Bits and group size that agree with the spec, the shapes, and the model's width.

    The shapes alone give bits * group_size; a width or one given number settles the rest.
    """
    if spec.mode is not None and spec.mode != parts.mode:
        return None
    words, groups = parts.codes.shape[-1], parts.scales.shape[-1]
    if parts.mode == "mxfp4":
        options = [(4, 32)]
    else:
        sizes = (32, 64, 128) if spec.group_size is None else (spec.group_size,)
        options = [(bits, size) for size in sizes for bits in BITS]
    options = [
        (bits, size)
        for bits, size in options
        if words * 32 == groups * size * bits
        and spec.bits in {None, bits}
        and spec.group_size in {None, size}
        and width in {None, groups * size}
    ]
    # MLX's own default is groups of 64.
    return min(options, key=lambda option: (option[1] != 64, option[1]), default=None)


def _contradiction(parts: _Parts, spec: Spec, where: str, width: int | None) -> CheckpointError:
    need = "" if width is None else f" and the model's input width {width}"
    product = parts.codes.shape[-1] * 32 / max(1, parts.scales.shape[-1])
    return CheckpointError(
        f"{where} says {spec} for {parts.path!r}, but its codes {parts.codes.shape} and "
        f"{parts.mode} scales {parts.scales.shape}{need} contradict that: they need "
        f"bits x group_size = {product:g}"
        + ("" if width is None else f" ({parts.codes.shape[-1] * 32 / width:g} bits)")
    )
