"""Where a token's time goes: what the host does in a step, and every kernel of it."""

import time
from typing import Any

import mlx.core as mx
import numpy as np


def host_times(contender: Any, caches: list[Any], steps: int) -> dict[str, float]:
    """Milliseconds a token that the host spends: building a step, sending it off, waiting.

    A step is one row, and the host one step behind, as in decoding. Where waiting takes next to
    nothing, the host is what limits.
    """
    spent = {"build": 0.0, "dispatch": 0.0, "wait": 0.0}
    y = mx.array([1], mx.int32)
    mx.eval(y)
    mx.synchronize()
    for _ in range(steps):
        begin = time.perf_counter()
        following = contender.choose(contender.step(y, caches))
        built = time.perf_counter()
        mx.async_eval(following)
        sent = time.perf_counter()
        np.asarray(y)
        read = time.perf_counter()
        for name, seconds in zip(spent, (built - begin, sent - built, read - sent), strict=True):
            spent[name] += 1e3 * seconds / steps
        y = following
    mx.eval(y)
    return spent


def show_host_times(name: str, contender: Any, caches: list[Any], steps: int) -> None:
    """Print a line of them."""
    spent = host_times(contender, caches, steps)
    parts = ", ".join(f"{part} {value:.3f} ms" for part, value in spent.items())
    print(f"  {name}, host a token: {parts}; in all {sum(spent.values()):.3f} ms", flush=True)


def show_kernels(contender: Any, caches: list[Any], steps: int, most: int = 24) -> None:
    """Print the GPU time of every kernel of a token, the longest first."""
    try:
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        print("  no figures of single kernels: torch is not installed", flush=True)
        return
    if mx.default_device() == mx.cpu:
        print("  no figures of single kernels on a CPU", flush=True)
        return
    y = mx.array([1], mx.int32)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(steps):
            y = contender.choose(contender.step(y, caches))
            mx.eval(y)
        mx.synchronize()
    found = [event for event in traced.key_averages() if event.device_time_total > 0]
    found.sort(key=lambda event: -event.device_time_total)
    whole = sum(event.device_time_total for event in found)
    launches = sum(event.count for event in found) / steps
    print(f"  kernels: {whole / steps:.0f} us a token in {launches:.0f} launches")
    for event in found[:most]:
        each, count = event.device_time_total / event.count, event.count / steps
        share = 100 * event.device_time_total / whole
        print(f"    {share:4.1f} %  {count:6.1f} x {each:8.2f} us  {_short(event.key)}")


def _short(name: str) -> str:
    name = name.replace("mlx::core::cu::", "").removeprefix("custom_kernel_")
    return name if len(name) <= 70 else name[:67] + "..."
