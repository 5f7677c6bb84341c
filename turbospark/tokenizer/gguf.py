"""The vocabulary inside a GGUF file, given its metadata."""

import math
from collections.abc import Mapping
from typing import Any

from turbospark.errors import TokenizerError
from turbospark.tokenizer import sentencepiece_model as pieces
from turbospark.tokenizer.chat import templates_from_gguf
from turbospark.tokenizer.front import Tokenizer
from turbospark.tokenizer.pretokenizers import PRE_TOKENIZERS
from turbospark.tokenizer.spm import SPACE, SentencePieceVocabulary, load_processor
from turbospark.tokenizer.tokenizer_json import TokenizersVocabulary, build_byte_level_bpe
from turbospark.tokenizer.vocabulary import AddedToken, SpecialTokens, Vocabulary

_KEY = "tokenizer.ggml."
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "<｜end▁of▁sentence｜>", "<end_of_utterance>",
})  # fmt: skip
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str = "GGUF metadata") -> Tokenizer:
    """Build the tokenizer that a GGUF file carries.

    The kind is `tokenizer.ggml.model`: "llama" is a sentencepiece BPE that merges by score, "gpt2"
    a byte-level BPE that merges by rank and cuts the text as `tokenizer.ggml.pre` says. A GGUF
    file seldom names every id that ends a turn, so control tokens whose text is a known end mark
    (`<end_of_turn>`, `<|im_end|>`, ...) count as ends too.

    Args:
        metadata: keys as in the file; lists may be any sequence, numpy arrays included.
        source: what messages call the file.

    Raises:
        TokenizerError: a key is missing, malformed or contradicts another, or the kind of
            vocabulary is not implemented; names `source` and the key.
    """
    fields = _Fields(metadata, source)
    kind = fields.text("model")
    tokens = fields.tokens()
    types = fields.types(len(tokens))
    builders = {"llama": _score_vocabulary, "gpt2": _rank_vocabulary}
    if kind not in builders:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.model {kind!r} is not implemented; known: "
            f"{', '.join(sorted(builders))}"
        )
    vocabulary = builders[kind](fields, tokens, types)
    special = _special_tokens(fields, tokens, types, kind)
    return Tokenizer(vocabulary, special, templates_from_gguf(metadata, source))


class _Fields:
    """Typed reading of `tokenizer.ggml.*` keys."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self.source = source

    def fail(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.source}: {_KEY}{key} {problem}")

    def text(self, key: str) -> str:
        value = self._metadata.get(_KEY + key)
        if not isinstance(value, str):
            raise self.fail(key, "is missing" if value is None else "is not text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_KEY + key)
        if value is None:
            return default
        if not isinstance(value, bool) and value not in (0, 1):
            raise self.fail(key, f"is {value!r}, neither true nor false")
        return bool(value)

    def token(self, key: str, size: int) -> int | None:
        value = self._metadata.get(_KEY + key)
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise self.fail(key, f"is {value!r}, not a token id")
        if not 0 <= int(value) < size:
            raise self.fail(key, f"is {int(value)}, outside the {size} tokens of the vocabulary")
        return int(value)

    def items(self, key: str) -> list[Any]:
        value = self._metadata.get(_KEY + key)
        if value is None:
            raise self.fail(key, "is missing")
        listed: Any = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(listed, list | tuple):
            raise self.fail(key, f"is {type(value).__name__}, not a list")
        return list(listed) if isinstance(listed, tuple) else listed  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]

    def texts(self, key: str) -> list[str]:
        values = self.items(key)
        if all(type(value) is str for value in values):
            return values
        return [self._as_text(key, index, value) for index, value in enumerate(values)]

    def _as_text(self, key: str, index: int, value: Any) -> str:
        try:
            return value.decode() if isinstance(value, bytes) else str.__str__(value)
        except (UnicodeDecodeError, TypeError):
            raise self.fail(key, f"holds at {index} something that is no UTF-8 text") from None

    def tokens(self) -> list[str]:
        tokens = self.texts("tokens")
        if not tokens:
            raise self.fail("tokens", "is empty")
        return tokens

    def types(self, size: int) -> list[int]:
        if self._metadata.get(_KEY + "token_type") is None:
            raise self.fail("token_type", "is missing")
        types = self.items("token_type")
        if len(types) != size:
            raise self.fail("token_type", f"has {len(types)} entries for {size} tokens")
        try:
            unknown = set(types) - pieces.PIECE_TYPES
        except TypeError:
            unknown = {"a list"}
        if unknown:
            raise self.fail("token_type", f"holds {sorted(map(str, unknown))[0]}, not 1 to 6")
        return list(map(int, types))

    def scores(self, size: int) -> list[float]:
        scores = self.items("scores")
        if len(scores) != size:
            raise self.fail("scores", f"has {len(scores)} entries for {size} tokens")
        try:
            if all(map(math.isfinite, scores)) and all(abs(score) < 3e38 for score in scores):
                return scores
        except TypeError:
            pass
        raise self.fail("scores", "holds something that is no finite 32-bit number")


def _score_vocabulary(fields: _Fields, tokens: list[str], types: list[int]) -> Vocabulary:
    scores = fields.scores(len(tokens))
    unknown = _unknown_id(fields, types)
    byte_count = types.count(pieces.BYTE)
    if byte_count not in {0, 256}:
        raise fields.fail("token_type", f"marks {byte_count} byte tokens; 0 or 256 make sense")
    names, spellings = _distinct(_as_pieces(tokens, types))
    kinds = [
        pieces.UNKNOWN if token == unknown else pieces.CONTROL if kind == pieces.UNKNOWN else kind
        for token, kind in enumerate(types)
    ]
    add_dummy_prefix = fields.flag("add_space_prefix", default=True)
    model = pieces.write_bpe_model(
        zip(names, scores, kinds, strict=True),
        add_dummy_prefix=add_dummy_prefix,
        byte_fallback=byte_count == 256,
    )
    hidden = {pieces.CONTROL, pieces.UNKNOWN}
    return SentencePieceVocabulary(
        load_processor(model, fields.source),
        pieces.Normalizer(add_dummy_prefix, remove_extra_whitespaces=False),
        fields.source,
        added=[
            AddedToken(content=tokens[token], id=token)
            for token, kind in enumerate(kinds)
            if kind in hidden
        ],
        spellings=spellings,
    )


def _unknown_id(fields: _Fields, types: list[int]) -> int:
    named = fields.token("unknown_token_id", len(types))
    if named is not None:
        return named
    if pieces.UNKNOWN not in types:
        raise fields.fail("unknown_token_id", "is missing, and no token is of the unknown type")
    return types.index(pieces.UNKNOWN)


def _as_pieces(tokens: list[str], types: list[int]) -> list[str]:
    """User-defined tokens are stored with plain spaces; sentencepiece matches escaped ones."""
    return [
        token.replace(" ", SPACE) if kind == pieces.USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]


def _distinct(names: list[str]) -> tuple[list[str], dict[int, str]]:
    """Give empty and repeated names a stand-in; return the names and what they stood for."""
    if len(set(names)) == len(names) and "" not in names:
        return names, {}
    seen, distinct = {""}, list[str]()
    spellings: dict[int, str] = {}
    for token, name in enumerate(names):
        if name in seen:
            spellings[token] = name
            name = f"\ufdd0{token}"
        seen.add(name)
        distinct.append(name)
    return distinct, spellings


def _rank_vocabulary(fields: _Fields, tokens: list[str], types: list[int]) -> Vocabulary:
    pre = fields.text("pre")
    if pre not in PRE_TOKENIZERS:
        raise fields.fail(
            "pre", f"{pre!r} is not implemented; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(fields.texts("merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise fields.fail("merges", f"holds at {index} {line!r}, not two tokens and a space")
        merges.append((left, right))
    names, spellings = _distinct(tokens)
    added = [
        AddedToken(content=tokens[token], id=token, special=kind != pieces.USER_DEFINED)
        for token, kind in enumerate(types)
        if kind in {pieces.CONTROL, pieces.UNKNOWN, pieces.USER_DEFINED} and token not in spellings
    ]
    tokenizer = build_byte_level_bpe(names, merges, added, PRE_TOKENIZERS[pre], fields.source)
    return TokenizersVocabulary(tokenizer, fields.source, spellings=spellings)


def _special_tokens(
    fields: _Fields, tokens: list[str], types: list[int], kind: str
) -> SpecialTokens:
    size = len(tokens)
    ids = {
        name: fields.token(f"{key}_token_id", size)
        for name, key in (
            ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"),
            ("pad_token", "padding"), ("sep_token", "seperator"), ("mask_token", "mask"),
        )
    }  # fmt: skip
    bos, eos = ids["bos_token"], ids["eos_token"]
    # llama.cpp's defaults where the file does not say
    adds_bos = fields.flag("add_bos_token", default=kind == "llama")
    adds_eos = fields.flag("add_eos_token", default=False)
    for wanted, token, key in ((adds_bos, bos, "bos"), (adds_eos, eos, "eos")):
        if wanted and token is None:
            raise fields.fail(f"{key}_token_id", f"is missing, and add_{key}_token is true")
    ends = {eos, *(fields.token(f"{key}_token_id", size) for key in ("eot", "eom"))} - {None}
    ends |= _ends_by_text(tokens, types)
    return SpecialTokens(
        bos_id=bos,
        eos_ids=frozenset(end for end in ends if end is not None),
        before=(bos,) if adds_bos and bos is not None else (),
        after=(eos,) if adds_eos and eos is not None else (),
        named={name: tokens[token] for name, token in ids.items() if token is not None},
    )


def _ends_by_text(tokens: list[str], types: list[int]) -> set[int]:
    ends = {
        tokens[token]: token
        for token, kind in enumerate(types)
        if kind in {pieces.CONTROL, pieces.USER_DEFINED} and tokens[token] in _END_TEXTS
    }
    if ends.keys() >= _HARMONY_ENDS:  # there <|end|> closes one of several messages of a reply
        ends.pop("<|end|>", None)
    return set(ends.values())
