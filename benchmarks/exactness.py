"""How far are both engines' logits in bfloat16 from those in float32, over the same weights?

    python benchmarks/exactness.py make FILE [SHAPE:LAYERS ...]    anywhere: float32, on the CPU
    python benchmarks/exactness.py check FILE                      on a GPU: both engines

Shapes are cut to their first layers and a small vocabulary. Both engines read the same tokens one
by one; a figure is the largest difference of a row's logits from float32's, over the rows the
median and the largest. Greedy tokens of two engines part where such differences exceed a margin.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gpu_models import Pair, build_pair
from gpu_shapes import SHAPES, shrunk
from mlx_lm.models.cache import make_prompt_cache

from turbospark.kernels.device import on_cpu
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel
from turbospark.settings import KernelPolicy

CASES = (
    "llama-8B:4", "qwen3_5-4B:4", "qwen3_5-4B:8", "qwen3_5-35B-A3B:4", "qwen3_5-35B-A3B:8",
    "gemma4-26B-A4B:6", "gemma4-26B-A4B:12", "qwen3-30B-A3B:4", "gpt-oss-20B:6",
    "deepseek-v2-lite:4", "spark2_5-4B:4", "muse-glimmer-30B:4",
)  # fmt: skip
VOCABULARY = 1024
IDS = np.random.default_rng(3).integers(0, VOCABULARY, 24).astype(np.int32)
REFERENCE = KernelPolicy(kernels="reference")

Step = Callable[[mx.array], mx.array]
"""Tokens [1] -> their logits [1, V]."""


def pair_of(case: str, *, widened: bool = False) -> Pair:
    name, layers = case.split(":")
    return build_pair(shrunk(SHAPES[name], int(layers), VOCABULARY), widened=widened)


def our_step(pair: Pair) -> Step:
    """turbospark's own: the first row as a prompt, the others through the compiled step."""
    caches = pair.ours.make_caches(len(IDS), 128)
    compiled = None if on_cpu() else CompiledModel(pair.ours)

    def step(tokens: mx.array) -> mx.array:
        if compiled is None or not caches[0].offset:
            phase = Phase.DECODE if caches[0].offset else Phase.PREFILL
            return pair.ours(tokens, caches, phase=phase).logits
        return compiled(tokens, caches, phase=Phase.DECODE).logits

    return step


def their_step(pair: Pair) -> Step:
    caches = make_prompt_cache(pair.theirs)
    return lambda tokens: pair.theirs(tokens[None], cache=caches)[0]


def logits_of(step: Step) -> np.ndarray:
    """[T, V] float32."""
    rows = list[np.ndarray]()
    for token in IDS:
        row = step(mx.array([int(token)]))[-1].astype(mx.float32)
        mx.eval(row)
        rows.append(np.array(row))
    return np.stack(rows)


def make(file: Path, cases: Sequence[str]) -> None:
    """Keep float32's logits of every case; what is there already stays."""
    mx.set_default_device(mx.cpu)
    found: dict[str, Any] = dict(np.load(file)) if file.exists() else {}
    for case in cases:
        pair = pair_of(case, widened=True)
        pair.bind(REFERENCE)
        found[case] = logits_of(our_step(pair))
        np.savez(file, **found)
        print(f"{case:20s} logits up to {np.abs(found[case]).max():.2f}", flush=True)


def check(file: Path) -> None:
    """Print how far both engines are from what `make` has kept."""
    print("| shape: layers | largest logit | turbospark, median / most | mlx-lm, median / most |")
    print("| --- | --- | --- | --- |")
    for case, exact in np.load(file).items():
        pair = pair_of(case)
        theirs = logits_of(their_step(pair))
        pair.bind(REFERENCE if on_cpu() else None)
        ours = logits_of(our_step(pair))
        errors = (np.abs(rows - exact).max(axis=1) for rows in (ours, theirs))
        figures = " | ".join(f"{np.median(error):.3f} / {error.max():.3f}" for error in errors)
        print(f"| {case} | {np.abs(exact).max():.2f} | {figures} |", flush=True)
        mx.clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("task", choices=("make", "check"))
    parser.add_argument("file", type=Path, help="an .npz")
    parser.add_argument("cases", nargs="*", metavar="SHAPE:LAYERS", default=list(CASES))
    options = parser.parse_args()
    if options.task == "make":
        make(options.file, options.cases)
    else:
        check(options.file)


if __name__ == "__main__":
    main()
