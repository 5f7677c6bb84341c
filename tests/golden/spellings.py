"""Checkpoint names that exporters give to routed experts, made of those in the fixtures.

The fixtures have transformers' names in memory: experts stacked, gate and up fused.
"""

from turbospark.kernels.weights import QuantizedWeight
from turbospark.loading.install import parts_of
from turbospark.nn.weights import rows_of

NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def unfused(weights):
    """Gate and up apart from each other, every stacked matrix under `.weight`."""
    found = {}
    for name, value in weights.items():
        path = name.removesuffix(".weight")
        if path.endswith("experts.gate_up_proj"):
            half = value.shape[1] // 2
            found[path.replace("gate_up", "gate") + ".weight"] = rows_of(value, 0, half)
            found[path.replace("gate_up", "up") + ".weight"] = rows_of(value, half, 2 * half)
        elif path.endswith("experts.down_proj"):
            found[f"{path}.weight"] = value
        else:
            found[name] = value
    return found


def alone(weights):
    """One matrix an expert."""
    found = {}
    for name, value in unfused(weights).items():
        head, marker, leaf = name.rpartition(".experts.")
        if not marker:
            found[name] = value
            continue
        for expert in range(value.shape[0]):
            one = one_of(value, expert)
            found[f"{head}.experts.{expert}.{leaf}"] = one
    return found


def one_of(value, expert):
    if not isinstance(value, QuantizedWeight):
        return value[expert]
    parts = [part[expert] for part in parts_of(value)]
    return QuantizedWeight(*parts, value.bits, value.group_size)


def sparse_block(weights):
    """Mixtral's own names."""
    found = {}
    for name, value in alone(weights).items():
        if ".experts." in name:
            head, leaf, kind = name.rsplit(".", 2)
            name = f"{head}.{NUMBERED[leaf]}.{kind}"
        found[name.replace(".mlp.", ".block_sparse_moe.")] = value
    return found


def switched(weights):
    """The names of MLX conversions."""
    return {
        name.replace(".mlp.experts.", ".mlp.switch_mlp."): value
        for name, value in unfused(weights).items()
    }


def switched_block(weights):
    return {
        name.replace(".mlp.", ".block_sparse_moe."): value
        for name, value in switched(weights).items()
    }


def wrapped(weights):
    return {f"language_model.{name}": value for name, value in switched(weights).items()}


def apart(weights):
    """gpt_oss in floats as MLX stores it: gate and up apart, matrices [E, N, K]."""
    found = {}
    for name, value in weights.items():
        stem, marker, leaf = name.rpartition(".experts.")
        stem += marker
        if leaf == "gate_up_proj_bias":
            found |= {f"{stem}gate_proj.bias": value[:, ::2], f"{stem}up_proj.bias": value[:, 1::2]}
        elif leaf == "gate_up_proj":
            turned = value.swapaxes(1, 2)
            found |= {f"{stem}gate_proj.weight": turned[:, ::2],
                      f"{stem}up_proj.weight": turned[:, 1::2]}  # fmt: skip
        elif marker and leaf == "down_proj":
            found[f"{stem}down_proj.weight"] = value.swapaxes(1, 2)
        else:
            found[name.replace("down_proj_bias", "down_proj.bias")] = value
    return found
