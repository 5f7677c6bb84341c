"""How fast are products with 4-bit weights on a GPU, and which geometry is best?

    python benchmarks/gpu_products.py [--seconds 85] [--only tensor,vector,layer,wide] [--json]

Needs an Apple or NVIDIA GPU. Calls form a compiled chain in which each waits for the one before;
weights are rotated through more memory than a cache holds; a figure is the median of rounds in
which the contenders take turns. Bandwidth is of the weights, in per cent of a copy measured in the
same run. `host` is what submitting a call costs. MLX's product stands behind a small operation that
makes it wait for the call before. It stops when its seconds are spent.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
from gpu_timing import Bench as Timed
from gpu_timing import Call, Chain, Times, difference, medians

from turbospark.kernels.gpu import int4_mma
from turbospark.kernels.gpu.int4_gemv import vector_product
from turbospark.kernels.gpu.int4_geometry import VectorGeometry, vector_geometry
from turbospark.kernels.gpu.int4_mma import Geometry, choose_geometry
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import CUDA, GpuTarget
from turbospark.kernels.weights import Norm, QuantizedWeight

DTYPE = mx.bfloat16
CALLS, GRAPHS = 40, 4
ROTATED_BYTES = 320 << 20
SWEPT = [(28672, 4096), (4096, 4096), (4096, 14336)]
SHAPES = [(6144, 4096), (128256, 4096), (2048, 2048), (16384, 2048), (9216, 2560), (2560, 9216)]


@dataclass
class Figure:
    """One line of the table; `us` and `host_us` a call, MLX's own in `mlx_us`."""

    what: str
    us: float
    host_us: float
    tb_s: float
    percent: float
    mlx_us: float
    error: float


def weight_copies(shapes: Sequence[tuple[int, int]], least: int = 1) -> list[list[QuantizedWeight]]:
    """Copies of weights that together exceed a cache."""

    def make(N: int, K: int) -> QuantizedWeight:
        codes = mx.random.randint(0, 1 << 16, (N, K // 4)).astype(mx.uint16).view(mx.uint32)
        scales, biases = (mx.random.normal((N, K // 64)).astype(DTYPE) * 0.01 for _ in range(2))
        mx.eval(codes, scales, biases)
        return QuantizedWeight(codes, scales, biases, 4, 64)

    first = [make(N, K) for N, K in shapes]
    count = max(least, min(CALLS, ROTATED_BYTES // sum(w.nbytes for w in first)))
    return [first, *([make(N, K) for N, K in shapes] for _ in range(count - 1))]


def linked(launch: Callable[..., list[mx.array]], product: Int4Product, x: mx.array) -> Call:
    """A launch that waits for its link: it stands where an absent residual would."""
    shaped = product.outputs(x)[0][0]

    def call(link: mx.array, _: int) -> mx.array:
        assert not product.residual
        return launch(product, x, link if link.shape == shaped else None)[0]

    return call


def tensor_candidates(product: Int4Product, rows: int) -> Iterator[Geometry]:
    default = choose_geometry(product, rows)
    yield default
    found = [
        replace(default, tall=tall, step=step, blocks=blocks, stages=stages)
        for tall, step, blocks, stages in (
            (1, 4, 1, 6), (1, 4, 2, 3), (1, 4, 3, 3), (1, 4, 4, 2), (1, 8, 2, 3), (1, 8, 1, 4),
            (2, 4, 1, 4), (2, 4, 2, 3), (2, 4, 2, 2), (2, 8, 1, 3),
        )
    ]  # fmt: skip
    if product.norm is None:
        found += [
            replace(default, staged=not default.staged, stages=3),
            replace(default, staged=not default.staged, stages=3, blocks=1, tall=2),
        ]
    for cut in found:
        if cut != default and int4_mma.fits(product, rows, cut):
            yield cut


def vector_candidates(
    target: GpuTarget, product: Int4Product, rows: int
) -> Iterator[VectorGeometry]:
    default = vector_geometry(target.name, product, rows)
    yield default
    for per_group, simdgroups in ((1, 4), (1, 8), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8), (8, 2)):
        cut = replace(default, rows=per_group, simdgroups=simdgroups)
        if cut != default and rows * (8 + per_group) <= 128:
            yield cut


class Bench(Timed):
    def __init__(self, seconds: float, as_json: bool) -> None:
        super().__init__(seconds)
        self._as_json = as_json

    def show(self, figure: Figure, chain: Chain) -> None:
        if self._as_json:
            print(json.dumps(figure.__dict__), flush=True)
            return
        theirs = f"MLX {figure.mlx_us:6.1f} us" if figure.mlx_us else ""
        print(
            f"{figure.what:70s} {figure.us:7.2f} us  host {figure.host_us:5.2f}  "
            f"{figure.tb_s:5.2f} TB/s {figure.percent:4.0f} %  err {figure.error:.0e}  "
            f"first {chain.first_s:4.1f} s  {theirs}",
            flush=True,
        )

    def figure(self, what: str, nbytes: int, ours: Times, error: float) -> Figure:
        tb_s = nbytes / ours.us / 1e6
        return Figure(what, *ours, tb_s, 100 * tb_s / self.copy, 0.0, error)

    def launches(self, products: Sequence[Int4Product], x: mx.array, cut: object) -> Call:
        """One kernel over all copies of a weight."""

        def launch(product: Int4Product, x: mx.array, link: mx.array | None) -> list[mx.array]:
            if isinstance(cut, Geometry):
                return int4_mma.int4_mma(product, x, link, self.target, cut)
            assert isinstance(cut, VectorGeometry)
            return vector_product(product, x, link, self.target, cut)

        calls = [linked(launch, product, x) for product in products]
        return lambda link, number: calls[number % len(calls)](link, number)

    def products(
        self, shape: tuple[int, int], rows: int, *, tensor: bool, swept: bool = False
    ) -> None:
        """Every candidate, and MLX's product, on one shape."""
        copies = weight_copies([shape])
        products = [Int4Product((w,), (None,)) for (w,) in copies]
        x = mx.random.normal((rows, shape[1])).astype(DTYPE)
        mx.eval(x)
        first = products[0]
        cuts: list[Geometry | VectorGeometry] = list(
            tensor_candidates(first, rows)
            if tensor
            else vector_candidates(self.target, first, rows)
        )
        theirs = Chain(mlx_call([w for (w,) in copies], x), x[:1, :1], CALLS, GRAPHS)
        for index, cut in enumerate(cuts if swept else cuts[:1]):
            if self.is_over:
                return
            self._one(shape, rows, cut, products, x, (theirs,) if index == 0 else ())

    def _one(
        self,
        shape: tuple[int, int],
        rows: int,
        cut: Geometry | VectorGeometry,
        products: Sequence[Int4Product],
        x: mx.array,
        others: Sequence[Chain],
    ) -> None:
        name = f"{shape[0]}x{shape[1]} M={rows} {short(cut)}"
        try:
            call = self.launches(products, x, cut)
            wanted = products[0].reference(x, None)[0]
            error = difference(call(mx.zeros((1,)), 0), wanted)
            chain = Chain(call, mx.zeros((rows, shape[0]), DTYPE), CALLS, GRAPHS)
            ours, *rest = medians([chain, *others])
        except (RuntimeError, ValueError) as problem:
            print(f"{name}: {problem}", flush=True)
            return
        figure = self.figure(name, products[0].nbytes, ours, error)
        if rest:
            figure.mlx_us = rest[0].us
        self.show(figure, chain)

    def layer(self, rows: int, tensor: bool) -> None:
        """The products of a Llama-8B layer in their fused forms: four launches."""
        shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096),
                  (14336, 4096), (14336, 4096), (4096, 14336)]  # fmt: skip
        copies = weight_copies(shapes, 3)
        norm = Norm(mx.ones((4096,), DTYPE), 1e-5)

        def launch(product: Int4Product, x: mx.array, added: mx.array | None) -> list[mx.array]:
            if tensor:
                return int4_mma.int4_mma(product, x, added, self.target)
            return vector_product(product, x, added, self.target)

        def call(h: mx.array, number: int) -> mx.array:
            q, k, v, o, gate, up, down = copies[number % len(copies)]
            heads = launch(Int4Product((q, k, v), (None,) * 3, norm), h, None)[0]
            h = launch(Int4Product((o,), (None,), residual=True), heads, h)[0]
            pair = Int4Product((gate, up), (None,) * 2, norm, "silu")
            inner = launch(pair, h, None)[0]
            return launch(Int4Product((down,), (None,), residual=True), inner, h)[0]

        chain = Chain(call, mx.random.normal((rows, 4096)).astype(DTYPE), CALLS, GRAPHS)
        (ours,) = medians([chain])
        nbytes = sum(w.nbytes for w in copies[0])
        self.show(self.figure(f"layer of llama-8B, M={rows}, 4 launches", nbytes, ours, 0.0), chain)

    def wide(self, shape: tuple[int, int]) -> None:
        """From how many rows a dense product with the dequantized weight is faster."""
        copies = [w for (w,) in weight_copies([shape])]
        for rows in (16, 32, 64, 128, 256, 512, 2048):
            if self.is_over:
                return
            x = mx.random.normal((rows, shape[1])).astype(DTYPE)
            mx.eval(x)

            def dense(link: mx.array, number: int, x: mx.array = x) -> mx.array:
                w = copies[number % len(copies)]
                values = mx.dequantize(w.codes, w.scales, w.biases, group_size=64, bits=4)
                return 1e-6 * ((x + link) @ values.T)[:1, :1]

            calls = (dense, mlx_call(copies, x))
            # A graph that meets a weight twice dequantizes it once.
            wide, quantized = medians([Chain(c, x[:1, :1], len(copies), GRAPHS) for c in calls])
            print(
                f"{shape[0]}x{shape[1]} {rows:5d} rows: dense {wide.us:8.1f} us  "
                f"quantized {quantized.us:8.1f} us",
                flush=True,
            )


def mlx_call(weights: Sequence[QuantizedWeight], x: mx.array) -> Call:
    """MLX's product; a number of its result joins the next x."""

    def call(link: mx.array, number: int) -> mx.array:
        w = weights[number % len(weights)]
        y = mx.quantized_matmul(x + link, w.codes, w.scales, w.biases, group_size=64, bits=4)
        return 1e-6 * y[:1, :1]

    return call


def short(cut: Geometry | VectorGeometry) -> str:
    if isinstance(cut, VectorGeometry):
        return f"rows {cut.rows} simdgroups {cut.simdgroups} words {cut.words}"
    staged = "staged" if cut.staged else "direct"
    return (
        f"warps {cut.warps} tall {cut.tall} step {cut.step} blocks {cut.blocks} "
        f"stages {cut.stages} {staged}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="tensor,layer,wide,vector", help="parts, comma separated")
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    bench = Bench(arguments.seconds, arguments.json)
    for part in plan(bench, arguments.only.split(",")):
        part()
    if bench.is_over:
        print("stopped: its seconds are spent", flush=True)


def plan(bench: Bench, parts: Sequence[str]) -> Iterator[Callable[[], None]]:
    """What to measure, the most telling first."""
    is_cuda = bench.target.name == CUDA.name
    has_tensor = is_cuda and "tensor" in parts
    for rows in (1, 8):
        if has_tensor:
            yield from (partial(bench.products, s, rows, tensor=True) for s in SWEPT)
        if "layer" in parts:
            yield partial(bench.layer, rows, is_cuda)
    if has_tensor:
        yield from (partial(bench.products, s, 1, tensor=True, swept=True) for s in SWEPT)
    if "wide" in parts and is_cuda:
        yield partial(bench.wide, (14336, 4096))
    for rows in (1, 8, 2, 4):
        if has_tensor:
            yield from (partial(bench.products, s, rows, tensor=True) for s in SHAPES)
    if has_tensor:
        yield from (partial(bench.products, s, 8, tensor=True, swept=True) for s in SWEPT)
    if "vector" in parts:
        yield from (partial(bench.products, s, 1, tensor=False, swept=not is_cuda) for s in SWEPT)


if __name__ == "__main__":
    main()
