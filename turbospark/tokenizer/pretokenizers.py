r"""How byte-level BPE vocabularies cut a text before merging, by the name that GGUF files give.

`tokenizer.ggml.pre` names the checkpoint's own pre-tokenizer; the patterns are those of the
original tokenizer.json files, in the syntax of the tokenizers library (Oniguruma). Each pattern is
applied inside the pieces the one before it left; white space that a pattern does not match stays a
piece of its own.
"""

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _SIGNS
_QWEN2 = _WORDS + r"|\p{N}" + _SIGNS
_QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    f"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_GPT4O = (
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut a text.

    Attributes:
        patterns: applied one after the other; what each matches becomes a piece.
        whole_words: a piece that is a token by itself is not merged up from its bytes.
        nfc: the text is brought into Unicode's composed form first.
        adds_bos: begin of text is put before a text where the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False


_GPT2_LIKE = PreTokenizer((_GPT2,))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2_LIKE = PreTokenizer((_QWEN2,), nfc=True)

PRE_TOKENIZERS = {
    "default": _GPT2_LIKE,
    "gpt-2": _GPT2_LIKE,
    "gpt2": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "olmo": _GPT2_LIKE,
    "mpt": _GPT2_LIKE,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "llama-bpe": _LLAMA3_LIKE,
    "falcon3": _LLAMA3_LIKE,
    "falcon-h1": _LLAMA3_LIKE,
    "pixtral": _LLAMA3_LIKE,
    "lfm2": _LLAMA3_LIKE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_LIKE,
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
}
