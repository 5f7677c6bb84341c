"""What running a loaded model needs to know beside its weights."""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turbospark.errors import OptionError
from turbospark.kernels.device import on_cpu
from turbospark.protocols import CausalModel
from turbospark.runner.context import choose_max_context, row_bytes
from turbospark.sessions.budget import default_limit
from turbospark.sessions.checkpoints import Checkpoints
from turbospark.sessions.session import Session
from turbospark.settings import RunnerConfig, resolve

_LOG = logging.getLogger("turbospark")
_CHUNK_ON_CPU, _CHUNK_ON_GPU = 256, 2048


@dataclass(frozen=True, slots=True)
class Serving:
    """What `load` found out about running a model.

    Attributes:
        config: the options it was loaded with.
        stop_ids: ids that end a text.
        chunk: prompt tokens of one pass.
        max_context: tokens a session may hold.
        idle_bytes: what conversations that are not in use may keep.
    """

    config: RunnerConfig
    stop_ids: frozenset[int]
    chunk: int
    max_context: int
    idle_bytes: int

    def describe(self) -> Mapping[str, Any]:
        """The options that were left open, as they were decided."""
        return {
            "max_context": self.max_context,
            "prefill_chunk": self.chunk,
            "session_bytes": self.idle_bytes,
        }


def decide(
    model: CausalModel, config: RunnerConfig, stop_ids: frozenset[int], free_bytes: int | None
) -> Serving:
    """Decide what a configuration leaves open.

    Args:
        model: what will run.
        config: the options.
        stop_ids: ids that end a text.
        free_bytes: memory that may be had now, or None where the machine does not say.
    """
    trained = model.max_position
    context = choose_max_context(
        config.max_context, trained, row_bytes(model.make_caches(1, 0)), free_bytes
    )
    if trained is not None and context > trained:
        _LOG.warning(
            "max_context=%d is more than the %d tokens the model was trained for", context, trained
        )
    chunk = config.prefill_chunk or (_CHUNK_ON_CPU if on_cpu() else _CHUNK_ON_GPU)
    idle = config.session_bytes
    return Serving(
        config, stop_ids, chunk, context, default_limit(free_bytes) if idle is None else idle
    )


_SERVED: dict[int, tuple[Serving, Any]] = {}
"""By id of a living model: what `load` found out, and the tokenizer."""


def remember(model: Any, serving: Serving, tokenizer: Any) -> None:
    """Know what a model was loaded with, as long as it lives."""
    _SERVED[id(model)] = serving, tokenizer
    weakref.finalize(model, _SERVED.pop, id(model), None)


def recall(model: Any, tokenizer: Any, free_bytes: int | None) -> Serving:
    """What a model was loaded with, or the defaults for one that `load` has not seen."""
    known = _SERVED.get(id(model))
    if known is None:
        stop_ids = frozenset[int]() if tokenizer is None else frozenset[int](tokenizer.eos_ids)
        return decide(model, resolve(RunnerConfig), stop_ids, free_bytes)
    return known[0]


def tokenizer_of(model: Any) -> Any:
    """The tokenizer that a model was loaded with; None for one that `load` has not seen."""
    return _SERVED.get(id(model), (None, None))[1]


def check_model(model: Any) -> None:
    """Refuse what is no model.

    Raises:
        OptionError: it is of another type.
    """
    if not all(hasattr(model, name) for name in ("make_caches", "vocab_size", "max_position")):
        raise OptionError(f"a model of type {type(model).__name__}: give the one that `load` gave")


def session_maker(
    model: CausalModel, serving: Serving, max_context: int | None = None
) -> Callable[[], Session]:
    """What opens empty sessions of a model; a runner gives them their drafter's state."""
    context = serving.max_context if max_context is None else max_context
    config = serving.config

    opened_for = weakref.ref(model)

    def make() -> Session:
        session = Session(
            lambda: model.make_caches(context, config.ring_slack),
            context,
            checkpoints=Checkpoints(config.checkpoint_bytes, config.checkpoint_every),
        )
        session.opened_for = opened_for
        return session

    return make
