"""How fast is the attention side of a decode step on a GPU, and which geometry is best?

    python benchmarks/gpu_attention.py [--seconds 85] [--only joined,chunks,main,heads,...]

Needs an Apple or NVIDIA GPU. Calls form a compiled chain in which each waits for the one before;
caches are rotated through more memory than a cache holds; a figure is the median of rounds in which
ours and MLX's operations take turns. Times of attention are those of the GPU alone: a chain waits
behind work that the host submits before it. Bandwidth is of the keys and values, in per cent of a
copy measured in the same run; `error` is the largest difference over MLX's largest number. `joined`
sets norms, rotation, cache rows, attention and gate as one unit against one after the other
(`apart`), and against attention alone. It stops when its seconds are spent.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import mlx.core as mx
from gpu_timing import Bench as Timed
from gpu_timing import Busy, Call, Chain, difference, medians

from turbospark.kernels.gpu import attention_geometry
from turbospark.kernels.gpu.attention_decode import attention_step
from turbospark.kernels.gpu.attention_geometry import Chunks
from turbospark.kernels.gpu.head_norm_rope import HeadUnit, head_norm_rope
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.gpu.rotated_attention import HeadInputs, RotatedLayer, rotated_attention
from turbospark.kernels.gpu.step_rows import lengths_of
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import AttentionLayer, HeadGeometry
from turbospark.kernels.weights import Norm

DTYPE = mx.bfloat16
CALLS, GRAPHS = 24, 2
ROTATED_BYTES = 160 << 20
TAIL = 128
MAIN = [(128, 32, 8), (64, 32, 8), (256, 16, 4), (512, 16, 2), (128, 64, 8), (64, 16, 2)]
MORE = [(256, 16, 2), (128, 8, 2), (512, 8, 4), (64, 64, 8), (256, 32, 8), (96, 32, 4)]
LENGTHS = [32768, 2048, 16]
ROWS = [1, 8, 4, 2]
JOINED = [(128, 32, 8), (256, 16, 4), (64, 32, 8), (512, 16, 2), (512, 16, 1)]
GATED = (256, 16, 4)  # as qwen3_5 has it

Link = Sequence[mx.array]


def chained(
    *calls: Call, start: Link, is_compiled: bool = True, busy: Busy | None = None
) -> list[float]:
    """Microseconds of each contender's call; behind `busy` those of the GPU alone."""
    chains = [Chain(call, start, CALLS, GRAPHS, is_compiled=is_compiled) for call in calls]
    return [times.us for times in medians(chains, busy)]


class Bench(Timed):
    """Prints a table."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._busy = Busy()

    def attention(self, shape: tuple[int, int, int], length: int, rows: int, cut: str = "") -> None:
        """One line: attention of `rows` queries over `length` rows."""
        D, Hq, Hkv = shape
        caches = step_rows(Hkv, D, length, rows)
        whole = [whole_rows(cache, length) for cache in caches]
        q = mx.random.normal((rows, Hq, D)).astype(DTYPE)
        swapped = mx.contiguous(q.swapaxes(0, 1)[None])
        mx.eval(q, swapped, whole)
        scale = D**-0.5

        def ours(link: Link, call: int) -> Link:
            y = attention_step(link[0], caches[call % len(caches)], scale, target=self.target)
            return [mx.reshape(y, q.shape)]

        def theirs(link: Link, call: int) -> Link:
            k, v = whole[call % len(whole)]
            mask = "causal" if rows > 1 else None
            return [mx.fast.scaled_dot_product_attention(link[0], k, v, scale=scale, mask=mask)]

        one, other = ours([q], 0)[0], theirs([swapped], 0)[0][0].swapaxes(0, 1)
        chains = [Chain(ours, [q], CALLS, GRAPHS)]
        chains += [] if cut else [Chain(theirs, [swapped], CALLS, GRAPHS)]
        us, *rest = (times.us for times in medians(chains, self._busy))
        nbytes = 4 * Hkv * D * length
        what = f"{length:6d} rows  D {D:3d}  {Hq:2d}:{Hkv} heads  M {rows}  {cut}"
        self.line(what, us, rest[0] if rest else None, nbytes, difference(one, other))

    def joined(self, shape: tuple[int, int, int], length: int, rows: int) -> None:
        """One line: all between a layer's projections, as one unit and one after the other."""
        D, Hq, Hkv = shape
        caches = step_rows(Hkv, D, length, rows)
        weight = mx.random.normal((D,)).astype(DTYPE)
        q, k, v = (mx.random.normal((rows, H * D)).astype(DTYPE) for H in (Hq, Hkv, Hkv))
        gate = mx.random.normal((rows, Hq * D)).astype(DTYPE) if shape == GATED else None
        mx.eval(q, k, v, weight)
        norm = Norm(weight, 1e-6)
        rope = Rope.build("default", 1e6, D)
        layer = AttentionLayer(HeadGeometry(Hq, Hkv, D), rope, (norm, norm, None), D**-0.5)
        rotated = RotatedLayer.build(layer)

        def whole(link: Link, call: int) -> Link:
            inputs = HeadInputs(link[0], k, v, gate)
            given = caches[call % len(caches)]
            y, tail = rotated_attention(inputs, given, rotated, target=self.target)
            assert tail is not None
            return [y, tail.k, tail.v]

        def apart(link: Link, call: int) -> Link:
            given = caches[call % len(caches)]
            heads, tail = head_norm_rope(link[0], k, v, given, rotated.unit, target=self.target)
            assert tail is not None
            sealed = tail if given.sealed is given.tail else given.sealed
            step = StepRows(sealed, tail, given.lengths)
            y = attention_step(heads, step, layer.scale, target=self.target)
            return [y if gate is None else y * mx.sigmoid(gate), tail.k, tail.v]

        def alone(link: Link, call: int) -> Link:
            heads = mx.reshape(link[0], (rows, Hq, D))
            y = attention_step(heads, caches[call % len(caches)], layer.scale, target=self.target)
            return [y, *link[1:]]

        # A graph does not compile whose inputs it also reads by themselves.
        start = [q, caches[0].tail.k + 0, caches[0].tail.v + 0]
        error = difference(whole(start, 0)[0], apart(start, 0)[0])
        us, apart_us, alone_us = chained(whole, apart, alone, start=start, busy=self._busy)
        nbytes = 4 * Hkv * D * length
        shares = [nbytes / time / 1e6 / self.copy * 100 for time in (us, alone_us)]
        what = f"{length:6d} rows  D {D:3d}  {Hq:2d}:{Hkv} heads  M {rows}"
        print(
            f"{what:40s} joined {us:6.1f} us {shares[0]:3.0f} % of a copy  "
            f"apart {apart_us:6.1f} us {apart_us / us:5.2f}x  "
            f"attention alone {alone_us:6.1f} us {shares[1]:3.0f} %  error {error:.1e}",
            flush=True,
        )

    def line(self, what: str, us: float, mlx_us: float | None, nbytes: int, error: float) -> None:
        ratio = "" if mlx_us is None else f"  MLX {mlx_us:7.1f} us {mlx_us / us:5.2f}x"
        print(
            f"{what:58s} {us:7.1f} us {self.bandwidth(nbytes, us)}{ratio}  error {error:.1e}",
            flush=True,
        )


def step_rows(Hkv: int, D: int, length: int, rows: int) -> list[StepRows]:
    """Caches that together exceed a GPU's own; `length` rows, the queries' among them."""
    boundary = (length - 1) // TAIL * TAIL
    count = min(CALLS, max(1, ROTATED_BYTES // (4 * Hkv * D * length)))

    def block(capacity: int) -> RowBlock:
        k, v = (mx.random.normal((Hkv, capacity, D)).astype(DTYPE) for _ in range(2))
        mx.eval(k, v)
        return RowBlock(k, v)

    lengths, made = lengths_of(boundary, length - rows), list[StepRows]()
    for _ in range(count):
        tail = block(TAIL)
        made.append(StepRows(block(boundary) if boundary else tail, tail, lengths))
    return made


def whole_rows(rows: StepRows, length: int) -> list[mx.array]:
    """Keys and values side by side, as MLX's own caches keep them."""
    made = []
    for name in ("k", "v"):
        sealed, tail = getattr(rows.sealed, name), getattr(rows.tail, name)
        held = length if rows.sealed is rows.tail else length - sealed.shape[1]
        parts = [tail[:, :held]] if rows.sealed is rows.tail else [sealed, tail[:, :held]]
        made.append(mx.contiguous(mx.concatenate(parts, axis=1))[None])
    return made


def joined_figures(bench: Bench) -> Iterator[None]:
    for length in reversed(LENGTHS):
        for shape in JOINED:
            yield bench.joined(shape, length, 1)
    for length in reversed(LENGTHS):
        yield bench.joined(JOINED[0], length, 8)


def chunk_figures(bench: Bench) -> Iterator[None]:
    """Whether a longer first chunk, and so one launch for more rows, costs less than a second."""
    for shape in JOINED[:2]:
        for length in (200, 380, 2048):
            for size in (128, 256, 512):
                cut = Chunks(size, 16, 2)
                with mock.patch.object(attention_geometry, "chunks", lambda *_, c=cut, **__: c):
                    print(f"chunks of {size:3d}", end=" ")
                    yield bench.joined(shape, length, 1)


def main_figures(bench: Bench) -> Iterator[None]:
    for rows in ROWS[:2]:
        for length in LENGTHS:
            for shape in MAIN:
                yield bench.attention(shape, length, rows)


def more_figures(bench: Bench) -> Iterator[None]:
    for rows in ROWS[2:]:
        for length in LENGTHS:
            for shape in MAIN[:4]:
                yield bench.attention(shape, length, rows)
    for shape in MORE:
        for rows in ROWS[:2]:
            for length in LENGTHS[:2]:
                yield bench.attention(shape, length, rows)


CUTS: dict[int, list[tuple[int, int, int]]] = {
    64: [(64, 4, 4), (64, 4, 2), (64, 8, 2), (64, 2, 4)],
    128: [(64, 4, 2), (64, 4, 1), (64, 8, 1), (64, 4, 4)],
    256: [(64, 8, 1), (64, 4, 1), (64, 4, 2)],
    512: [(64, 8, 1)],
}


def cut_figures(bench: Bench) -> Iterator[None]:
    """Geometry of the first pass: columns, warps and key tiles of a warp; first chunks."""
    for shape in MAIN[:4]:
        D, _, Hkv = shape
        default = attention_geometry.TENSOR_SHAPES[D]
        for dims, warps, tiles in CUTS[D]:
            keys = 8 * warps * tiles
            for size in (keys, 2 * keys, 4 * keys):
                for first in (max(16, 128 // Hkv), max(16, 256 // Hkv), 512 // Hkv):
                    if (dims, warps, tiles) != default and first != max(16, 256 // Hkv):
                        continue
                    chunks = Chunks(size, first)
                    with (
                        mock.patch.dict(
                            attention_geometry.TENSOR_SHAPES, {D: (dims, warps, tiles)}
                        ),
                        mock.patch.object(
                            attention_geometry, "chunks", lambda *_, c=chunks, **__: c
                        ),
                    ):
                        cut = f"{warps}x{tiles} chunks {size}x{first}"
                        for length in LENGTHS[:2]:
                            yield bench.attention(shape, length, 1, cut)
    vector = replace(bench.target, own="")
    with mock.patch.object(bench, "target", vector):
        for shape in MAIN[:4]:
            yield bench.attention(shape, LENGTHS[0], 1, "vector body")


def norm_figures(bench: Bench) -> Iterator[None]:
    for C in (2048, 4096, 5376):
        weight = mx.random.normal((C,)).astype(DTYPE)
        norm = Norm(weight, 1e-6)
        for rows in (1, 8):
            x = mx.random.normal((rows, C)).astype(DTYPE)
            mx.eval(x, weight)
            for is_compiled in (True, False):
                us, mlx_us = chained(
                    lambda link, _, n=norm: [rms_norm(link[0], n, target=bench.target)],
                    lambda link, _, w=weight: [mx.fast.rms_norm(link[0], w, 1e-6)],
                    start=[x],
                    is_compiled=is_compiled,
                )
                error = difference(
                    rms_norm(x, norm, target=bench.target), mx.fast.rms_norm(x, weight, 1e-6)
                )
                what = f"rms_norm {rows} x {C}, {'compiled' if is_compiled else 'eager'}"
                yield bench.line(what, us, mlx_us, 2 * x.nbytes + weight.nbytes, error)
        x, r = (mx.random.normal((1, C)).astype(DTYPE) for _ in range(2))
        mx.eval(x, r)

        def ours(link: Link, _: int, norm: Norm = norm, r: mx.array = r) -> Link:
            return [rms_norm(link[0], norm, r, target=bench.target)]

        def theirs(link: Link, _: int, w: mx.array = weight, r: mx.array = r) -> Link:
            return [r + mx.fast.rms_norm(link[0], w, 1e-6)]

        us, mlx_us = chained(ours, theirs, start=[x])
        error = difference(ours([x], 0)[0], theirs([x], 0)[0])
        yield bench.line(f"rms_norm 1 x {C} + residual", us, mlx_us, 4 * x.nbytes, error)


def head_figures(bench: Bench) -> Iterator[None]:
    """Norms of queries and keys, RoPE, rows of the tail, against one MLX operation each."""
    for D, Hq, Hkv in (MAIN[0], MAIN[1], MAIN[2]):
        weight = mx.random.normal((D,)).astype(DTYPE)
        rope, norm = Rope.build("default", 1e6, D), Norm(weight, 1e-6)
        unit = HeadUnit.build(HeadGeometry(Hq, Hkv, D), rope, q_norm=norm, k_norm=norm)
        tail = mx.zeros((Hkv, TAIL, D), DTYPE)
        lengths, held = lengths_of(896, 1000), mx.array([104], mx.int32)
        for rows in (1, 8):
            q, k, v = (mx.random.normal((rows, H * D)).astype(DTYPE) for H in (Hq, Hkv, Hkv))
            mx.eval(q, k, v, tail, held, weight)

            def ours(link: Link, _: int, unit=unit, k=k, v=v, lengths=lengths) -> Link:
                q, *tails = link
                block = RowBlock(*tails)
                y, made = head_norm_rope(
                    q, k, v, StepRows(block, block, lengths), unit, target=bench.target
                )
                assert made is not None
                return [mx.reshape(y, q.shape), made.k, made.v]

            def theirs(link: Link, _: int, k=k, v=v, w=weight, D=D, held=held, rows=rows) -> Link:
                q, *tails = link
                heads = [
                    mx.fast.rms_norm(mx.reshape(x, (rows, -1, D)), w, 1e-6).swapaxes(0, 1)[None]
                    for x in (q, k)
                ]
                y, keys = (
                    mx.fast.rope(x, D, traditional=False, base=1e6, scale=1.0, offset=held + 896)[0]
                    for x in heads
                )
                values = mx.reshape(v, (rows, -1, D)).swapaxes(0, 1)
                new = [
                    mx.slice_update(old, x, held, axes=[1])
                    for old, x in zip(tails, (keys, values), strict=True)
                ]
                return [mx.reshape(y.swapaxes(0, 1), q.shape), *new]

            start = [q, tail, tail + 0]
            error = difference(ours(start, 0)[1][:, :105], theirs(start, 0)[1][:, :105])
            for is_compiled in (True, False):
                us, mlx_us = chained(ours, theirs, start=start, is_compiled=is_compiled)
                mode = "compiled" if is_compiled else "eager"
                what = f"heads of {D}, {Hq}:{Hkv}, M {rows}, {mode}"
                yield bench.line(what, us, mlx_us, 4 * tail.nbytes, error)


SUITES = {
    "joined": joined_figures,
    "chunks": chunk_figures,
    "main": main_figures,
    "norms": norm_figures,
    "heads": head_figures,
    "cuts": cut_figures,
    "more": more_figures,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--only", default=",".join(SUITES), help="suites, comma separated")
    arguments = parser.parse_args()
    bench = Bench(arguments.seconds)
    for name in arguments.only.split(","):
        for _ in SUITES[name](bench):
            if bench.is_over:
                sys.exit(f"out of time in {name}")


if __name__ == "__main__":
    main()
