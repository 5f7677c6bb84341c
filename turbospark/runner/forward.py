"""One forward pass over a session: evaluated, checked and recorded before it counts."""

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark.errors import ContextLengthError, NonFiniteError, ProducerError, TurbosparkError
from turbospark.kernels.process import claim_process
from turbospark.protocols import CausalModel, Phase
from turbospark.sampling.view import as_numpy
from turbospark.sessions.session import Session

_DIAGNOSIS_CHUNK = 256


def advance(
    model: CausalModel, session: Session, tokens: Sequence[int], *, phase: Phase, head: bool = True
) -> mx.array | None:
    """Feed tokens into a session; on a failure the session is tainted.

    Args:
        model: whose forward pass runs.
        session: caches and record advance together by len(tokens).
        tokens: at least one id.
        phase: what the pass is for.
        head: whether the last token's logits are wanted.

    Returns:
        [V] evaluated logits, or None without `head`.

    Raises:
        ContextLengthError: the tokens do not fit; nothing was fed.
        NonFiniteError: the logits hold NaN or infinity; the first bad layer is named.
        ProducerError: the pass failed.
        KernelError: this process was forked from one that had computed; nothing was fed.
    """
    claim_process()
    start = session.position
    if start + len(tokens) > session.max_context:
        raise ContextLengthError(
            f"{session!r} cannot take {len(tokens)} more tokens; load with a larger max_context"
        )
    try:
        logits = _evaluated(model, session, tokens, phase, head)
        if logits is not None:
            _check_finite(logits, model, session, tokens)
    except BaseException as error:
        session.taint()
        if isinstance(error, TurbosparkError) or not isinstance(error, Exception):
            raise
        raise ProducerError(
            f"the forward pass over tokens {start} to {start + len(tokens) - 1} failed "
            f"({type(error).__name__}: {error}); the session starts over at its next prompt"
        ) from error
    session.record(tokens, start)
    return logits


def _evaluated(
    model: CausalModel, session: Session, tokens: Sequence[int], phase: Phase, head: bool
) -> mx.array | None:
    fed = mx.array(np.array(tokens, dtype=np.int32))
    if head:
        output = model(fed, session.caches, phase=phase, logits="last")
        if output.logits is None:
            raise ProducerError("the model returned no logits where the last row's were asked for")
        logits = output.logits
        row = logits.reshape(-1) if logits.shape[0] == 1 else logits[-1]  # a slice is a copy
        _evaluate(row)
        return row
    # The last layer's residual stream needs every row that the caches took.
    last = model.num_layers - 1
    output = model(fed, session.caches, phase=phase, logits="none", taps=(last,))
    _evaluate(output.taps[last])
    return None


def _evaluate(array: mx.array) -> None:
    mx.eval(array)  # pyright: ignore[reportUnknownMemberType]


def _check_finite(
    logits: mx.array, model: CausalModel, session: Session, tokens: Sequence[int]
) -> None:
    row = as_numpy(logits)
    if math.isfinite(row.max()) and math.isfinite(row.min()):  # either is NaN where a value is
        return
    position = len(session.fed_ids) + len(tokens) - 1
    where = first_bad_layer(model, session, [*session.fed_ids.ids, *tokens])
    raise NonFiniteError(f"the logits of position {position} hold NaN or infinity: {where}")


def first_bad_layer(model: CausalModel, session: Session, tokens: Sequence[int]) -> str:
    """Feed tokens again into fresh caches and say where the first non-finite value arises."""
    caches = session.fresh_caches()
    layers = range(model.num_layers)
    worst: tuple[int, int] | None = None
    for start in range(0, len(tokens), _DIAGNOSIS_CHUNK):
        fed = mx.array(np.array(tokens[start : start + _DIAGNOSIS_CHUNK], dtype=np.int32))
        output = model(fed, caches, phase=Phase.PREFILL, logits="none", taps=tuple(layers))
        for layer in layers:
            bad = ~np.isfinite(as_numpy(output.taps[layer].astype(mx.float32))).all(axis=-1)
            if bad.any() and (worst is None or layer < worst[0]):
                worst = layer, start + int(np.argmax(bad))
    if worst is None:
        return "every layer's output is finite, so the output head is at fault"
    layer, position = worst
    return f"the first bad output is that of layer {layer} (of {len(layers)}) at token {position}"
