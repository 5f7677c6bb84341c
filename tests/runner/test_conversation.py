"""Conversations: ids are appended, nothing is fed twice, endings leave a defined state."""

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from turbospark.errors import (
    ContextLengthError,
    OptionError,
    ProducerError,
    PromptError,
    UnsupportedError,
)
from turbospark.testing import (
    ByteTokenizer,
    ScriptedDrafter,
    ScriptedModel,
    scripted_engine,
    scripted_logits,
)


class Rewriting(ByteTokenizer):
    """Its template drops what the assistant said before, as templates of thinking models do."""

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        kept = [m if m["role"] != "assistant" else {**m, "content": "-"} for m in messages]
        return super().apply_chat_template(kept, **options)


def rendered(tokenizer: ByteTokenizer, messages: list[dict[str, Any]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def test_a_turn_feeds_only_what_is_new() -> None:
    engine = scripted_engine()
    chat = engine.session("a")
    first = chat.send("hello", max_tokens=6)
    second = chat.send("more", max_tokens=6)
    assert second.reused_tokens == first.prompt_tokens + len(first.token_ids) - 1
    assert second.reuse_reason == "the prompt continues what was fed"
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "user", "assistant"]
    assert chat.messages[1]["content"] == first


def test_appended_ids_are_those_that_were_generated() -> None:
    engine = scripted_engine()
    chat = engine.session()
    first = chat.send("hello", max_tokens=6)
    before = rendered(ByteTokenizer(), [{"role": "user", "content": "hello"}])
    chat.send("more", max_tokens=1)
    tail = ByteTokenizer().encode("<end>\nuser:more<end>\nassistant:", add_special_tokens=False)
    assert chat.runner.session.fed_ids.ids == [*before, *first.token_ids, *tail]


def test_a_reply_equals_that_of_a_cold_engine() -> None:
    chat = scripted_engine().session()
    chat.send("hello", max_tokens=6)
    second = chat.send("more", max_tokens=6)
    fed = chat.runner.session.fed_ids.ids[: second.prompt_tokens]
    cold = scripted_engine(prefix_reuse=False)
    assert cold.generate(fed, max_tokens=6).token_ids == second.token_ids


def test_a_reply_that_ended_itself_gets_its_end_from_the_template() -> None:
    prompt = rendered(ByteTokenizer(), [{"role": "user", "content": "hello"}])
    model = ScriptedModel(scripted_logits(259, [*b"ok", 258], len(prompt)))
    chat = scripted_engine(model).session()
    assert chat.send("hello") == "ok"
    second = chat.send("more", max_tokens=1)
    assert second.reused_tokens == len(prompt) + 2
    tail = ByteTokenizer().encode("<end>\nuser:more<end>\nassistant:", add_special_tokens=False)
    assert chat.runner.session.fed_ids.ids == [*prompt, *b"ok", *tail]


def test_a_stop_string_leaves_no_hidden_tokens_in_the_text() -> None:
    prompt = rendered(ByteTokenizer(), [{"role": "user", "content": "hello"}])
    model = ScriptedModel(scripted_logits(259, list(b"yes STOP no"), len(prompt)))
    chat = scripted_engine(model).session()
    assert chat.send("hello", stop="STOP") == "yes "
    chat.send("more", max_tokens=1)
    tail = ByteTokenizer().encode("<end>\nuser:more<end>\nassistant:", add_special_tokens=False)
    assert chat.runner.session.fed_ids.ids == [*prompt, *b"yes ", *tail]


def test_a_template_that_rewrites_the_past_is_followed_and_the_rest_reused() -> None:
    engine = scripted_engine(tokenizer=Rewriting())
    chat = engine.session()
    first = chat.send("hello", max_tokens=6)
    second = chat.send("more", max_tokens=6)
    expected = rendered(Rewriting(), chat.messages[:3])
    assert chat.runner.session.fed_ids.ids[: second.prompt_tokens] == expected
    assert 0 < second.reused_tokens <= first.prompt_tokens
    assert "parts" in second.reuse_reason


def test_without_a_template_messages_are_text_that_continues() -> None:
    chat = scripted_engine(tokenizer=ByteTokenizer(chat=False)).session()
    first = chat.send("Once", max_tokens=4)
    chat.send(" upon", max_tokens=1)
    assert chat.runner.session.fed_ids.ids == [256, *b"Once", *first.token_ids, *b" upon"]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_closed_reply_is_kept_as_far_as_it_was_given(after: int) -> None:
    chat = scripted_engine().session()
    stream = chat.stream("hello", max_tokens=20)
    parts = [next(stream) for _ in range(after)]
    stream.close()  # type: ignore[attr-defined]
    if not after:
        assert chat.messages == []
    else:
        assert chat.messages[1]["content"] == "".join(part.text for part in parts)
    second = chat.send("more", max_tokens=6)
    fed = chat.runner.session.fed_ids.ids[: second.prompt_tokens]
    assert scripted_engine().generate(fed, max_tokens=6).token_ids == second.token_ids


def test_a_failure_before_the_first_token_leaves_the_conversation_as_it_was() -> None:
    chat = scripted_engine(ScriptedModel(fail_on=ord("!"))).session()
    chat.send("hello", max_tokens=4)
    before = list(chat.messages)
    with pytest.raises(ProducerError):
        chat.send("oh!", max_tokens=4)
    assert chat.messages == before
    again = chat.send("more", max_tokens=4)
    assert again.reused_tokens == 0
    assert "failed" in again.reuse_reason


def test_a_message_that_does_not_fit_moves_nothing() -> None:
    chat = scripted_engine(max_context=40).session()
    chat.send("hello", max_tokens=4)
    fed = chat.runner.session.fed_ids.ids
    with pytest.raises(ContextLengthError):
        chat.send("x" * 40)
    assert chat.runner.session.fed_ids.ids == fed
    assert len(chat.messages) == 2


def test_sessions_do_not_touch_each_other_or_the_engine() -> None:
    engine = scripted_engine()
    one, two = engine.session("one"), engine.session("two")
    expected = scripted_engine().session().send("hello", max_tokens=5)
    streams = [chat.stream("hello", max_tokens=5) for chat in (one, two)]
    found: list[list[int]] = [[], []]
    for _ in range(5):
        engine.generate("something else", max_tokens=2)
        for index, stream in enumerate(streams):
            found[index].append(next(stream).token or 0)
    assert found == [expected.token_ids, expected.token_ids]


def test_without_prefix_reuse_every_turn_feeds_all_of_it() -> None:
    chat = scripted_engine(prefix_reuse=False).session()
    other = scripted_engine().session()
    for message in ("hello", "more"):
        out, expected = (each.send(message, max_tokens=6) for each in (chat, other))
        assert out.token_ids == expected.token_ids
        assert (out.reused_tokens, out.reuse_reason) == (0, "prefix reuse is off")


def test_reset_starts_over() -> None:
    chat = scripted_engine().session()
    first = chat.send("hello", max_tokens=5)
    chat.reset()
    assert chat.messages == []
    again = chat.send("hello", max_tokens=5)
    assert again.token_ids == first.token_ids
    assert again.reused_tokens == 0


def test_reset_ends_a_reply_in_progress() -> None:
    chat = scripted_engine().session()
    stream = chat.stream("hello", max_tokens=9)
    next(stream)
    chat.reset()
    with pytest.raises(ProducerError, match="ended by a later use"):
        next(stream)
    assert chat.messages == []


def test_a_closed_conversation_takes_no_more() -> None:
    with scripted_engine().session("alice") as chat:
        chat.send("hello", max_tokens=2)
        stream = chat.stream("hello", max_tokens=9)
        next(stream)
    assert "closed" in repr(chat)
    assert chat.runner.session.position == 0
    with pytest.raises(PromptError, match="takes no more messages"):
        chat.send("hello")
    with pytest.raises(ProducerError):
        next(stream)


def test_what_a_conversation_owns_is_refused_by_name() -> None:
    chat = scripted_engine().session()
    with pytest.raises(OptionError, match="owns its caches"):
        chat.send("hello", prompt_cache=[])
    with pytest.raises(OptionError, match=r"load\(\.\.\., draft=\.\.\.\)"):
        chat.send("hello", draft_model=object())


def test_a_name_gives_the_same_conversation_until_it_is_closed() -> None:
    engine = scripted_engine()
    alice = engine.session("alice")
    alice.send("hello", max_tokens=3)
    assert engine.session("alice") is alice
    assert engine.session("bob") is not alice
    assert engine.session() is not engine.session()
    alice.close()
    again = engine.session("alice")
    assert again is not alice
    assert again.messages == []
    alice.close()
    assert engine.session("alice") is again


@pytest.mark.parametrize("name", [None, 5, ["alice"]])
def test_a_name_is_text(tmp_path: Path, name: Any) -> None:
    engine = scripted_engine()
    chat = engine.session()
    chat.save(tmp_path / "a")
    calls = [lambda: engine.session(name), lambda: chat.fork(name)]
    if name is not None:
        calls.append(lambda: engine.load_session(tmp_path / "a", name))
    for call in calls:
        with pytest.raises(OptionError, match=f"name of type {type(name).__name__}: give text"):
            call()


def test_a_named_conversation_is_kept_and_a_nameless_one_goes_with_its_last_holder() -> None:
    engine = scripted_engine()
    engine.session("alice").send("hello", max_tokens=3)
    gc.collect()
    assert len(engine.session("alice").messages) == 2
    nameless = weakref.ref(engine.session())
    gc.collect()
    assert nameless() is None


@pytest.mark.parametrize("name", ["", "alice"])
def test_closing_gives_every_cache_back(name: str) -> None:
    engine = scripted_engine(ScriptedModel(recurrent=1))
    chat = engine.session(name)
    chat.send("hello", max_tokens=5)
    stream = chat.stream("more", max_tokens=9)
    next(stream)
    fork = chat.fork()
    session = chat.runner.session
    kept = [weakref.ref(cache) for cache in session.caches]
    assert session.nbytes == chat.nbytes > 0
    chat.close()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert chat.nbytes == session.nbytes == 0
    assert fork.send("on", max_tokens=3).reused_tokens > 0


def test_both_branches_of_a_fork_go_on_alone() -> None:
    engine = scripted_engine()
    chat = engine.session()
    chat.send("hello", max_tokens=6)
    fork = chat.fork("other")
    assert engine.session("other") is fork
    said = {"left": chat, "right": fork}
    for _ in range(2):
        for word, branch in said.items():
            branch.send(word, max_tokens=6)
    for word, branch in said.items():
        alone = scripted_engine().session()
        for message in ("hello", word, word):
            expected = alone.send(message, max_tokens=6)
        assert branch.messages == alone.messages
        assert branch.runner.session.fed_ids.ids == alone.runner.session.fed_ids.ids
        assert expected.reused_tokens > 0
    with pytest.raises(OptionError, match="'other' is open"):
        chat.fork("other")


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_fork_ends_a_reply_in_progress_and_shares_what_was_given(after: int) -> None:
    chat = scripted_engine().session()
    stream = chat.stream("hello", max_tokens=20)
    for _ in range(after):
        next(stream)
    fork = chat.fork()
    assert fork.messages == chat.messages
    assert fork.runner.session.text_ids == chat.runner.session.text_ids
    if after:
        with pytest.raises(ProducerError, match="ended by a later use"):
            next(stream)
    fork.messages[:] = []
    assert len(chat.messages) == (2 if after else 0)


@pytest.mark.parametrize("block_passes", [False, True])
@pytest.mark.parametrize("recurrent", [0, 1])
def test_drafting_may_come_and_go_between_turns(recurrent: int, block_passes: bool) -> None:
    model = ScriptedModel(recurrent=recurrent)
    drafter = ScriptedDrafter(model.logits_of, "alternating", block_passes=block_passes)
    chat = scripted_engine(model, drafter=drafter, draft_block=3).session()
    plain = scripted_engine(ScriptedModel(recurrent=recurrent)).session()
    for turn, draft in enumerate(["auto", "off", "auto", "off", "off", "auto"]):
        out = chat.send(f"turn {turn}", max_tokens=9, draft=draft)
        expected = plain.send(f"turn {turn}", max_tokens=9)
        assert out.token_ids == expected.token_ids
        assert (out.rounds > 0) == (draft == "auto"), out.draft_off_reason
        assert turn == 0 or out.reused_tokens >= expected.reused_tokens - 1 > 0
    assert chat.messages == plain.messages


def test_idle_conversations_over_the_byte_budget_are_fed_again_and_say_so() -> None:
    engine = scripted_engine(session_bytes=1000)
    alice, bob, carol = (engine.session(name) for name in ("alice", "bob", "carol"))
    first = alice.send("hello", max_tokens=6)
    bob.send("hello", max_tokens=6)
    assert not bob.send("x" * 60, max_tokens=6).evicted
    out = carol.send("x", max_tokens=6)
    assert out.evicted
    assert (alice.nbytes, bob.nbytes > 0) == (0, True)
    again = alice.send("more", max_tokens=6)
    assert again.reused_tokens == 0
    assert "within session_bytes" in again.reuse_reason
    assert again.prompt_tokens > first.prompt_tokens + 6
    fed = alice.runner.session.fed_ids.ids[: again.prompt_tokens]
    assert scripted_engine().generate(fed, max_tokens=6).token_ids == again.token_ids
    last = alice.send("more", max_tokens=6)
    assert last.reused_tokens == again.prompt_tokens + 5
    assert "continues" in last.reuse_reason


def test_a_reply_in_progress_is_not_taken_for_idle() -> None:
    engine = scripted_engine(session_bytes=0)
    alice, bob = engine.session("alice"), engine.session("bob")
    expected = scripted_engine().session().send("hello", max_tokens=9)
    stream = alice.stream("hello", max_tokens=9)
    tokens = [next(stream).token]
    for _ in range(3):
        bob.send("hi", max_tokens=2)
        tokens.append(next(stream).token)
    tokens += [part.token for part in stream]
    assert tokens == expected.token_ids
    bob.send("hi", max_tokens=2)
    assert alice.nbytes == 0


def test_parked_conversations_count_against_the_budget_too() -> None:
    engine = scripted_engine(session_slots=3, session_bytes=900)
    texts = [list(range(start, start + 50)) for start in (0, 100)]
    for text in texts:
        engine.generate(text, max_tokens=2)
    chat = engine.session("alice")
    assert not chat.send("x", max_tokens=2).evicted
    chat.send("x" * 100, max_tokens=2)
    out = engine.session("bob").send("hi", max_tokens=2)
    assert out.evicted
    again = [engine.generate([*text, 7], max_tokens=2).reused_tokens for text in texts]
    assert again == [0, 50]


def test_two_threads_interleave_two_conversations() -> None:
    engine = scripted_engine(ScriptedModel(recurrent=1))
    assert engine.session("one").runner.lock is engine.session("two").runner.lock
    messages = [f"turn {turn}" for turn in range(6)]

    def texts(chat: Any, found: list[Any]) -> None:
        found.extend(chat.send(message, max_tokens=9).token_ids for message in messages)

    expected: list[Any] = []
    texts(scripted_engine(ScriptedModel(recurrent=1)).session(), expected)
    found: list[list[Any]] = [[], []]
    threads = [
        threading.Thread(target=texts, args=(engine.session(name), found[index]))
        for index, name in enumerate(("one", "two"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


def test_threads_that_share_a_conversation_wait_for_each_other() -> None:
    chat = scripted_engine().session()
    threads = [
        threading.Thread(target=lambda: [chat.send("hello", max_tokens=7) for _ in range(4)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = scripted_engine().session()
    for _ in range(12):
        alone.send("hello", max_tokens=7)
    assert chat.messages == alone.messages


def test_a_message_asked_for_before_another_one_went_ahead_is_refused() -> None:
    chat = scripted_engine().session()
    late = chat.stream("late", max_tokens=3)
    chat.send("hello", max_tokens=3)
    with pytest.raises(PromptError, match="gone on since"):
        next(late)
    assert len(chat.messages) == 2


@pytest.mark.parametrize("message", [None, 5, b"hi", [1, 2], [{"role": "user", "content": "hi"}]])
def test_what_is_no_message_is_refused(message: Any) -> None:
    chat = scripted_engine().session()
    with pytest.raises(PromptError, match="a message of type"):
        chat.send(message)
    assert chat.messages == []


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_conversation_is_not_copied_or_pickled(take: Any) -> None:
    with pytest.raises(UnsupportedError, match="keep its `messages`"):
        take(scripted_engine().session())


@pytest.mark.parametrize("message", ["", {"role": "user", "content": None}])
def test_a_message_without_text_is_refused_without_a_template(message: Any) -> None:
    chat = scripted_engine(tokenizer=ByteTokenizer(chat=False)).session()
    with pytest.raises(PromptError, match="non-empty"):
        chat.send(message)


def test_a_reply_whose_conversation_was_closed_says_so() -> None:
    engine = scripted_engine()
    chat = engine.session("alice")
    stream = chat.stream("hello", max_tokens=9)
    next(stream)
    chat.close()
    with pytest.raises(ProducerError, match="ended when its conversation was closed"):
        next(stream)
    other = engine.session("bob")
    stream = other.stream("hello", max_tokens=9)
    next(stream)
    other.send("once more", max_tokens=2)
    with pytest.raises(ProducerError, match="ended by a later use of"):
        next(stream)


def test_a_block_without_a_drafter_names_the_way_to_one() -> None:
    with pytest.raises(OptionError, match=r"draft_block=3: .*such as draft='ngram', or leave"):
        scripted_engine().generate("x", draft_block=3)
    with pytest.raises(OptionError, match="such as draft='ngram', or leave draft_block out"):
        scripted_engine(draft_block=3)
