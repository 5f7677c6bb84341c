"""The jinja2 environment that chat templates run in. Imported when a template is first used."""

from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any, NoReturn, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from turbospark.tokenizer.template import MAX_OUTPUT, to_json

MAX_RANGE = 1_000_000


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also bounds repeated texts and powers."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = _product_size(left, right) if operator == "*" else _power_size(left, right)
        if size > MAX_OUTPUT:
            raise SecurityError(f"{operator} gives a value of more than {MAX_OUTPUT} parts")
        return super().call_binop(context, operator, left, right)


def _product_size(left: Any, right: Any) -> int:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
            return len(many) * times  # pyright: ignore[reportUnknownArgumentType]
    return 0


def _power_size(base: Any, exponent: Any) -> int:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        return base.bit_length() * exponent
    return 0


def bounded_range() -> Callable[..., range]:
    """A `range` for one rendering, whose results are MAX_RANGE long together at most."""
    left = MAX_RANGE

    def take(*arguments: int) -> range:
        nonlocal left
        taken = range(*arguments)
        left -= len(taken)
        if left < 0:
            raise SecurityError(f"its ranges hold more than {MAX_RANGE} numbers")
        return taken

    return take


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@cache
def sandbox() -> ImmutableSandboxedEnvironment:
    """The environment; shared, since it holds nothing of a template."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    cast("dict[str, Any]", environment.filters)["tojson"] = to_json
    cast("dict[str, Any]", environment.globals).update(
        raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    return environment
