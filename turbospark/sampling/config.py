"""What sampling options may hold."""

import math
from collections.abc import Mapping
from typing import Any

from turbospark.errors import OptionError
from turbospark.settings import GenerationConfig

MAX_TOP_K = 256
MAX_LOGPROBS = 256


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
    _demand("repetition_penalty", repetition, 0.0 < repetition < math.inf, "above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(config, name)
        _demand(name, value, -2.0 <= value <= 2.0, "-2 to 2")
    _demand("seed", config.seed, config.seed is None or config.seed < 2**64, "below 2**64")
    _demand("logprobs", config.logprobs, config.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")


def check_logit_bias(bias: Mapping[Any, Any] | None, vocab_size: int) -> dict[int, float]:
    """A bias of the form token id to number, every id held against the vocabulary.

    Raises:
        OptionError: an id is none of the vocabulary's, or a value is no number.
    """
    checked: dict[int, float] = {}
    for token, value in (bias or {}).items():
        if isinstance(token, bool) or not str(token).isdecimal() or int(token) >= vocab_size:
            raise OptionError(
                f"logit_bias names token {token!r}; ids run from 0 to {vocab_size - 1}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise OptionError(f"logit_bias[{token}]={value!r} is not a number")
        if value == math.inf:
            raise OptionError(f"logit_bias[{token}] is infinite; only -inf, which bans, is allowed")
        checked[int(token)] = float(value)
    return checked


def _demand(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise OptionError(f"{name}={value} is out of range: {wanted} is allowed")
