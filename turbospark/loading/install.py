"""Putting weights into a built model, and refusing those that do not fit it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import CheckpointError
from turbospark.kernels.device import on_cpu
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading.arrays import evaluate
from turbospark.loading.checkpoint import some
from turbospark.loading.quantize import (
    Quantization,
    quantization_for,
    quantize_weight,
    require_divisible,
)
from turbospark.loading.source import Source
from turbospark.nn.linear import Matrix

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_MLX_GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one parameter: a module, its attribute, and the shape it must have."""

    module: nn.Module
    attribute: str
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        return isinstance(self.module, Matrix) and self.attribute == "weight"


@dataclass(frozen=True, slots=True)
class Handling:
    """What happens to weights on their way into the model.

    Attributes:
        on_cpu: everything but matrices becomes float32.
        quantize: dense matrices are quantized so.
        stream: dtype of the stream and of dense matrices on a GPU; None leaves the stream that of
            the embedding's numbers, and matrices as they are stored.
    """

    on_cpu: bool
    quantize: Quantization | None = None
    stream: mx.Dtype | None = None

    @classmethod
    def of(cls, source: Source, quantize: Quantization | None = None) -> Self:
        """What this device asks of a checkpoint.

        GGUF has its numbers in blocks with float16 factors whatever a model was trained in, and
        streams of some models leave float16's range.
        """
        wide = source.kind == "gguf" and not on_cpu()
        return cls(on_cpu(), quantize, mx.bfloat16 if wide else None)


def parameter_slots(model: nn.Module) -> dict[str, Slot]:
    """Every parameter of a model by its path."""
    slots: dict[str, Slot] = {}
    modules = cast("list[tuple[str, nn.Module]]", model.named_modules())
    for path, module in modules:
        prefix = f"{path}." if path else ""
        for name, value in cast("dict[str, Any]", module).items():
            if not isinstance(value, mx.array) or name.startswith("_"):
                continue
            shape = value.shape
            if isinstance(module, Matrix):
                if name in {"scales", "biases"}:
                    continue
                shape = tuple(module.value.shape) if name == "weight" else shape
            slots[prefix + name] = Slot(module, name, shape)
    return slots


def install_weights(
    model: nn.Module,
    weights: dict[str, Weight],
    where: str,
    handling: Handling,
    progress: Callable[[Weight], None] = lambda _: None,
) -> None:
    """Set every parameter of a model; each is evaluated before the next.

    Args:
        model: changed in place.
        weights: sanitized names to values; emptied, so that a converted source is freed at once.
        where: the files they come from, for messages.
        handling: the device's float types, and quantization while loading.
        progress: called with each value as the file held it.

    Raises:
        CheckpointError: tensors are missing, left over or misshapen; the model is unchanged.
        OptionError: no matrix can be quantized as wished.
    """
    slots = parameter_slots(model)
    check_fit(slots, weights, where)
    if handling.quantize is not None:
        widths = (slot.shape[-1] for slot in slots.values() if slot.is_matrix)
        require_divisible(widths, handling.quantize, where)
    for name, slot in slots.items():
        weight = weights.pop(name)
        value = handled(slot, name, weight, handling)
        _evaluate(value, name, where)
        if isinstance(slot.module, Matrix) and slot.is_matrix:
            slot.module.assign(value)
        else:
            setattr(slot.module, slot.attribute, value)
        progress(weight)


def check_fit(slots: Mapping[str, Slot], weights: Mapping[str, Weight], where: str) -> None:
    """Compare a model's parameters with the tensors given.

    Raises:
        CheckpointError: naming the first few that are missing, left over or misshapen.
    """
    missing = [name for name in slots if name not in weights]
    extra = [name for name in weights if name not in slots]
    wrong = [
        fault
        for name, slot in slots.items()
        if name in weights and (fault := _misfit(name, slot, weights[name]))
    ]
    faults: list[str] = []
    if missing:
        faults.append(f"{len(missing)} tensors are missing ({some(missing)})")
    if extra:
        faults.append(f"{len(extra)} are left over ({some(extra)})")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        faults.append(f"{len(wrong)} do not fit ({'; '.join(wrong[:3])}{more})")
    if faults:
        raise CheckpointError(
            f"the tensors of {where} are not those of the model that its configuration "
            f"describes: {', '.join(faults)}. The names are the model's own"
        )


def _misfit(name: str, slot: Slot, weight: Weight) -> str:
    if tuple(weight.shape) != slot.shape:
        return f"{name!r} is {tuple(weight.shape)} where {slot.shape} is needed"
    if isinstance(weight, QuantizedWeight):
        return "" if slot.is_matrix else f"{name!r} is quantized, which only matrices can be"
    return "" if weight.dtype in _FLOATS else f"{name!r} holds {weight.dtype}, not floats"


def handled(slot: Slot, name: str, weight: Weight, handling: Handling) -> Weight:
    """A weight as the model will hold it; nothing is evaluated."""
    if not slot.is_matrix:
        vector = cast("mx.array", weight)
        return vector.astype(mx.float32) if handling.on_cpu else vector
    if isinstance(weight, QuantizedWeight):
        if weight.group_size in _MLX_GROUPS or handling.on_cpu:
            return weight
        return dequantize_reference(weight).astype(handling.stream or mx.float16)
    if handling.quantize is None:
        return weight if handling.stream is None else weight.astype(handling.stream)
    path = name.removesuffix(".weight")
    chosen = quantization_for(path, slot.shape[-1], handling.quantize)
    return weight if chosen is None else quantize_weight(weight, chosen)


def parts_of(weight: Weight) -> list[mx.array]:
    """The arrays of a weight."""
    if not isinstance(weight, QuantizedWeight):
        return [weight]
    biases = [] if weight.biases is None else [weight.biases]
    return [weight.codes, weight.scales, *biases]


def _evaluate(weight: Weight, name: str, where: str) -> None:
    try:
        evaluate(*parts_of(weight))
    except RuntimeError as error:
        raise CheckpointError(f"tensor {name!r} of {where} cannot be read: {error}") from error
