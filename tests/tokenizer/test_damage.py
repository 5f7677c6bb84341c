"""Damaged files give an error that names them, or a tokenizer that works; nothing else."""

import copy
import json
import random

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer.test_load import MODELS
from tokenizer.vocabularies import (
    escaped_metadata,
    rank_metadata,
    score_metadata,
    tokenizer_json,
    write_folder,
)

from turbospark.errors import TokenizerError, TurbosparkError
from turbospark.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from turbospark.tokenizer.tokenizer_json import guarded

CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "add_bos_token": True,
    "additional_special_tokens": ["<b>"],
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True, "lstrip": False}},
    "chat_template": [{"name": "default", "template": "{{ messages[0]['content'] }}"}],
}
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=4),
    st.lists(st.integers(0, 3), max_size=2), st.just({}), st.just({"type": "Sequence"}),
)  # fmt: skip


def damaged(data: bytes, seed: int) -> bytes:
    """Flip, cut, drop and insert a few bytes, often near the ends, where the structure is."""
    dice, out = random.Random(seed), bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 8])):
        end = len(out)
        place = dice.choice([dice.randrange(end + 1), end - dice.randrange(min(300, end) + 1)])
        match dice.randrange(5):
            case 0 | 1:
                out[place : place + 1] = bytes(b ^ 1 << dice.randrange(8) for b in out[place:][:1])
            case 2:
                del out[place : place + dice.choice([1, 10, 1000])]
            case 3:
                out[place:place] = dice.randbytes(dice.choice([1, 5, 60]))
            case 4:
                del out[place:]
    return bytes(out)


def replaced(value, seed: int, junk):
    """A deep copy of a JSON value with one thing in it replaced or taken away."""
    value, dice = copy.deepcopy(value), random.Random(seed)
    inner = value
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = dice.choice(keys)
        if isinstance(inner[key], dict | list) and inner[key] and dice.random() < 0.75:
            inner = inner[key]
        elif dice.random() < 0.3:
            del inner[key]
            return value
        else:
            inner[key] = junk
            return value


TEXTS = ("Příliš  日本 👍 the\n\nfox½ ﬁ Ⅷ <b></s>", "", " ")


def works_or_names(name: str, build) -> Tokenizer | None:
    """The tokenizer, if the damage left one that works."""
    try:
        tokenizer = build()
        works(tokenizer)
    except TurbosparkError as error:
        assert name in str(error)  # noqa: PT017 - an error is only one of the two outcomes
        return None
    return tokenizer


def works(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert all(0 <= token < len(tokenizer) for token in ids)
        detokenizer = tokenizer.detokenizer()
        assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == tokenizer.decode(ids)
    for token in range(0, len(tokenizer), max(1, len(tokenizer) // 40)):
        tokenizer.token_text(token)
        tokenizer.decode([token])


@pytest.mark.parametrize("model", MODELS)
@given(seed=st.integers(0, 1 << 40))
@settings(max_examples=120, deadline=None)
def test_damaged_sentencepiece_file(model, seed, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged model"
    data = damaged(MODELS[model], seed)
    write_folder(folder, tokenizer__model=data)
    tokenizer = works_or_names("tokenizer.model", lambda: load_tokenizer(folder))
    if tokenizer is not None:
        on_disk = sentencepiece.SentencePieceProcessor(model_proto=data)
        assert len(tokenizer) == on_disk.GetPieceSize()
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            assert ids == on_disk.encode(text)


def same_as_file(tokenizer: Tokenizer | None, path) -> None:
    if tokenizer is None:
        return
    on_disk = tokenizers.Tokenizer.from_file(str(path))
    on_disk.no_truncation()
    on_disk.no_padding()
    for text in TEXTS:
        assert tokenizer.encode(text) == on_disk.encode(text).ids


def test_panic_of_the_library_becomes_an_error_and_an_interrupt_does_not():
    class PanicException(BaseException):
        pass

    def fail(error: BaseException):
        raise error

    with pytest.raises(TokenizerError, match=r"^x\.json is not a usable tokenizer: index 3$"):
        guarded("x.json", lambda: fail(PanicException("index\n 3")))
    for kind in (KeyboardInterrupt, SystemExit, MemoryError):
        with pytest.raises(kind):
            guarded("x.json", lambda kind=kind: fail(kind()))


@given(seed=st.integers(0, 1 << 40))
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_of_tokenizer_json(seed, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged json"
    data = json.dumps(tokenizer_json(), ensure_ascii=False).encode()
    write_folder(folder, tokenizer__json=damaged(data, seed))
    found = works_or_names("tokenizer.json", lambda: load_tokenizer(folder))
    same_as_file(found, folder / "tokenizer.json")


@given(seed=st.integers(0, 1 << 40), junk=JUNK)
@settings(max_examples=250, deadline=None)
def test_junk_in_tokenizer_json(seed, junk, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "junk json"
    write_folder(folder, tokenizer__json=replaced(tokenizer_json(), seed, junk))
    found = works_or_names("tokenizer.json", lambda: load_tokenizer(folder))
    same_as_file(found, folder / "tokenizer.json")


@given(seed=st.integers(0, 1 << 40))
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_of_tokenizer_config(seed, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged config"
    data = damaged(json.dumps(CONFIG).encode(), seed)
    write_folder(folder, tokenizer__json=tokenizer_json(), tokenizer_config__json=data)
    works_or_names("tokenizer_config.json", lambda: load_tokenizer(folder))


@pytest.mark.parametrize("vocabulary", ["tokenizer__json", "tokenizer__model"])
@given(seed=st.integers(0, 1 << 40), junk=JUNK)
@settings(max_examples=150, deadline=None)
def test_junk_in_tokenizer_config(vocabulary, seed, junk, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / f"junk config {vocabulary}"
    content = tokenizer_json() if vocabulary == "tokenizer__json" else MODELS["plain"]
    write_folder(folder, **{vocabulary: content})
    write_folder(folder, tokenizer_config__json=replaced(CONFIG, seed, junk))
    works_or_names("tokenizer_config.json", lambda: load_tokenizer(folder))


@pytest.mark.parametrize("metadata", [score_metadata, rank_metadata, escaped_metadata])
@given(seed=st.integers(0, 1 << 40), junk=JUNK)
@settings(max_examples=200, deadline=None)
def test_junk_in_gguf_metadata(metadata, seed, junk):
    changed = replaced(metadata(), seed, junk)
    works_or_names("some.gguf", lambda: tokenizer_from_gguf(changed, "some.gguf"))


@pytest.mark.parametrize("unit", [0x7FFFFC00, 0xFFFFFFFF])  # a step, and a text, out of reach
def test_character_map_that_leads_outside_its_memory_is_refused(unit, tmp_path):
    data = bytearray(MODELS["nfkc"])
    trie = data.rindex(b"nmt_nfkc") + len("nmt_nfkc") + 4 + 4  # tag, length, the trie's size
    assert int.from_bytes(data[trie - 4 : trie], "little") % 1024 == 0
    data[trie + 40 : trie + 44] = unit.to_bytes(4, "little")
    write_folder(tmp_path, tokenizer__model=bytes(data))
    with pytest.raises(TurbosparkError, match=r"tokenizer\.model: its map of characters is dam"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_character_map_never_leads_outside_its_memory(seed, tmp_path):
    model = MODELS["nfkc"]
    dice, data = random.Random(seed), bytearray(model)
    for _ in range(dice.choice([1, 2, 200])):  # the map is the last 240 kB but for a few bytes
        data[dice.randrange(len(data) - 239_000, len(data) - 100)] ^= 1 << dice.randrange(8)
    write_folder(tmp_path, tokenizer__model=bytes(data))
    works_or_names("tokenizer.model", lambda: load_tokenizer(tmp_path))
