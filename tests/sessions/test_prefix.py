"""The reuse decision: length and reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbospark.sessions.fed_ids import FedIds
from turbospark.sessions.prefix import decide_reuse


def fed(*ids: int) -> FedIds:
    record = FedIds()
    record.record(ids, 0)
    return record


@pytest.mark.parametrize(
    ("prompt", "position", "max_rewind", "tokens", "reason"),
    [
        ([1, 2, 3, 4], 3, 0, 3, "continues"),
        ([1, 2, 9, 9], 3, 1, 2, "parts from what was fed at token 2; 1 taken back"),
        ([1, 2, 9, 9], 3, 0, 0, "going back 1 tokens is more than the 0"),
        ([1, 2, 3], 3, 1, 2, "all of the prompt but its last token"),
        ([9, 2, 3], 3, 3, 0, "differs from what was fed at token 0"),
        ([1], 3, 3, 0, "one token"),
        ([1, 2, 3, 4], 2, 2, 0, "hold 2 tokens where the record has 3"),
    ],
)
def test_the_decision_names_its_reason(
    prompt: list[int], position: int, max_rewind: int, tokens: int, reason: str
) -> None:
    reuse = decide_reuse(fed(1, 2, 3), prompt, position=position, max_rewind=max_rewind)
    assert reuse.tokens == tokens
    assert reason in reuse.reason


def test_off_tainted_and_empty_keep_nothing() -> None:
    tainted = fed(1, 2)
    tainted.taint()
    for record, enabled, reason in (
        (fed(1, 2), False, "is off"),
        (tainted, True, "failed"),
        (fed(), True, "nothing was fed"),
    ):
        reuse = decide_reuse(record, [1, 2, 3], position=2, max_rewind=2, enabled=enabled)
        assert reuse.tokens == 0
        assert reason in reuse.reason


@given(
    st.lists(st.integers(0, 1), max_size=9),
    st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.integers(0, 9),
)
def test_what_is_kept_is_shared_and_reachable(
    ids: list[int], prompt: list[int], max_rewind: int
) -> None:
    reuse = decide_reuse(fed(*ids), prompt, position=len(ids), max_rewind=max_rewind)
    assert reuse.reason
    assert 0 <= reuse.tokens < len(prompt)
    assert prompt[: reuse.tokens] == ids[: reuse.tokens]
    if reuse.tokens:
        assert len(ids) - reuse.tokens <= max_rewind
