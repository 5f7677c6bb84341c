import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from tokenizer.small_bpe import cut_as_gpt2, cut_as_llama3, merge_by_rank, split_at
from tokenizer.vocabularies import (
    CONTROL,
    NORMAL,
    TEXTS,
    byte_character,
    escaped_metadata,
    rank_merges,
    rank_metadata,
)

from turbospark.errors import TokenizerError
from turbospark.tokenizer import tokenizer_from_gguf
from turbospark.tokenizer.pretokenizers import PRE_TOKENIZERS
from turbospark.tokenizer.ranked_bpe import build_byte_level_bpe

KEY = "tokenizer.ggml."


def cut_digits_then_gpt2(text: str) -> list[str]:
    pieces: list[str] = []
    plain = ""
    for character in text:
        if unicodedata.category(character)[0] == "N":
            pieces += [*cut_as_gpt2(plain), character]
            plain = ""
        else:
            plain += character
    return [*pieces, *cut_as_gpt2(plain)]


CUTS = {
    "gpt-2": cut_as_gpt2,
    "smollm": cut_digits_then_gpt2,
    "llama-bpe": cut_as_llama3,
    "qwen2": lambda text: cut_as_llama3(unicodedata.normalize("NFC", text), digits=1),
    "deepseek-r1-qwen": lambda text: cut_as_llama3(text, digits=1),
}
BYTES = [byte_character(byte) for byte in range(256)]
ENGINES = {pre: build_byte_level_bpe(BYTES, [], [], PRE_TOKENIZERS[pre], pre) for pre in CUTS}
TOKENIZERS = {pre: tokenizer_from_gguf(rank_metadata(pre)) for pre in CUTS}


def slow_ids(text: str, pre: str) -> list[int]:
    ids = {token: index for index, token in enumerate(rank_metadata()[KEY + "tokens"])}
    found = [ids["<s>"]] if pre == "llama-bpe" else []
    for part, is_token in split_at(text, ["<b>", "<s>", "</s>"]):
        if is_token:
            found.append(ids[part])
            continue
        for piece in CUTS[pre](part):
            symbols = [byte_character(byte) for byte in piece.encode()]
            found += [ids[symbol] for symbol in merge_by_rank(symbols, rank_merges())]
    return found


@pytest.mark.parametrize("pre", CUTS)
@given(text=TEXTS)
@example(text="it's IT'S ' s 12345² \r\n\n x  y\t\tz \n 日本  ")
@settings(max_examples=120, deadline=None)
def test_rank_vocabulary_equals_a_slow_encoder(pre, text):
    assert TOKENIZERS[pre].encode(text) == slow_ids(text, pre)


@pytest.mark.parametrize("pre", CUTS)
@given(text=TEXTS)
@example(text="'Sx it'SX 'ſ 'LLama 'vex'dé \r\n\r x\n  \n y'")
@settings(max_examples=200, deadline=None)
def test_pre_tokenizer_cuts_as_a_slow_one(pre, text):
    engine = ENGINES[pre]
    text = engine.normalizer.normalize_str(text) if engine.normalizer else text
    pieces = [piece for piece, _ in engine.pre_tokenizer.pre_tokenize_str(text)]
    spelled = ["".join(BYTES[byte] for byte in cut.encode()) for cut in CUTS[pre](text)]
    assert pieces == spelled


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_rank_vocabulary_decodes_what_it_encoded(text):
    ids = TOKENIZERS["gpt-2"].encode(text, parse_special=False)
    assert TOKENIZERS["gpt-2"].decode(ids) == text


@given(TEXTS)
@example("日 a  b\n<b>")
@settings(max_examples=200, deadline=None)
def test_escaped_vocabulary_equals_a_slow_encoder(text):
    metadata = escaped_metadata()
    ids = {token: index for index, token in enumerate(metadata[KEY + "tokens"])}
    merges = [tuple(line.split(" ")) for line in metadata[KEY + "merges"]]
    found = [1]  # the begin of text, whatever the file says
    for part, is_token in split_at(text, ["<unk>", "<s>", "</s>", "  ", "   ", "\n\n", "<b>"]):
        if is_token:
            found.append(ids[part])
            continue
        for symbol in merge_by_rank(part.replace(" ", "▁"), merges):
            spelled = [f"<0x{byte:02X}>" for byte in symbol.encode()]
            found += [ids[s] for s in ([symbol] if symbol in ids else spelled)]
    tokenizer = tokenizer_from_gguf({**metadata, KEY + "add_bos_token": False})
    assert tokenizer.encode(text) == found
    plain = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(plain) == text.replace("▁", " ")


def test_every_pre_tokenizer_builds_and_keeps_the_text():
    text = "It's 12345 naïve Ǆ words,日本語のテキスト e\u0301!\r\n\n  x\t(y)/z <= 1.5 नमस्ते"
    for pre in PRE_TOKENIZERS:
        tokenizer = tokenizer_from_gguf(rank_metadata(pre))
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_whole_words_are_taken_as_they_are_only_where_the_original_does_so():
    metadata = rank_metadata()
    tokens = [*metadata[KEY + "tokens"], "zqzq"]  # no merges lead there
    types = [*metadata[KEY + "token_type"], NORMAL]
    changes = {KEY + "tokens": tokens, KEY + "token_type": types}
    llama = tokenizer_from_gguf({**metadata, **changes, KEY + "pre": "llama-bpe"})
    assert llama.encode("zqzq", add_special_tokens=False) == [len(tokens) - 1]
    assert len(tokenizer_from_gguf({**metadata, **changes}).encode("zqzq")) == 4


def test_begin_of_text_is_added_only_when_the_file_says_so():
    bos = rank_metadata()[KEY + "bos_token_id"]
    assert TOKENIZERS["gpt-2"].encode("") == []
    assert TOKENIZERS["llama-bpe"].encode("") == [bos]  # as llama.cpp where the file is silent
    assert (
        tokenizer_from_gguf(
            {**rank_metadata("llama-bpe"), KEY + "add_bos_token": np.bool_(False)}
        ).encode("")
        == []
    )
    adding = tokenizer_from_gguf({**rank_metadata(), KEY + "add_bos_token": True})
    assert adding.encode("") == [bos]
    assert adding.bos_id == bos
    assert adding.bos_token == "<s>"


def test_added_token_that_looks_like_byte_characters_decodes_to_itself():
    metadata = rank_metadata()
    changed = tokenizer_from_gguf(
        {
            **metadata,
            KEY + "tokens": [*metadata[KEY + "tokens"], "éé"],
            KEY + "token_type": [*metadata[KEY + "token_type"], CONTROL],
        }
    )
    ids = changed.encode("xééy")
    assert len(changed) - 1 in ids
    assert changed.decode(ids, skip_special_tokens=False) == "xééy"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pre": None}, "pre is missing"),
        ({"pre": "gpt-9"}, "pre 'gpt-9' is not implemented; known: .*qwen2"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b", "ab"]}, "merges holds at 1 'ab'"),
        ({"merges": ["a \u4e2d"]}, "not a usable tokenizer.*\u4e2d"),
        ({"merges": [3]}, "merges holds at 0"),
        ({"token_type": None}, "token_type is missing"),
        ({"eos_token_id": 99999}, "outside the"),
    ],
)
def test_malformed_metadata_is_refused_by_file(changes, fault):
    changed = {**rank_metadata(), **{KEY + name: value for name, value in changes.items()}}
    kept = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(TokenizerError, match=fault) as caught:
        tokenizer_from_gguf(kept, "ranks.gguf")
    assert "ranks.gguf" in str(caught.value)
