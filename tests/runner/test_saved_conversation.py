"""A conversation in a file: it goes on as if never saved, and nowhere it does not belong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import turbospark as ts
from turbospark.errors import CheckpointError, OptionError, PromptError, SourceError
from turbospark.sessions.file import read_file, write_file
from turbospark.testing import (
    ByteTokenizer,
    ScriptedCache,
    ScriptedDrafter,
    ScriptedModel,
    scripted_engine,
    write_tiny_checkpoint,
)

Make = Callable[[], ts.Engine]


def drafting(**options: Any) -> ts.Engine:
    model = ScriptedModel(recurrent=1)
    drafter = ScriptedDrafter(model.logits_of, "alternating", **options)
    return scripted_engine(model, drafter=drafter, draft_block=3)


ENGINES: dict[str, Make] = {
    "plain": scripted_engine,
    "no template": lambda: scripted_engine(tokenizer=ByteTokenizer(chat=False)),
    "window": lambda: scripted_engine(ScriptedModel(reach=9)),
    "recurrent": lambda: scripted_engine(ScriptedModel(recurrent=2)),
    "step drafter": drafting,
    "block drafter": lambda: drafting(block_passes=True),
}


def state(chat: ts.Conversation) -> Any:
    session = chat.runner.session
    drafter = session.drafter_state.export()
    return (
        chat.messages, session.fed_ids.ids, session.pending, session.position,
        [{n: np.array(a).tolist() for n, a in c.export().items()} for c in session.caches],
        {name: np.array(array).tolist() for name, array in drafter.items()},
    )  # fmt: skip


@pytest.mark.parametrize("kind", ENGINES)
def test_it_goes_on_as_if_never_saved(tmp_path: Path, kind: str) -> None:
    engine = ENGINES[kind]()
    chat = engine.session("alice")
    chat.send("hello", max_tokens=7)
    chat.send("more", max_tokens=6)
    chat.save(tmp_path / "a.tsession")
    restored = ENGINES[kind]().load_session(tmp_path / "a.tsession")
    assert restored.name == "alice"
    assert state(restored) == state(chat)
    for message in ("and then?", "why"):
        here, there = (each.send(message, max_tokens=8) for each in (chat, restored))
        assert there.token_ids == here.token_ids
        assert there.reused_tokens == here.reused_tokens > 0
        assert there.reuse_reason == here.reuse_reason
        assert there.draft_off_reason == here.draft_off_reason
    assert state(restored) == state(chat)


@pytest.mark.parametrize("kind", ["plain", "step drafter"])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_saving_ends_a_reply_in_progress_and_keeps_what_was_given(
    tmp_path: Path, kind: str, after: int
) -> None:
    engine = ENGINES[kind]()
    chat = engine.session()
    stream = chat.stream("hello", max_tokens=20)
    given = [next(stream).token for _ in range(after)]
    chat.save(tmp_path / "a")
    restored = engine.load_session(tmp_path / "a")
    assert restored.messages == chat.messages
    text = restored.runner.session.text_ids
    assert text[len(text) - after :] == given
    assert restored.send("on", max_tokens=5).token_ids == chat.send("on", max_tokens=5).token_ids


def test_what_a_family_keeps_beside_its_caches_is_in_the_file(tmp_path: Path) -> None:
    engine = scripted_engine()
    chat = engine.session()
    chat.send("hello", max_tokens=3)
    chat.runner.session.extras["rope_delta"] = mx.array([-17])
    chat.save(tmp_path / "a")
    for other in (engine.load_session(tmp_path / "a"), chat.fork()):
        assert other.runner.session.extras["rope_delta"].tolist() == [-17]
        other.reset()
        assert other.runner.session.extras == {}
    assert chat.runner.session.extras != {}


def test_without_the_drafter_the_text_goes_on_and_with_it_again_too(tmp_path: Path) -> None:
    chat = drafting().session()
    chat.send("hello", max_tokens=7)
    chat.save(tmp_path / "a")
    off = scripted_engine(ScriptedModel(recurrent=1)).load_session(tmp_path / "a")
    expected = chat.send("more", max_tokens=6)
    plain = off.send("more", max_tokens=6)
    assert plain.token_ids == expected.token_ids
    assert plain.reused_tokens > 0
    off.save(tmp_path / "a")
    again = drafting().load_session(tmp_path / "a")
    out = again.send("why", max_tokens=6)
    assert out.token_ids == chat.send("why", max_tokens=6).token_ids
    assert out.reused_tokens > 0
    assert "drafter" in out.draft_off_reason


def test_a_last_message_may_be_sent_anew_to_recurrent_layers_too(tmp_path: Path) -> None:
    engine = ENGINES["recurrent"]()
    chat = engine.session()
    chat.send("hello", max_tokens=7)
    chat.send("a question " * 5, max_tokens=7)
    chat.save(tmp_path / "a")
    restored = ENGINES["recurrent"]().load_session(tmp_path / "a")
    restored.save(tmp_path / "b")
    again = ENGINES["recurrent"]().load_session(tmp_path / "b")
    prompt = [*chat.runner.session.fed_ids.ids[:110], 1]
    here, *there = (each.runner.try_reuse_prefix(prompt) for each in (chat, restored, again))
    assert here.tokens > 30
    assert there == [here, here]
    assert state(restored)[1:] == state(chat)[1:]


def test_an_empty_conversation_can_be_saved(tmp_path: Path) -> None:
    engine = scripted_engine()
    engine.session("new").save(tmp_path / "a")
    restored = engine.load_session(tmp_path / "a", name="other")
    assert restored.send("hello", max_tokens=3) == engine.session().send("hello", max_tokens=3)


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    engine = scripted_engine()
    chat = engine.session()
    for count in (1, 2):
        chat.send("hello", max_tokens=3)
        chat.save(tmp_path / "a")
        assert len(engine.load_session(tmp_path / "a").messages) == 2 * count
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_name_must_be_free(tmp_path: Path) -> None:
    engine = scripted_engine()
    chat = engine.session("alice")
    chat.send("hello", max_tokens=3)
    chat.save(tmp_path / "a")
    with pytest.raises(OptionError, match="'alice' is open: close it, or give another name"):
        engine.load_session(tmp_path / "a")
    assert engine.load_session(tmp_path / "a", name="bob").messages == chat.messages
    chat.close()
    assert engine.load_session(tmp_path / "a") is engine.session("alice")


def test_a_place_that_cannot_be_written_is_named_and_the_conversation_goes_on(
    tmp_path: Path,
) -> None:
    chat = scripted_engine().session()
    chat.send("hello", max_tokens=3)
    with pytest.raises(OptionError, match=r"cannot be saved as .*gone/a: No such file"):
        chat.save(tmp_path / "gone" / "a")
    assert chat.send("more", max_tokens=3).reused_tokens > 0


def test_a_closed_and_a_broken_conversation_are_not_saved(tmp_path: Path) -> None:
    engine = scripted_engine(ScriptedModel(fail_on=ord("!")))
    chat = engine.session()
    chat.send("hello", max_tokens=3)
    with pytest.raises(ts.ProducerError):
        chat.send("oh!")
    with pytest.raises(CheckpointError, match="a forward pass failed in it"):
        chat.save(tmp_path / "a")
    chat.close()
    with pytest.raises(PromptError, match="closed"):
        chat.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("models")

    def folder(name: str, **values: Any) -> Path:
        path = root / name
        return path if path.exists() else write_tiny_checkpoint(path, **values)

    return folder


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "weights": ({"seed": 6}, {}, "weights"),
    "layers": ({"num_hidden_layers": 2}, {}, "configuration, quantization .*, weights"),
    "window": ({"model_type": "mistral", "sliding_window": 16}, {}, "model type .*mistral here"),
    "quantization": ({}, {"quantize": "int8-g32"}, r"quantization \(22 x float in the file, 3 x"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_refuses_it_and_says_what_differs(
    folders: Callable[..., Path], tmp_path: Path, other: str
) -> None:
    values, options, said = OTHERS[other]
    own = ts.load(folders("own"), kernels="reference", max_context=64)
    chat = own.session("a")
    chat.send("hello", max_tokens=4)
    chat.save(tmp_path / "a")
    values = {"seed": 5, **values}
    engine = ts.load(folders(other, **values), kernels="reference", max_context=64, **options)
    mine = engine.session("mine")
    before = mine.send("hello", max_tokens=4)
    with pytest.raises(CheckpointError, match=f"a was saved under another model: .*{said}"):
        engine.load_session(tmp_path / "a")
    assert mine.send(" you", max_tokens=2).reused_tokens == before.prompt_tokens + 3
    assert ts.load(folders("own"), kernels="reference").load_session(tmp_path / "a").messages


@pytest.mark.parametrize("draft", ["off", "ngram", "itself"])
@pytest.mark.parametrize("window", [None, 16])
def test_a_real_model_goes_on_too(
    folders: Callable[..., Path], tmp_path: Path, window: int | None, draft: str
) -> None:
    values = {"model_type": "mistral", "sliding_window": window} if window else {}
    folder = folders(f"real {window}", **values)
    options: dict[str, Any] = {"draft": folder if draft == "itself" else draft}
    if draft != "off":
        options["draft_block"] = 3
    chat = ts.load(folder, max_context=400, **options).session()
    chat.send("xyz" * 50, max_tokens=9)
    chat.save(tmp_path / "a")
    restored = ts.load(folder, max_context=300, **options).load_session(tmp_path / "a")
    here, there = (each.send(" and", max_tokens=40) for each in (chat, restored))
    assert there.token_ids == here.token_ids
    assert there.reused_tokens == here.reused_tokens > 150
    assert there.accepted_per_position == here.accepted_per_position
    assert (there.drafted > 0) == (draft != "off")
    with pytest.raises(CheckpointError, match="load with max_context=158 or more"):
        ts.load(folder, max_context=100).load_session(tmp_path / "a")


def test_another_draft_model_begins_anew(folders: Callable[..., Path], tmp_path: Path) -> None:
    own, other = folders("own"), folders("weights", seed=6)
    chat = ts.load(own, draft=str(own), draft_block=2).session()
    chat.send("hello", max_tokens=7)
    chat.save(tmp_path / "a")
    restored = ts.load(own, draft=str(other), draft_block=2).load_session(tmp_path / "a")
    assert len(restored.runner.session.drafter_state.export()) < len(
        chat.runner.session.drafter_state.export()
    )
    here, there = (each.send(" and", max_tokens=7) for each in (chat, restored))
    assert there.token_ids == here.token_ids
    assert there.reused_tokens == here.reused_tokens > 0


def test_a_tokenizer_of_other_content_refuses_it(tmp_path: Path) -> None:
    scripted_engine().session().save(tmp_path / "a")
    other = scripted_engine(tokenizer=ByteTokenizer(chat=False))
    with pytest.raises(CheckpointError, match=r"differs is tokenizer\. Load what"):
        other.load_session(tmp_path / "a")


class PackedCache(ScriptedCache):
    """Stands for rows of fewer bits."""


class PackedModel(ScriptedModel):
    def make_caches(self, max_context: int, slack: int) -> list[Any]:
        return [ScriptedCache(), PackedCache()]


def test_caches_of_another_kind_refuse_it(tmp_path: Path) -> None:
    chat = scripted_engine(PackedModel()).session()
    chat.send("hello", max_tokens=3)
    chat.save(tmp_path / "a")
    said = "its caches are 1 x ScriptedCache, 1 x PackedCache, this model's are 2 x ScriptedCache"
    with pytest.raises(CheckpointError, match=said):
        scripted_engine().load_session(tmp_path / "a")
    with pytest.raises(CheckpointError, match="caches"):
        scripted_engine(ScriptedModel(recurrent=1)).load_session(tmp_path / "a")


def test_arrays_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    engine = scripted_engine()
    chat = engine.session()
    chat.send("hello", max_tokens=3)
    chat.save(tmp_path / "a")
    values, arrays = read_file(tmp_path / "a")
    write_file(tmp_path / "b", values, {**arrays, "fed_ids": arrays["fed_ids"][:-1]})
    with pytest.raises(CheckpointError, match=r"caches of \[\d+\] tokens for \d+ fed ids"):
        engine.load_session(tmp_path / "b")
    del arrays["cache.1.ids"]
    write_file(tmp_path / "b", values, arrays)
    with pytest.raises(CheckpointError, match="cache 1: a scripted cache takes ids"):
        engine.load_session(tmp_path / "b")


WRONG: dict[str, list[Any]] = {
    "caches": [None, 5], "pending": ["x", []], "drafter": [None, 3], "name": [None, 7, []],
    "fingerprint": [None, "x", []], "messages": [None, "x", [1], {}], "written": [5, []],
    "prompt_end": [None, "x", 0, 10_000],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "a"
    chat = scripted_engine(ScriptedModel(recurrent=1)).session("alice")
    chat.send("hello", max_tokens=3)
    chat.save(path)
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_kind_is_refused_by_name(whole: Path, tmp_path: Path, name: str) -> None:
    engine = scripted_engine(ScriptedModel(recurrent=1))
    values, arrays = read_file(whole)
    assert name in values
    files = [values | {name: wrong} for wrong in WRONG[name]]
    if name != "prompt_end":
        files.append({other: value for other, value in values.items() if other != name})
    for wrong in files:
        write_file(tmp_path / "b", wrong, arrays)
        with pytest.raises(CheckpointError, match=r"b (is damaged|cannot go on here): "):
            engine.load_session(tmp_path / "b")
    assert engine.session("alice").messages == []


@pytest.mark.parametrize("name", ["fed_ids", "ids", "prompt_end.2.0"])
def test_an_array_of_another_kind_is_refused(whole: Path, tmp_path: Path, name: str) -> None:
    engine = scripted_engine(ScriptedModel(recurrent=1))
    values, arrays = read_file(whole)
    array = arrays.pop(name)
    for wrong in ({}, {name: array.astype(mx.float32)}, {name: array[None]}):
        write_file(tmp_path / "b", values, arrays | wrong)
        with pytest.raises(CheckpointError, match=r"b (is damaged|cannot go on here): "):
            engine.load_session(tmp_path / "b")
    assert engine.session("alice").messages == []


@pytest.mark.parametrize("name", ["fed_ids", "ids"])
@pytest.mark.parametrize("token", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(
    whole: Path, tmp_path: Path, name: str, token: int
) -> None:
    values, arrays = read_file(whole)
    ids = [*arrays[name].tolist()[:-1], token]  # type: ignore[misc]
    write_file(tmp_path / "b", values, arrays | {name: mx.array(ids, mx.int32)})
    with pytest.raises(CheckpointError, match=f"{name}' hold {token}; ids run to"):
        scripted_engine(ScriptedModel(recurrent=1)).load_session(tmp_path / "b")


def test_a_damaged_file_is_refused_and_the_engine_stays_usable(tmp_path: Path) -> None:
    engine = scripted_engine()
    chat = engine.session("a")
    chat.send("hello", max_tokens=3)
    chat.save(tmp_path / "a")
    raw = bytearray((tmp_path / "a").read_bytes())
    raw[-2] ^= 1
    (tmp_path / "b").write_bytes(raw)
    with pytest.raises(CheckpointError, match="b is damaged"):
        engine.load_session(tmp_path / "b", name="b")
    with pytest.raises(SourceError, match="nobody"):
        engine.load_session(tmp_path / "nobody", name="b")
    assert engine.session("b").messages == []
    assert chat.send("more", max_tokens=3).reused_tokens > 0


def test_messages_survive_whatever_they_hold(tmp_path: Path) -> None:
    engine = scripted_engine()
    chat = engine.session()
    chat.send({"role": "user", "content": "👩‍👧 日本語\n\u2028", "name": "é"}, max_tokens=3)
    chat.save(tmp_path / "a")
    assert engine.load_session(tmp_path / "a").messages == chat.messages
    chat.messages.append({"role": "user", "content": object()})
    with pytest.raises(OptionError, match="not JSON serializable"):
        chat.save(tmp_path / "b")
    assert json.dumps(engine.load_session(tmp_path / "a").messages)


def test_that_its_caches_were_given_back_is_saved_too(tmp_path: Path) -> None:
    engine = scripted_engine(session_bytes=0)
    chat = engine.session("alice")
    chat.send("hello", max_tokens=6)
    engine.session("bob").send("hi", max_tokens=2)
    assert chat.nbytes == 0
    chat.save(tmp_path / "a")
    restored = scripted_engine().load_session(tmp_path / "a")
    twin = restored.fork()
    for each in (restored, twin):
        first, second = each.send("more", max_tokens=6), each.send("more", max_tokens=6)
        assert "within session_bytes" in first.reuse_reason
        assert "continues" in second.reuse_reason


def test_a_file_that_does_not_say_whether_caches_were_given_back_is_read(tmp_path: Path) -> None:
    chat = scripted_engine().session()
    chat.send("hello", max_tokens=6)
    chat.save(tmp_path / "a")
    values, arrays = read_file(tmp_path / "a")
    assert values.pop("given_back") is False
    write_file(tmp_path / "b", values, arrays)
    again = scripted_engine().load_session(tmp_path / "b").send("more", max_tokens=6)
    assert "continues" in again.reuse_reason
    write_file(tmp_path / "c", values | {"given_back": 1}, arrays)
    with pytest.raises(CheckpointError, match="'given_back' is 1"):
        scripted_engine().load_session(tmp_path / "c")
