"""Checkpoint names of routed experts, however an exporter spells them, as the models' own."""

import re
from collections.abc import Mapping
from typing import Any

from turbospark.nn.weights import add_once, split_rows, stack_matrices

_ALONE = re.compile(r"(?P<stem>.+\.mlp\.experts)\.(?P<index>\d+)\.(?P<leaf>\w+)\.weight")
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def expert_weights(weights: Mapping[str, Any], num_experts: int) -> dict[str, Any]:
    """Experts under `mlp.experts.{gate,up,down}_proj.weight`, stacked [E, N, K]; idempotent.

    They may come under `mlp.switch_mlp`, with gate and up fused (the gate's rows first), without
    `.weight`, or as one matrix an expert, whose names may be Mixtral's w1, w2 and w3.

    Args:
        weights: name to tensor, dense or quantized; other tensors stay as they are.
        num_experts: matrices that stand alone are joined where all of these are there.

    Raises:
        CheckpointError: fused rows do not divide, matrices of one layer differ in layout, or are
            there in two spellings.
    """
    found: dict[str, Any] = {}
    for name, value in weights.items():
        for own, part in _renamed(name, value).items():
            add_once(found, own, part)
    alone: dict[str, dict[int, str]] = {}
    for name in found:
        match = _ALONE.fullmatch(name)
        if match:
            leaf = _NUMBERED.get(match["leaf"], match["leaf"])
            alone.setdefault(f"{match['stem']}.{leaf}.weight", {})[int(match["index"])] = name
    for stem, names in alone.items():
        if sorted(names) == list(range(num_experts)):
            parts = [found.pop(names[index]) for index in range(num_experts)]
            add_once(found, stem, stack_matrices(stem, parts))
    return found


def _renamed(name: str, value: Any) -> dict[str, Any]:
    """A stacked tensor of a layer's experts under the model's names; others as they are."""
    name = name.replace(".mlp.switch_mlp.", ".mlp.experts.")
    head, marker, leaf = name.rpartition(".mlp.experts.")
    leaf = leaf.removesuffix(".weight")
    if not marker or "." in leaf:
        return {name: value}
    stem = f"{head}{marker}"
    if leaf == "gate_up_proj":
        gate, up = split_rows(name, value)
        return {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
    return {f"{stem}{leaf}.weight": value}
