"""A session as values and arrays for a file, and back."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.caches.parts import Parts, export_parts, split_parts
from turbospark.errors import CheckpointError
from turbospark.protocols import RollbackPoint
from turbospark.sessions.checkpoints import Checkpoint
from turbospark.sessions.session import Session

_KINDS: dict[str, Any] = {
    "caches": list, "pending": int | None, "drafter": str, "name": str, "fingerprint": dict,
    "messages": list, "written": str | None,
}  # fmt: skip
_TEXTS = ("fed_ids", "ids")


def export_session(session: Session, drafter: str) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Everything that a session has beside what a model gives anew.

    Args:
        session: between two turns.
        drafter: which one has drafted in it, in words.

    Raises:
        CheckpointError: a forward pass failed in it, so its caches are not to be trusted.
    """
    if session.fed_ids.tainted:
        raise CheckpointError(
            f"{session!r} cannot be saved: a forward pass failed in it; send it something, which "
            "feeds it anew, or reset it"
        )
    values: dict[str, Any] = {
        "caches": [type(cache).__name__ for cache in session.caches],
        "pending": session.pending,
        "drafter": drafter,
    }
    caches = {str(index): cache.export() for index, cache in enumerate(session.caches)}
    parts: Parts = {"cache": export_parts(caches), "extra": session.extras}
    if session.drafter_state is not None:
        parts["drafter"] = session.drafter_state.export()
    point = _last_prompt_end(session)
    if point is not None:
        values["prompt_end"] = point.position
        states = {
            str(index): {str(place): part for place, part in enumerate(state)}
            for index, state in point.recurrent.items()
        }
        parts["prompt_end"] = export_parts(states)
    fed = mx.array(np.array(session.fed_ids.ids, dtype=np.int32))
    return values, {"fed_ids": fed, **export_parts(parts)}


def check_kinds(values: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> None:
    """Refuse a saved conversation in which something is missing or of another kind.

    Raises:
        CheckpointError: naming it.
    """
    for name, kind in _KINDS.items():
        if name not in values or not isinstance(values[name], kind):
            raise CheckpointError(f"its {name!r} is {_said(values, name)}")
    for message in values["messages"]:
        if not isinstance(message, dict):
            raise CheckpointError(f"a message of it is {message!r}")
    end = values.get("prompt_end", 1)
    if not isinstance(end, int) or end < 1:
        raise CheckpointError(f"its 'prompt_end' is {end!r}")
    if not isinstance(values.get("given_back", False), bool):
        raise CheckpointError(f"its 'given_back' is {_said(values, 'given_back')}")
    for name in _TEXTS:
        array = arrays.get(name)
        if array is None or array.dtype != mx.int32 or array.ndim != 1:
            what = "missing" if array is None else f"{array.dtype} of shape {array.shape}"
            raise CheckpointError(f"its {name!r} are {what}")


def check_ids(arrays: Mapping[str, mx.array], vocab_size: int) -> None:
    """Refuse token ids that no model of `vocab_size` has.

    Raises:
        CheckpointError: naming one.
    """
    for name in _TEXTS:
        for token in np.asarray(arrays[name]):
            if not 0 <= token < vocab_size:
                raise CheckpointError(f"its {name!r} hold {token}; ids run to {vocab_size - 1}")


def restore_session(
    session: Session, drafter: str, values: Mapping[str, Any], arrays: Mapping[str, mx.array]
) -> None:
    """Put what `export_session` gave into a session that nothing was fed to.

    Another drafter than the saved one begins without having seen the text.

    Raises:
        CheckpointError: the caches or the drafter are of another kind; throw the session away.
    """
    kinds = [type(cache).__name__ for cache in session.caches]
    if values["caches"] != kinds:
        raise CheckpointError(
            f"its caches are {_counted(values['caches'])}, this model's are {_counted(kinds)}"
        )
    parts = split_parts(arrays)
    caches = split_parts(parts.get("cache", {}))
    for index, cache in enumerate(session.caches):
        try:
            cache.restore(caches.get(str(index), {}))
        except CheckpointError as error:
            raise CheckpointError(f"cache {index}: {error}") from error
    if session.drafter_state is not None and values["drafter"] == drafter:
        try:
            session.drafter_state.restore(parts.get("drafter", {}))
        except CheckpointError as error:
            raise CheckpointError(f"drafter {drafter!r}: {error}") from error
    fed: list[int] = np.asarray(arrays["fed_ids"]).tolist()
    offsets = {cache.offset for cache in session.caches}
    if offsets - {len(fed)}:
        raise CheckpointError(f"caches of {sorted(offsets)} tokens for {len(fed)} fed ids")
    session.record(fed, 0)
    session.pending = values["pending"]
    session.extras = parts.get("extra", {})
    if "prompt_end" in values:
        states = split_parts(parts.get("prompt_end", {}))
        point = _read_point(session, values["prompt_end"], states)
        session.checkpoints.add(Checkpoint(point, ends_prompt=True))


def _read_point(session: Session, position: int, parts: Parts) -> RollbackPoint:
    states: dict[int, Any] = {}
    for index, cache in enumerate(session.caches):
        if cache.recurrent:
            states[index] = tuple(parts.get(str(index), {}).values())
            if _layout(states[index]) != _layout(cache.state):
                raise CheckpointError(
                    f"the state of cache {index} at its prompt's end is {_layout(states[index])}, "
                    f"not {_layout(cache.state)}"
                )
    if position > session.position:
        raise CheckpointError(f"its prompt ends at {position} of {session.position} tokens")
    return RollbackPoint(position, states)


def _layout(state: tuple[mx.array, ...]) -> list[Any]:
    return [(part.shape, part.dtype) for part in state]


def _said(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name])[:60] if name in values else "missing"


def _last_prompt_end(session: Session) -> RollbackPoint | None:
    """Where a last message that is sent anew would go back to, for recurrent layers."""
    kept = (taken.point for taken in reversed(session.checkpoints.all) if taken.ends_prompt)
    return next(kept, None)


def _counted(kinds: list[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"
