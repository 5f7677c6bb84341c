"""How near to the memory's speed is attention on a CPU, and how fast is it over a prompt?

    python benchmarks/attention.py [--repeats 21] [--isa auto] [--threads 0] [--json]

Decode reads every key and value once: bytes a second of one call, against a plain read of a large
block in the same round, on the same threads. That read also empties the caches, as a model's
weights do between two calls; a small call behind it wakes the threads, as the call before does.
Prefill is bound by arithmetic: the products of the causal half of a prompt. The head norms with
RoPE stand beside them as they do in a layer. Figures are medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from turbospark.caches.kv import KVCache
from turbospark.kernels.host.cpu import core_count
from turbospark.kernels.host.target import HostKernels
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

SHAPES = {
    "gemma3-270m": HeadGeometry(4, 1, 256),
    "llama-8b": HeadGeometry(32, 8, 128),
    "qwen2-0.5b": HeadGeometry(14, 2, 64),
}
CONTEXTS = (16, 512, 4096, 16384)
PROMPTS = (256, 2048)
READ_BYTES = 128 << 20


@dataclass(frozen=True)
class Figure:
    what: str
    microseconds: float
    speed: float
    unit: str
    percent_of_read: float | None = None


def main() -> None:
    options = parse_arguments()
    kernels = HostKernels(KernelPolicy(kernels="host", isa=options.isa, threads=options.threads))
    figures = []
    with ThreadPoolExecutor(options.threads or core_count()) as pool:
        read = reader(pool, options.threads or core_count())
        for name, heads in SHAPES.items():
            figures += [decode(name, heads, kernels, n, read, options.repeats) for n in CONTEXTS]
            figures += [prefill(name, heads, kernels, n, options.repeats // 4) for n in PROMPTS]
    if options.json:
        print(json.dumps({"kernels": kernels.describe(), "figures": list(map(asdict, figures))}))
        return
    print(kernels.describe())
    for figure in figures:
        share = f"{figure.percent_of_read:5.0f} % of a read" if figure.percent_of_read else ""
        print(
            f"{figure.what:42}{figure.microseconds:10.1f} us{figure.speed:9.1f} {figure.unit} "
            f"{share}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time attention on a CPU.")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--isa", default="auto", choices=["auto", "avx512", "avx2", "generic"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def reader(pool: ThreadPoolExecutor, threads: int) -> Callable[[], object]:
    """A plain read of READ_BYTES by as many threads as the kernels have."""
    parts = np.array_split(np.ones(READ_BYTES // 8, np.int64), threads)
    return lambda: list(pool.map(np.max, parts))


def decode(
    name: str,
    heads: HeadGeometry,
    kernels: HostKernels,
    context: int,
    read: Callable[[], object],
    repeats: int,
) -> Figure:
    cache = filled(heads, context)
    q = mx.random.normal((1, heads.num_heads, heads.head_dim))
    attend = kernels.attend(heads, heads.head_dim**-0.5, None, None)
    assert attend is not None
    small = filled(heads, 512)  # enough for every thread
    reading: list[float] = []
    attending: list[float] = []
    for _ in range(repeats):
        reading.append(timed(read))
        attend(q, small, Phase.DECODE)
        attending.append(timed(lambda: attend(q, cache, Phase.DECODE)))
    seconds = statistics.median(attending)
    speed = 2 * context * heads.num_kv_heads * heads.head_dim * 4 / seconds
    plain = READ_BYTES / statistics.median(reading)
    what = f"{name} decode at {context}"
    return Figure(what, seconds * 1e6, speed / 1e9, "GB/s", 100 * speed / plain)


def prefill(
    name: str, heads: HeadGeometry, kernels: HostKernels, tokens: int, repeats: int
) -> Figure:
    Hq, Hkv, D = heads.num_heads, heads.num_kv_heads, heads.head_dim
    cache = KVCache(Hkv, D, tokens)
    rows = [mx.random.normal((tokens, count * D)) for count in (Hq, Hkv, Hkv)]
    mx.eval(rows)
    rope = Rope.build("default", 10_000.0, D)
    rotate = kernels.head_norm_rope(heads, None, None, None, rope)
    attend = kernels.attend(heads, D**-0.5, None, None)
    assert rotate is not None
    assert attend is not None

    def layer() -> None:
        cache.rewind(cache.offset)
        attend(rotate(*rows, cache, Phase.PREFILL), cache, Phase.PREFILL)

    layer()
    seconds = statistics.median(timed(layer) for _ in range(max(3, repeats)))
    products = 2 * 2 * Hq * D * tokens * tokens / 2
    return Figure(f"{name} prefill of {tokens}", seconds * 1e6, products / seconds / 1e9, "GFLOP/s")


def filled(heads: HeadGeometry, rows: int) -> KVCache:
    cache = KVCache(heads.num_kv_heads, heads.head_dim, rows)
    k = mx.random.normal((rows - 1, heads.num_kv_heads, heads.head_dim))
    cache.append(k, k)
    cache.append(k[:1], k[:1])
    return cache


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
