"""A reply that ends or is left inside a round: what the session then holds."""

import pytest
from runner.drafting import PROMPT
from runner.generations import KINDS, assert_drafter_follows, make, stream, text

from turbospark.errors import ProducerError
from turbospark.runner.runner import Runner


@pytest.mark.parametrize("recurrent", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [0, 1, 2, 3, 5, 6, 9])
def test_a_client_that_goes_away_at_any_token_leaves_a_session_that_continues_as_if_cold(
    kind: str, given: int, recurrent: int
) -> None:
    whole = text(make(None)).token_ids
    runner = make(kind, recurrent=recurrent)
    responses = stream(runner, draft_block=4)
    for _ in range(given):
        next(responses)
    responses.close()  # type: ignore[attr-defined]
    said = [*PROMPT, *whole[:given]]
    if given:
        assert runner.session.text_ids == said
        assert runner.session.fed_ids.ids == said[:-1]
        assert runner.session.open_round is None
        assert_drafter_follows(runner)
    longer = [*said, 3, 4]
    again = text(runner, longer, draft_block=4)
    assert again.token_ids == text(make(None), longer).token_ids
    assert again.reused_tokens == max(len(said) - 1, 0) * bool(given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [1, 2, 4, 7])
def test_a_later_turn_settles_a_reply_that_was_left_standing(kind: str, given: int) -> None:
    whole = text(make(None)).token_ids
    runner = make(kind)
    responses = stream(runner, draft_block=4)
    for _ in range(given):
        next(responses)
    runner.begin_turn()
    assert runner.session.open_round is None
    assert runner.session.text_ids == [*PROMPT, *whole[:given]]
    assert_drafter_follows(runner)
    longer = [*PROMPT, *whole[:given], 3]
    assert text(runner, longer).token_ids == text(make(None), longer).token_ids
    with pytest.raises(ProducerError, match="ended by a later use"):
        next(responses)
    assert runner.session.fed_ids.ids[: len(longer)] == longer


@pytest.mark.parametrize("given", [1, 2, 4])
def test_a_reply_left_standing_by_another_runner_of_the_session_is_text_as_far_as_given(
    given: int,
) -> None:
    whole = text(make(None)).token_ids
    first = make("perfect")
    responses = stream(first, draft_block=4)
    for _ in range(given):
        next(responses)
    session = first.session
    session.settle()
    said = [*PROMPT, *whole[:given]]
    assert session.text_ids == said
    second = Runner(first.model, session, first.drafter, prefix_reuse=True)
    out = text(second, [*said, 3], draft_block=4)
    assert out.reused_tokens == len(said) - 1
    assert out.token_ids == text(make(None), [*said, 3]).token_ids
    with pytest.raises(ProducerError, match="ended by a later use"):
        next(responses)
    assert session.text_ids == [*said, 3, *out.token_ids]


def test_two_runners_of_a_session_never_meet_in_an_open_round() -> None:
    first = make("perfect")
    responses = stream(first, draft_block=4)
    for _ in range(3):
        next(responses)
    second = Runner(first.model, first.session, first.drafter, prefix_reuse=True)
    assert text(second, [1, 2, 3]).token_ids == text(make(None), [1, 2, 3]).token_ids
    after = first.session.fed_ids.ids
    responses.close()  # type: ignore[attr-defined]
    assert first.session.fed_ids.ids == after


def test_a_fork_of_a_session_in_the_midst_of_a_reply_does_not_end_it() -> None:
    runner = make(None)
    responses = stream(runner)
    given = [next(responses).token for _ in range(3)]
    twin = runner.session.fork()
    twin.settle()
    assert twin.text_ids == [*PROMPT, *given]
    given.extend(response.token for response in responses)
    assert given == text(make(None)).token_ids


def test_a_reply_left_standing_that_is_dropped_later_moves_nothing() -> None:
    runner = make("perfect")
    responses = stream(runner, draft_block=4)
    for _ in range(3):
        next(responses)
    out = text(runner, [1, 2, 3], max_tokens=4)
    before = runner.session.text_ids
    responses.close()  # type: ignore[attr-defined]
    assert runner.session.text_ids == before == [1, 2, 3, *out.token_ids]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_token_in_a_round_is_not_fed_and_ends_the_text(kind: str) -> None:
    whole = text(make(None)).token_ids
    for stop in dict.fromkeys(whole[:12]):
        runner = make(kind)
        out = text(runner, draft_block=5, stop_ids=frozenset({stop}))
        kept = whole[: whole.index(stop) + 1]
        assert (out.token_ids, out.stop_reason) == (kept, stop)
        assert runner.session.fed_ids.ids == [*PROMPT, *kept[:-1]]
        assert_drafter_follows(runner)


@pytest.mark.parametrize("kind", KINDS)
def test_when_the_last_token_is_given_all_is_settled(kind: str) -> None:
    for stop in dict.fromkeys(text(make(None)).token_ids):
        runner = make(kind)
        responses = stream(runner, draft_block=4, stop_ids=frozenset({stop}))
        last = next(response for response in responses if response.finish_reason)
        assert runner.session.open_round is None
        assert runner.session.text_ids == [*PROMPT, *last.token_ids]
        assert last.rollbacks <= last.rounds
        responses.close()  # type: ignore[attr-defined]
