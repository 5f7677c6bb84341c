"""One forward pass over a session: evaluated and checked before it counts."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from turbospark.errors import ContextLengthError, NonFiniteError, ProducerError, TurbosparkError
from turbospark.kernels.process import claim_process
from turbospark.protocols import CausalModel, Drafter, ForwardOutput, LogitRows, Phase
from turbospark.sampling.view import as_numpy
from turbospark.sessions.session import Session

_DIAGNOSIS_CHUNK = 256


def advance(
    model: CausalModel,
    session: Session,
    tokens: Sequence[int],
    drafter: Drafter,
    *,
    phase: Phase,
    logits: LogitRows,
    record: bool = False,
) -> ForwardOutput:
    """Feed tokens into a session's caches. The record has not moved; see `commit`.

    Args:
        model: whose forward pass runs.
        session: its caches advance by len(tokens).
        tokens: at least one id.
        drafter: says what it needs of the pass.
        phase: what the pass is for.
        logits: which rows go through the output head.
        record: whether the pass may be cut short afterwards.

    Returns:
        logits [R, V], hidden rows and taps, all evaluated.

    Raises:
        ContextLengthError: the tokens do not fit; nothing was fed.
        NonFiniteError: logits hold NaN or infinity; the first bad layer is named.
        ProducerError: the pass failed; in this and the case above the session is tainted.
        KernelError: this process was forked from one that had computed; nothing was fed.
    """
    claim_process()
    start = session.position
    if start + len(tokens) > session.max_context:
        raise ContextLengthError(
            f"{session!r} cannot take {len(tokens)} more tokens; load with a larger max_context"
        )
    # The last layer's residual stream needs every row that the caches took.
    last = () if logits != "none" else (model.num_layers - 1,)
    with tainting(session, f"the forward pass over tokens {start} to {start + len(tokens) - 1}"):
        session.epoch += 1
        output = model(
            mx.array(np.array(tokens, dtype=np.int32)),
            session.caches,
            phase=phase,
            logits=logits,
            taps=tuple({*drafter.taps, *last}),
            hidden=drafter.hidden,
            record=record,
        )
        if logits != "none" and output.logits is None:
            raise ProducerError("the model returned no logits where they were asked for")
        _evaluate(output, session)
        if output.logits is not None:
            _check_finite(output.logits, model, session, tokens, start)
    return output


def launch(
    model: CausalModel, session: Session, token: mx.array, drafter: Drafter
) -> ForwardOutput:
    """Begin a decode pass over one token [1] int32; the caches advance, nothing is evaluated.

    Raises:
        ContextLengthError: it does not fit; nothing was fed.
        ProducerError: the pass could not be built; the session is tainted.
    """
    if session.position >= session.max_context:
        raise ContextLengthError(f"{session!r} is full; load with a larger max_context")
    with tainting(session, f"the forward pass over token {session.position}"):
        session.epoch += 1
        return model(
            token,
            session.caches,
            phase=Phase.DECODE,
            logits="last",
            taps=drafter.taps,
            hidden=drafter.hidden,
        )


def commit(
    session: Session, tokens: Sequence[int], start: int, drafter: Drafter, output: ForwardOutput
) -> None:
    """Note that a pass over `tokens` counts, and let the drafter follow over it.

    Args:
        session: its caches stand behind the tokens; the record moves.
        tokens: those that were fed from `start` on.
        start: position of the first one.
        drafter: follows, unless drafting is off for the session.
        output: of the pass, cut to these tokens.

    Raises:
        ProducerError: the drafter failed; the session is tainted.
    """
    session.record(tokens, start)
    if session.draft_off:
        return
    with tainting(session, f"{drafter!r} over tokens {start} to {start + len(tokens) - 1}"):
        drafter.observe(session.drafter_state, session.fed_ids, start, output)


@contextmanager
def tainting(session: Session, what: str) -> Generator[None]:
    """Taint a session where the body fails, and say what failed.

    Raises:
        ProducerError: an error of another library was raised.
    """
    try:
        yield
    except BaseException as error:
        session.taint()
        if isinstance(error, TurbosparkError) or not isinstance(error, Exception):
            raise
        raise ProducerError(
            f"{what} failed ({type(error).__name__}: {error}); the session starts over at its next "
            "prompt"
        ) from error


def last_row(output: ForwardOutput) -> mx.array:
    """Logits [V] of the last row that went through the head."""
    logits = output.logits
    assert logits is not None
    return logits.reshape(-1) if logits.shape[0] == 1 else logits[-1]  # a slice is a copy


def first_rows(output: ForwardOutput, count: int) -> ForwardOutput:
    """A pass cut to its first rows, without logits."""
    hidden = None if output.hidden is None else output.hidden[:count]
    return ForwardOutput(None, {tap: rows[:count] for tap, rows in output.taps.items()}, hidden)


def _evaluate(output: ForwardOutput, session: Session) -> None:
    states = [array for cache in session.caches if cache.recurrent for array in cache.state]
    # Rows that no logits hang on yet would keep every pass since then from being forgotten.
    rows = [array for cache in session.caches for array in getattr(cache, "tail_arrays", ())]
    given = [array for array in (output.logits, output.hidden) if array is not None]
    mx.eval(*given, *output.taps.values(), *states, *rows)  # pyright: ignore[reportUnknownMemberType]


def _check_finite(
    logits: mx.array, model: CausalModel, session: Session, tokens: Sequence[int], start: int
) -> None:
    rows = as_numpy(logits)
    if math.isfinite(rows.max()) and math.isfinite(rows.min()):  # either is NaN where a value is
        return
    bad = int(np.argmax(~np.isfinite(rows).all(axis=-1)))
    position = start + len(tokens) - rows.shape[0] + bad
    raise not_finite(model, session, [*session.fed_ids.ids[:start], *tokens], position)


def not_finite(
    model: CausalModel, session: Session, tokens: Sequence[int], position: int | None = None
) -> NonFiniteError:
    """What to raise for bad logits.

    Args:
        model: run again to find the layer.
        session: gives fresh caches.
        tokens: all that were fed.
        position: of the bad row; by default the last one.
    """
    position = len(tokens) - 1 if position is None else position
    where = first_bad_layer(model, session, tokens)
    return NonFiniteError(f"the logits of position {position} hold NaN or infinity: {where}")


def first_bad_layer(model: CausalModel, session: Session, tokens: Sequence[int]) -> str:
    """Feed tokens again into fresh caches and say where the first non-finite value arises."""
    caches = session.fresh_caches()
    layers = range(model.num_layers)
    worst: tuple[int, int] | None = None
    hint = ""
    for start in range(0, len(tokens), _DIAGNOSIS_CHUNK):
        fed = mx.array(np.array(tokens[start : start + _DIAGNOSIS_CHUNK], dtype=np.int32))
        output = model(fed, caches, phase=Phase.PREFILL, logits="none", taps=tuple(layers))
        if output.taps[0].dtype == mx.float16:
            hint = "; the stream is float16, which some models leave: load a bfloat16 release"
        for layer in layers:
            bad = ~np.isfinite(as_numpy(output.taps[layer].astype(mx.float32))).all(axis=-1)
            if bad.any() and (worst is None or layer < worst[0]):
                worst = layer, start + int(np.argmax(bad))
    if worst is None:
        return "every layer's output is finite, so the output head is at fault"
    layer, position = worst
    where = f"layer {layer} (of {len(layers)}) at token {position}"
    return f"the first bad output is that of {where}{hint}"
