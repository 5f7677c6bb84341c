"""Layers of routed experts for gpu_mixers.py: whole, launch by launch, and as mlx-lm runs them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from gpu_models import Pair, build_pair
from gpu_shapes import SHAPES, shrunk
from gpu_timing import Bench, Busy, Call, Chain, medians

from turbospark.kernels.gpu import experts_mix, experts_unit
from turbospark.kernels.gpu.experts_geometry import ExpertGeometry
from turbospark.kernels.gpu.experts_mix import experts_down, experts_up
from turbospark.kernels.gpu.experts_scores import experts_scores, joined_router
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.weights import ExpertBlock, Weight
from turbospark.nn.moe import RoutedExperts
from turbospark.protocols import Phase

NAMES = (
    "qwen3_5-35B-A3B", "gemma4-26B-A4B", "qwen3-30B-A3B", "gpt-oss-20B", "deepseek-v2-lite",
)  # fmt: skip
LAYERS, CALLS = 4, 24
CUTS = ((1, 4), (1, 8), (2, 4), (2, 8))

Step = Callable[[mx.array], mx.array]
"""h [M, C] -> [M, C]."""


@dataclass(frozen=True)
class Layer:
    """One layer of both engines over the same weights."""

    unit: RoutedExperts
    block: ExpertBlock
    theirs: Step

    def whole(self, h: mx.array) -> mx.array:
        """In three launches, four where sums are normed."""
        return self.unit.advance(h, Phase.DECODE)

    def apart(self, h: mx.array) -> mx.array:
        """Scores and a shared expert in launches of their own."""
        kept, self.unit._block = self.unit._block, None
        try:
            return self.unit.advance(h, Phase.DECODE)
        finally:
            self.unit._block = kept


def build_layers(name: str) -> list[Layer]:
    """Layers of a shape that have experts, with the kernels of this machine."""
    config = SHAPES[name]
    pair = build_pair(shrunk(config, LAYERS + _dense_layers(config)))
    pair.bind()
    return layers_of(pair, config)


def _dense_layers(config: Mapping[str, Any]) -> int:
    return config.get("first_k_dense_replace", 0)


def layers_of(pair: Pair, config: Mapping[str, Any]) -> list[Layer]:
    """Every layer of a model that has experts, behind those that have none."""
    dense, made = _dense_layers(config), list[Layer]()
    trunk = pair.theirs.layers[dense:]
    for own, other in zip(pair.ours.model.layers[dense:], trunk, strict=True):
        unit = own.routed if config["model_type"] == "gemma4" else own.mlp.routed
        block = unit._whole()
        if block is None:
            raise SystemExit("the layer is none that bodies know")
        step = gemma_step if config["model_type"] == "gemma4" else plain_step
        made.append(Layer(unit, block, partial(step, other)))
    return made


def plain_step(layer: Any, h: mx.array) -> mx.array:
    """As in mlx-lm's decoder layers."""
    return (h[None] + layer.mlp(layer.post_attention_layernorm(h[None])))[0]


def gemma_step(layer: Any, h: mx.array) -> mx.array:
    """As in mlx-lm's decoder layer of gemma4."""
    x = h[None]
    dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(x)))
    ids, weights = layer.router(x)
    sparse = layer.experts(layer.pre_feedforward_layernorm_2(x), ids, weights)
    both = dense + layer.post_feedforward_layernorm_2(sparse)
    return ((x + layer.post_feedforward_layernorm(both)) * layer.layer_scalar)[0]


def token_bytes(block: ExpertBlock) -> tuple[int, int, int]:
    """Weight bytes that one row reads in each launch: scores, hidden rows, sum."""
    experts, shared = block.experts, block.shared
    few = experts.top_k / experts.gate.shape[0]
    up = few * (_nbytes(experts.gate) + _nbytes(experts.up))
    down = few * _nbytes(experts.down)
    if shared is not None:
        up += _nbytes(shared.gate) + _nbytes(shared.up)
        down += _nbytes(shared.down)
    return _nbytes(block.router), int(up), int(down)


def _nbytes(w: Weight) -> int:
    return w.nbytes


def pair(call: Call, start: mx.array, busy: Busy, calls: int = CALLS) -> tuple[float, float]:
    """Microseconds of a call: all in all, and of the GPU alone."""
    chain = Chain(call, start, calls)
    return medians([chain])[0].us, medians([chain], busy)[0].us


def blocks(bench: Bench, rows: Sequence[int]) -> None:
    """Layers whole, in more launches, and as mlx-lm runs them."""
    busy = Busy()
    print("us of a layer, all in all / of the GPU alone", flush=True)
    for name in NAMES:
        if bench.is_over:
            return
        layers = build_layers(name)
        C = layers[0].block.router.shape[1]
        for M in rows:
            h = mx.random.normal((M, C)).astype(mx.bfloat16)
            mx.eval(h)
            told, wholes = [], []
            for form in ("whole", "apart", "theirs"):
                calls = 6 if form == "theirs" else CALLS
                whole, alone = pair(partial(_turn, layers, form), h, busy, calls)
                told.append(f"{form} {whole:7.1f} / {alone:6.1f}")
                wholes.append(whole)
            error = _difference(layers[0], h)
            times = f"{wholes[2] / wholes[0]:5.2f}x"
            print(
                f"{name:18s} {M} rows: {', '.join(told)}; {times}, differ {error:.1e}", flush=True
            )
            if M == 1:
                _parts(bench.target, busy, layers, h)


def _turn(layers: Sequence[Layer], form: str, link: mx.array, number: int) -> mx.array:
    return getattr(layers[number % len(layers)], form)(link)


def _difference(layer: Layer, h: mx.array) -> float:
    ours, theirs = layer.whole(h).astype(mx.float32), layer.theirs(h).astype(mx.float32)
    return (mx.abs(ours - theirs).max() / mx.abs(theirs).max()).item()


def _parts(target: GpuTarget, busy: Busy, layers: Sequence[Layer], h: mx.array) -> None:
    """Each launch of a row alone."""
    made = [_launches(layer.block, target, h) for layer in layers]
    sizes = token_bytes(layers[0].block)
    for index, (part, nbytes) in enumerate(zip(("scores", "up", "down"), sizes, strict=True)):

        def call(link: mx.array, number: int, index: int = index) -> mx.array:
            given = mx.depends(h, [link])
            return made[number % len(made)][index](given)

        whole, alone = pair(call, mx.zeros((1,)), busy)
        speed = nbytes / max(alone, 0.1) / 1e6
        print(f"  {part:8s} {whole:7.1f} / {alone:6.1f} us, {speed:5.2f} TB/s", flush=True)


def _launches(block: ExpertBlock, target: GpuTarget, h: mx.array) -> tuple[Step, Step, Step]:
    """The three of a layer, each with all it needs but h."""
    shared, join = block.shared, experts_unit.join_of(block)
    router = joined_router(block.router, None if shared is None else shared.score)
    given = {"target": target, "bundle": experts_unit.bundle_of(block, router)}

    def score(x: mx.array) -> mx.array:
        return experts_scores(x, block.router_norm, router, block.router_bias, **given)

    def up(x: mx.array) -> mx.array:
        return experts_up(
            x, block.norm, scores, block.experts, shared, groups=block.groups, **given
        )

    def down(x: mx.array) -> mx.array:
        made = mx.depends(hidden, [x])
        return experts_down(made, block.experts, shared, x, join=join, dtype=x.dtype, **given)

    scores = score(h)
    hidden = up(h)
    mx.eval(scores, hidden)
    return score, up, down


def cuts(bench: Bench) -> None:
    """Geometries of the two large launches, GPU time alone."""
    busy = Busy()
    for name in NAMES:
        layers = build_layers(name)
        for M in (1, 8):
            h = mx.random.normal((M, layers[0].block.router.shape[1])).astype(mx.bfloat16)
            for line in _cut_lines(bench.target, busy, layers, h):
                if bench.is_over:
                    return
                print(f"{name:18s} {M} rows {line}", flush=True)


def _cut_lines(
    target: GpuTarget, busy: Busy, layers: Sequence[Layer], h: mx.array
) -> Iterator[str]:
    made = [_launches(layer.block, target, h) for layer in layers]
    for which in ("up_geometry", "down_geometry"):
        chosen = getattr(experts_mix, which)
        for rows, simdgroups in CUTS:
            cut = ExpertGeometry(rows, simdgroups)
            setattr(experts_mix, which, lambda *_, cut=cut: cut)
            try:
                index = 1 if which == "up_geometry" else 2

                def call(link: mx.array, number: int, index: int = index) -> mx.array:
                    return made[number % len(made)][index](mx.depends(h, [link]))

                _, alone = pair(call, mx.zeros((1,)), busy)
            finally:
                setattr(experts_mix, which, chosen)
            yield f"{which.removesuffix('_geometry'):4s} {rows} x {simdgroups}: {alone:6.1f} us"
