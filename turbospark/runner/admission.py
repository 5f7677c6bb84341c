"""What is refused before any state moves."""

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, cast

from turbospark.errors import ContextLengthError, OptionError, PromptError


def check_ids(tokens: Sequence[Any], vocab_size: int) -> list[int]:
    """Token ids as plain integers, each held against the vocabulary.

    Raises:
        PromptError: there is none, or one is no id of this vocabulary.
    """
    ids: list[int] = []
    for index, token in enumerate(tokens):
        value = _as_index(token)
        if value is None:
            raise PromptError(f"the prompt's item {index} is {token!r}, not a token id")
        if not 0 <= value < vocab_size:
            raise PromptError(
                f"the prompt's token {index} is {value}; ids run from 0 to {vocab_size - 1}"
            )
        ids.append(value)
    if not ids:
        raise PromptError("the prompt is empty: give at least one token or character")
    return ids


def check_stop_ids(tokens: Any, vocab_size: int) -> frozenset[int]:
    """Ids of the option `stop_token_ids`, each held against the vocabulary.

    Raises:
        OptionError: it is no list of ids of this vocabulary.
    """
    if tokens is None:
        return frozenset()
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise OptionError(f"stop_token_ids={tokens!r} is not a list of token ids")
    ids: set[int] = set()
    for token in cast("Iterable[Any]", tokens):
        value = _as_index(token)
        if value is None or not 0 <= value < vocab_size:
            raise OptionError(
                f"stop_token_ids holds {token!r}; token ids run from 0 to {vocab_size - 1}"
            )
        ids.add(value)
    return frozenset(ids)


def _as_index(token: Any) -> int | None:
    if isinstance(token, bool) or not isinstance(token, SupportsIndex):
        return None
    return token.__index__()


def check_budget(prompt_tokens: int, max_tokens: int, max_context: int) -> int:
    """How many tokens may be generated.

    Args:
        prompt_tokens: length of the prompt, what reuse covers included.
        max_tokens: the wish; -1 is all that fits.
        max_context: tokens the session may hold.

    Raises:
        OptionError: max_tokens is 0.
        ContextLengthError: prompt and budget do not fit.
    """
    if max_tokens == 0:
        raise OptionError("max_tokens=0 asks for no token; give 1 or more, or -1 for all that fit")
    budget = max_context - prompt_tokens if max_tokens < 0 else max_tokens
    if budget < 1 or prompt_tokens + budget > max_context:
        room = max(max_context - prompt_tokens, 0)
        raise ContextLengthError(
            f"a prompt of {prompt_tokens} tokens and max_tokens={max_tokens} exceed max_context="
            f"{max_context}: {room} tokens are left for the answer; lower max_tokens, shorten the "
            "prompt, or load with a larger max_context"
        )
    return budget
