"""One chat template, run by jinja2 in a sandbox.

The dialect is that of transformers: `trim_blocks`, `lstrip_blocks`, `break` and `continue`, the
`generation` block, `raise_exception`, `strftime_now`, and a `tojson` that leaves HTML characters
and other scripts alone.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partial
from typing import Any

from turbospark.errors import TemplateError
from turbospark.tokenizer.messages import Conversation, fitted_messages

MAX_OUTPUT = 1 << 24
_NEEDLE = "Vh3kQ7"
_HINTS = (
    (("alternate", "alternating"), "merge messages of the same role that follow one another"),
    (("system",), "put the system text into the first user message"),
    (("tool",), "check the order of tool calls and tool results"),
)


class Template:
    """A compiled chat template.

    Its source comes with a checkpoint and is not trusted: it cannot reach Python objects' insides,
    and loops, repeated texts and output are bounded.
    """

    def __init__(self, source: str, origin: str) -> None:
        """Compile a template.

        Args:
            source: jinja2 source.
            origin: the file that messages name.

        Raises:
            TemplateError: the source is not a template; quotes jinja2's reason and the line.
        """
        import jinja2

        from turbospark.tokenizer.sandbox import sandbox

        self._origin = origin
        self._source = source
        self._sandbox = sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template of {origin} is damaged: {error.message} (line {error.lineno})"
            ) from None
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise TemplateError(f"the chat template of {origin} is damaged: {error}") from None

    def render(
        self, conversation: Conversation, values: Mapping[str, Any], extra: frozenset[str]
    ) -> str:
        """Write a conversation.

        Args:
            conversation: what to write.
            values: further variables.
            extra: those of them that the caller chose; the template must read them.

        Raises:
            TemplateError: the template refuses or fails; quotes its message.
        """
        self._refuse_unread(extra | ({"tools"} if conversation.tools else set[str]()))
        given = {"tools": conversation.tools, "documents": None, **values}
        messages = fitted_messages(
            conversation.messages, cache(partial(self._takes_form, values=given))
        )
        text = self._run({**given, "messages": messages})
        return self._left_open(text, messages) if conversation.is_open else text

    @cached_property
    def _reads(self) -> frozenset[str]:
        from jinja2 import meta

        return frozenset(meta.find_undeclared_variables(self._sandbox.parse(self._source)))

    def _refuse_unread(self, names: frozenset[str]) -> None:
        unread = sorted(names - self._reads)
        if unread:
            raise TemplateError(
                f"the chat template of {self._origin} does not read {', '.join(unread)}; leave it "
                f"out (it reads {', '.join(sorted(self._reads)) or 'nothing'})"
            )

    def _takes_form(self, form: str, values: Mapping[str, Any]) -> bool:
        """Whether a user message with content of this form comes out as its text alone."""
        content = _NEEDLE if form == "text" else [{"type": "text", "text": _NEEDLE}]
        try:
            text = self._run({**values, "messages": [{"role": "user", "content": content}]})
        except TemplateError:
            return False
        is_spelled_out = f"'{_NEEDLE}'" in text or f'"{_NEEDLE}"' in text
        return _NEEDLE in text and not is_spelled_out

    def _run(self, values: Mapping[str, Any]) -> str:
        import jinja2

        from turbospark.tokenizer.sandbox import bounded_range

        values = {**values, "range": bounded_range()}
        try:
            return "".join(_bounded(self._template.generate(values), self._origin))
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise self._failed(str(error.message or error)) from None
        except RecursionError:
            raise self._failed("it calls itself without end") from None
        except Exception as error:  # noqa: BLE001 - a template can raise whatever Python can
            raise self._failed(f"{type(error).__name__}: {error}") from None

    def _failed(self, message: str) -> TemplateError:
        lowered = message.lower()
        hint = next(
            (hint for words, hint in _HINTS if any(word in lowered for word in words)),
            "change the messages to what it asks for, or give another chat_template",
        )
        return TemplateError(
            f"the chat template of {self._origin} refused the messages: {message!r}; {hint}"
        )

    def _left_open(self, text: str, messages: list[dict[str, Any]]) -> str:
        """Cut what the template writes behind the text of the last message."""
        content: Any = messages[-1]["content"]
        last = content if isinstance(content, str) else content[-1]["text"]
        for spelled in (last, last.rstrip(), last.strip()):
            if (start := text.rfind(spelled)) >= 0:
                return text[: start + len(spelled)]
        raise TemplateError(
            f"the chat template of {self._origin} does not write the last message's text as it is, "
            "so it cannot be continued; use add_generation_prompt"
        )


def _bounded(parts: Iterator[str], origin: str) -> Iterator[str]:
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_OUTPUT:
            raise TemplateError(
                f"the chat template of {origin} writes more than {MAX_OUTPUT} characters"
            )
        yield part


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter of chat templates."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
