"""What was said in a conversation: messages, and the very ids that stand for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from turbospark.errors import PromptError
from turbospark.runner.prompt import TextCodec, encode_text
from turbospark.runner.results import GenerationResponse


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt of a conversation: its ids, and its text where a template wrote it."""

    ids: list[int]
    text: str | None


def as_message(message: Any) -> dict[str, Any]:
    """A message as templates take it.

    Raises:
        PromptError: it is neither text nor a mapping.
    """
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise PromptError(
            f"a message of type {type(message).__name__}: give text, or a mapping with a role and "
            "content"
        )
    return dict(cast("Mapping[str, Any]", message))


@dataclass(slots=True)
class Transcript:
    """Messages and ids of one conversation; what was said once is never tokenized again.

    Attributes:
        messages: every message so far, replies included.
        ids: of the text so far.
        written: that text, where a chat template wrote it.
    """

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ids: list[int] = field(default_factory=list[int])
    written: str | None = None

    def copy(self) -> Self:
        """An independent transcript with the same content."""
        messages = [dict(message) for message in self.messages]
        return type(self)(messages, list(self.ids), self.written)

    def next_turn(self, sent: Mapping[str, Any], tokenizer: TextCodec) -> Turn:
        """The prompt that `sent` makes; nothing is remembered yet.

        With a chat template every message is a turn of it; without one, what is sent is text that
        continues the text so far.

        Raises:
            PromptError: there is no template, and `sent` holds no text.
            TemplateError: the template refuses the messages.
        """
        if tokenizer.chat_template is None:
            return Turn(self._continued(sent, tokenizer), None)
        text = tokenizer.apply_chat_template(
            [*self.messages, sent], add_generation_prompt=True, tokenize=False
        )
        if self.written is not None and text.startswith(self.written):
            rest = text[len(self.written) :]
            return Turn([*self.ids, *tokenizer.encode(rest, add_special_tokens=False)], text)
        # The template rewrites what was said before: tokenize it all, and reuse what is equal.
        return Turn(tokenizer.encode(text, add_special_tokens=False), text)

    def answered(
        self, turn: Turn, response: GenerationResponse, reply: str, tokenizer: TextCodec
    ) -> None:
        """Note the ids and the text that stand now, as if no further token followed."""
        generated: Sequence[int] = response.token_ids
        if response.finish_reason == "stop":
            if isinstance(response.stop_reason, str):
                generated = shown_ids(generated, reply, tokenizer)
            else:
                generated = generated[:-1]
        self.ids = [*turn.ids, *generated]
        self.written = None if turn.text is None else turn.text + reply

    def _continued(self, sent: Mapping[str, Any], tokenizer: TextCodec) -> list[int]:
        content = sent.get("content")
        if not isinstance(content, str) or not content:
            raise PromptError("without a chat template a message is a non-empty text")
        if not self.ids:
            return encode_text(content, tokenizer)
        return [*self.ids, *tokenizer.encode(content, add_special_tokens=False)]


def shown_ids(tokens: Sequence[int], shown: str, tokenizer: TextCodec) -> list[int]:
    """Ids of a text that a stop string cut: the tokens within it, and what is left of it."""
    detokenizer, text = tokenizer.detokenizer(), ""
    kept, covered = 0, ""
    for count, token in enumerate(tokens, 1):
        text += detokenizer.add(token)
        if not shown.startswith(text):
            break
        if len(text) > len(covered):
            kept, covered = count, text
    if tokenizer.decode(tokens[:kept]) != covered:  # its last token holds half a character more
        kept, covered = 0, ""
    rest = shown[len(covered) :]
    return [*tokens[:kept], *(tokenizer.encode(rest, add_special_tokens=False) if rest else [])]
