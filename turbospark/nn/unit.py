"""The base of fusion units: the seam between families and kernels."""

from typing import Any, cast

import mlx.nn as nn

from turbospark.kernels.target import KernelSet


class Unit:
    """One fused step over the weights of some modules.

    A family makes its units beside the modules that own the weights and calls them in its
    forward pass. A unit is no module, so it owns no parameter; `bind` looks the weights up once
    they are loaded. Unbound, or where the target has no body for its weights, it runs its
    reference: a plain composition of MLX operations.
    """

    body = "reference"
    """Name of the target whose body runs."""

    def bind(self, kernels: KernelSet) -> None:
        """Choose the body. Call it after the weights are set, and again when they change."""
        raise NotImplementedError


def units_of(model: nn.Module) -> list[tuple[str, Unit]]:
    """Every unit of a model with the path of the module that holds it."""
    found: list[tuple[str, Unit]] = []
    for path, module in cast("list[tuple[str, Any]]", model.named_modules()):
        for name, value in cast("dict[str, Any]", vars(module)).items():
            if isinstance(value, Unit):
                found.append((f"{path}.{name}" if path else name, value))
    return found


def bind_units(model: nn.Module, kernels: KernelSet) -> dict[str, int]:
    """Bind every unit of a model; return how many run on which body, as "unit body" counts."""
    counts: dict[str, int] = {}
    for _, unit in units_of(model):
        unit.bind(kernels)
        key = f"{type(unit).__name__} {unit.body}"
        counts[key] = counts.get(key, 0) + 1
    return counts
