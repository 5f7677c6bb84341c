"""Prompts: text, token ids, or messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import mlx.core as mx
import numpy as np

from turbospark.errors import PromptError
from turbospark.runner.admission import check_ids
from turbospark.runner.sink import StreamingDetokenizer


@runtime_checkable
class TextCodec(Protocol):
    """What running prompts needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text."""
        ...

    def detokenizer(self) -> StreamingDetokenizer:
        """A fresh detokenizer for one generation."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Messages to ids, or to text with `tokenize=False`."""
        ...


def prompt_ids(prompt: Any, tokenizer: TextCodec, vocab_size: int) -> list[int]:
    """Ids of a prompt.

    Args:
        prompt: text; token ids as a list, a tuple or an array; or a list of messages, to which
            alone the chat template is applied.
        tokenizer: the model's.
        vocab_size: bounds the ids.

    Raises:
        PromptError: it is empty, of another kind, or holds an id outside the vocabulary.
        TemplateError: there is no chat template, or it refuses the messages.
    """
    if isinstance(prompt, str):
        return check_ids(encode_text(prompt, tokenizer), vocab_size) if prompt else check_ids([], 1)
    if isinstance(prompt, mx.array | np.ndarray):
        rows: Any = np.array(cast(Any, prompt))
        if rows.ndim != 1:
            raise PromptError(f"a prompt array of shape {rows.shape}: one row is needed")
        return check_ids(rows.tolist(), vocab_size)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise PromptError(
            f"a prompt of type {type(prompt).__name__}: give text, token ids, or messages"
        )
    items: list[Any] = list(prompt)  # type: ignore[reportUnknownArgumentType]
    if items and isinstance(items[0], Mapping):
        ids = tokenizer.apply_chat_template(items, add_generation_prompt=True, tokenize=True)
        return check_ids(ids, vocab_size)
    return check_ids(items, vocab_size)


def encode_text(text: str, tokenizer: TextCodec) -> list[int]:
    """Ids of a text with the model's special tokens, a leading one written out not doubled."""
    bos = tokenizer.bos_id
    written = "" if bos is None else tokenizer.decode([bos], skip_special_tokens=False)
    already = bool(written) and text.startswith(written)
    return tokenizer.encode(text, add_special_tokens=not already)
