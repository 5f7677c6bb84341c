"""The vocabulary inside a GGUF file, given its metadata."""

from collections.abc import Mapping
from typing import Any

from turbospark.tokenizer import sentencepiece_model as pieces
from turbospark.tokenizer.chat import templates_from_gguf
from turbospark.tokenizer.front import Tokenizer
from turbospark.tokenizer.gguf_fields import GGUFFields
from turbospark.tokenizer.pretokenizers import PRE_TOKENIZERS
from turbospark.tokenizer.ranked_bpe import build_byte_level_bpe, build_escaped_bpe
from turbospark.tokenizer.spm import SPACE, SentencePieceVocabulary, load_processor
from turbospark.tokenizer.tokenizer_json import TokenizersVocabulary
from turbospark.tokenizer.vocabulary import AddedToken, SpecialTokens, Vocabulary

_END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "<｜end▁of▁sentence｜>", "<end_of_utterance>",
})  # fmt: skip
_HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str = "GGUF metadata") -> Tokenizer:
    """Build the tokenizer that a GGUF file carries.

    The kind is `tokenizer.ggml.model`: "llama" is a sentencepiece BPE that merges by score, "gpt2"
    a byte-level BPE that merges by rank and cuts the text as `tokenizer.ggml.pre` says, "gemma4" a
    BPE over characters that merges by rank. A GGUF file seldom names every id that ends a turn, so
    control tokens whose text is a known end mark (`<end_of_turn>`, `<|im_end|>`, ...) count too.

    Args:
        metadata: keys as in the file; lists may be any sequence, numpy arrays included.
        source: what messages call the file.

    Raises:
        TokenizerError: a key is missing, malformed or contradicts another, or the kind of
            vocabulary is not implemented; names `source` and the key.
    """
    fields = GGUFFields(metadata, source)
    kind = fields.text("model")
    tokens = fields.tokens()
    types = fields.types(len(tokens))
    builders = {
        "llama": _score_vocabulary,
        "gpt2": _byte_level_vocabulary,
        "gemma4": _escaped_vocabulary,
    }
    if kind not in builders:
        raise fields.fail(
            "model", f"{kind!r} is not implemented; known: {', '.join(sorted(builders))}"
        )
    vocabulary = builders[kind](fields, tokens, types)
    special = _special_tokens(fields, tokens, types, kind)
    return Tokenizer(vocabulary, special, templates_from_gguf(metadata, source))


def _score_vocabulary(fields: GGUFFields, tokens: list[str], types: list[int]) -> Vocabulary:
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
        skipped=_unused(types),
    )


def _unknown_id(fields: GGUFFields, types: list[int]) -> int:
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


def _byte_level_vocabulary(fields: GGUFFields, tokens: list[str], types: list[int]) -> Vocabulary:
    pre = fields.text("pre")
    if pre not in PRE_TOKENIZERS:
        raise fields.fail(
            "pre", f"{pre!r} is not implemented; known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    names, spellings = _distinct(tokens)
    tokenizer = build_byte_level_bpe(
        names,
        _merges(fields),
        _found_as_text(names, types, spellings),
        PRE_TOKENIZERS[pre],
        fields.source,
    )
    return TokenizersVocabulary(
        tokenizer, fields.source, spellings=spellings, skipped=_unused(types)
    )


def _escaped_vocabulary(fields: GGUFFields, tokens: list[str], types: list[int]) -> Vocabulary:
    names, spellings = _distinct(tokens)
    unknown = fields.token("unknown_token_id", len(tokens))
    tokenizer = build_escaped_bpe(
        names,
        _merges(fields),
        _found_as_text(names, types, spellings),
        None if unknown is None else names[unknown],
        fields.source,
    )
    return TokenizersVocabulary(
        tokenizer, fields.source, spellings=spellings, skipped=_unused(types)
    )


def _unused(types: list[int]) -> list[int]:
    """Padding that the converter wrote; it stands for no text."""
    return [token for token, kind in enumerate(types) if kind == pieces.UNUSED]


def _merges(fields: GGUFFields) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(fields.texts("merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise fields.fail("merges", f"holds at {index} {line!r}, not two tokens and a space")
        merges.append((left, right))
    return merges


def _found_as_text(
    names: list[str], types: list[int], spellings: Mapping[int, str]
) -> list[AddedToken]:
    found = {pieces.CONTROL, pieces.UNKNOWN, pieces.USER_DEFINED}
    return [
        AddedToken(content=names[token], id=token, special=kind != pieces.USER_DEFINED)
        for token, kind in enumerate(types)
        if kind in found and token not in spellings
    ]


def _special_tokens(
    fields: GGUFFields, tokens: list[str], types: list[int], kind: str
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
    adds_bos = fields.flag("add_bos_token", default=bos is not None and _adds_bos(fields, kind))
    adds_bos |= kind == "gemma4"  # early files deny it, and the model talks garbage without
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


def _adds_bos(fields: GGUFFields, kind: str) -> bool:
    """Whether begin of text is added where the file does not say; llama.cpp's defaults."""
    if kind == "gpt2":
        return PRE_TOKENIZERS[fields.text("pre")].adds_bos
    return True


def _ends_by_text(tokens: list[str], types: list[int]) -> set[int]:
    found = [token for token, text in enumerate(tokens) if text in _END_TEXTS]
    ends = {
        tokens[token]: token
        for token in found
        if types[token] in {pieces.CONTROL, pieces.USER_DEFINED}
    }
    if ends.keys() >= _HARMONY_ENDS:  # there <|end|> closes one of several messages of a reply
        ends.pop("<|end|>", None)
    return set(ends.values())
