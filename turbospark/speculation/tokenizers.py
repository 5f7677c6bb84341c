"""Whether two checkpoints read and write the same tokens: by what their vocabularies say."""

from typing import Protocol

from turbospark.errors import OptionError

_SAMPLED = 4096
_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.\n",
    'def f(x: int) -> str:\n    return f"{x!r}"\t# naïve\n',
    "Größe, œuvre, 東京タワー, مرحبا, Привет, 🙂👍🏽\n\n  two  spaces",
)


class Vocabulary(Protocol):
    """What is compared of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_text(self, token: int) -> str: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def check_same_tokens(target: Vocabulary, draft: Vocabulary) -> None:
    """Refuse a draft model whose ids mean other texts than the target's.

    Raises:
        OptionError: naming the first difference.
    """
    difference = _difference(target, draft)
    if difference is not None:
        raise OptionError(
            f"the draft model's tokenizer is not the model's own: {difference}; take a draft "
            "model of the same family and generation"
        )


def check_draft_model(target: Vocabulary, draft: Vocabulary, rows: int, where: object) -> None:
    """Refuse a draft model whose ids mean other texts, or that has no rows for some of them.

    Args:
        target: of the model drafted for.
        draft: of the draft model.
        rows: ids that the draft model knows.
        where: its files, for the message.

    Raises:
        OptionError: naming the first difference.
    """
    check_same_tokens(target, draft)
    if rows < target.vocab_size:
        raise OptionError(
            f"the draft model {where} has {rows} rows for the {target.vocab_size} tokens of its "
            "tokenizer: its files are not of one model"
        )


def _difference(target: Vocabulary, draft: Vocabulary) -> str | None:
    if target.vocab_size != draft.vocab_size:
        return f"it has {draft.vocab_size} tokens, the model's has {target.vocab_size}"
    for name, mine, theirs in (
        ("bos_id", draft.bos_id, target.bos_id),
        ("eos_ids", draft.eos_ids, target.eos_ids),
    ):
        if mine != theirs:
            return f"its {name} is {_shown(mine)}, the model's is {_shown(theirs)}"
    strangers = sorted(draft.special_ids ^ target.special_ids)
    if strangers:
        return f"token {strangers[0]} is special for only one of them"
    size = target.vocab_size
    step = max(1, size // _SAMPLED)
    for token in sorted({*range(0, size, step), *range(max(0, size - 64), size)}):
        own, other = draft.token_text(token), target.token_text(token)
        if own != other:
            return f"token {token} is {own!r}, the model's is {other!r}"
    for text in _TEXTS:
        if target.encode(text) != draft.encode(text):
            return f"it splits {text.strip()!r} otherwise"
    return None


def _shown(value: int | frozenset[int] | None) -> object:
    return sorted(value) if isinstance(value, frozenset) else value
