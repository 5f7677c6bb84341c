import io
import json

import pytest
import sentencepiece
from hypothesis import given, settings
from tokenizer.small_bpe import CORPUS
from tokenizer.vocabularies import TEXTS, tokenizer_json, write_folder

from turbospark.errors import TokenizerError
from turbospark.tokenizer import load_tokenizer


def trained(kind: str = "bpe", **options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        model_type=kind,
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.99,
        control_symbols=["<turn>"],
        user_defined_symbols=["<b>"],
        minloglevel=2,
        **options,
    )
    return model.getvalue()


LLAMA_LIKE = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS = {
    "plain": trained(**LLAMA_LIKE, add_dummy_prefix=False),
    "llama": trained(**LLAMA_LIKE),
    "unigram": trained("unigram", **LLAMA_LIKE),
    "nfkc": trained("unigram"),
}


@pytest.mark.parametrize("name", MODELS)
@given(text=TEXTS)
@settings(max_examples=80, deadline=None)
def test_sentencepiece_file_gives_the_librarys_own_ids(name, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model", numbered=True)
    tokenizer = load_tokenizer(write_folder(folder, tokenizer__model=MODELS[name]))
    own = sentencepiece.SentencePieceProcessor(model_proto=MODELS[name])
    assert tokenizer.encode(text, parse_special=False) == [own.bos_id(), *own.encode(text)]
    ids = [token for token in own.encode(text) if token != own.unk_id()]
    if "\ufffd" not in own.decode(ids):
        assert tokenizer.decode(ids) == own.decode(ids)


def test_tokenizer_json_wins_over_tokenizer_model(tmp_path):
    write_folder(tmp_path, tokenizer__model=MODELS["llama"], tokenizer__json=tokenizer_json())
    assert "tokenizer.json" in repr(load_tokenizer(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert "tokenizer.model" in repr(load_tokenizer(tmp_path))


def test_folder_without_a_vocabulary_says_what_it_has(tmp_path):
    write_folder(tmp_path, tekken__json="{}")
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor .*found tekken\.json"):
        load_tokenizer(tmp_path)


def test_truncation_stated_in_the_file_does_not_cut_prompts(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer__json=tokenizer_json()))
    text = "a long text with many more tokens than three"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_post_processor_gives_the_begin_of_text(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer__json=tokenizer_json()))
    assert tokenizer.encode("")[0] == 1
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.encode("fox")[1:] == tokenizer.encode("fox", add_special_tokens=False)


def test_post_processor_that_puts_an_id_of_no_token_is_refused(tmp_path):
    damaged = json.loads(json.dumps(tokenizer_json()))
    damaged["post_processor"]["special_tokens"]["<s>"]["ids"] = [9999]
    write_folder(tmp_path, tokenizer__json=damaged)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the post-processor puts id 9999"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings_json", "ids"),
    [
        ({}, [1]),
        ({"bos_token": "<s>", "add_bos_token": False}, []),
        ({"eos_token": "</s>", "add_eos_token": True}, [1, 2]),
        ({"bos_token": {"content": "</s>"}, "add_bos_token": True}, [2]),
    ],
)
def test_explicit_flags_override_the_post_processor(tmp_path, settings_json, ids):
    write_folder(tmp_path, tokenizer__json=tokenizer_json(), tokenizer_config__json=settings_json)
    assert load_tokenizer(tmp_path).encode("") == ids


def test_begin_of_text_of_a_sentencepiece_file_follows_the_flags(tmp_path):
    write_folder(tmp_path, tokenizer__model=MODELS["plain"])
    assert load_tokenizer(tmp_path).encode("") == [1]
    write_folder(tmp_path, tokenizer_config__json={"add_bos_token": False, "add_eos_token": True})
    assert load_tokenizer(tmp_path).encode("") == [2]
    assert load_tokenizer(tmp_path).eos_ids == {2}


@pytest.mark.parametrize("eos", [2, [2, 5], None])
def test_end_of_text_comes_from_config_only_where_the_tokenizer_is_silent(tmp_path, eos):
    write_folder(tmp_path, tokenizer__json=tokenizer_json())
    expected = {2: {2}, None: set()}.get(eos if not isinstance(eos, list) else 0, {2, 5})
    assert load_tokenizer(tmp_path, {"eos_token_id": eos}).eos_ids == expected
    write_folder(tmp_path, tokenizer_config__json={"eos_token": "<s>"})
    assert load_tokenizer(tmp_path, {"eos_token_id": eos}).eos_ids == {1}


def test_special_tokens_map_names_tokens_where_the_config_is_silent(tmp_path):
    write_folder(
        tmp_path,
        tokenizer__json=tokenizer_json(),
        special_tokens_map__json={"eos_token": {"content": "</s>"}, "bos_token": "<b>"},
        tokenizer_config__json={"bos_token": "<s>"},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_named_token_that_is_no_added_token_is_parsed_and_skipped_all_the_same(tmp_path):
    content = tokenizer_json()
    content["added_tokens"] = content["added_tokens"][:2]
    write_folder(tmp_path, tokenizer__json=content)
    write_folder(tmp_path, tokenizer_config__json={"eos_token": "</s>"})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("fox</s>")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "fox"


def test_tokens_of_the_config_are_added_with_their_ids(tmp_path):
    size = len(tokenizer_json()["model"]["vocab"])
    added = {
        str(size): {"content": "<|user|>", "special": True},
        str(size + 1): {"content": "<tool>", "special": False},
    }
    write_folder(tmp_path, tokenizer__json=tokenizer_json())
    write_folder(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("<|user|>x<tool>", add_special_tokens=False)
    assert (ids[0], ids[-1], len(tokenizer)) == (size, size + 1, size + 2)
    assert tokenizer.decode(ids) in {"x<tool>", " x<tool>"}
    added[str(size + 7)] = {"content": "<late>"}
    write_folder(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})
    with pytest.raises(TokenizerError, match=rf"tokenizer_config.json.*'<late>' the id {size + 7}"):
        load_tokenizer(tmp_path)


def test_tokens_added_to_a_sentencepiece_file_come_from_both_json_files(tmp_path):
    size = sentencepiece.SentencePieceProcessor(model_proto=MODELS["llama"]).vocab_size()
    write_folder(
        tmp_path,
        tokenizer__model=MODELS["llama"],
        added_tokens__json={"<|end|>": size + 4, "<x>": size + 1},
        tokenizer_config__json={
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                str(size): {"content": "<|user|>", "special": True, "rstrip": True},
                str(size + 2): {"content": "[SEP]", "special": True, "lstrip": True},
                str(size + 3): {"content": "word", "special": False, "single_word": True},
            },
        },
    )
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == size + 5
    assert tokenizer.eos_ids == {size + 4}
    encode = tokenizer.encode
    assert encode("<x><|end|>", add_special_tokens=False) == [size + 1, size + 4]
    assert encode("<|user|>  \n[SEP]") == encode("<|user|>[SEP]") == [1, size, size + 2]
    assert encode("  [SEP]") == [1, size + 2]
    assert size + 3 in encode("a word.")
    assert size + 3 not in encode("swords word_")
    assert tokenizer.decode([size, size + 1, size + 4]) == "<x>"
    assert tokenizer.decode([size + 3]) == "word"


def test_longest_of_the_added_tokens_that_fit_is_found(tmp_path):
    size = sentencepiece.SentencePieceProcessor(model_proto=MODELS["plain"]).vocab_size()
    added = {"<x": size, "<x>": size + 1, "<x>>>": size + 2, "x>": size + 3}
    write_folder(tmp_path, tokenizer__model=MODELS["plain"], added_tokens__json=added)
    ids = load_tokenizer(tmp_path).encode("<x<x><x>>>x><x>>", add_special_tokens=False)
    assert ids[:5] == [size, size + 1, size + 2, size + 3, size + 1]


def test_added_token_takes_over_the_id_of_a_piece(tmp_path):
    own = sentencepiece.SentencePieceProcessor(model_proto=MODELS["plain"])
    write_folder(tmp_path, tokenizer__model=MODELS["plain"])
    piece = own.piece_to_id("<turn>")
    added = {str(piece): {"content": "<|im_start|>", "special": True}}
    write_folder(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|im_start|>") == [1, piece]
    assert tokenizer.token_text(piece) == "<|im_start|>"


def test_prefix_space_is_put_once_when_legacy_is_off(tmp_path):
    write_folder(tmp_path, tokenizer__model=MODELS["llama"])
    own = sentencepiece.SentencePieceProcessor(model_proto=MODELS["llama"])
    inner = sentencepiece.SentencePieceProcessor(model_proto=MODELS["plain"])
    turn = own.piece_to_id("<turn>")
    legacy = load_tokenizer(tmp_path).encode("the<turn>fox")
    assert legacy == [1, *own.encode("the"), turn, *own.encode("fox")]
    write_folder(tmp_path, tokenizer_config__json={"legacy": False})
    once = load_tokenizer(tmp_path).encode("the<turn>fox")
    assert once == [1, *own.encode("the"), turn, *inner.encode("fox")]


def test_padding_rows_of_the_embedding_decode_to_nothing(tmp_path):
    write_folder(tmp_path, tokenizer__json=tokenizer_json())
    size = len(load_tokenizer(tmp_path))
    tokenizer = load_tokenizer(tmp_path, {"vocab_size": size + 9})
    assert len(tokenizer) == tokenizer.vocab_size == size
    assert tokenizer.decode([size, size + 8]) == ""
    assert tokenizer.detokenizer().add(size + 8) == ""


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (None, "▁the <b> ▁fox"),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, "the<b> fox"),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, " the<b> fox"),
        ({"type": "Fuse"}, "▁the<b>▁fox"),
    ],
)
def test_decoders_of_other_vocabularies_decode_as_the_library_does(tmp_path, decoder, text):
    vocab = {"<unk>": 0, "▁the": 1, "<b>": 2, "▁fox": 3}
    content = tokenizer_json(
        model={"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        decoder=decoder and {"split": True, **decoder},
        added_tokens=[],
        normalizer=None,
        post_processor=None,
    )
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer__json=content))
    assert tokenizer.decode([1, 2, 3]) == text
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.add, [1, 2, 3])) + detokenizer.finish() == text
    assert tokenizer.decode(2) == "<b>"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}, "Replace"),
        ({"type": "Strip", "content": " ", "start": 0, "stop": 1}, "Strip"),
        ({"type": "Strip", "content": " ", "start": 2, "stop": 0}, "Strip of 2"),
    ],
)
def test_decoder_that_is_not_implemented_is_refused_by_name(tmp_path, decoder, named):
    write_folder(tmp_path, tokenizer__json=tokenizer_json(decoder=decoder))
    with pytest.raises(TokenizerError, match=rf"tokenizer.json: the decoder {named}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings_json", "fault"),
    [
        ("[1]", "holds list where an object belongs"),
        ("{", "not readable JSON"),
        ('{"a": ' * 100_000, "not readable JSON"),
        (b'{"bos_token": "\xff"}', "not readable JSON"),
        ({"bos_token": 7}, "bos_token is 7"),
        ({"eos_token": {"content": None}}, "eos_token is"),
        ({"bos_token": "\ud800"}, "not a token's text"),
        ({"eos_token": "<missing>"}, "eos_token is '<missing>', which .* does not hold"),
        ({"add_bos_token": "yes"}, "neither true nor false"),
        ({"add_eos_token": True}, "no file says which token eos_token is"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": 0}, "added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder holds 'x'"),
        ({"added_tokens_decoder": {"1": {"content": 1}}}, "token 1 is .*not a token's text"),
        ({"added_tokens_decoder": {"9" * 30: {"content": "a"}}}, "for an id"),
        ({"added_tokens_decoder": {"1": {"content": "a", "special": 1}}}, "special = 1"),
        ({"additional_special_tokens": 3}, "is int, not a list"),
        ({"additional_special_tokens": [3]}, "additional_special_tokens is 3"),
    ],
)
def test_malformed_tokenizer_config_is_refused_by_name(tmp_path, settings_json, fault):
    write_folder(tmp_path, tokenizer__json=tokenizer_json(), tokenizer_config__json=settings_json)
    with pytest.raises(TokenizerError, match=fault) as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer_config.json" in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 1.5, "3", True, None, 1 << 40])
def test_added_token_with_an_impossible_id_is_refused(tmp_path, bad):
    write_folder(tmp_path, tokenizer__model=MODELS["plain"], added_tokens__json={"<x>": bad})
    with pytest.raises(TokenizerError, match=r"added_tokens.json: the token '<x>'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "Rumour"}},
        {"added_tokens": 3},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated"}},
    ],
)
def test_malformed_tokenizer_json_is_refused_by_name(tmp_path, change):
    change.setdefault("post_processor", None)
    write_folder(tmp_path, tokenizer__json=tokenizer_json(**change))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_must_be_json(tmp_path):
    for content in ("", "{", "[]", b"\xff\xfe", json.dumps(tokenizer_json())[:-40]):
        write_folder(tmp_path, tokenizer__json=content)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)


def test_truncated_sentencepiece_file_is_refused_by_name(tmp_path):
    model = MODELS["nfkc"]
    for size in (0, 1, 7, len(model) // 3, len(model) - 70_000, len(model) - 1):
        write_folder(tmp_path, tokenizer__model=model[:size])
        with pytest.raises(TokenizerError, match=r"tokenizer\.model is not a .*sentencepiece"):
            load_tokenizer(tmp_path)


def test_tiktoken_file_under_the_name_of_a_sentencepiece_file_is_refused(tmp_path):
    write_folder(tmp_path, tokenizer__model=b"IQ== 0\nIg== 1\n" * 50)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is not a"):
        load_tokenizer(tmp_path)
