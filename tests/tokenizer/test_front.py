import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from tokenizer.vocabularies import score_metadata, tokenizer_json, write_folder

from turbospark.errors import PromptError
from turbospark.tokenizer import load_tokenizer, tokenizer_from_gguf
from turbospark.tokenizer.tokenizer_json import TokenizersVocabulary, load_tokenizer_json

TOKENIZER = tokenizer_from_gguf(score_metadata(), "small.gguf")


@pytest.mark.parametrize("bad", [None, 3, b"fox", ["fox"]])
def test_only_text_is_encoded(bad):
    with pytest.raises(PromptError, match=f"not {type(bad).__name__}"):
        TOKENIZER.encode(bad)


def test_half_of_a_surrogate_pair_is_refused_by_place():
    with pytest.raises(PromptError, match=r"character 3 .*U\+DC00"):
        TOKENIZER.encode("fox\udc00")
    with pytest.raises(PromptError, match=r"character 1 .*byte 0xFE of input that is no UTF-8"):
        TOKENIZER.encode(b"x\xfe".decode(errors="surrogateescape"))


def test_ids_of_any_integer_kind_are_decoded():
    ids = TOKENIZER.encode("the fox")
    assert TOKENIZER.decode(np.array(ids)) == TOKENIZER.decode(mx.array(ids)) == "the fox"
    assert TOKENIZER.decode(iter(ids)) == TOKENIZER.decode(tuple(ids)) == "the fox"
    assert TOKENIZER.decode(TOKENIZER.token_id("<b>")) == "<b>"
    with pytest.raises(TypeError):
        TOKENIZER.decode([1.5])


def test_token_id_and_text_are_inverse_and_unknown_text_has_no_id():
    for token in (0, 1, 2, 3, 260, 300, len(TOKENIZER) - 1):
        assert TOKENIZER.token_id(TOKENIZER.token_text(token)) == token
    assert TOKENIZER.token_id("no such token") is None
    assert TOKENIZER.token_text(3) == "<0x00>"


def test_repr_names_file_and_size():
    assert repr(TOKENIZER) == f"Tokenizer('small.gguf', vocab_size={len(TOKENIZER)})"


def test_vocabulary_with_gaps_counts_to_its_largest_id(tmp_path):
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 9}
    content = tokenizer_json(
        model={"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        added_tokens=[],
        post_processor=None,
    )
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer__json=content))
    assert len(tokenizer) == 10
    assert tokenizer.decode([2, 5, 9]) == "ab"
    assert tokenizer.token_text(5) == ""


class Unhurried:
    """A tokenizer that lets other threads run between its switch and its work."""

    def __init__(self, engine) -> None:
        self.__dict__["engine"] = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def __setattr__(self, name, value) -> None:
        setattr(self.engine, name, value)
        time.sleep(0.001)


def test_threads_that_parse_special_text_or_not_do_not_disturb_each_other(tmp_path):
    write_folder(tmp_path, tokenizer__json=tokenizer_json())
    engine = Unhurried(load_tokenizer_json(tmp_path / "tokenizer.json"))
    vocabulary = TokenizersVocabulary(engine, "unhurried")
    text = "the </s> fox"
    expected = {flag: vocabulary.encode(text, parse_special=flag) for flag in (True, False)}
    assert expected[True] != expected[False]
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        found = [vocabulary.encode(text, parse_special=flag) for _ in range(30)]
        wrong.extend(flag for ids in found if ids != expected[flag])

    threads = [threading.Thread(target=work, args=(flag,)) for flag in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
