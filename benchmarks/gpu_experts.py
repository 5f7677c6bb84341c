"""How fast are layers of routed experts on a GPU, and how are their launches best cut?

    python benchmarks/gpu_experts.py [--seconds 40] [--rows 1,4] [--only gpt-oss-20B,...]

Needs an Apple or NVIDIA GPU. Of each shape it measures a layer, its difference from mlx-lm's, and
both large launches in every cut: microseconds of the GPU alone, and bandwidth of the weights that
rows read, those of routed experts once a row. Calls form a compiled chain in which each waits for
the one before, over several layers, so that no cache holds their weights. It stops when its seconds
are spent. gpu_mixers.py measures whole layers, launch by launch, and as mlx-lm runs them.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from gpu_links import Links
from gpu_models import Pair, build_pair
from gpu_shapes import SHAPES, shrunk
from gpu_timing import Bench, Busy, Call, Chain, medians

from turbospark.kernels.gpu import experts_mix, experts_unit
from turbospark.kernels.gpu.experts_geometry import ExpertGeometry, words_of
from turbospark.kernels.gpu.experts_mix import experts_down, experts_up
from turbospark.kernels.gpu.experts_scores import experts_scores, joined_router
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.weights import ExpertBlock, Weight
from turbospark.nn.moe import RoutedExperts
from turbospark.protocols import Phase

NAMES = (
    "gpt-oss-20B", "gemma4-26B-A4B", "deepseek-v2-lite", "qwen3-30B-A3B", "qwen3_5-35B-A3B",
)  # fmt: skip
LAYERS, CALLS = 8, 24
UP_CUTS = (
    (8, 4, 6), (16, 4, 3), (8, 4, 3), (16, 4, 6), (4, 4, 6), (8, 4, 8), (8, 2, 8), (4, 2, 8),
)  # fmt: skip
DOWN_CUTS = (
    (8, 8, 4), (8, 8, 8), (16, 8, 8), (16, 8, 4), (8, 4, 8), (4, 4, 8), (4, 4, 4),
)  # fmt: skip
"""Columns, those asked for ahead, SIMD-groups of a threadgroup."""
WORDS = (4, 2, 1)

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
    made = launches_of(layers, target)
    sizes = token_bytes(layers[0].block)
    for part, nbytes in zip(("scores", "up", "down"), sizes, strict=True):
        whole, alone = pair(*linked(made, part, h), busy)
        speed = nbytes / max(alone, 0.1) / 1e6
        print(f"  {part:8s} {whole:7.1f} / {alone:6.1f} us, {speed:5.2f} TB/s", flush=True)


class Launches:
    """The three of a layer."""

    def __init__(self, block: ExpertBlock, links: Links) -> None:
        self._block, self.join, self.links = block, experts_unit.join_of(block), links
        score = None if block.shared is None else block.shared.score
        self._router = joined_router(block.router, score)
        bundle = experts_unit.bundle_of(block, self._router)
        self._given: dict[str, Any] = {"target": links.target, "bundle": bundle}

    def scores(self, h: mx.array) -> mx.array:
        block = self._block
        return experts_scores(h, block.router_norm, self._router, block.router_bias, **self._given)

    def up(self, h: mx.array, scores: mx.array) -> mx.array:
        block = self._block
        return experts_up(
            h, block.norm, scores, block.experts, block.shared, groups=block.groups, **self._given
        )

    def down(self, h: mx.array, hidden: mx.array) -> mx.array:
        block = self._block
        return experts_down(
            hidden, block.experts, block.shared, h, join=self.join, dtype=h.dtype, **self._given
        )


def launches_of(layers: Sequence[Layer], target: GpuTarget) -> list[Launches]:
    """Those of layers, which one link can hold up."""
    links = Links(target)
    return [Launches(layer.block, links) for layer in layers]


def linked(made: Sequence[Launches], part: str, h: mx.array) -> tuple[Call, mx.array]:
    """One launch of layers that take turns, each behind the one before; what the first waits for.

    Whatever comes before it in a layer is made of rows h once.
    """
    steps = list[Callable[[], mx.array]]()
    for layer in made:
        given = [h]
        if part != "scores":
            scores = layer.scores(h)
            given.append(scores if part == "up" else layer.up(h, scores))
        mx.eval(given)
        steps.append(partial(getattr(layer, part), *given))

    def call(link: mx.array, number: int) -> mx.array:
        return made[0].links.behind(link, steps[number % len(steps)])

    # Of the result's type, or the first call would be compiled by itself.
    is_stream = part == "down" and made[0].join != experts_mix.APART
    return call, mx.zeros((8,), h.dtype if is_stream else mx.float32)


def cuts(bench: Bench, rows: Sequence[int] = (1, 4), names: Sequence[str] = NAMES) -> None:
    """Cuts of the two large launches, GPU time alone."""
    busy = Busy()
    for name in names:
        if bench.is_over:
            return
        layers = build_layers(name)
        C = layers[0].block.router.shape[1]
        whole, inputs = [], []
        for M in rows:
            h = mx.random.normal((M, C)).astype(mx.bfloat16)
            mx.eval(h)
            _, alone = pair(partial(_turn, layers, "whole"), h, busy)
            whole.append(f"{M} rows {alone:6.1f} us, differ {_difference(layers[0], h):.1e}")
            inputs.append(h)
        print(f"{name}: a layer of {'; '.join(whole)}", flush=True)
        for line in _cut_lines(bench, busy, layers, inputs):
            print(f"{name:18s} {line}", flush=True)
            if bench.is_over:
                return


def _cut_lines(
    bench: Bench, busy: Busy, layers: Sequence[Layer], inputs: Sequence[mx.array]
) -> Iterator[str]:
    made = launches_of(layers, bench.target)
    for part, others in (("down", DOWN_CUTS), ("up", UP_CUTS)):
        chosen = getattr(experts_mix, f"{part}_geometry")
        shared = {"shared": layers[0].block.shared is not None} if part == "up" else {}
        default = chosen(bench.target.name, inputs[0].shape[1], **shared)
        for cut in dict.fromkeys((default, *(ExpertGeometry(*other) for other in others))):
            told = []
            setattr(experts_mix, f"{part}_geometry", lambda *_, cut=cut, **__: cut)
            try:
                for h in inputs:
                    _, alone = pair(*linked(made, part, h), busy)
                    nbytes = rows_bytes(layers[0].block, h.shape[0])[part]
                    speed = bench.bandwidth(nbytes, alone)
                    told.append(f"{h.shape[0]} rows {alone:6.1f} us {speed}")
            finally:
                setattr(experts_mix, f"{part}_geometry", chosen)
            size = f"{cut.columns:2d} columns, {cut.ahead} ahead, {cut.simdgroups} SIMD-groups"
            yield f"{part:4s} {size}: {'; '.join(told)}{' (default)' * (cut == default)}"


def rows_bytes(block: ExpertBlock, rows: int) -> dict[str, int]:
    """Weight bytes of each large launch, those of routed experts once a row."""
    whole, routed = token_bytes(block), token_bytes(replace(block, shared=None))
    return {part: whole[i] + (rows - 1) * routed[i] for i, part in ((1, "up"), (2, "down"))}


def words(bench: Bench, names: Sequence[str] = NAMES) -> None:
    """Words that a lane takes at a time, of one row."""
    busy, chosen = Busy(), experts_mix.words_of
    for name in names:
        layers = build_layers(name)
        made = launches_of(layers, bench.target)
        C, inner = layers[0].block.router.shape[1], layers[0].block.experts.down.shape[2]
        h = mx.random.normal((1, C)).astype(mx.bfloat16)
        mx.eval(h)
        for count in WORDS:
            if bench.is_over:
                return
            experts_mix.words_of = lambda _, count=count: count
            try:
                told = [
                    f"{part} {pair(*linked(made, part, h), busy)[1]:6.1f} us"
                    for part in ("up", "down")
                ]
            finally:
                experts_mix.words_of = chosen
            default = ", ".join(f"{words_of(K)} of {K}" for K in (C, inner))
            print(f"{name:18s} {count} words: {', '.join(told)} (default {default})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rows", default="1,4", help="comma separated, 1 to 8")
    parser.add_argument("--only", default=",".join(NAMES), help="shapes, comma separated")
    parser.add_argument(
        "--words", action="store_true", help="what a lane takes at a time instead of cuts"
    )
    arguments = parser.parse_args()
    bench, names = Bench(arguments.seconds), arguments.only.split(",")
    if arguments.words:
        words(bench, names)
    else:
        cuts(bench, [int(M) for M in arguments.rows.split(",")], names)
    if bench.is_over:
        print("stopped: out of seconds", flush=True)


if __name__ == "__main__":
    main()
