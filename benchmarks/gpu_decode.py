"""How fast does a GPU decode, prefill and verify, next to mlx-lm on the same random weights?

    python benchmarks/gpu_decode.py SHAPE [SHAPE ...] [--contexts 16,2048,32768] [--verify 2,4,8]
                                    [--prefill 512,2048] [--repeats 5] [--alone] [--no-verdict]
                                    [--out parts/] [--budget SECONDS] [--layers N] [--profile]
    python benchmarks/gpu_decode.py SHAPE --env
    python benchmarks/gpu_decode.py --merge parts/ > table.md

One process a call and one pair of models a shape, over the same arrays: INT4 in groups of 64, and
MXFP4 where a shape's experts have it. Contenders take turns; a figure is the median over the
rounds, and every round begins at the same context. A round decodes STEPS tokens greedily, each
token chosen on the device and read by the host one step later; it starts behind a cache filled with
random rows. Verify feeds M rows a pass, at the first context, and takes them back. Prefill is one
pass over a fresh cache and the logits of its last row. Bytes a token are those of the weights that
one token reads and of the cache rows it attends to; their share is of the copy bandwidth measured
in the same run. Memory grows by what a step ahead needs: a copy of the cache would show.

A first round of each figure compiles and is not timed; what is in brackets says how long that took.
An empty list leaves a kind of figure out, and `--alone` leaves mlx-lm out: what changed in
turbospark is measured again in little time. `--profile` says instead where a token's time goes,
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
from gpu_contenders import (
    Ours,
    Theirs,
    attended_bytes,
    decode_seconds,
    greedy_verdict,
    prefill_seconds,
)
from gpu_models import active_bytes, build_pair
from gpu_profile import show_host_times, show_kernels
from gpu_shapes import SHAPES, TINY, shrunk
from gpu_table import Part, Rate, markdown

from turbospark.kernels.device import on_cpu
from turbospark.settings import KernelPolicy

STEPS, WIDE_STEPS, WARM_STEPS = 96, 48, 2
VERIFY = (2, 4, 8)
PREFILL = (512, 2048)
VERDICT_SECONDS = 20.0
ENVIRONMENTS: Sequence[Mapping[str, str]] = (
    {},
    {"MLX_USE_CUDA_GRAPHS": "0"},
    {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "100000"},
    {"MLX_MAX_OPS_PER_BUFFER": "25"},
)
"""What `--env` compares: MLX reads these once, when it first computes."""
_VARIABLES = sorted({name for values in ENVIRONMENTS for name in values})
_BEGIN = time.perf_counter()


class OutOfTimeError(Exception):
    """The seconds of `--budget` are over."""


def stage(text: str) -> None:
    """Print what is done, and how long the script has run."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {text}", flush=True)


def compared(
    what: str,
    measure: Callable[[Any, bool], float],
    contenders: Sequence[Any],
    repeats: int,
    *,
    deadline: float = float("inf"),
    seconds: float = float("inf"),
) -> list[float]:
    """Medians in milliseconds over rounds in which contenders take turns.

    Args:
        what: is measured, for a line about the round that warms up.
        measure: seconds of a contender; told whether it only warms up.
        contenders: who takes turns.
        repeats: rounds at most, behind the first one; there is always one.
        deadline: no round begins after that time.
        seconds: no round begins so long after the first one.

    Raises:
        OutOfTimeError: the deadline has passed before anything began.
    """
    if time.perf_counter() > deadline:
        raise OutOfTimeError
    warm = [_timed(partial(measure, contender, True)) for contender in contenders]
    stage(f"  {what}: warm after " + " + ".join(f"{spent:.1f}" for spent in warm) + " s")
    begin = time.perf_counter()
    rounds: list[list[float]] = []
    while len(rounds) < repeats:
        rounds.append([measure(contender, False) for contender in contenders])
        now = time.perf_counter()
        if now > deadline or now - begin > seconds:
            break
    return [1e3 * statistics.median(times) for times in zip(*rounds, strict=True)]


def copy_bandwidth() -> float:
    """TB/s of a copy through MLX, read and written bytes together."""
    x = mx.zeros((1 << 28 if not on_cpu() else 1 << 20,), mx.float32)
    mx.eval(x)
    copy = mx.compile(lambda x: x + 1)
    mx.eval(copy(x))
    best = min(_timed(lambda: mx.eval(copy(x))) for _ in range(10))
    return 2 * x.nbytes / best / 1e12


def memory_growth(run: Callable[[], Any]) -> float:
    """GB by which the memory in use grows at most while something runs."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return max(0.0, (mx.get_peak_memory() - before) / 1e9)


def build(name: str, options: argparse.Namespace) -> tuple[list[Any], dict[str, int], int]:
    """Contenders over one pair of models, the bodies of ours, and bytes of weights a token."""
    config = dict(SHAPES | {"tiny": TINY})[name]
    if options.layers:
        config = shrunk(config, options.layers)
    pair = build_pair(config)
    stage(f"{name}: {sum(x.nbytes for x in pair.arrays.values()) / 1e9:.1f} GB drawn")
    # Host kernels have no compiled step; on a CPU this script only shows that it works.
    _, bodies = pair.bind(KernelPolicy(kernels="reference") if on_cpu() else None)
    stage(f"{name}: kernels bound")
    contenders = [Ours(pair)] if options.alone else [Ours(pair), Theirs(pair)]
    return contenders, bodies, active_bytes(pair.arrays, config)


def measure(name: str, options: argparse.Namespace, deadline: float) -> None:
    """Measure a shape, print every figure as it comes and keep the part."""
    contenders, bodies, weights = build(name, options)
    part = Part(
        shape=name,
        device=str(mx.device_info().get("device_name", platform.machine())),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=shlex.join(["python", "benchmarks/gpu_decode.py", *sys.argv[1:]]),
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        bandwidth=copy_bandwidth(),
        bodies=bodies,
    )
    stage(f"{name} on {part.device}, copy bandwidth {part.bandwidth:.2f} TB/s")
    try:
        fill(part, contenders, weights, options, deadline)
    except OutOfTimeError:
        part.stopped = f"stopped after {options.budget:.0f} s: the figures left are not measured"
        print(f"  {part.stopped}", flush=True)
    keep(part, options)
    stage(f"{name}: peak memory {part.peak_gb:.1f} GB\n")


def keep(part: Part, options: argparse.Namespace) -> None:
    """Write what is known of a part, so that a run that is cut short leaves it."""
    part.peak_gb = max(part.peak_gb, mx.get_peak_memory() / 1e9)
    if options.out:
        part.write(options.out)


def fill(
    part: Part,
    contenders: Sequence[Any],
    weights: int,
    options: argparse.Namespace,
    deadline: float,
) -> None:
    """Measure and keep one figure after the other."""
    few = min(options.repeats, 3)

    def add(
        kind: str, count: int, context: int, run: Any, repeats: int, gbytes: float = 0.0
    ) -> None:
        what = f"{kind} {count} @{context}"
        times = compared(what, run, contenders, repeats, deadline=deadline)
        keep(part, options)
        grown = memory_growth(partial(run, contenders[0], False)) if gbytes else 0.0
        part.add(Rate(kind, count, context, times[0], (times[1:] or [None])[0], gbytes, grown))
        keep(part, options)

    for context in options.contexts:
        caches = {id(contender): contender.filled(context) for contender in contenders}
        gbytes = (weights + attended_bytes(caches[id(contenders[0])], context)) / 1e9

        def decoded(c: Any, is_first: bool, rows: int = 1, caches: Any = caches) -> float:
            steps = WARM_STEPS if is_first else STEPS if rows == 1 else WIDE_STEPS
            return decode_seconds(c, caches[id(c)], rows, steps)

        add("decode", 1, context, decoded, options.repeats, gbytes)
        is_first = context == options.contexts[0]
        for rows in options.verify if is_first else ():
            add("verify", rows, context, partial(decoded, rows=rows), few, gbytes)
        if is_first and options.verdict and len(contenders) == 2:
            part.verdict = greedy_verdict(contenders, VERDICT_SECONDS)
            stage(f"  {part.verdict}")
    for count in options.prefill:
        add("prefill", count, 0, lambda c, _first, count=count: prefill_seconds(c, count), few)


def profile(name: str, options: argparse.Namespace) -> None:
    """Print where a token's time goes."""
    contenders, _, _ = build(name, options)
    for contender in contenders:
        for context in options.contexts:
            caches = contender.filled(context)
            for steps in (WARM_STEPS, STEPS):
                seconds = decode_seconds(contender, caches, 1, steps)
            stage(f"{contender.name} {name} @{context}: {1e3 * seconds:.3f} ms a token")
            show_host_times(contender.name, contender, caches, STEPS)
            contender.take_back(caches, STEPS)
            if contender is contenders[0] or context == options.contexts[0]:
                show_kernels(contender, caches, 8)


def race(name: str, options: argparse.Namespace) -> None:
    """Print decode times of both, a child of `--env`."""
    contenders, _, _ = build(name, options)
    caches = {id(contender): contender.filled(options.contexts[0]) for contender in contenders}

    def decoded(c: Any, is_first: bool) -> float:
        return decode_seconds(c, caches[id(c)], 1, WARM_STEPS if is_first else STEPS)

    times = compared("decode", decoded, contenders, 100, seconds=options.seconds)
    ours, *theirs = times
    beside = f", mlx-lm {theirs[0]:.3f} ms, {theirs[0] / ours:.2f}x" if theirs else ""
    stage(f"  decode {ours:.3f} ms{beside}")
    show_host_times(contenders[0].name, contenders[0], caches[id(contenders[0])], STEPS)


def compare_environments(name: str, options: argparse.Namespace) -> None:
    """Run a race in a process of its own for each of ENVIRONMENTS."""
    for values in ENVIRONMENTS:
        said = " ".join(f"{name}={value}" for name, value in values.items())
        stage(f"{name} with {said or 'nothing set'}:")
        context = str(options.contexts[0])
        command = [sys.executable, __file__, name, "--race", "--contexts", context]
        command += ["--seconds", str(options.seconds)]
        command += ["--layers", str(options.layers)] if options.layers else []
        command += ["--alone"] if options.alone else []
        mine = {key: value for key, value in os.environ.items() if key not in _VARIABLES}
        subprocess.run(command, env=mine | values, check=False)


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--contexts", type=_numbers, default=[16, 2048, 32768])
    parser.add_argument("--verify", type=_numbers, default=list(VERIFY), help="rows; may be empty")
    parser.add_argument("--prefill", type=_numbers, default=list(PREFILL), help="may be empty")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="measure turbospark only")
    parser.add_argument("--no-verdict", dest="verdict", action="store_false")
    parser.add_argument("--layers", type=int, help="cut every shape to its first layers")
    parser.add_argument("--out", type=Path, help="folder for a JSON part a shape")
    parser.add_argument("--budget", type=float, help="seconds after which nothing more begins")
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
        deadline = _BEGIN + (options.budget or float("inf"))
        if time.perf_counter() > deadline:
            stage(f"{name}: not begun, {options.budget:.0f} s are over")
        elif chosen:
            chosen[0](name, options)
        else:
            measure(name, options, deadline)
        mx.clear_cache()


if __name__ == "__main__":
    main()
