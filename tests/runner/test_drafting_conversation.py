"""A tiny Qwen 3.5 with real drafters: conversations, forks and files, against no drafting."""

from pathlib import Path
from typing import Any

import pytest
from loading.drafter_files import write_blocks, write_qwen

import turbospark as ts

SAID = ("0123456789" * 4, "2718", "31415926535", "16180")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    chat = ts.load(folder, draft="off", **REFERENCE).session()
    return [chat.send(text, max_tokens=11).token_ids for text in SAID]


REFERENCE: dict[str, Any] = {"kernels": "reference", "max_context": 256}


@pytest.fixture(scope="module", params=["auto", "ngram", "blocks", "model"])
def engine(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> ts.Engine:
    draft: Any = request.param
    if draft == "blocks":
        draft = write_blocks(tmp_path_factory.mktemp("drafts") / "blocks")
    elif draft == "model":
        draft = folder
    return ts.load(folder, draft=draft, draft_block=3, **REFERENCE)


def drafts(engine: ts.Engine, out: ts.GeneratedText) -> bool:
    """Whether it was drafted; a lookup may find nothing in a text that repeats nothing."""
    return out.drafted > 0 or engine.drafter.name == "ngram"


def test_a_drafted_conversation_says_what_a_plain_one_says(
    engine: ts.Engine, plain: list[list[int]]
) -> None:
    chat = engine.session()
    before = None
    for text, expected in zip(SAID, plain, strict=True):
        out = chat.send(text, max_tokens=11)
        assert out.token_ids == expected
        assert drafts(engine, out), out.draft_off_reason
        assert before is None or out.reused_tokens == before.prompt_tokens + 10
        before = out


def test_forked_and_restored_it_goes_on_and_drafts(
    engine: ts.Engine, plain: list[list[int]], tmp_path: Path
) -> None:
    chat = engine.session()
    for text in SAID[:2]:
        chat.send(text, max_tokens=11)
    chat.save(tmp_path / "a")
    branches = [chat, chat.fork(), engine.load_session(tmp_path / "a")]
    for text, expected in zip(SAID[2:], plain[2:], strict=True):
        outs = [branch.send(text, max_tokens=11) for branch in branches]
        for out in outs:
            assert out.token_ids == expected
            assert drafts(engine, out), out.draft_off_reason
            assert out.accepted_per_position == outs[0].accepted_per_position
            assert out.reused_tokens == outs[0].reused_tokens > 60


def test_a_reply_broken_off_anywhere_leaves_what_was_given(engine: ts.Engine) -> None:
    for after in (1, 2, 3, 6):
        chat = engine.session()
        stream = chat.stream(SAID[0], max_tokens=11)
        given = [next(stream).token for _ in range(after)]
        out = chat.send(SAID[1], max_tokens=7)
        text = [*map(ord, SAID[0]), *given, *map(ord, SAID[1])]
        assert out.prompt_tokens == len(text)
        assert out.token_ids == engine.generate(text, max_tokens=7, draft="off").token_ids


def test_anonymous_conversations_take_their_drafters_along(folder: Path) -> None:
    engine = ts.load(folder, session_slots=2, draft_block=2, **REFERENCE)
    texts = [[*map(ord, text)] for text in (SAID[0], SAID[2] * 3)]
    known = [0, 0]
    for turn in range(3):
        for who, text in enumerate(texts):
            out = engine.generate(text, max_tokens=8)
            assert out.reused_tokens == known[who]
            assert out.drafted > 0, (turn, out.draft_off_reason)
            known[who] = len(text) + 7
            text.extend([*out.token_ids, 50 + turn, 51])
