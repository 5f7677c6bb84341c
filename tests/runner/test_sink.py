"""The one commit: order, precedence, and what enters the history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbospark.runner.sink import Committed, FinishReason, TokenSink
from turbospark.testing import ByteDetokenizer, ByteTokenizer

EOS = 257


def sink(max_tokens: int = 9, stops: tuple[str, ...] = (), **options: object) -> TokenSink:
    return TokenSink(
        [1, 2, 3], ByteDetokenizer(), stop_ids={EOS}, stops=stops, max_tokens=max_tokens, **options
    )  # type: ignore[arg-type]


def commit(target: TokenSink, tokens: list[int]) -> list[Committed]:
    done: list[Committed] = []
    for token in tokens:
        done.append(target.commit(token))
        if done[-1].reason is not None:
            break
    return done


def test_tokens_that_go_on_enter_the_history() -> None:
    target = sink()
    done = commit(target, [*b"ab"])
    assert [c.text for c in done] == ["a", "b"]
    assert [c.index for c in done] == [0, 1]
    assert target.history.tolist() == [1, 2, 3, *b"ab"]


def test_a_stop_token_is_counted_and_neither_shown_nor_kept() -> None:
    target = sink()
    done = commit(target, [*b"a", EOS])
    assert done[-1].reason is FinishReason.STOP_TOKEN
    assert done[-1].text == ""
    assert target.generated == 2
    assert target.history.tolist() == [1, 2, 3, *b"a"]


def test_the_token_that_ends_is_not_kept() -> None:
    for options, token in (({"max_tokens": 2}, ord("b")), ({"stops": ("b",)}, ord("b"))):
        target = sink(**options)
        done = commit(target, [ord("a"), token, ord("c")])
        assert done[-1].reason is not None
        assert target.history.tolist() == [1, 2, 3, ord("a")]


def test_stop_string_goes_before_budget_and_budget_before_cancel() -> None:
    always = lambda: True  # noqa: E731
    one = commit(sink(1, ("a",), cancelled=always), [*b"a"])[-1]
    assert (one.reason, one.stop, one.text) == (FinishReason.STOP_STRING, "a", "")
    assert commit(sink(1, cancelled=always), [*b"a"])[-1].reason is FinishReason.MAX_TOKENS
    assert commit(sink(2, cancelled=always), [*b"a"])[-1].reason is FinishReason.CANCELLED


def test_a_split_stop_string_never_leaks_its_head() -> None:
    done = commit(sink(stops=("END",)), [*b"xEND"])
    assert [c.text for c in done] == ["x", "", "", ""]
    assert done[-1].stop == "END"


@pytest.mark.parametrize("last", [{"max_tokens": 3}, {"cancelled": lambda: True}])
def test_text_held_back_is_given_out_at_the_end(last: dict[str, object]) -> None:
    target = sink(stops=("END",), **last)
    done = commit(target, [*b"EN?"] if "max_tokens" in last else [*b"E"])
    assert "".join(c.text for c in done) == ("EN?" if "max_tokens" in last else "E")


def test_a_stop_token_gives_out_the_text_held_back() -> None:
    done = commit(sink(stops=("END",)), [*b"EN", EOS])
    assert "".join(c.text for c in done) == "EN"
    assert done[-1].reason is FinishReason.STOP_TOKEN


def test_half_a_character_is_flushed_as_decode_would() -> None:
    half = list("é".encode())[:1]
    done = commit(sink(max_tokens=1), half)
    assert done[-1].text == ByteTokenizer().decode(half) == "\ufffd"


def test_a_stop_string_may_be_completed_by_the_flush() -> None:
    done = commit(sink(max_tokens=2, stops=("x\ufffd",)), [ord("x"), 0xC3])
    assert "".join(c.text for c in done) == ""
    assert done[-1].reason is FinishReason.STOP_STRING


@given(
    st.lists(
        st.one_of(st.sampled_from(list("日本č 👩‍👩‍👧".encode())), st.integers(0, 255)), max_size=30
    ),
    st.lists(st.text(alphabet="日č \ufffd", min_size=1, max_size=2), max_size=2),
)
def test_shown_text_and_stop_string_equal_decode(tokens: list[int], stops: list[str]) -> None:
    target = sink(max_tokens=len(tokens) + 1, stops=tuple(stops))
    done = commit(target, [*tokens, EOS])
    shown = "".join(c.text for c in done)
    whole = ByteTokenizer().decode(tokens)
    if done[-1].stop is None:
        assert shown == whole
    else:
        # The pieces a detokenizer lets through may part only where decode agrees.
        assert whole.startswith(shown)
        assert not any(stop in shown for stop in stops)
