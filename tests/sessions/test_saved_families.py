"""Every registered family: saved and restored through a file, it goes on as if never saved."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import assert_same_logits, feed
from golden.tiny import TINY, tiny_model

from turbospark.errors import CheckpointError
from turbospark.protocols import Phase
from turbospark.sessions.file import read_file, write_file
from turbospark.sessions.saved import export_session, restore_session
from turbospark.sessions.session import Session

TOKENS = np.random.default_rng(7).integers(0, 67, size=47).astype(np.int32)
KINDS = sorted(TINY)


def session_of(model: Any, max_context: int = 64) -> Session:
    return Session(lambda: model.make_caches(max_context, 5), max_context)


def fed(model: Any, count: int, chunk: int) -> Session:
    session = session_of(model)
    for start in range(0, count, chunk):
        part = TOKENS[start : min(start + chunk, count)]
        feed(model, part, [len(part)], caches=session.caches)
        session.record(part.tolist(), start)
    return session


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [7, 40])
def test_it_goes_on_as_if_never_saved(tmp_path: Path, kind: str, chunk: int) -> None:
    model = tiny_model(kind)
    session = fed(model, 37, chunk)
    write_file(tmp_path / "a", *export_session(session, "off"))
    restored = session_of(model, 50)
    restore_session(restored, "off", *read_file(tmp_path / "a"))
    assert restored.fed_ids.ids == TOKENS[:37].tolist()
    assert restored.candidate().max_rewind == session.candidate().max_rewind
    runs = [
        np.concatenate([
            feed(model, TOKENS[37:42], [1] * 5, phase=Phase.DECODE, caches=each.caches),
            feed(model, TOKENS[42:], [5], caches=each.caches),
        ])
        for each in (session, restored)
    ]  # fmt: skip
    assert_same_logits(model, *runs)
    one, other = (export_session(each, "off")[1] for each in (session, restored))
    assert one.keys() == other.keys()
    assert all(mx.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_family_takes_it(kind: str) -> None:
    model = tiny_model(kind)
    saved = export_session(fed(model, 9, 9), "off")
    for other in KINDS:
        session = session_of(tiny_model(other))
        alike = _same_caches(session.caches, session_of(model).caches)
        if not alike:
            with pytest.raises(CheckpointError):
                restore_session(session, "off", *saved)


def _alike(one: Any, other: Any) -> bool:
    """Whether two caches keep rows or states of the same shapes."""
    names = ("num_kv_heads", "head_dim", "window")
    if type(one) is not type(other):
        return False
    if one.recurrent:
        return [part.shape for part in one.state] == [part.shape for part in other.state]
    return all(getattr(one, name, None) == getattr(other, name, None) for name in names)


def _same_caches(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(_alike, some, others))
