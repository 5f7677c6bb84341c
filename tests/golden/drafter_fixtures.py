"""Golden drafters as tests use them: weights drawn again, modules built over a built trunk."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from golden.drafter_recipes import BLOCKS, HEADS, draw_block_drafter, draw_trunk
from golden.fixtures import build_model
from golden.weights import fingerprint

from turbospark.kernels.device import on_cpu
from turbospark.kernels.reference import ReferenceKernels
from turbospark.kernels.target import KernelSet
from turbospark.loading.install import Handling, install_weights
from turbospark.nn.unit import bind_units
from turbospark.protocols import Phase
from turbospark.registry import resolve_family

FOLDER = Path(__file__).parent / "drafters"
CONTEXT = 96


@dataclass(frozen=True, eq=False)
class Golden:
    """One fixture.

    Attributes:
        config: of the checkpoint that holds the drafter.
        weights: checkpoint name to float32 array.
        arrays: inputs and expectations by name.
    """

    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]


@cache
def load_drafter_golden(name: str) -> Golden:
    """Read a fixture and draw its weights; their fingerprint must be the one recorded."""
    facts = json.loads((FOLDER / f"{name}.json").read_text())
    draw = draw_trunk if name in HEADS else draw_block_drafter
    weights = draw(facts["shapes"])
    assert fingerprint(weights) == facts["sha256"], f"{name}: other weights were drawn"
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return Golden(facts["config"], weights, dict(arrays))


def as_mlx(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: mx.array(value) for name, value in weights.items()}


@cache
def trunk_of(name: str, kernels: KernelSet | None = None) -> Any:
    """The trunk that a fixture drafts for."""
    golden = load_drafter_golden(name if name in HEADS else "qwen3_5_mtp")
    return build_model(golden.config, as_mlx(golden.weights), kernels)


@cache
def drafter_module(name: str, kernels: KernelSet | None = None) -> Any:
    """A fixture's drafter over its trunk, bound."""
    assert name in HEADS or name in BLOCKS
    golden, trunk = load_drafter_golden(name), trunk_of(name, kernels)
    family = golden.config["model_type"] if name in HEADS else "qwen3_5"
    build = resolve_family(family).drafters["mtp" if name in HEADS else "dflash"]
    module = build(golden.config, trunk)
    install_weights(
        module, module.sanitize(as_mlx(golden.weights)), f"golden {name}", Handling(on_cpu())
    )
    bind_units(module, kernels or ReferenceKernels())
    return module


def run_trunk(trunk: Any, ids: Any, taps: tuple[int, ...] = (), caches: Any = None) -> Any:
    """One prefill pass with hidden rows and taps: the ForwardOutput."""
    caches = trunk.make_caches(CONTEXT, 16) if caches is None else caches
    tokens = mx.array(np.asarray(ids, dtype=np.int32))
    return trunk(tokens, caches, phase=Phase.PREFILL, logits="all", taps=taps, hidden=True)
