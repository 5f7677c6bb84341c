"""Small vocabularies of every kind, as GGUF metadata and as tokenizer.json."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizer.small_bpe import CORPUS, Pair, cut_as_gpt2, learn_merges

from turbospark.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
USER_TOKENS = ("  ", "   ", "\n\n", "<b>")

TRICKY = (
    "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇨🇿", "é", "é", "ď", "日本語", "한국어", "नमस्ते", "مرحبا", "ß", "İ",
    "\ufffd", "\u00a0", "\u0120", "Ġ", "▁", "\u200d", "\ufeff", "\0", "\x1b", "\U0010ffff",
    "\u0301", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "'s", "'LL", "<b>", "<s>", "</s>",
    "<0x41>", "12345", "²", "Ⅷ", "_", "...", "x = [1, 2]\n",
)  # fmt: skip

# Python and the tokenizers library know different versions of Unicode
ASSIGNED = st.characters(exclude_categories=("Cs", "Cn", "Co"))
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(TRICKY),
        st.sampled_from([word for line in CORPUS for word in (line, *line.split(" "))]),
        st.text(ASSIGNED, max_size=5),
    ),
    max_size=8,
).map("".join)


def byte_character(byte: int) -> str:
    """How GPT-2 writes a byte, by its own definition."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


@cache
def score_metadata() -> dict[str, Any]:
    """A sentencepiece-like vocabulary: specials, bytes, user-defined tokens, scored pieces."""
    lines = [line.replace(" ", "▁") for line in CORPUS]
    merges = learn_merges([word for line in lines for word in line.split("\n")], 150)
    characters = sorted({c for line in lines for c in line} - {"日", "\n", "\t", "½"})
    known = [a + b for a, b in merges if "日" not in a + b]
    frozen = {token.replace(" ", "▁") for token in USER_TOKENS}
    pieces = [p for p in dict.fromkeys([*known, *characters]) if p not in frozen]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *USER_TOKENS]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[USER_DEFINED] * len(USER_TOKENS)]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types + [NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


@cache
def rank_merges() -> tuple[Pair, ...]:
    words = [word for line in CORPUS for word in cut_as_gpt2(line)]
    return tuple(learn_merges([[*map(byte_character, word.encode())] for word in words], 200))


@cache
def rank_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    """A byte-level vocabulary: bytes, merged pieces, a user-defined token, specials at the end."""
    merges = rank_merges()
    tokens = [byte_character(byte) for byte in range(256)]
    tokens = [*dict.fromkeys([*tokens, *(a + b for a, b in merges)])]
    normal = len(tokens)
    tokens += ["<b>", "<s>", "</s>", "[PAD]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.token_type": [NORMAL] * normal + [USER_DEFINED, CONTROL, CONTROL, UNUSED],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    }


@cache
def escaped_metadata() -> dict[str, Any]:
    """A vocabulary of Gemma 4's kind: characters merged by rank, byte tokens for the others."""
    base = score_metadata()
    merges = learn_merges([line.replace(" ", "▁") for line in CORPUS], 90)
    merges = [pair for pair in merges if not {*"日½\n\t"} & set("".join(pair))]
    head = 3 + 256 + len(USER_TOKENS)
    single = [t for t in base["tokenizer.ggml.tokens"][head:] if len(t) == 1]
    pieces = [*dict.fromkeys([*single, *(a + b for a, b in merges)])]
    return base | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": base["tokenizer.ggml.tokens"][:head] + pieces,
        "tokenizer.ggml.token_type": base["tokenizer.ggml.token_type"][:head]
        + [NORMAL] * len(pieces),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
    }


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """A Llama-like tokenizer.json with byte fallback, a prefix space and a begin of text."""
    metadata = escaped_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {"<unk>": True, "<s>": True, "</s>": True, "<b>": False}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": {
            "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
        },
        "padding": None,
        "added_tokens": [
            {
                "id": tokens.index(text), "content": text, "special": is_special,
                "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            }
            for text, is_special in special.items()
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }  # fmt: skip
    return content | changes


def write_folder(folder: Path, **files: Any) -> Path:
    """Write files; `a__json` names a.json, whose content is dumped, and `a__model` a.model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def small_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """A tokenizer of each back end: scores, ranks, escaped, json."""
    if kind == "json":
        return load_tokenizer(write_folder(folder, tokenizer__json=tokenizer_json()))
    metadata = {"scores": score_metadata, "ranks": rank_metadata, "escaped": escaped_metadata}
    return tokenizer_from_gguf(metadata[kind](), f"small {kind}")


KINDS = ("scores", "ranks", "escaped", "json")
