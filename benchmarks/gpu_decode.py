"""How fast does a GPU decode, prefill and verify, next to mlx-lm on the same random weights?

    python benchmarks/gpu_decode.py SHAPE [SHAPE ...] [--contexts 16,2048,32768] [--repeats 5]
                                    [--out parts/] [--layers N] [--profile]
    python benchmarks/gpu_decode.py --merge parts/

One process a call and one pair of models a shape, over the same INT4 arrays. Contenders take
turns; a figure is the median over the rounds. A round decodes STEPS tokens greedily, each token
chosen on the device and read by the host one step later; it starts behind a cache filled with
random rows. Verify feeds M rows a pass, each pass waiting for the one before. Prefill is one pass
over a fresh cache and the logits of its last row. Bytes a token are those of the weights that one
token reads and of the cache rows it attends to; their share is of the copy bandwidth measured in
the same run. `--merge` prints one table of all parts.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gpu_models import SHAPES, Pair, build_pair, shrunk
from mlx_lm.models.cache import make_prompt_cache

from turbospark.kernels.device import on_cpu
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel
from turbospark.settings import KernelPolicy

STEPS = 32
VERIFY = (2, 4, 8)
PREFILL = (512, 2048)
IDENTITY = 32
MARGIN = 0.05
_RANDOM = np.random.default_rng(5)


@dataclass
class Rate:
    """One comparison: milliseconds of a step or a pass for both, and their ratio."""

    what: str
    ours_ms: float
    theirs_ms: float
    tokens: int = 1
    gbytes: float = 0.0

    @property
    def ratio(self) -> float:
        return self.theirs_ms / self.ours_ms

    def line(self, bandwidth: float) -> str:
        rate = 1e3 * self.tokens / self.ours_ms
        read = self.gbytes / self.ours_ms  # GB / ms = TB / s
        share = f"{read:5.2f} TB/s {100 * read / bandwidth:3.0f} %" if self.gbytes else ""
        return (
            f"  {self.what:18s} {self.ours_ms:9.3f} ms {rate:10.1f} tok/s  mlx-lm "
            f"{self.theirs_ms:9.3f} ms  {self.ratio:5.2f}x  {share}"
        )


@dataclass
class Part:
    """The figures of one shape."""

    shape: str
    device: str
    versions: dict[str, str]
    bandwidth: float
    bodies: dict[str, int]
    rates: list[Rate] = field(default_factory=list)
    verdict: str = ""
    peak_gb: float = 0.0

    def show(self) -> None:
        print(f"{self.shape} on {self.device}, copy bandwidth {self.bandwidth:.2f} TB/s")
        for rate in self.rates:
            print(rate.line(self.bandwidth))
        print(f"  {self.verdict}; peak memory {self.peak_gb:.1f} GB\n", flush=True)


class Ours:
    """turbospark's model, its decode step compiled."""

    def __init__(self, pair: Pair) -> None:
        self._model = pair.ours
        self._step = CompiledModel(pair.ours)

    def filled(self, context: int) -> list[Any]:
        """Caches that hold `context` rows."""
        caches = self._model.make_caches(context + 1024, 128)
        self._model(_ids(8), caches, phase=Phase.PREFILL)
        for cache in caches:
            count = context - 8
            if count <= 0:
                continue
            if cache.recurrent:
                cache.advance(count, cache.state)
                continue
            shape = (count, cache.num_kv_heads, cache.head_dim)
            k, v = (mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2))
            cache.append(k, v)
            mx.eval(cache.rows().tail.k)
        return caches

    def step(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        output = self._step(tokens, caches, phase=Phase.DECODE, logits="all")
        return output.logits

    def prefill(self, count: int) -> mx.array:
        caches = self._model.make_caches(count + 8, 128)
        return self._model(_ids(count), caches, phase=Phase.PREFILL).logits

    def started(self) -> tuple[list[Any], mx.array]:
        """Caches behind a short prompt, and its last logits [V]."""
        caches = self._model.make_caches(512, 128)
        output = self._model(_ids(16), caches, phase=Phase.PREFILL)
        return caches, output.logits[-1]


class Theirs:
    """mlx-lm's model, as its own generation loop runs it."""

    def __init__(self, pair: Pair) -> None:
        self._model = pair.theirs

    def filled(self, context: int) -> list[Any]:
        caches = make_prompt_cache(self._model)
        mx.eval(self._model(_ids(8)[None], cache=caches))
        count = context - 8
        for cache in caches:
            if count <= 0 or not hasattr(cache, "keys"):
                continue
            _, heads, _, dims = cache.keys.shape
            shape = (1, heads, count, dims)
            k, v = (mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2))
            mx.eval(cache.update_and_fetch(k, v))
        return caches

    def step(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        return self._model(tokens[None], cache=caches)[0]

    def prefill(self, count: int) -> mx.array:
        caches, ids = make_prompt_cache(self._model), _ids(count)
        self._model(ids[None, :-1], cache=caches)
        mx.eval([cache.state for cache in caches])  # as mlx-lm: no head over the prompt
        return self._model(ids[None, -1:], cache=caches)[0]

    def started(self) -> tuple[list[Any], mx.array]:
        caches = make_prompt_cache(self._model)
        return caches, self._model(_ids(16)[None], cache=caches)[0, -1]


def decode_seconds(contender: Any, caches: list[Any], rows: int) -> float:
    """Seconds a pass of `rows` rows, the host one pass behind."""
    y = mx.array(np.arange(rows, dtype=np.int32))
    mx.eval(y)
    mx.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        following = mx.argmax(contender.step(y, caches), axis=-1).astype(mx.int32)
        mx.async_eval(following)
        np.asarray(y)  # a slice would be an operation behind the pass that has just begun
        y = following
    mx.eval(y)
    return (time.perf_counter() - begin) / STEPS


def prefill_seconds(contender: Any, count: int) -> float:
    mx.synchronize()
    begin = time.perf_counter()
    mx.eval(contender.prefill(count))
    return time.perf_counter() - begin


def compared(
    measure: Callable[[Any], float], contenders: Sequence[Any], repeats: int
) -> list[float]:
    """Medians in milliseconds over rounds in which contenders take turns; one round to warm up."""
    seconds: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats + 1):
        for kept, contender in zip(seconds, contenders, strict=True):
            value = measure(contender)
            if turn:
                kept.append(value)
    return [1e3 * statistics.median(kept) for kept in seconds]


def copy_bandwidth() -> float:
    """TB/s of a copy through MLX, read and written bytes together."""
    x = mx.zeros((1 << 28 if not on_cpu() else 1 << 20,), mx.float32)
    mx.eval(x)
    copy = mx.compile(lambda x: x + 1)
    mx.eval(copy(x))
    best = min(_timed(lambda: mx.eval(copy(x))) for _ in range(10))
    return 2 * x.nbytes / best / 1e12


def greedy_verdict(pair: Pair) -> str:
    """How long greedy tokens agree, and by how much the choice was open where they part."""
    texts: list[list[int]] = []
    margins: list[float] = []
    for contender in (Ours(pair), Theirs(pair)):
        caches, row = contender.started()
        tokens: list[int] = []
        for _ in range(IDENTITY):
            top = mx.sort(row.astype(mx.float32))[-2:].tolist()
            if not texts:
                margins.append(top[1] - top[0])
            tokens.append(int(mx.argmax(row).item()))
            row = contender.step(mx.array([tokens[-1]], mx.int32), caches)[-1]
        texts.append(tokens)
    for place, (a, b) in enumerate(zip(*texts, strict=True)):
        if a != b:
            word = "within" if margins[place] < MARGIN else "OUTSIDE"
            return f"tokens part at {place}, margin {margins[place]:.3f} ({word} {MARGIN})"
    return f"{IDENTITY} greedy tokens equal mlx-lm's"


def active_bytes(pair: Pair, config: dict[str, Any]) -> int:
    """Weight bytes that one token reads."""
    text = config.get("text_config", config)
    experts, top_k = text.get("num_experts"), text.get("num_experts_per_tok")
    top_k = top_k or text.get("top_k_experts")
    total = 0
    for path, array in pair.arrays.items():
        if "embed_tokens" in path and not config.get("tie_word_embeddings"):
            continue
        share = top_k / experts if experts and array.ndim == 3 and "conv1d" not in path else 1
        total += int(array.nbytes * share)
    return total


def measure(name: str, options: argparse.Namespace) -> Part:
    config = SHAPES[name]
    if options.layers:
        config = shrunk(config, options.layers)
    # Host kernels have no compiled step; on a CPU this script only shows that it works.
    pair = build_pair(config, KernelPolicy(kernels="reference") if on_cpu() else None)
    contenders = [Ours(pair), Theirs(pair)]
    part = Part(
        shape=name,
        device=str(mx.device_info().get("device_name", platform.machine())),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        bandwidth=copy_bandwidth(),
        bodies=pair.bodies,
    )
    part.verdict = greedy_verdict(pair)
    weights = active_bytes(pair, config)
    step_ms = 0.0
    for context in options.contexts:
        caches = [contender.filled(context) for contender in contenders]
        by_name = {id(c): cache for c, cache in zip(contenders, caches, strict=True)}
        rows = sum(
            2 * 2 * min(context, getattr(c, "window", context)) * c.num_kv_heads * c.head_dim
            for c in caches[0]
            if not c.recurrent
        )
        for width in (1, *(VERIFY if context == options.contexts[0] else ())):
            ours, theirs = compared(
                lambda c, width=width, by_name=by_name: decode_seconds(c, by_name[id(c)], width),
                contenders,
                options.repeats,
            )
            what = f"decode @{context}" if width == 1 else f"verify {width} @{context}"
            part.rates.append(Rate(what, ours, theirs, width, (weights + rows) / 1e9))
            if width == 1 and context == options.contexts[0]:
                step_ms = ours
            elif width > 1:
                print(f"    {name} {width} rows cost {ours / step_ms:.2f}x of one", flush=True)
    for count in options.prefill:
        ours, theirs = compared(
            lambda c, count=count: prefill_seconds(c, count), contenders, min(options.repeats, 3)
        )
        part.rates.append(Rate(f"prefill {count}", ours, theirs, count))
    part.peak_gb = mx.get_peak_memory() / 1e9
    return part


def merge(folder: Path) -> None:
    """Print the table of all parts in a folder."""
    for path in sorted(folder.glob("*.json")):
        values = json.loads(path.read_text())
        values["rates"] = [Rate(**rate) for rate in values["rates"]]
        Part(**values).show()


def _timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _ids(count: int) -> mx.array:
    return mx.array(np.random.default_rng(count).integers(0, 1000, count).astype(np.int32))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--contexts", type=_numbers, default=[16, 2048, 32768])
    parser.add_argument("--prefill", type=_numbers, default=list(PREFILL))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, help="cut every shape to its first layers")
    parser.add_argument("--out", type=Path, help="folder for a JSON part a shape")
    parser.add_argument("--merge", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.merge:
        merge(options.merge)
        return
    for name in options.shapes:
        if name not in SHAPES:
            sys.exit(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
        part = measure(name, options)
        part.show()
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name}.json").write_text(json.dumps(asdict(part), indent=1))
        mx.clear_cache()


if __name__ == "__main__":
    main()
