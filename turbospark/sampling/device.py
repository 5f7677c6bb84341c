"""Choosing tokens where the logits are, so that the next step need not wait for the host.

The same law as `shaping`, in float32: top-p over the full distribution, top-k, min-p, temperature
last, and the draw in ranked order.
"""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from turbospark.kernels.gpu import argmax
from turbospark.kernels.gpu.kernel import current_target
from turbospark.sampling.select import Chooser
from turbospark.settings import GenerationConfig

NOTHING = argmax.NOT_FINITE
"""What is picked where the logits hold NaN or infinity."""


class DevicePicker:
    """Picks a generation's tokens on the device. Use it where `serves` says so.

    Args:
        chooser: whose law and uniform numbers it takes.
    """

    def __init__(self, chooser: Chooser) -> None:
        config, self._chooser = chooser.config, chooser
        self._is_greedy = config.temperature == 0.0
        pick: Callable[..., mx.array] = (
            _greedy if self._is_greedy else partial(_drawn, config=config)
        )
        self._pick: Callable[..., mx.array] = mx.compile(pick)

    def pick(self, logits: mx.array, step: int) -> mx.array:
        """The token [1] int32 that follows logits [1, V]; NOTHING where they are not finite.

        Args:
            logits: raw ones.
            step: tokens generated so far.
        """
        if self._is_greedy:
            target = current_target()
            if target is not None and argmax.serves(logits.shape[-1], target):
                return argmax.argmax_rows(logits.astype(mx.float32), target=target)
            return self._pick(logits)
        return self._pick(logits, mx.array([self._chooser.uniform(step)], mx.float32))


def serves(chooser: Chooser) -> bool:
    """Whether a token can be chosen without the host: nothing hangs on earlier tokens."""
    config = chooser.config
    return (
        chooser.is_plain
        and not config.logprobs
        and (
            config.temperature == 0.0
            or (
                config.repetition_penalty == 1.0
                and config.presence_penalty == 0.0
                and config.frequency_penalty == 0.0
            )
        )
    )


def _checked(token: mx.array, logits: mx.array) -> mx.array:
    token = token.astype(mx.int32).reshape(1)
    return mx.where(mx.isfinite(logits).all(), token, NOTHING)


def _greedy(logits: mx.array) -> mx.array:
    return _checked(mx.argmax(logits), logits)


def _drawn(logits: mx.array, uniform: mx.array, config: GenerationConfig) -> mx.array:
    scores = logits.reshape(-1).astype(mx.float32)
    ranked = _ranked(scores, config.top_k)
    values = scores[ranked]
    shares = mx.exp(values - mx.logsumexp(scores))  # at temperature 1
    kept = shares >= config.min_p * shares[0]
    if config.top_p is not None:
        kept = kept & (mx.cumsum(shares) - shares < config.top_p)
    weights = mx.where(kept, mx.exp((values - values[0]) / config.temperature), 0.0)
    sums = mx.cumsum(weights)
    place = (sums <= uniform * sums[-1]).sum()
    last = kept.sum() - 1
    return _checked(ranked[mx.minimum(place, last)], logits)


def _ranked(scores: mx.array, top_k: int) -> mx.array:
    """The ids of the best scores, best first, the lower id first among equals."""
    if not 0 < top_k < scores.size:
        return mx.argsort(-scores)
    best = mx.sort(mx.argpartition(-scores, top_k - 1)[:top_k])
    return best[mx.argsort(-scores[best])]
