"""Checkpoint names of routed experts, however an exporter spells them, as the models' own."""

import re
from collections.abc import Mapping
from typing import Any

from turbospark.errors import CheckpointError
from turbospark.nn.weights import add_once, split_rows, stack_matrices

_ALONE = re.compile(r"(?P<stem>.+\.mlp\.experts)\.(?P<index>\d+)\.(?P<leaf>\w+)\.weight")
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def expert_weights(weights: Mapping[str, Any], num_experts: int) -> dict[str, Any]:
    """Experts under `mlp.experts.{gate,up,down}_proj.weight`, stacked [E, N, K]; idempotent.

    They may come under `mlp.switch_mlp`, with gate and up fused (the gate's rows first), without
    `.weight`, or as one matrix an expert, whose names may be Mixtral's w1, w2 and w3.

    Args:
        weights: name to tensor, dense or quantized; other tensors stay as they are.
        num_experts: of a layer whose experts have matrices of their own.

    Raises:
        CheckpointError: fused rows do not divide, matrices of one layer differ in layout, are
            there in two spellings, lack some expert's, or are more than there are experts.
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
    _check_numbers(alone, num_experts)
    for stem, names in alone.items():
        parts = [found.pop(names[index]) for index in range(num_experts)]
        add_once(found, stem, stack_matrices(stem, parts))
    return found


def _check_numbers(alone: Mapping[str, Mapping[int, str]], num_experts: int) -> None:
    """Refuse layers of other experts than the configuration's, naming the first one."""
    wanted = range(num_experts)
    for stem, names in alone.items():
        beyond = [name for index, name in names.items() if index not in wanted]
        if beyond:
            raise CheckpointError(
                f"{beyond[0]!r} is of an expert beyond the configuration's {num_experts}, which "
                f"are numbered 0 to {num_experts - 1}: config.json and weights are not of one model"
            )
        lost = [index for index in wanted if index not in names]
        if lost:
            index, name = next(iter(names.items()))
            missing = name.replace(f".experts.{index}.", f".experts.{lost[0]}.")
            others = f", as are those of {len(lost) - 1} more experts" if len(lost) > 1 else ""
            raise CheckpointError(
                f"expert {lost[0]} of layer {_layer(stem)} is not whole: its {missing!r} is "
                f"missing{others}, while {len(names)} of {num_experts} experts have theirs (such "
                f"as {name!r}); repeat the download, or convert the checkpoint anew"
            )


def _layer(stem: str) -> str:
    return stem.rpartition("layers.")[2].partition(".")[0]


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
