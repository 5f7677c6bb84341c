"""Conversations under any order of calls, against the script that their model follows."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turbospark as ts
from turbospark.testing import ByteTokenizer, ScriptedDrafter, ScriptedModel, scripted_engine

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"reach": 9},
    "recurrent": {"recurrent": 1},
    "step drafter": {"recurrent": 1, "drafter": False},
    "block drafter": {"reach": 11, "drafter": True},
}
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "plain", "break", "fork", "save", "give back", "reset"]),
        st.integers(0, 5),
        st.integers(0, 7),
    ),
    max_size=14,
)


def engine_of(kind: str) -> ts.Engine:
    options = dict(KINDS[kind])
    block_passes = options.pop("drafter", None)
    model = ScriptedModel(**options)
    tokenizer = ByteTokenizer(chat=False)
    tokenizer.eos_ids = frozenset()
    if block_passes is None:
        return scripted_engine(model, tokenizer)
    drafter = ScriptedDrafter(model.logits_of, "alternating", block_passes=block_passes)
    return scripted_engine(model, tokenizer, drafter=drafter, draft_block=3)


def script(engine: ts.Engine, ids: list[int], count: int) -> list[int]:
    """What the model says after a text."""
    said: list[int] = []
    for _ in range(count):
        said.append(int(np.argmax(engine.model.logits_of([*ids, *said]).astype(np.float32))))
    return said


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(calls=CALLS)
def test_every_conversation_says_what_its_own_text_leads_to(
    kind: str, calls: list[tuple[str, int, int]]
) -> None:
    engine = engine_of(kind)
    chats: list[ts.Conversation] = [engine.session()]
    texts: list[list[int]] = [[]]
    for serial, (call, which, count) in enumerate(calls):
        at = which % len(chats)
        chat, text = chats[at], texts[at]
        if call == "fork":
            chats.append(chat.fork())
            texts.append(list(text))
        elif call == "save":
            with tempfile.TemporaryDirectory() as folder:
                chat.save(Path(folder) / "a")
                chats.append(engine.load_session(Path(folder) / "a"))
            texts.append(list(text))
        elif call == "give back":
            assert chat.give_back()
        elif call == "reset":
            chat.reset()
            text.clear()
        else:
            say(engine, chat, text, f"<{serial}>", call, count)
        assert chat.runner.session.text_ids in (text, [])
        for other in chats:
            check_drafter(engine, other)


def check_drafter(engine: ts.Engine, chat: ts.Conversation) -> None:
    """The rows that a drafter has written are those of this conversation's text."""
    session = chat.runner.session
    if isinstance(engine.drafter, ScriptedDrafter):
        rows = session.drafter_state.rows
        assert rows == engine.drafter.rows_of(session.fed_ids.ids)[: len(rows)]


def say(
    engine: ts.Engine, chat: ts.Conversation, text: list[int], said: str, call: str, count: int
) -> None:
    prompt = [*text, *engine.tokenizer.encode(said, add_special_tokens=not text)]
    if call == "break":
        stream = chat.stream(said, max_tokens=9)
        given = [next(stream).token for _ in range(count)]
        stream.close()  # type: ignore[attr-defined]
        if not given:
            return
    else:
        out = chat.send(said, max_tokens=count + 1, draft="off" if call == "plain" else "auto")
        given = out.token_ids
        assert out.prompt_tokens == len(prompt)
    assert given == script(engine, prompt, len(given))
    text[:] = [*prompt, *given]
