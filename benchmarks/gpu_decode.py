"""How fast does a GPU decode, prefill and verify, next to mlx-lm on the same random weights?

    python benchmarks/gpu_decode.py SHAPE [SHAPE ...] [--contexts 16,2048,32768] [--repeats 5]
                                    [--out parts/] [--budget SECONDS] [--layers N] [--profile]
    python benchmarks/gpu_decode.py SHAPE --env
    python benchmarks/gpu_decode.py --merge parts/ > table.md

One process a call and one pair of models a shape, over the same INT4 arrays. Contenders take
turns; a figure is the median over the rounds, and every round begins at the same context. A round
decodes STEPS tokens greedily, each token chosen on the device and read by the host one step later;
it starts behind a cache filled with random rows. Verify feeds M rows a pass, each pass waiting for
the one before. Prefill is one pass over a fresh cache and the logits of its last row. Bytes a token
are those of the weights that one token reads and of the cache rows it attends to; their share is of
the copy bandwidth measured in the same run. `--profile` says instead where a token's time goes,
`--env` how what MLX reads from the environment changes it. `--merge` prints one table of all parts.
"""

import argparse
import datetime
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gpu_models import SHAPES, TINY, Pair, build_pair, shrunk
from gpu_profile import show_host_times, show_kernels
from gpu_table import Part, Rate, markdown
from mlx_lm.models.cache import make_prompt_cache

from turbospark.kernels.device import on_cpu
from turbospark.kernels.gpu.argmax import argmax_rows
from turbospark.kernels.gpu.kernel import current_target
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel
from turbospark.settings import KernelPolicy

STEPS, WIDE_STEPS, WARM_STEPS = 32, 6, 2
VERIFY = (2, 4, 8)
PREFILL = (512, 2048)
IDENTITY = 32
MARGIN = 0.05
ENVIRONMENTS: Sequence[Mapping[str, str]] = (
    {},
    {"MLX_USE_CUDA_GRAPHS": "0"},
    {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "100000"},
    {"MLX_MAX_OPS_PER_BUFFER": "25"},
)
"""What `--env` compares: MLX reads these once, when it first computes."""
_VARIABLES = sorted({name for values in ENVIRONMENTS for name in values})


class OutOfTimeError(Exception):
    """The seconds of `--budget` are over."""


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

    def take_back(self, caches: list[Any], count: int) -> None:
        """Forget the newest rows; recurrent state goes on from where it is."""
        for cache in caches:
            if not cache.recurrent:
                cache.rewind(count)

    def step(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        output = self._step(tokens, caches, phase=Phase.DECODE, logits="all")
        return output.logits

    def choose(self, logits: mx.array) -> mx.array:
        target = current_target()
        return _argmax(logits) if target is None else argmax_rows(logits, target=target)

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

    def take_back(self, caches: list[Any], count: int) -> None:
        for cache in caches:
            if hasattr(cache, "trim") and cache.is_trimmable():
                cache.trim(count)

    def step(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        return self._model(tokens[None], cache=caches)[0]

    def choose(self, logits: mx.array) -> mx.array:
        return _argmax(logits)

    def prefill(self, count: int) -> mx.array:
        caches, ids = make_prompt_cache(self._model), _ids(count)
        self._model(ids[None, :-1], cache=caches)
        mx.eval([cache.state for cache in caches])  # as mlx-lm: no head over the prompt
        return self._model(ids[None, -1:], cache=caches)[0]

    def started(self) -> tuple[list[Any], mx.array]:
        caches = make_prompt_cache(self._model)
        return caches, self._model(_ids(16)[None], cache=caches)[0, -1]


def decode_seconds(contender: Any, caches: list[Any], rows: int, steps: int) -> float:
    """Seconds a pass of `rows` rows, the host one pass behind."""
    y = mx.array(np.arange(rows, dtype=np.int32))
    mx.eval(y)
    mx.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        following = contender.choose(contender.step(y, caches))
        mx.async_eval(following)
        np.asarray(y)  # a slice would be an operation behind the pass that has just begun
        y = following
    mx.eval(y)
    seconds = (time.perf_counter() - begin) / steps
    contender.take_back(caches, rows * steps)
    return seconds


def prefill_seconds(contender: Any, count: int) -> float:
    mx.synchronize()
    begin = time.perf_counter()
    mx.eval(contender.prefill(count))
    return time.perf_counter() - begin


def compared(
    measure: Callable[[Any, bool], float], contenders: Sequence[Any], repeats: int, deadline: float
) -> list[float]:
    """Medians in milliseconds over rounds in which contenders take turns; one round to warm up.

    Raises:
        OutOfTimeError: the deadline has passed before every contender has a figure.
    """
    seconds: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats + 1):
        for kept, contender in zip(seconds, contenders, strict=True):
            if time.perf_counter() > deadline and not seconds[-1]:
                raise OutOfTimeError
            value = measure(contender, turn == 0)
            if turn:
                kept.append(value)
        if time.perf_counter() > deadline and seconds[-1]:
            break
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


def build(name: str, options: argparse.Namespace) -> tuple[Pair, dict[str, Any]]:
    """Both models of a shape, and its configuration."""
    config = dict(SHAPES | {"tiny": TINY})[name]
    if options.layers:
        config = shrunk(config, options.layers)
    begin = time.perf_counter()
    # Host kernels have no compiled step; on a CPU this script only shows that it works.
    pair = build_pair(config, KernelPolicy(kernels="reference") if on_cpu() else None)
    print(f"{name}: weights drawn in {time.perf_counter() - begin:.1f} s", flush=True)
    return pair, config


def measure(name: str, options: argparse.Namespace, deadline: float) -> None:
    """Measure a shape, print every figure as it comes and keep the part."""
    pair, config = build(name, options)
    part = Part(
        shape=name,
        device=str(mx.device_info().get("device_name", platform.machine())),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=shlex.join(["python", "benchmarks/gpu_decode.py", *sys.argv[1:]]),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        bandwidth=copy_bandwidth(),
        bodies=pair.bodies,
    )
    print(f"{name} on {part.device}, copy bandwidth {part.bandwidth:.2f} TB/s", flush=True)
    try:
        part.verdict = greedy_verdict(pair)
        print(f"  {part.verdict}", flush=True)
        fill(part, pair, active_bytes(pair, config), options, deadline)
    except OutOfTimeError:
        part.stopped = f"stopped after {options.budget:.0f} s: the figures left are not measured"
        print(f"  {part.stopped}", flush=True)
    keep(part, options)
    print(f"  peak memory {part.peak_gb:.1f} GB\n", flush=True)


def keep(part: Part, options: argparse.Namespace) -> None:
    """Write what is known of a part, so that a run that is cut short leaves it."""
    part.peak_gb = mx.get_peak_memory() / 1e9
    if options.out:
        part.write(options.out)


def fill(
    part: Part, pair: Pair, weights: int, options: argparse.Namespace, deadline: float
) -> None:
    """Measure and keep one figure after the other."""
    contenders = [Ours(pair), Theirs(pair)]
    few = min(options.repeats, 3)
    for context in options.contexts:
        caches = [contender.filled(context) for contender in contenders]
        by_name = {id(c): cache for c, cache in zip(contenders, caches, strict=True)}
        gbytes = (weights + attended_bytes(caches[0], context)) / 1e9

        def decoded(c: Any, is_first: bool, rows: int = 1, by_name: Any = by_name) -> float:
            steps = WARM_STEPS if is_first else STEPS if rows == 1 else WIDE_STEPS
            return decode_seconds(c, by_name[id(c)], rows, steps)

        medians = compared(decoded, contenders, options.repeats, deadline)
        part.add(Rate("decode", 1, context, *medians, gbytes))
        for rows in VERIFY if context == options.contexts[0] else ():
            medians = compared(partial(decoded, rows=rows), contenders, few, deadline)
            part.add(Rate("verify", rows, context, *medians, gbytes))
        keep(part, options)
    for count in options.prefill:
        medians = compared(
            lambda c, _first, count=count: prefill_seconds(c, count), contenders, few, deadline
        )
        part.add(Rate("prefill", count, 0, *medians))


def attended_bytes(caches: Sequence[Any], context: int) -> int:
    """Bytes of keys and values that a token at `context` reads."""
    return sum(
        2 * 2 * min(context, getattr(c, "window", context)) * c.num_kv_heads * c.head_dim
        for c in caches
        if not c.recurrent
    )


def profile(name: str, options: argparse.Namespace) -> None:
    """Print where a token's time goes."""
    pair, _ = build(name, options)
    for who, contender in (("turbospark", Ours(pair)), ("mlx-lm", Theirs(pair))):
        for context in options.contexts:
            caches = contender.filled(context)
            for steps in (WARM_STEPS, STEPS):
                seconds = decode_seconds(contender, caches, 1, steps)
            print(f"{who} {name} @{context}: {1e3 * seconds:.3f} ms a token", flush=True)
            show_host_times(who, contender, caches, STEPS)
            contender.take_back(caches, STEPS)
            if who == "turbospark" or context == options.contexts[0]:
                show_kernels(contender, caches, 8)


def race(name: str, options: argparse.Namespace) -> None:
    """Print decode times of both, a child of `--env`."""
    pair, _ = build(name, options)
    contenders = [Ours(pair), Theirs(pair)]
    caches = {id(contender): contender.filled(options.contexts[0]) for contender in contenders}

    def decoded(c: Any, is_first: bool) -> float:
        return decode_seconds(c, caches[id(c)], 1, WARM_STEPS if is_first else STEPS)

    # No new round begins after that time.
    ours, theirs = compared(decoded, contenders, 100, time.perf_counter() + options.seconds)
    print(f"  decode {ours:.3f} ms, mlx-lm {theirs:.3f} ms, {theirs / ours:.2f}x", flush=True)
    show_host_times("turbospark", contenders[0], caches[id(contenders[0])], STEPS)


def compare_environments(name: str, options: argparse.Namespace) -> None:
    """Run a race in a process of its own for each of ENVIRONMENTS."""
    for values in ENVIRONMENTS:
        said = " ".join(f"{name}={value}" for name, value in values.items())
        print(f"{name} with {said or 'nothing set'}:", flush=True)
        context = str(options.contexts[0])
        command = [sys.executable, __file__, name, "--race", "--contexts", context]
        command += ["--seconds", str(options.seconds)]
        if options.layers:
            command += ["--layers", str(options.layers)]
        mine = {key: value for key, value in os.environ.items() if key not in _VARIABLES}
        subprocess.run(command, env=mine | values, check=False)


def _argmax(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def _timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _ids(count: int) -> mx.array:
    return mx.array(np.random.default_rng(count).integers(0, 512, count).astype(np.int32))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--contexts", type=_numbers, default=[16, 2048, 32768])
    parser.add_argument("--prefill", type=_numbers, default=list(PREFILL))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, help="cut every shape to its first layers")
    parser.add_argument("--out", type=Path, help="folder for a JSON part a shape")
    parser.add_argument("--budget", type=float, help="seconds after which nothing more is measured")
    parser.add_argument("--merge", type=Path, metavar="FOLDER")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--env", action="store_true", help="compare what MLX reads there")
    parser.add_argument("--seconds", type=float, default=5.0, help="of decoding a setting of --env")
    parser.add_argument("--race", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.merge:
        paths = sorted(options.merge.glob("*.json"))
        print(markdown(map(Part.read, paths)) if paths else f"no parts in {options.merge}")
        return
    for name in options.shapes:
        if name not in (*SHAPES, "tiny"):
            sys.exit(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    tasks = ((options.race, race), (options.env, compare_environments), (options.profile, profile))
    for name in options.shapes:
        chosen = [task for wanted, task in tasks if wanted]
        deadline = begin + (options.budget or float("inf"))
        if time.perf_counter() > deadline:
            print(f"{name}: not begun, {options.budget:.0f} s are over", flush=True)
        elif chosen:
            chosen[0](name, options)
        else:
            measure(name, options, deadline)
        mx.clear_cache()


if __name__ == "__main__":
    main()
