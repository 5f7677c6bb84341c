import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer.vocabularies import KINDS, NORMAL, TEXTS, score_metadata, small_tokenizer

from turbospark.errors import PromptError
from turbospark.tokenizer import Tokenizer, tokenizer_from_gguf


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    built = {kind: small_tokenizer(kind, folder / kind) for kind in KINDS}
    prefixing = {**score_metadata(), "tokenizer.ggml.add_space_prefix": True}
    return {**built, "scores with prefix": tokenizer_from_gguf(prefixing)}


ALL_KINDS = (*KINDS, "scores with prefix")
IDS = st.lists(st.integers(0, 400), max_size=24)  # every vocabulary has byte tokens among these


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", ALL_KINDS)
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_stream_of_a_text_joins_to_its_decoding(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(streamed(tokenizer, ids, skip=skip)) == whole


@pytest.mark.parametrize("kind", ALL_KINDS)
@given(ids=IDS)
@settings(max_examples=250, deadline=None)
def test_stream_of_any_ids_joins_to_their_decoding(tokenizers, kind, ids):
    tokenizer = tokenizers[kind]
    ids = [token % len(tokenizer) for token in ids]
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(streamed(tokenizer, ids, skip=skip)) == whole


@pytest.mark.parametrize("kind", ALL_KINDS)
@given(text=TEXTS, data=st.data())
@settings(max_examples=80, deadline=None)
def test_stream_cut_at_any_token_flushes_as_decode_does(tokenizers, kind, text, data):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ALL_KINDS)
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
@example("👩‍👩‍👧‍👦 日本語 ď नमस्ते")
@settings(max_examples=100, deadline=None)
def test_stream_never_shows_a_half_character_that_later_bytes_complete(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    parts = streamed(tokenizer, tokenizer.encode(text, parse_special=False))
    assert "\ufffd" not in "".join(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_character_is_shown_with_its_last_byte(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("x👍y", add_special_tokens=False)
    parts = streamed(tokenizer, ids)
    shown = [part for part in parts if part]
    assert shown in (["x", "👍", "y"], [" x", "👍", "y"])
    assert parts.count("") == len(ids) - 3 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_half_an_emoji_at_the_end_flushes_as_one_replacement(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("x👍", add_special_tokens=False)[:-1]
    parts = streamed(tokenizer, ids)
    assert parts[-1] == "\ufffd"
    assert tokenizer.decode(ids).endswith("x\ufffd")


@pytest.mark.parametrize("kind", ["scores", "escaped", "json"])
def test_bytes_that_are_not_utf8_are_marked_and_good_ones_kept(tokenizers, kind):
    tokenizer = tokenizers[kind]
    spelled = [0xFF, *"é".encode(), 0xE6, 0x97, ord("a"), *"日".encode(), 0x80]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in spelled]
    assert "".join(streamed(tokenizer, ids)) == "\ufffdé\ufffda日\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_token_inside_a_character_does_not_break_it(tokenizers, kind):
    tokenizer = tokenizers[kind]
    head, *rest = tokenizer.encode("☃", add_special_tokens=False)[-3:]
    special = tokenizer.token_id("</s>")
    ids = [head, special, *rest]
    assert tokenizer.decode(ids).endswith("☃")
    assert "".join(streamed(tokenizer, ids)).endswith("☃")
    kept = tokenizer.decode(ids, skip_special_tokens=False)
    assert kept.endswith("\ufffd</s>\ufffd\ufffd")


def test_leading_space_is_dropped_once_where_the_vocabulary_puts_one(tokenizers):
    for kind in ("json", "scores with prefix"):
        tokenizer = tokenizers[kind]
        for text in (" leading space", " ", "  two", "", "x"):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert "".join(streamed(tokenizer, ids)) == text


def test_leading_space_is_kept_where_the_vocabulary_puts_none(tokenizers):
    for kind in ("scores", "ranks", "escaped"):
        tokenizer = tokenizers[kind]
        for text in (" leading space", " ", "  two"):
            assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("text", ["\u00a0", "\u0120", "Ġa", "▁", "Ċ", "č", "\u2028", "\x85"])
def test_odd_single_characters_stream(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    whole = "".join(streamed(tokenizer, tokenizer.encode(text)))
    assert whole == (text if kind == "ranks" else text.replace("▁", " "))


@pytest.mark.parametrize("kind", KINDS)
def test_finish_starts_over(tokenizers, kind):
    tokenizer = tokenizers[kind]
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("x日y")
    for _ in range(2):
        assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == tokenizer.decode(ids)
    detokenizer.add(ids[-3])
    assert detokenizer.finish() in {"\ufffd", ""}


@pytest.mark.parametrize("kind", KINDS)
def test_id_outside_the_vocabulary_is_refused_and_moves_nothing(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for token in (-1, len(tokenizer), 10**9):
        detokenizer = tokenizer.detokenizer()
        text = detokenizer.add(tokenizer.encode("x")[-1])
        with pytest.raises(PromptError, match=f"token id {token} is outside the vocabulary"):
            detokenizer.add(token)
        assert (text + detokenizer.finish()).strip() == "x"
        with pytest.raises(PromptError, match=f"token id {token} is outside"):
            tokenizer.decode([token])
        with pytest.raises(PromptError, match=f"token id {token} is outside"):
            tokenizer.token_text(token)


def test_building_one_costs_little_and_a_token_costs_the_same_at_any_length(tokenizers):
    tokenizer = tokenizers["scores"]
    begin = time.process_time()
    for _ in range(1000):
        tokenizer.detokenizer()
    assert time.process_time() - begin < 0.5  # 0.5 ms each, where other engines need 52 ms
    ids = tokenizer.encode("日本 fox ", add_special_tokens=False) * 50
    detokenizer = tokenizer.detokenizer()
    costs = []
    for _ in range(40):
        begin = time.process_time()
        for token in ids:
            detokenizer.add(token)
        costs.append(time.process_time() - begin)
    assert min(costs[-10:]) < 3 * min(costs[:10])


def test_building_one_costs_the_same_with_a_large_vocabulary():
    metadata = {**score_metadata()}
    for key, more in (
        ("tokens", [f"w{number}" for number in range(40_000)]),
        ("scores", [-999.0] * 40_000),
        ("token_type", [NORMAL] * 40_000),
    ):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *more]
    tokenizer = tokenizer_from_gguf(metadata)
    begin = time.process_time()
    for _ in range(100):
        tokenizer.detokenizer()
    assert time.process_time() - begin < 0.05  # a table of all texts costs some 10 ms each time
