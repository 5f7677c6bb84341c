"""Is the second half of a dense layer faster in one launch than in three, and in which geometry?

    python benchmarks/gpu_chain.py [--seconds 55] [--rows 1,4,8] [--sizes 8b,4b,1b] [--sweep]

Needs an NVIDIA GPU. A call projects the stream and finishes the layer, in a compiled chain in which
each call waits for the one before; what the projection takes is measured alone and taken off. The
host submits everything while the GPU is busy with something else, so `us` is the GPU's time and
`host` what submitting costs. Weights are rotated through more memory than a cache holds, and a
figure is the median of rounds in which the contenders take turns.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
from gpu_products import CALLS, DTYPE, linked, weight_copies
from gpu_timing import Bench, Busy, Call, Chain, Times, medians

from turbospark.kernels.gpu.int4_chain import (
    COUNTERS,
    ChainGeometry,
    Int4Chain,
    choose_geometry,
    fits,
    int4_chain,
)
from turbospark.kernels.gpu.int4_mma import int4_mma
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import CUDA, GpuTarget
from turbospark.kernels.weights import Norm, QuantizedWeight

SIZES = {"8b": (4096, 4096, 14336), "4b": (4096, 2560, 9216), "1b": (2048, 2048, 8192)}
"""K, C and I of llama-8B, qwen3_5-4B and llama-1B."""
GRAPHS = 3


class Layer:
    """The products of one layer shape, with a few copies of its weights."""

    def __init__(self, target: GpuTarget, sizes: tuple[int, int, int], rows: int) -> None:
        self.target, self.sizes, self.rows = target, sizes, rows
        K, C, I = sizes  # noqa: E741
        self.norm = Norm(mx.ones((C,), DTYPE), 1e-5)
        copies = weight_copies([(K, C), (C, K), (I, C), (I, C), (C, I)], 3)
        self.queries = [Int4Product((w[0],), (None,), self.norm) for w in copies]
        self.chains = [Int4Chain(tuple(w[1:]), (None,) * 4, self.norm, "silu") for w in copies]
        self.h = mx.random.normal((rows, C)).astype(DTYPE)
        mx.eval(self.h)

    @property
    def nbytes(self) -> int:
        return self.chains[0].nbytes

    def projected(self, h: mx.array, number: int, zeros: int) -> list[mx.array]:
        product = self.queries[number % len(self.queries)]
        return int4_mma(product, h, None, self.target, zeros=zeros)

    def in_one(self, cut: ChainGeometry) -> Call:
        def call(h: mx.array, number: int) -> mx.array:
            x, zeros = self.projected(h, number, COUNTERS)
            chain = self.chains[number % len(self.chains)]
            return int4_chain(chain, x, h, zeros, self.target, cut)

        return call

    def in_three(self, h: mx.array, number: int) -> mx.array:
        x = self.projected(h, number, 0)[0]
        output, gate, up, down = self.chains[number % len(self.chains)].weights
        middle = Int4Product((gate, up), (None,) * 2, self.norm, "silu")
        h = self.one(output, x, h)
        return self.one(down, int4_mma(middle, h, None, self.target)[0], h)

    def one(self, w: QuantizedWeight, x: mx.array, added: mx.array) -> mx.array:
        return int4_mma(Int4Product((w,), (None,), residual=True), x, added, self.target)[0]

    def projection(self) -> Call:
        """The projection alone, each waiting for the one before."""
        calls = [
            linked(lambda p, x, link: int4_mma(p, x, link, self.target), product, self.h)
            for product in self.queries
        ]
        return lambda link, number: calls[number % len(calls)](link, number)

    def cuts(self, *, swept: bool) -> Iterator[ChainGeometry]:
        chosen = choose_geometry(self.chains[0], self.rows)
        yield chosen
        if not swept:
            return
        for blocks, ring in ((1, 4), (1, 6), (1, 8), (1, 10), (2, 3), (2, 4), (2, 5)):
            for staged, tall in ((True, 1), (False, 1), (False, 2), (True, 2)):
                cut = replace(chosen, blocks=blocks, ring=ring, staged_inner=staged, tall=tall)
                few = (blocks == 2 or not staged) and ring not in (4, 6)
                if cut != chosen and not few and fits(self.chains[0], self.rows, cut):
                    yield cut


def compare(layer: Layer, bench: Bench, busy: Busy, *, swept: bool) -> None:
    """One table: three launches, and the chain in each geometry."""
    K, C, _ = layer.sizes
    start = mx.zeros((layer.rows, K), DTYPE)
    alone = Chain(layer.projection(), start, CALLS, GRAPHS)
    three = Chain(layer.in_three, layer.h, CALLS, GRAPHS)
    wanted = layer.in_three(layer.h, 0)
    print(f"\nK {K} C {C} I {layer.sizes[2]}, {layer.rows} rows, {layer.nbytes / 1e6:.0f} MB")
    for index, cut in enumerate(layer.cuts(swept=swept)):
        if bench.is_over:
            return
        begin = time.perf_counter()
        try:
            found = layer.in_one(cut)(layer.h, 0)
            same = bool(mx.array_equal(found, wanted).item())
            one = Chain(layer.in_one(cut), layer.h, CALLS, GRAPHS)
        except (RuntimeError, ValueError) as problem:
            print(f"  {short(cut)}: {problem}", flush=True)
            continue
        built_s = time.perf_counter() - begin
        own, in_three, in_one = medians([alone, three, one], busy)
        if index == 0:
            show(layer, "three launches", in_three, own, "")
        note = f"{'same' if same else 'OTHER'} bits, built in {built_s:.1f} s"
        show(layer, short(cut), in_one, own, note)


def show(layer: Layer, what: str, found: Times, own: Times, note: str) -> None:
    us, host_us = (a - b for a, b in zip(found, own, strict=True))
    print(
        f"  {what:44s} {us:7.2f} us {layer.nbytes / us / 1e6:5.2f} TB/s  host {host_us:6.2f} us  "
        f"{note}",
        flush=True,
    )


def short(cut: ChainGeometry) -> str:
    staged = f"{'x' if cut.staged_x else '-'}{'i' if cut.staged_inner else '-'}"
    return f"chain ring {cut.ring} blocks {cut.blocks} tall {cut.tall} staged {staged}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--rows", default="1,8,4")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--sweep", action="store_true", help="several geometries of the chain")
    arguments = parser.parse_args()
    bench, busy = Bench(arguments.seconds, CUDA.name), Busy()
    for rows in map(int, arguments.rows.split(",")):
        for name in arguments.sizes.split(","):
            if not bench.is_over:
                layer = Layer(bench.target, SIZES[name], rows)
                compare(layer, bench, busy, swept=arguments.sweep)


if __name__ == "__main__":
    main()
