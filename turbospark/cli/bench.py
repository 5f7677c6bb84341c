"""`turbospark bench`: prefill and decode rates, and how near they come to the memory.

Rows are pp (a prompt's pass), tg (plain decode) and, where a drafter is open, dg (greedy text with
drafting).
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType]

from turbospark.api import Engine
from turbospark.cli.engine import open_engine
from turbospark.cli.generate import DEFAULT_PROMPT, draft_fields
from turbospark.cli.output import Console
from turbospark.errors import OptionError
from turbospark.kernels.device import on_cpu
from turbospark.runner.loops import prefill
from turbospark.runner.results import GenerationResponse
from turbospark.runner.runner import Runner
from turbospark.sampling.view import as_numpy
from turbospark.version import __version__

_STREAM_BYTES = 1 << 28
_SEED = 20


def bench(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print a table, or one JSON object."""
    prompts = _sizes("--prompt-tokens", arguments.prompt_tokens)
    replies = _sizes("--gen-tokens", arguments.gen_tokens)
    if arguments.repetitions < 1:
        raise OptionError("--repetitions is at least 1")
    engine = open_engine(arguments, console)
    runner = engine.new_runner(prefix_reuse=False)
    _check_room(engine, prompts, replies)
    bandwidth = memory_bandwidth()
    weight_bytes = bytes_a_token(engine.model)
    rows: list[dict[str, Any]] = []
    for size in prompts:
        rates = _repeat(lambda n=size: prefill_rate(runner, n, engine.prefill_chunk), arguments)
        rows.append(_row(f"pp{size}", rates, None))
    for size in replies:
        rates = _repeat(lambda n=size: decode_rate(runner, n), arguments)
        rows.append(_row(f"tg{size}", rates, weight_bytes / bandwidth))
        if engine.drafter.name != "off":
            rows.append(_drafted_row(engine, size, arguments))
    facts = _facts(engine, bandwidth, weight_bytes)
    if arguments.json:
        console.show(json.dumps({**facts, "tests": rows}))
    else:
        _print_table(facts, rows, console)


def prefill_rate(runner: Runner, count: int, chunk: int) -> float:
    """Prompt tokens a second over a prompt of `count` random tokens."""
    ids = np.random.default_rng(_SEED).integers(0, runner.model.vocab_size, count).tolist()
    return count / prefill(runner, ids, chunk=chunk).seconds


def decode_rate(runner: Runner, count: int) -> float:
    """Tokens a second over `count` greedy decode steps behind an empty context."""
    runner.reset()
    logits = cast(mx.array, runner.prefill_chunk([_SEED % runner.model.vocab_size], 0))
    began = time.perf_counter()
    for position in range(1, count + 1):
        logits = runner.produce(int(np.argmax(as_numpy(logits))), position)
    return count / (time.perf_counter() - began)


def drafted_text(engine: Engine, count: int) -> GenerationResponse:
    """The end of a greedy text of at most `count` tokens, drafted as the engine does."""
    with engine.session() as conversation:
        return conversation.send(DEFAULT_PROMPT, max_tokens=count).response


def memory_bandwidth() -> float:
    """Bytes a second of reading a large array: all cores of a CPU, or the GPU."""
    if not on_cpu():
        block = mx.zeros((_STREAM_BYTES,), mx.float32)
        return max(_timed(lambda: mx.max(block).item(), block.nbytes) for _ in range(7))
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = np.array_split(np.ones(_STREAM_BYTES // 8, dtype=np.int64), threads or 1)
    with ThreadPoolExecutor(threads) as pool:
        size = sum(part.nbytes for part in parts)
        return max(_timed(lambda: list(pool.map(np.max, parts)), size) for _ in range(7))


def bytes_a_token(model: Any) -> int:
    """Weight bytes that one decode step of a dense model reads: all but untied embedding rows."""
    sizes = {
        name: value.nbytes
        for name, value in cast("Iterable[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    }
    total = sum(sizes.values())
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    untied = any("lm_head" in name for name in sizes)
    return total - embedding if untied else total


def _timed(work: Any, size: int) -> float:
    began = time.perf_counter()
    work()
    return size / (time.perf_counter() - began)


def _repeat(measure: Any, arguments: argparse.Namespace) -> list[float]:
    measure()  # the first run compiles and touches the weights
    return [measure() for _ in range(arguments.repetitions)]


def _row(name: str, rates: Sequence[float], seconds_a_token: float | None) -> dict[str, Any]:
    median = statistics.median(rates)
    row: dict[str, Any] = {
        "test": name,
        "tokens_per_second": median,
        "deviation": statistics.pstdev(rates),
        "repetitions": len(rates),
    }
    if seconds_a_token is not None:
        row["percent_of_bandwidth"] = 100 * median * seconds_a_token
    return row


def _drafted_row(engine: Engine, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    texts: list[GenerationResponse] = []

    def rate() -> float:
        texts.append(drafted_text(engine, count))
        return texts[-1].generation_tps

    row = _row(f"dg{count}", _repeat(rate, arguments), None)
    reuse = {"reused_tokens": texts[-1].reused_tokens, "evicted": texts[-1].evicted}
    return row | reuse | draft_fields(texts[-1])


def _facts(engine: Engine, bandwidth: float, weight_bytes: int) -> dict[str, Any]:
    return {
        "model": str(engine.source),
        "bytes_per_token": weight_bytes,
        "bandwidth_bytes_per_second": bandwidth,
        "kernels": engine.kernels.describe(),
        "bodies": engine.bodies,
        "prefill_chunk": engine.prefill_chunk,
        "max_context": engine.max_context,
        "prefix_reuse": False,
        "drafter": engine.drafter.name,
        "draft_off_reason": engine.runner.draft_off_reason(),
        "peak_memory": mx.get_peak_memory() / 1e9,
        "device": str(mx.default_device()),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "turbospark": __version__,
            "mlx": version("mlx"),
            "python": platform.python_version(),
        },
    }


def _print_table(facts: dict[str, Any], rows: list[dict[str, Any]], console: Console) -> None:
    console.show(f"model    {facts['model']} ({facts['bytes_per_token'] / 1e6:.0f} MB a token)")
    console.show(f"kernels  {facts['kernels']}")
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    console.show(f"machine  {facts['platform']}; {versions}")
    console.show(f"memory   {facts['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s read\n")
    console.show("| test   |        tok/s |  of bandwidth |")
    console.show("| ------ | -----------: | ------------: |")
    for row in rows:
        rate = f"{row['tokens_per_second']:.1f} ± {row['deviation']:.1f}"
        share = row.get("percent_of_bandwidth")
        shown = "" if share is None else f"{share:.0f} %"
        console.show(f"| {row['test']:6} | {rate:>12} | {shown:>13} |")


def _sizes(name: str, text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise OptionError(f"{name}={text!r} is not a list of whole numbers above 0, such as 64,256")
    return sizes


def _check_room(engine: Engine, prompts: Sequence[int], replies: Sequence[int]) -> None:
    longest = max(*prompts, max(replies) + 1)
    if longest > engine.max_context:
        raise OptionError(f"{longest} tokens exceed max_context={engine.max_context}; raise it")
