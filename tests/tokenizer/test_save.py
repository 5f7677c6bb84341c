import pytest
from hypothesis import given, settings
from tokenizer.test_load import MODELS
from tokenizer.vocabularies import (
    CONTROL,
    KINDS,
    TEXTS,
    UNUSED,
    score_metadata,
    small_tokenizer,
    tokenizer_json,
    write_folder,
)

from turbospark.errors import TokenizerError
from turbospark.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

USER = {"role": "user", "content": "fox"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Each kind as it was built, and as it comes back from its own files."""
    folder = tmp_path_factory.mktemp("saved")
    built = {kind: small_tokenizer(kind, folder / kind) for kind in KINDS}
    adding = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_space_prefix": True}
    built["scores with ends"] = tokenizer_from_gguf({**score_metadata(), **adding})
    write_folder(folder / "model", tokenizer__model=MODELS["llama"])
    built["model"] = load_tokenizer(folder / "model")
    return {kind: (tokenizer, saved(tokenizer, folder)) for kind, tokenizer in built.items()}


def saved(tokenizer: Tokenizer, folder) -> Tokenizer:
    target = folder / f"saved {id(tokenizer)}"
    target.mkdir()
    tokenizer.save(target)
    return load_tokenizer(target)


@pytest.mark.parametrize("kind", [*KINDS, "scores with ends", "model"])
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_saved_tokenizer_gives_the_same_ids_and_text(pairs, kind, text):
    tokenizer, again = pairs[kind]
    ids = tokenizer.encode(text)
    assert again.encode(text) == ids
    plain = tokenizer.encode(text, parse_special=False)
    assert again.encode(text, parse_special=False) == plain
    for skip in (True, False):
        assert again.decode(ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", [*KINDS, "scores with ends", "model"])
def test_saved_tokenizer_keeps_the_parts_that_ids_play(pairs, kind):
    tokenizer, again = pairs[kind]
    for name in ("bos_id", "bos_token", "eos_token", "eos_token_id", "eos_ids", "vocab_size"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert again.special_ids >= tokenizer.special_ids - {
        token for token in tokenizer.special_ids if tokenizer.token_text(token) == "[PAD]"
    }


def test_saved_tokenizer_keeps_every_template(tmp_path):
    key = "tokenizer.chat_template"
    metadata = {**score_metadata(), key: "D ď", f"{key}.rag": "R"}
    again = saved(tokenizer_from_gguf(metadata), tmp_path)
    assert again.chat_template == "D ď"
    assert again.apply_chat_template([USER], tokenize=False, chat_template="rag") == "R"
    only_default = saved(tokenizer_from_gguf({**score_metadata(), key: "D"}), tmp_path)
    assert only_default.chat_template == "D"


def test_saved_tokenizer_keeps_several_ids_before_a_text(tmp_path):
    content = tokenizer_json()
    head = content["post_processor"]["single"]
    head.insert(1, {"SpecialToken": {"id": "<b>", "type_id": 0}})
    token = content["model"]["vocab"]["<b>"]
    content["post_processor"]["special_tokens"]["<b>"] = {
        "id": "<b>", "ids": [token], "tokens": ["<b>"],
    }  # fmt: skip
    tokenizer = load_tokenizer(write_folder(tmp_path / "first", tokenizer__json=content))
    assert tokenizer.encode("") == [1, token]
    assert saved(tokenizer, tmp_path).encode("") == [1, token]


def test_vocabulary_with_repeated_tokens_is_not_saved(tmp_path):
    key = "tokenizer.ggml."
    metadata = {
        **score_metadata(),
        key + "tokens": [*score_metadata()[key + "tokens"], "", "<s>"],
        key + "token_type": [*score_metadata()[key + "token_type"], UNUSED, CONTROL],
        key + "scores": [*score_metadata()[key + "scores"], 0.0, 0.0],
    }
    with pytest.raises(TokenizerError, match="2 tokens have an empty or repeated text"):
        tokenizer_from_gguf(metadata, "x.gguf").save(tmp_path)
