import numpy as np
import pytest
from hypothesis import example, given, settings
from tokenizer.small_bpe import merge_by_score, split_at
from tokenizer.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    TEXTS,
    UNKNOWN,
    UNUSED,
    USER_TOKENS,
    score_metadata,
)

from turbospark.errors import TokenizerError
from turbospark.tokenizer import Tokenizer, tokenizer_from_gguf

KEY = "tokenizer.ggml."


def build(**changes) -> Tokenizer:
    changed = {KEY + name: value for name, value in changes.items()}
    merged = {k: v for k, v in {**score_metadata(), **changed}.items() if v is not None}
    return tokenizer_from_gguf(merged, "small.gguf")


def slow_ids(text: str, *, prefix: bool = False) -> list[int]:
    tokens = score_metadata()[KEY + "tokens"]
    types, scores = score_metadata()[KEY + "token_type"], score_metadata()[KEY + "scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    ranked = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}
    found: list[int] = []
    for part, is_special in split_at(text, ["<unk>", "<s>", "</s>"]):
        if is_special:
            found.append(ids[part])
            continue
        escaped = ("▁" if prefix else "") + part.replace(" ", "▁")
        user = {token.replace(" ", "▁"): ids[token] for token in USER_TOKENS}
        for stretch, is_user in split_at(escaped, user):
            if is_user:
                found.append(user[stretch])
                continue
            for symbol in merge_by_score(stretch, ranked):
                spelled = [f"<0x{byte:02X}>" for byte in symbol.encode()]
                found += [ids[s] for s in ([symbol] if symbol in ranked else spelled)]
    return found


TOKENIZER = build()
PREFIXING = build(add_space_prefix=True)


@given(TEXTS)
@example("a <b>日  x\n\n\n</s>   y")
@settings(max_examples=400, deadline=None)
def test_score_vocabulary_equals_a_slow_encoder(text):
    assert TOKENIZER.encode(text, add_special_tokens=False) == slow_ids(text)


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_score_vocabulary_with_prefix_puts_a_space_before_each_stretch(text):
    ids = slow_ids(text, prefix=True)
    assert PREFIXING.encode(text, add_special_tokens=False) == ids


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_score_vocabulary_decodes_what_it_encoded(text):
    expected = text.replace("▁", " ")
    assert TOKENIZER.decode(TOKENIZER.encode(text, parse_special=False)) == expected
    single = PREFIXING.encode(text, parse_special=False)
    assert PREFIXING.decode(single) == expected


def test_special_text_is_parsed_unless_asked_not_to():
    eos = TOKENIZER.token_id("</s>")
    assert TOKENIZER.encode("</s>") == [1, eos]
    plain = TOKENIZER.encode("</s>", parse_special=False)
    assert eos not in plain
    assert TOKENIZER.decode(plain) == "</s>"


def test_user_defined_tokens_are_found_even_when_special_text_is_plain():
    assert TOKENIZER.token_id("<b>") in TOKENIZER.encode("x<b>", parse_special=False)


def test_begin_and_end_of_text_follow_the_flags():
    assert build().encode("") == [1]
    assert build(add_eos_token=True).encode("") == [1, 2]
    assert build(add_bos_token=False).encode("") == []
    assert build(bos_token_id=None).encode("") == []
    assert TOKENIZER.encode("a", add_special_tokens=False) == slow_ids("a")


def test_special_ids_vanish_from_decoded_text_unless_kept():
    ids = [1, *TOKENIZER.encode("fox", add_special_tokens=False), 2]
    assert TOKENIZER.decode(ids) == "fox"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<s>fox</s>"
    assert {0, 1, 2} <= TOKENIZER.special_ids


def test_ends_of_a_turn_are_united_from_ids_and_known_texts():
    tokens = [*score_metadata()[KEY + "tokens"], "<end_of_turn>", "<|im_end|>", "<|eot_id|>"]
    types = [*score_metadata()[KEY + "token_type"], CONTROL, CONTROL, NORMAL]
    scores = [*score_metadata()[KEY + "scores"], 0.0, 0.0, -9e9]
    size = len(tokens)
    built = build(tokens=tokens, token_type=types, scores=scores, eot_token_id=5)
    assert built.eos_ids == {2, 5, size - 3, size - 2}  # a normal token is no mark


def test_harmony_end_of_one_message_is_no_end_of_the_reply():
    tokens = [*score_metadata()[KEY + "tokens"], "<|end|>", "<|return|>", "<|call|>"]
    types = [*score_metadata()[KEY + "token_type"], CONTROL, CONTROL, CONTROL]
    scores = [*score_metadata()[KEY + "scores"], 0.0, 0.0, 0.0]
    built = build(tokens=tokens, token_type=types, scores=scores)
    assert built.eos_ids == {2, len(tokens) - 2, len(tokens) - 1}


def test_numpy_lists_and_byte_strings_build_the_same_vocabulary():
    built = build(
        tokens=[token.encode() for token in score_metadata()[KEY + "tokens"]],
        scores=np.array(score_metadata()[KEY + "scores"], np.float32),
        token_type=np.array(score_metadata()[KEY + "token_type"], np.int32),
        bos_token_id=np.uint32(1),
    )
    assert built.encode("the quick  fox") == TOKENIZER.encode("the quick  fox")


def test_repeated_and_empty_tokens_keep_their_ids_and_spelling():
    tokens = [*score_metadata()[KEY + "tokens"], "the", "", "[PAD]", "[PAD]"]
    types = [*score_metadata()[KEY + "token_type"], NORMAL, NORMAL, UNUSED, UNUSED]
    scores = [*score_metadata()[KEY + "scores"], -5e3, -5e3, 0.0, 0.0]
    built = build(tokens=tokens, token_type=types, scores=scores)
    size = len(tokens)
    assert len(built) == size
    assert [built.token_text(token) for token in range(size - 4, size)] == tokens[-4:]
    assert built.encode("the fox") == TOKENIZER.encode("the fox")
    assert built.decode([size - 4, size - 3, size - 2, size - 1]) == "the"


def test_vocabulary_without_byte_tokens_gives_unknown_for_a_character_it_lacks():
    built = tokenizer_from_gguf(
        {
            KEY + "model": "llama",
            KEY + "tokens": ["<unk>", "a", "b", "ab"],
            KEY + "scores": [0.0, -1.0, -2.0, -3.0],
            KEY + "token_type": [UNKNOWN, NORMAL, NORMAL, NORMAL],
            KEY + "add_bos_token": False,
            KEY + "add_space_prefix": False,
        }
    )
    assert built.encode("ab日a") == [3, 0, 1]
    assert built.decode([3, 0, 1], skip_special_tokens=False) == "ab<unk>a"
    assert built.bos_id is None
    assert built.eos_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": None}, "model is missing"),
        ({"model": 7}, "model is not text"),
        ({"model": "bert"}, "'bert' is not implemented"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "tokens is str, not a list"),
        ({"tokens": [1, 2]}, "tokens holds at 0"),
        ({"tokens": [b"\xff"]}, "tokens holds at 0"),
        ({"tokens": ["a", "\ud800"]}, "tokens holds at 1"),
        ({"scores": None}, "scores is missing"),
        ({"scores": [1.0]}, "scores has 1 entries"),
        ({"token_type": None}, "token_type is missing"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"bos_token_id": 10**6}, "outside the"),
        ({"eos_token_id": -1}, "outside the"),
        ({"eos_token_id": "2"}, "not a token id"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is true"),
        ({"add_eos_token": "yes"}, "neither true nor false"),
        ({"add_eos_token": True, "eos_token_id": None}, "add_eos_token is true"),
    ],
)
def test_malformed_metadata_is_refused_by_file_and_key(changes, fault):
    with pytest.raises(TokenizerError, match=fault) as caught:
        build(**changes)
    assert "small.gguf: tokenizer.ggml." in str(caught.value)


def test_scores_and_types_with_impossible_values_are_refused():
    scores, types = score_metadata()[KEY + "scores"], score_metadata()[KEY + "token_type"]
    for bad in (float("nan"), float("inf"), 1e39, "1", None):
        with pytest.raises(TokenizerError, match="no finite 32-bit number"):
            build(scores=[bad, *scores[1:]])
    for bad in (0, 7, "1", None, [1]):
        with pytest.raises(TokenizerError, match="token_type holds"):
            build(token_type=[bad, *types[1:]])
    few_bytes = [NORMAL if kind == BYTE and i % 2 else kind for i, kind in enumerate(types)]
    with pytest.raises(TokenizerError, match="marks 128 byte tokens"):
        build(token_type=few_bytes)
    with pytest.raises(TokenizerError, match="no token is of the unknown type"):
        build(token_type=[NORMAL, *types[1:]], unknown_token_id=None)
