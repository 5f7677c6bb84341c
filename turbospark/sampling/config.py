"""What sampling options may hold."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, SupportsIndex, cast

from turbospark.errors import OptionError
from turbospark.settings import GenerationConfig

MAX_TOP_K = 256
MAX_LOGPROBS = 256
MAX_REPETITION = 1e6
_MAX_BIAS = 3e38
_LONGEST_ID = 10


def check_sampling(config: GenerationConfig) -> None:
    """Hold every sampling option against its range.

    Raises:
        OptionError: one is outside.
    """
    _demand("temperature", config.temperature, 0.0 <= config.temperature < math.inf, "0 or more")
    top_p = config.top_p
    _demand("top_p", top_p, top_p is None or 0.0 < top_p <= 1.0, "above 0 and at most 1")
    _demand("top_k", config.top_k, 0 <= config.top_k <= MAX_TOP_K, f"0 to {MAX_TOP_K}")
    _demand("min_p", config.min_p, 0.0 <= config.min_p < 1.0, "0 or more and below 1")
    repetition = config.repetition_penalty
    # Scores times or over it stay far inside float64.
    allowed = 1 / MAX_REPETITION <= repetition <= MAX_REPETITION
    _demand("repetition_penalty", repetition, allowed, f"1e-06 to {MAX_REPETITION:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(config, name)
        _demand(name, value, -2.0 <= value <= 2.0, "-2 to 2")
    _demand("seed", config.seed, config.seed is None or config.seed < 2**64, "below 2**64")
    _demand("logprobs", config.logprobs, config.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")


def check_logit_bias(bias: Any, vocab_size: int) -> dict[int, float]:
    """A bias of the form token id to number, every id held against the vocabulary.

    Raises:
        OptionError: it is no mapping, an id is none of the vocabulary's, or a value is no number
            that can be added to a logit.
    """
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise OptionError(
            f"logit_bias of type {type(bias).__name__}: give a mapping of token id to number"
        )
    checked: dict[int, float] = {}
    for token, value in cast("Mapping[Any, Any]", bias).items():
        token_id = _token_id(token)
        if not 0 <= token_id < vocab_size:
            raise OptionError(
                f"logit_bias names token {token!r}; ids run from 0 to {vocab_size - 1}"
            )
        number = _number(value)
        if number == math.inf:
            raise OptionError(
                f"logit_bias[{token_id}] is infinite; only -inf, which bans, is allowed"
            )
        if math.isnan(number) or (number > -math.inf and abs(number) > _MAX_BIAS):
            raise OptionError(f"logit_bias[{token_id}]={value!r} is no number that float32 holds")
        checked[token_id] = number
    return checked


def _token_id(token: object) -> int:
    """The id that a key names, as a number or, as in JSON, as its digits; -1 for none."""
    if isinstance(token, str):
        return int(token) if token.isdecimal() and len(token) <= _LONGEST_ID else -1
    if isinstance(token, bool) or not isinstance(token, SupportsIndex):
        return -1
    return token.__index__()


def _number(value: Any) -> float:
    """A number as a float; NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def _demand(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={value} is out of range: {wanted} is allowed")
