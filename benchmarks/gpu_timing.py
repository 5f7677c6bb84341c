"""How the scripts of kernels measure: chains of dependent calls that take turns, on one GPU."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from turbospark.kernels.gpu.kernel import GpuTarget, current_target

ROUNDS = 5

Call = Callable[[Any, int], Any]
"""(what to wait for, an array or a list of them; number of the call) -> the next of the kind."""


class Times(NamedTuple):
    """Microseconds of one call: until its result is there, and what submitting it costs."""

    us: float
    host_us: float


class Busy:
    """Work that keeps a GPU busy for some 15 ms, while the host submits what is measured.

    What the host does for a launch takes longer than most kernels, so that a chain by itself tells
    of the host; behind such work it tells of the GPU.
    """

    def __init__(self) -> None:
        self._x = mx.random.normal((8192, 8192)).astype(mx.bfloat16)
        mx.eval(self._x)

    def start(self) -> mx.array:
        y = self._x
        for _ in range(10):
            y = (y @ self._x) * 1e-2
        mx.async_eval(y)
        return y


class Chain:
    """Dependent calls in one graph, compiled or not.

    Args:
        call: is given what the call before gave, and its number.
        start: what the first call of a graph is given.
        calls: of a graph.
        graphs: of a figure, one behind the other.
        is_compiled: whether the graph is.
    """

    def __init__(
        self, call: Call, start: Any, calls: int, graphs: int = 1, *, is_compiled: bool = True
    ) -> None:
        def run(link: Any) -> Any:
            for number in range(calls):
                link = call(link, number)
            return link

        self._run: Callable[[Any], Any] = mx.compile(run) if is_compiled else run
        self._start, self._graphs, self._count = start, graphs, calls * graphs
        begin = time.perf_counter()
        mx.eval(self._run(start))
        self.first_s = time.perf_counter() - begin

    def times(self, busy: Busy | None = None) -> Times:
        """Of one call; behind `busy` those of the GPU alone.

        The host hears late that the work before is done. So there the time is that by which twice
        as many graphs take longer.
        """
        once, host = self._spent(self._graphs, busy)
        if busy is not None:
            twice, _ = self._spent(2 * self._graphs, busy)
            once = twice - once
        return Times(*(1e6 * seconds / self._count for seconds in (once, host)))

    def _spent(self, graphs: int, busy: Busy | None) -> tuple[float, float]:
        """Seconds until so many graphs are done, and that the host takes to submit them."""
        link = self._start
        mx.synchronize()
        work = None if busy is None else busy.start()
        begin = time.perf_counter()
        for _ in range(graphs):
            link = self._run(link)
            mx.async_eval(link)
        submitted = time.perf_counter() - begin
        if work is not None:
            mx.eval(work)
            begin = time.perf_counter()
        mx.eval(link)
        return time.perf_counter() - begin, submitted


def medians(chains: Sequence[Chain], busy: Busy | None = None, rounds: int = ROUNDS) -> list[Times]:
    """Of rounds in which the chains take turns."""
    taken = [[chain.times(busy) for chain in chains] for _ in range(rounds)]
    return [
        Times(*(statistics.median(column) for column in zip(*chain, strict=True)))
        for chain in zip(*taken, strict=True)
    ]


def difference(ours: mx.array, theirs: mx.array) -> float:
    """The largest difference, over the largest number of `theirs`."""
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.abs(b).max())


class Bench:
    """A GPU, what a copy reaches there, and an end of the seconds to spend.

    Args:
        seconds: from now on.
        needed: the target that a script is for; any GPU by default.
    """

    def __init__(self, seconds: float, needed: str = "") -> None:
        self.target = _target(needed)
        self._end = time.perf_counter() + seconds
        self.copy = _copy_tb_s()
        print(f"{self.target.name}, MLX {mx.__version__}, copy {self.copy:.2f} TB/s", flush=True)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self._end

    def bandwidth(self, nbytes: float, us: float) -> str:
        """Of so many bytes in a time, and in per cent of a copy."""
        tb_s = nbytes / us / 1e6
        return f"{tb_s:5.2f} TB/s {100 * tb_s / self.copy:4.0f} %"


def _target(needed: str) -> GpuTarget:
    target = current_target()
    if target is None or needed not in ("", target.name):
        which = f"a GPU of {needed}" if needed else "a GPU"
        sys.exit(f"{sys.argv[0]} needs {which}, but MLX computes on {mx.default_device()}")
    return target


def _copy_tb_s() -> float:
    """Bytes read and written by a copy, in terabytes a second."""
    x = mx.zeros((256 << 20,), mx.float32)
    mx.eval(x)
    chain = Chain(lambda link, _: link + 1.0, x, 1, is_compiled=False)
    return 2 * x.nbytes / min(chain.times().us for _ in range(8)) / 1e6
