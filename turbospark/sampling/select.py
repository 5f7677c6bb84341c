"""One step of a generation: from a row of logits to a token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from turbospark.errors import NonFiniteError, OptionError
from turbospark.sampling.config import check_logit_bias, check_sampling
from turbospark.sampling.ranking import Scores, best
from turbospark.sampling.shaping import Distribution, log_softmax, shaped
from turbospark.sampling.uniform import TARGET, fresh_seed, seeded_uniform
from turbospark.sampling.view import as_numpy
from turbospark.settings import GenerationConfig

Sampler = Callable[[mx.array], Any]
"""log-probabilities [1, V] -> token [1], as mlx-lm's samplers."""
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""tokens [n] of prompt and reply, logits [1, V] -> logits [1, V], as mlx-lm's processors.

A drafter that proposes token by token asks about tokens that may not stay, so the answer should
hang on the arguments alone.
"""

_REPLACED_BY_SAMPLER = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A chosen token.

    Attributes:
        token: its id.
        logits: [V] what it was chosen from: after processors and bias, before penalties.
        logprob: the token's log-probability, where log-probabilities were asked for.
        top_logprobs: the likeliest tokens with theirs, best first.
    """

    token: int
    logits: mx.array
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Chooser:
    """Chooses tokens for one generation; its options are checked when it is made.

    Args:
        config: sampling options.
        vocab_size: bounds the ids of `logit_bias`.
        logit_bias: token id to a number added to its logit; -inf bans it.
        processors: run in order on every row, before anything else.
        sampler: replaces the built-in sampling.

    Raises:
        OptionError: an option is out of range, one that `sampler` replaces is set beside it, or
            what should be a function is none.
    """

    def __init__(
        self,
        config: GenerationConfig,
        vocab_size: int,
        *,
        logit_bias: Any = None,
        processors: Sequence[LogitsProcessor] = (),
        sampler: Sampler | None = None,
    ) -> None:
        check_sampling(config)
        if sampler is not None:
            _refuse_beside_sampler(config)
            check_callable("sampler", sampler)
        self.config = config
        self.seed = fresh_seed() if config.seed is None else config.seed
        self._bias = check_logit_bias(logit_bias, vocab_size)
        self._processors = _checked_processors(processors)
        self._sampler = sampler

    @property
    def is_plain(self) -> bool:
        """Whether tokens come from the raw logits by the built-in sampling alone."""
        return self._sampler is None and not self._processors and not self._bias

    def choose(self, logits: mx.array, history: Sequence[int], prompt_tokens: int) -> Choice:
        """Choose the token that follows `history`.

        Args:
            logits: [V] raw logits.
            history: ids of prompt and reply so far.
            prompt_tokens: how many of them are the prompt's; the rest counts the step.

        Raises:
            NonFiniteError: the largest logit is NaN or infinity, or processors left nothing to
                choose. That all of them are finite is the producer's to say.
            OptionError: a processor or the sampler gave back something else than it should.
        """
        scores = self.score(logits, history)
        if self._sampler is not None:
            return self.choice(_run_sampler(self._sampler, scores, len(history)), scores)
        return self.choice(self.pick(scores, history, prompt_tokens), scores)

    def score(self, logits: mx.array, history: Sequence[int]) -> mx.array:
        """What a token is chosen from: logits [V] after processors and bias.

        Raises:
            NonFiniteError: see `choose`.
            OptionError: a processor gave back something else than it should.
        """
        scores = logits
        for processor in self._processors:
            answer = processor(mx.array(np.array(history, dtype=np.int32)), scores[None])
            scores = _checked_logits(answer, len(logits))
        if self._bias:
            scores = _biased(scores, self._bias)
        if self._processors or self._bias:
            _check_choosable(scores, len(history))
        return scores

    def pick(self, scores: mx.array, history: Sequence[int], prompt_tokens: int) -> int:
        """The token that the built-in sampling takes from what `score` gave.

        Raises:
            NonFiniteError: the largest score is NaN or infinity.
        """
        if self.config.temperature == 0.0:
            row = as_numpy(scores)
            token = int(np.argmax(row))  # NaN counts as the largest
            _check_top(float(row[token]), len(history))
            return token
        law = self.law(scores, history, prompt_tokens)
        return law.draw(self.uniform(len(history) - prompt_tokens))

    def law(self, scores: mx.array, history: Sequence[int], prompt_tokens: int) -> Distribution:
        """The distribution that the built-in sampling draws from, of what `score` gave.

        Raises:
            NonFiniteError: the largest score is NaN or infinity.
        """
        row = _float64(scores)
        _check_top(float(row.max()), len(history))
        return shaped(row, history, history[prompt_tokens:], self.config)

    def uniform(self, step: int, stream: int = TARGET) -> float:
        """This generation's number for a step and a purpose."""
        return seeded_uniform(self.seed, step, stream)

    def choice(self, token: int, scores: mx.array) -> Choice:
        """A token chosen from what `score` gave, with the log-probabilities asked for."""
        if not self.config.logprobs:
            return Choice(token, scores)
        logprobs = log_softmax(_float64(scores))
        ranked = best(logprobs, np.arange(len(logprobs)), self.config.logprobs)
        ranked = ranked[np.argsort(-logprobs[ranked], kind="stable")]
        top = tuple((int(i), float(logprobs[i])) for i in ranked)
        return Choice(token, scores, float(logprobs[token]), top)


def check_callable(name: str, value: object) -> None:
    """Refuse what cannot be called where a function is wanted.

    Raises:
        OptionError: naming the option.
    """
    if not callable(value):
        raise OptionError(f"{name}={value!r} is not a function")


def _checked_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    if callable(processors) or not isinstance(processors, Sequence):
        raise OptionError(
            f"logits_processors of type {type(processors).__name__}: give a list of functions"
        )
    found = tuple(cast("Sequence[Any]", processors))
    for index, processor in enumerate(found):
        check_callable(f"logits_processors[{index}]", processor)
    return found


def _checked_logits(answer: Any, vocab_size: int) -> mx.array:
    """What a processor gave back, as [V] float32."""
    is_numpy = isinstance(answer, np.ndarray)
    logits = mx.array(cast(Any, answer)) if is_numpy else answer
    if not isinstance(logits, mx.array) or logits.shape != (1, vocab_size):
        what = f"shape {logits.shape}" if isinstance(logits, mx.array) else type(logits).__name__
        raise OptionError(f"a logits processor gave {what}, not logits of shape (1, {vocab_size})")
    return logits[0].astype(mx.float32)


def _run_sampler(sampler: Sampler, scores: mx.array, position: int) -> int:
    total = mx.logsumexp(scores)
    _check_top(float(cast(float, total.item())), position)
    answer = sampler((scores - total)[None])
    if isinstance(answer, mx.array) and mx.issubdtype(answer.dtype, mx.floating):
        raise OptionError(f"the sampler gave {answer!r}, not one token id")
    ids = cast("NDArray[Any]", np.array(answer))
    if ids.size != 1 or ids.dtype.kind not in "iu":
        raise OptionError(f"the sampler gave {answer!r}, not one token id")
    token = int(ids.item())
    if not 0 <= token < scores.shape[-1]:
        raise OptionError(f"the sampler gave token {token}; ids run to {scores.shape[-1] - 1}")
    return token


def _refuse_beside_sampler(config: GenerationConfig) -> None:
    defaults = GenerationConfig()
    for name in _REPLACED_BY_SAMPLER:
        if getattr(config, name) != getattr(defaults, name):
            raise OptionError(f"{name} and a custom sampler exclude each other: leave one out")


def _float64(scores: mx.array) -> Scores:
    return as_numpy(scores.astype(mx.float32)).astype(np.float64)


def _biased(scores: mx.array, bias: dict[int, float]) -> mx.array:
    ids, values = mx.array(list(bias)), mx.array(list(bias.values()))
    return scores.at[ids].add(values)  # pyright: ignore[reportUnknownMemberType]


def _check_top(top: float, position: int) -> None:
    if not math.isfinite(top):
        raise NonFiniteError(f"the logits of position {position} hold NaN or infinity")


def _check_choosable(scores: mx.array, position: int) -> None:
    top = float(as_numpy(scores).max())
    if not np.isfinite(top):
        raise NonFiniteError(
            f"logits processors or logit_bias left no token to choose at position {position}: "
            f"the largest score is {top}"
        )
