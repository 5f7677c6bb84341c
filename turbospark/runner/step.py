"""A model whose decode steps are traced once and run as one graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.caches.step import StepCache, StepState
from turbospark.kernels.device import on_cpu
from turbospark.kernels.kv_rows import RowBlock, StepRows
from turbospark.protocols import CausalModel, ForwardOutput, LogitRows, Phase, RowInputs

MAX_ROWS = 8
"""Rows of a pass that is compiled."""

Arrays = list[mx.array]


class _Wish(NamedTuple):
    """What a pass is asked for: each is a graph of its own."""

    logits: LogitRows
    taps: tuple[int, ...]
    hidden: bool
    record: bool


def compiled_steps(model: CausalModel) -> CausalModel:
    """The model as a runner calls it: all runners of a model share its graphs.

    On a CPU a unit is one call of a host kernel, and there is nothing to compile.
    """
    if on_cpu() or not isinstance(model, nn.Module):
        return model
    known = getattr(model, "_compiled_steps", None)
    if known is None:
        known = CompiledModel(cast("CausalModel", model))
        object.__setattr__(model, "_compiled_steps", known)
    return known


class CompiledModel:
    """A family's model as the runner calls it; decode passes of a few rows are compiled.

    What changes from token to token is an array: positions, the tail of each row cache, recurrent
    state. So a graph is traced again only when the sealed rows double, for another number of
    rows, or for another wish.

    Attributes:
        model: the family's own.
        traces: how often a graph was traced.
    """

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.traces = 0
        self._graphs: dict[_Wish, Callable[..., Any]] = {}
        self._inputs: dict[_Wish, Mapping[int, RowInputs]] = {}
        self._recurrent: list[bool] = []
        self._lengths: mx.array
        self._follows: tuple[int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.model.vocab_size

    @property
    def max_position(self) -> int | None:
        """The trained length in tokens."""
        return self.model.max_position

    @property
    def num_layers(self) -> int:
        """Layers that `taps` may name."""
        return self.model.num_layers

    def make_caches(self, max_context: int, slack: int) -> list[Any]:
        """Empty caches for one session."""
        return self.model.make_caches(max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Checkpoint tensors under the model's own names."""
        return self.model.sanitize(weights)

    def __call__(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        *,
        phase: Phase,
        logits: LogitRows = "last",
        taps: Sequence[int] = (),
        hidden: bool = False,
        record: bool = False,
    ) -> ForwardOutput:
        """Feed tokens as `CausalModel.__call__` does."""
        count = tokens.shape[0]
        if phase is not Phase.DECODE or count > MAX_ROWS or not (caches and caches[0].offset):
            return self.model(
                tokens, caches, phase=phase, logits=logits, taps=taps, hidden=hidden, record=record
            )
        wish = _Wish(logits, tuple(taps), hidden, record)
        start, recurrent = caches[0].offset, [cache.recurrent for cache in caches]
        self._recurrent = recurrent
        # All tails begin at one position, so the first one that has rows speaks for all.
        if False in recurrent and caches[recurrent.index(False)].needs_seal(count):
            _settle(caches)
        given, boundary = list[Arrays](), start
        for cache in caches:
            if cache.recurrent:
                given.append(list(cache.state))
                continue
            sealed, tail, boundary = cache.step_blocks(count)
            own = [] if sealed is tail else [sealed.k, sealed.v]
            given.append([tail.k, tail.v, *own])
        if self._follows != (boundary, start):
            # Behind zeros it is no longer a small array, which would stay in the host's memory.
            placed = mx.array([boundary, start], mx.int32)
            self._lengths = mx.concatenate([placed, mx.zeros((2,), mx.int32)])
        looked_up = look_up(self.model, tokens, caches)
        changed, found = self._graph(wish)(tokens, self._lengths, given, looked_up)
        self._lengths, self._follows = found["lengths"], (boundary, start + count)
        for cache, arrays in zip(caches, changed, strict=True):
            if cache.recurrent:
                cache.advance(count, tuple(arrays))
            else:
                cache.take_tail(RowBlock(*arrays), count)
        inputs = self._inputs.get(wish, {})
        return ForwardOutput(
            found.get("logits"),
            {tap: found[f"tap{tap}"] for tap in wish.taps},
            found.get("hidden"),
            {index: rows.like(found[f"rows{index}"]) for index, rows in inputs.items()},
        )

    def _graph(self, wish: _Wish) -> Callable[..., tuple[list[Arrays], dict[str, Any]]]:
        graph = self._graphs.get(wish)
        if graph is None:

            def run(
                tokens: mx.array, lengths: mx.array, given: list[Arrays], looked_up: Arrays
            ) -> tuple[list[Arrays], dict[str, Any]]:
                return self._trace(wish, tokens, lengths, given, looked_up)

            graph = self._graphs[wish] = cast("Callable[..., Any]", mx.compile(run))
        return graph

    def _trace(
        self,
        wish: _Wish,
        tokens: mx.array,
        lengths: mx.array,
        given: list[Arrays],
        looked_up: Arrays,
    ) -> tuple[list[Arrays], dict[str, Any]]:
        self.traces += 1
        caches = [
            _step_cache(recurrent, arrays, lengths)
            for recurrent, arrays in zip(self._recurrent, given, strict=True)
        ]
        more: dict[str, Any] = {"found": looked_up} if looked_up else {}
        output = self.model(tokens, caches, phase=Phase.DECODE, **wish._asdict(), **more)
        self._inputs[wish] = output.row_inputs
        count = tokens.shape[0]
        found: dict[str, Any] = {"lengths": lengths + mx.array([0, count, 0, 0], mx.int32)}
        found |= {f"tap{tap}": output.taps[tap] for tap in wish.taps}
        found |= {f"rows{i}": list(rows.arrays()) for i, rows in output.row_inputs.items()}
        for name, array in (("logits", output.logits), ("hidden", output.hidden)):
            if array is not None:
                found[name] = array
        return [_changed(cache) for cache in caches], found


def look_up(model: CausalModel, tokens: mx.array, caches: Sequence[Any]) -> Arrays:
    """What a pass needs of tables that lie in files: no graph can read them.

    A model that has some says so by a method `look_up(tokens, caches)`, and takes what it gave as
    `found`.
    """
    ask: Callable[[mx.array, Sequence[Any]], Arrays] | None = getattr(model, "look_up", None)
    return [] if ask is None else ask(tokens, caches)


def _step_cache(recurrent: bool, arrays: Arrays, lengths: mx.array) -> StepCache | StepState:
    if recurrent:
        return StepState(tuple(arrays))
    tail = RowBlock(*arrays[:2])
    sealed = RowBlock(*arrays[2:]) if arrays[2:] else tail
    return StepCache(StepRows(sealed, tail, lengths))


def _changed(cache: StepCache | StepState) -> Arrays:
    if isinstance(cache, StepState):
        return list(cache.state)
    tail = cache.rows().tail
    return [tail.k, tail.v]


def _settle(caches: Sequence[Any]) -> None:
    """Wait for what is running, so that rows are sealed in place and not in a copy."""
    tails = [block for cache in caches if not cache.recurrent for block in cache.tail_arrays]
    mx.eval(tails)  # pyright: ignore[reportUnknownMemberType]
