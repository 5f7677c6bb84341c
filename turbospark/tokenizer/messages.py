"""Checking and shaping the messages that a chat template is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turbospark.errors import TemplateError
from turbospark.tokenizer.shapes import is_list, is_mapping, is_sequence

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages whose shape is sound.

    Attributes:
        messages: fresh dicts; "role" is text, "content" is text or a list of dicts.
        tools: JSON schemas, or None.
        is_open: the last message is to be continued.
    """

    messages: list[Message]
    tools: list[Any] | None
    is_open: bool = False


def checked_messages(messages: Any, tools: Any, is_open: bool) -> Conversation:
    """Check messages and tools from a caller.

    A message without text (content None, or absent beside tool calls) gets an empty one.

    Raises:
        TemplateError: something has the wrong shape; says which message and what to give.
    """
    if not is_sequence(messages):
        raise TemplateError(
            f"messages are {type(messages).__name__}; give a list such as "
            '[{"role": "user", "content": "Hello"}]'
        )
    if not messages:
        raise TemplateError("the list of messages is empty; give at least one message")
    checked = [_checked_message(item, index) for index, item in enumerate(messages)]
    if is_open and not _last_text(checked[-1]):
        raise TemplateError(
            "continue_final_message needs text in the last message, which has none; "
            "use add_generation_prompt"
        )
    return Conversation(checked, _checked_tools(tools), is_open)


def fitted_messages(messages: list[Message], takes: Callable[[str], bool]) -> list[Message]:
    """Give content in the form that a template reads: text, or a list of parts.

    Args:
        messages: as in `Conversation`.
        takes: says of "text" and "parts" whether the template shows content of that form.

    Raises:
        TemplateError: a part is not text and the template reads only text.
    """
    return [{**message, **_fitted(message, index, takes)} for index, message in enumerate(messages)]


def _checked_message(item: Any, index: int) -> Message:
    if not is_mapping(item):
        raise TemplateError(f"message {index} is {type(item).__name__}, not a mapping with a role")
    message = dict(item)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(
            f'message {index} has the role {role!r}; give "user", "assistant", "system" or "tool"'
        )
    if "content" not in message and not message.get("tool_calls"):
        raise TemplateError(f'message {index} ({role}) has no "content"')
    content = message.get("content")
    if content is None:
        message["content"] = ""
    elif is_sequence(content):
        message["content"] = _checked_parts(content, index)
    elif not isinstance(content, str):
        raise TemplateError(
            f"the content of message {index} ({role}) is {type(content).__name__}; give text, "
            "None, or a list of parts"
        )
    return message


def _checked_parts(parts: Sequence[Any], index: int) -> list[Message]:
    checked: list[Message] = []
    for part in parts:
        if isinstance(part, str):
            checked.append({"type": "text", "text": part})
            continue
        if not is_mapping(part) or not _is_sound_part(part):
            raise TemplateError(
                f'a part of message {index} is {part!r}; give {{"type": "text", "text": "..."}}'
            )
        checked.append(dict(part))
    return checked


def _is_sound_part(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and (kind != "text" or isinstance(part.get("text"), str))


def _checked_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not is_sequence(tools):
        raise TemplateError(f"tools are {type(tools).__name__}; give a list of JSON schemas")
    for index, tool in enumerate(tools):
        if not is_mapping(tool):
            raise TemplateError(
                f"tool {index} is {type(tool).__name__}; give its JSON schema, such as "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
    return list(tools) or None


def _last_text(message: Message) -> str:
    content: Any = message["content"]
    if is_list(content):
        content = content[-1].get("text", "") if content else ""
    return str(content).strip()


def _fitted(message: Message, index: int, takes: Callable[[str], bool]) -> Message:
    content: Any = message["content"]
    if isinstance(content, str):
        if not content or takes("text") or not takes("parts"):
            return {}
        return {"content": [{"type": "text", "text": content}]}
    if takes("parts"):
        return {}
    parts: list[Message] = content
    for part in parts:
        if part["type"] != "text":
            raise TemplateError(
                f"message {index} holds a part of type {part['type']!r}, but the chat template "
                "reads text only; leave the part out"
            )
    return {"content": "".join(part["text"] for part in parts)}
