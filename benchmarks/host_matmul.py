"""How close the host's matrix products come to the memory and arithmetic of this machine.

Decode is memory-bound: its figure is GB/s of weights, beside a plain read of memory measured in
the same run. Prefill is arithmetic: its figure is billions of multiplications a second. Rounds
are interleaved and medians are shown, so that a busy minute hits every line alike.

    python benchmarks/host_matmul.py [--model demo|8b] [--activations pair] [--rounds 9]
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from turbospark.kernels.host.library import open_host
from turbospark.kernels.host.target import HostKernels
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

# name, bits, group, zero, scale dtype, N, K
SHAPES = {
    "demo": [
        ("q Q5_0", 5, 32, True, mx.float16, 1024, 640),
        ("v Q8_0", 8, 32, True, mx.float16, 256, 640),
        ("o Q4_K", 4, 32, False, mx.float32, 640, 1024),
        ("gate Q5_0", 5, 32, True, mx.float16, 2048, 640),
        ("down Q6_K", 6, 16, True, mx.float32, 640, 2048),
        ("head Q8_0", 8, 32, True, mx.float16, 262144, 640),
    ],
    "8b": [
        ("qkv int4", 4, 64, False, mx.bfloat16, 6144, 4096),
        ("o int4", 4, 64, False, mx.bfloat16, 4096, 4096),
        ("gate int4", 4, 64, False, mx.bfloat16, 14336, 4096),
        ("down int4", 4, 64, False, mx.bfloat16, 4096, 14336),
        ("down Q6_K", 6, 16, True, mx.float32, 4096, 14336),
        ("head bf16", 16, 0, True, mx.bfloat16, 32064, 4096),
    ],
}
FOOTPRINT = 400 << 20  # weights cycled through, so that none is found in a cache
PREFILL_ROWS = 256


def draw(bits: int, group: int, zero: bool, dtype: mx.Dtype, N: int, K: int) -> Weight:
    rng = np.random.default_rng(0)
    if not group:
        return mx.array(rng.normal(size=(N, K)).astype(np.float32)).astype(dtype)
    words = rng.integers(0, 1 << 32, (N, K * bits // 32), dtype=np.uint32)
    scales = mx.array(rng.normal(size=(N, K // group)).astype(np.float32) / 99).astype(dtype)
    biases = None if zero else scales * 2
    middle = 1 << (bits - 1) if zero else None
    return QuantizedWeight(mx.array(words), scales, biases, bits, group, middle)


def stream_read(policy: KernelPolicy) -> Callable[[], float]:
    """A function that measures GB/s of a plain read of memory."""
    host = open_host(policy)
    buffer = np.ones(256 << 20, np.uint8)
    read = host.library.ts_stream_read
    read.restype = ctypes.c_int64
    read.argtypes = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)

    def measure() -> float:
        started = time.perf_counter()
        read(host.threads, buffer.ctypes.data, buffer.nbytes)
        return buffer.nbytes / (time.perf_counter() - started) / 1e9

    return measure


class Line:
    """One matrix: what decode and prefill of it reach."""

    def __init__(self, kernels: HostKernels, name: str, *shape) -> None:
        self.name, (*_, self.N, self.K) = name, shape
        first = draw(*shape)
        self.nbytes = first.nbytes
        copies = max(1, min(48, FOOTPRINT // first.nbytes))
        weights = [first] + [draw(*shape) for _ in range(copies - 1)]
        self.runs = [kernels.normed_projections(None, [w], [None]) for w in weights]
        self.figures: dict[str, list[float]] = {"1 row": [], "8 rows": [], "prefill": []}
        rng = np.random.default_rng(1)
        draws = rng.normal(size=(PREFILL_ROWS, self.K)).astype(np.float32)
        self.x = mx.array(draws)
        self.runs[0](self.x, Phase.PREFILL)

    def round(self) -> None:
        for name, rows in (("1 row", self.x[:1]), ("8 rows", self.x[:8])):
            mx.eval(rows)
            started = time.perf_counter()
            for run in self.runs:
                run(rows, Phase.DECODE)
            seconds = (time.perf_counter() - started) / len(self.runs)
            self.figures[name].append(self.nbytes / seconds / 1e9)
        if self.N > 100_000:  # heads see one row of a prompt
            return
        started = time.perf_counter()
        self.runs[0](self.x, Phase.PREFILL)
        seconds = time.perf_counter() - started
        self.figures["prefill"].append(PREFILL_ROWS * self.N * self.K / seconds / 1e9)

    def show(self, bandwidth: float) -> None:
        one, eight, prefill = (
            statistics.median(values) if values else float("nan")
            for values in self.figures.values()
        )
        print(
            f"{self.name:10} {self.N:7} x {self.K:<6} {one:7.1f} GB/s {one / bandwidth:5.0%}"
            f" {one / eight:8.1f}x {prefill:10.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="demo")
    parser.add_argument("--activations", choices=["exact", "pair", "int8"], default="pair")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    policy = KernelPolicy(activations=args.activations, isa=args.isa)
    kernels = HostKernels(policy)
    lines = [Line(kernels, *shape) for shape in SHAPES[args.model]]
    read, reads = stream_read(policy), []
    for _ in range(args.rounds):
        reads.append(read())
        for line in lines:
            line.round()
    bandwidth = statistics.median(reads)
    print(f"{kernels.describe()}; plain read {bandwidth:.1f} GB/s; medians of {args.rounds}")
    print("matrix           N x K            decode, 1 row    8 rows cost   prefill GMAC/s")
    for line in lines:
        line.show(bandwidth)


if __name__ == "__main__":
    main()
