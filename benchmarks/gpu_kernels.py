"""How fast are the GPU bodies, next to MLX's own operations on the same arrays?

    python benchmarks/gpu_kernels.py [--only gemv,norm,attention] [--repeats 7] [--json]

Needs an Apple or NVIDIA GPU. A figure is the median over the rounds of a chain of calls, each of
which waits for the one before; chains of both contenders take turns, and a chain of the glue alone
is taken off. Weights and caches are rotated through more memory than a cache holds.
gpu_products.py has more on products.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx

from turbospark.kernels.gpu.attention_decode import attention_decode
from turbospark.kernels.gpu.int4_gemv import int4_gemv
from turbospark.kernels.gpu.kernel import current_target
from turbospark.kernels.gpu.rms_norm import rms_norm
from turbospark.kernels.kv_rows import KVRows, RowBlock
from turbospark.kernels.weights import Norm, QuantizedWeight

CALLS = 40  # of a chain
ROTATED_BYTES = 400 << 20
DTYPE = mx.bfloat16
GEMV_SHAPES = [(4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (2816, 704), (640, 2048)]
ATTENTION = [(32, 8, 128), (8, 1, 256), (8, 2, 512), (64, 8, 64)]  # Hq, Hkv, D
LENGTHS = [512, 2048, 16384, 65536]
ROWS = [1, 2, 4, 8]

Step = Callable[[mx.array, int], mx.array]
"""(x, number of the call) -> y; only a number of y goes on to the next x."""


@dataclass(frozen=True)
class Figure:
    """Microseconds a call, ours and MLX's, and the bandwidth that ours reached."""

    what: str
    ours_us: float
    mlx_us: float
    ours_gb_s: float
    ratio: float


def chain(step: Step | None, x: mx.array) -> Callable[[], None]:
    """CALLS dependent calls, compiled into one graph."""

    def run(x: mx.array) -> mx.array:
        for call in range(CALLS):
            y = x if step is None else step(x, call)
            x = x + 1e-6 * y.reshape(-1)[:1].astype(x.dtype)
        return x

    compiled = mx.compile(run)

    def evaluate() -> None:
        mx.eval(compiled(x))

    return evaluate


def seconds(run: Callable[[], None]) -> float:
    """Wall time of one chain."""
    mx.synchronize()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def compare(what: str, x: mx.array, ours: Step, theirs: Step, nbytes: int, repeats: int) -> Figure:
    """Time both, in turns."""
    chains = [chain(step, x) for step in (ours, theirs, None)]
    for run in chains:
        run()
    rounds = [[seconds(run) for run in chains] for _ in range(repeats)]
    ours_s, theirs_s, glue_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    ours_us, mlx_us = (max(t - glue_s, 1e-9) / CALLS * 1e6 for t in (ours_s, theirs_s))
    return Figure(what, ours_us, mlx_us, nbytes / ours_us / 1e3, mlx_us / ours_us)


def weights(N: int, K: int) -> list[QuantizedWeight]:
    """Copies of a weight that together exceed what a cache holds."""
    first = QuantizedWeight(*mx.quantize(mx.random.normal((N, K)).astype(DTYPE)), 4, 64)
    count = min(CALLS, max(1, ROTATED_BYTES // first.nbytes))
    made = [
        QuantizedWeight(first.codes + 0, first.scales + 0, first.biases + 0, 4, 64)
        for _ in range(count)
    ]
    mx.eval([[w.codes, w.scales, w.biases] for w in made])
    return made


def gemv_steps(made: Sequence[QuantizedWeight]) -> tuple[Step, Step]:
    def ours(x: mx.array, call: int) -> mx.array:
        return int4_gemv(x, made[call % len(made)])

    def theirs(x: mx.array, call: int) -> mx.array:
        w = made[call % len(made)]
        return mx.quantized_matmul(x, w.codes, w.scales, w.biases)

    return ours, theirs


def gemv_figures(repeats: int) -> Iterator[Figure]:
    for N, K in GEMV_SHAPES:
        made = weights(N, K)
        for rows in ROWS:
            x = mx.random.normal((rows, K)).astype(DTYPE)
            yield compare(
                f"int4_gemv {rows} x {K} -> {N}", x, *gemv_steps(made), made[0].nbytes, repeats
            )


def norm_figures(repeats: int) -> Iterator[Figure]:
    for C in (640, 2048, 4096, 5376):
        weight = mx.random.normal((C,))
        norm, narrow = Norm(weight, 1e-6), weight.astype(DTYPE)
        for rows in (1, 8):
            x = mx.random.normal((rows, C)).astype(DTYPE)
            yield compare(
                f"rms_norm {rows} x {C}",
                x,
                lambda x, _, norm=norm: rms_norm(x, norm),
                lambda x, _, narrow=narrow: mx.fast.rms_norm(x, narrow, 1e-6),
                2 * x.nbytes + weight.nbytes,
                repeats,
            )


def attention_figures(repeats: int) -> Iterator[Figure]:
    for Hq, Hkv, D in ATTENTION:
        for length in LENGTHS:
            caches = kv_rows(Hkv, D, length)
            for rows in ROWS:
                q = mx.random.normal((rows, Hq, D)).astype(DTYPE)
                name = f"attention {rows} rows, {Hq}:{Hkv} heads of {D}, {length} keys"
                nbytes = 4 * Hkv * D * length
                yield compare(name, q, *attention_steps(caches, D**-0.5), nbytes, repeats)


def kv_rows(Hkv: int, D: int, length: int) -> list[KVRows]:
    boundary = (length - 1) // 128 * 128
    count = min(CALLS, max(1, ROTATED_BYTES // (4 * Hkv * D * length)))

    def block(rows: int) -> RowBlock:
        k, v = (mx.random.normal((Hkv, rows, D)).astype(DTYPE) for _ in range(2))
        mx.eval(k, v)
        return RowBlock(k, v)

    return [KVRows(block(boundary), block(128), 0, boundary, length) for _ in range(count)]


def attention_steps(caches: Sequence[KVRows], scale: float) -> tuple[Step, Step]:
    """MLX's side gets its keys and values whole, which its own caches keep that way."""
    whole = [
        tuple(
            mx.contiguous(mx.concatenate([sealed, tail[:, : rows.end - rows.boundary]], axis=1))
            for sealed, tail in ((rows.sealed.k, rows.tail.k), (rows.sealed.v, rows.tail.v))
        )
        for rows in caches
        if rows.sealed and rows.tail
    ]
    mx.eval(whole)

    def ours(q: mx.array, call: int) -> mx.array:
        return attention_decode(q, caches[call % len(caches)], scale)

    def theirs(q: mx.array, call: int) -> mx.array:
        k, v = whole[call % len(whole)]
        return mx.fast.scaled_dot_product_attention(
            q.swapaxes(0, 1)[None], k[None], v[None], scale=scale, mask="causal"
        )

    return ours, theirs


SUITES = {"gemv": gemv_figures, "norm": norm_figures, "attention": attention_figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SUITES), help="suites, comma separated")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    target = current_target()
    if target is None:
        sys.exit("gpu_kernels.py needs a GPU, but MLX computes on the CPU here")
    print(f"{target.name}, MLX {mx.__version__}, {DTYPE}", file=sys.stderr)
    for name in arguments.only.split(","):
        for figure in SUITES[name](arguments.repeats):
            if arguments.json:
                print(json.dumps(asdict(figure)), flush=True)
            else:
                print(
                    f"{figure.what:68s} {figure.ours_us:8.1f} us  MLX {figure.mlx_us:8.1f} us  "
                    f"{figure.ratio:5.2f}x  {figure.ours_gb_s:7.0f} GB/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
