"""Golden fixtures as tests use them: configuration, weights drawn again, expected logits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from golden.weights import draw_weights, fingerprint, int4_layout, quantize, quantize_mxfp4

from turbospark.errors import KernelError
from turbospark.kernels.device import on_cpu
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.select import choose_kernels
from turbospark.kernels.target import KernelSet
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading.config import normalise
from turbospark.loading.install import Handling, install_weights
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.registry import resolve_family
from turbospark.settings import KernelPolicy

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
COLUMN_STEP = 5


@dataclass(frozen=True, eq=False)
class Golden:
    """One fixture.

    Attributes:
        config: in the spelling of most published files; `config_v5` as transformers 5 saves it.
        weights: checkpoint name to float32 array.
        tokens: [T] int32.
        expected: kind ("full" or "int4") to the logits of some columns, and of the last row.
        mxfp4: the quantized form keeps its experts in MXFP4, as transformers stores it.
        stream: [L + 1, rows, C] before, between and (normed) after the layers, or None.
    """

    name: str
    config: dict[str, Any]
    config_v5: dict[str, Any]
    weights: dict[str, np.ndarray]
    tokens: np.ndarray
    expected: dict[str, tuple[np.ndarray, np.ndarray]]
    stream: np.ndarray | None = None
    mxfp4: bool = False

    @property
    def tolerance(self) -> float:
        """Random weights amplify rounding: Gemma 4 does not scale its attention scores down."""
        if "gemma4" in self.name:
            return 1e-3
        return 5e-4 if self.name == "qwen3_5_tied" else 1e-4

    def difference(self, logits: np.ndarray, kind: str) -> float:
        """Largest distance of logits [T, V] from the expected ones."""
        columns, last = self.expected[kind]
        return max(
            float(np.abs(logits[:, ::COLUMN_STEP] - columns).max()),
            float(np.abs(logits[-1] - last).max()),
        )


@cache
def load_golden(name: str) -> Golden:
    """Read a fixture and draw its weights; their fingerprint must be the one recorded."""
    description = json.loads((FOLDER / f"{name}.json").read_text())
    weights = draw_weights(description["shapes"], description["seed"], **description["settings"])
    assert fingerprint(weights) == description["sha256"], f"{name}: other weights were drawn"
    arrays = np.load(FOLDER / f"{name}.npz")
    expected = {kind: (arrays[kind], arrays[f"{kind}_last"]) for kind in ("full", "int4")}
    return Golden(
        name,
        description["config"],
        description["config_v5"],
        weights,
        arrays["tokens"],
        expected,
        arrays.get("stream"),
        description.get("mxfp4", False),
    )


def float_weights(golden: Golden) -> dict[str, Weight]:
    """The checkpoint's tensors as MLX arrays."""
    return {name: mx.array(value) for name, value in golden.weights.items()}


def int4_weights(golden: Golden) -> dict[str, Weight]:
    """The checkpoint's tensors, matrices quantized; each ends in `.weight` then."""
    weights: dict[str, Weight] = {}
    for name, value in golden.weights.items():
        if golden.mxfp4 and value.ndim == 3:
            blocks, scales = quantize_mxfp4(value.swapaxes(1, 2))
            weights |= {f"{name}_blocks": mx.array(blocks), f"{name}_scales": mx.array(scales)}
            continue
        layout = int4_layout(name, value.shape)
        if layout is None:
            weights[name] = mx.array(value)
            continue
        parts = (mx.array(part) for part in quantize(value, *layout))
        path = name if name.endswith(".weight") else f"{name}.weight"
        weights[path] = QuantizedWeight(*parts, *layout)
    return weights


def build_model(
    config: Mapping[str, Any], weights: Mapping[str, Weight], kernels: KernelSet | None = None
) -> Any:
    """A bound model of the family that `model_type` names."""
    model: Any = resolve_family(config["model_type"]).build(normalise(config, Path("config.json")))
    install_weights(model, model.sanitize(weights), "the golden weights", Handling(on_cpu()))
    bind_units(model, kernels or ReferenceKernels())
    return model


def kernel_sets() -> dict[str, KernelSet]:
    """Every target whose float32 arithmetic can run here, by name."""
    sets: dict[str, KernelSet] = {}
    for name, activations in (("reference", "auto"), ("host", "exact")):
        try:
            chosen = choose_kernels(KernelPolicy(kernels=name, activations=activations))
        except KernelError:
            continue
        sets[chosen.name] = chosen
    return sets


def feed(
    model: Any,
    tokens: np.ndarray,
    sizes: Sequence[int],
    *,
    phase: Phase = Phase.PREFILL,
    caches: list[Any] | None = None,
) -> np.ndarray:
    """Logits [T, V] of all tokens, fed in passes of the given sizes into caches (new ones)."""
    caches = model.make_caches(64, 16) if caches is None else caches
    rows, at = [], 0
    for size in sizes:
        step = mx.array(tokens[at : at + size])
        rows.append(np.array(model(step, caches, phase=phase, logits="all").logits))
        at += size
    assert at == len(tokens)
    return np.concatenate(rows)


def passes(count: int, size: int) -> list[int]:
    """Sizes of the passes that feed `count` tokens, `size` at a time."""
    return [min(size, count - at) for at in range(0, count, size)]


def assert_same_logits(model: Any, got: np.ndarray, expected: np.ndarray) -> None:
    """One computation in other portions: bit for bit on a CPU, close by on a GPU.

    A GPU adds products up in an order that depends on how many rows there are.
    """
    if on_cpu():
        assert np.array_equal(got, expected)
        return
    # Gemma 4's attention scores are not scaled down, so that it amplifies rounding.
    bound = 2e-2 if "gemma4" in type(model).__module__ else 3e-3
    assert np.abs(got - expected).max() < bound * expected.std()
