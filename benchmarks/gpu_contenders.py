"""What gpu_decode.py lets race: both engines' models behind caches that hold a context."""

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from gpu_models import Pair
from mlx_lm.models.cache import make_prompt_cache

from turbospark.kernels.gpu.argmax import argmax_rows
from turbospark.kernels.gpu.kernel import current_target
from turbospark.protocols import Phase
from turbospark.runner.step import CompiledModel

PROMPT = 8
"""Tokens of the prompt before a cache is filled."""
ROOM = 4096
"""Tokens of all rounds behind a context: recurrent state goes on from round to round."""
IDENTITY = 32
MARGIN = 0.05


class Ours:
    """turbospark's model, its decode step compiled."""

    name = "turbospark"

    def __init__(self, pair: Pair) -> None:
        self._model = pair.ours
        self._step = CompiledModel(pair.ours)

    def filled(self, context: int) -> list[Any]:
        """Caches that hold `context` rows."""
        caches = self._model.make_caches(context + ROOM, 128)
        self._prompt(caches)
        for cache in caches:
            count = context - PROMPT
            if count <= 0:
                continue
            if cache.recurrent:
                cache.advance(count, cache.state)
                continue
            shape = (count, cache.num_kv_heads)
            k, v = (_rows((*shape, dims)) for dims in (cache.head_dim, cache.value_dim))
            cache.append(k, v)
            mx.eval(cache.rows().tail.k)
        return caches

    def take_back(self, caches: list[Any], count: int) -> None:
        """Forget the newest rows; recurrent state goes on from where it is."""
        for cache in caches:
            if not cache.recurrent:
                cache.rewind(count)

    def step(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        output = self._step(tokens, caches, phase=Phase.DECODE, logits="all")
        return output.logits

    def choose(self, logits: mx.array) -> mx.array:
        target = current_target()
        return _argmax(logits) if target is None else argmax_rows(logits, target=target)

    def prefill(self, count: int) -> mx.array:
        caches = self._model.make_caches(count + 8, 128)
        return self._model(_ids(count), caches, phase=Phase.PREFILL).logits

    def started(self) -> tuple[list[Any], mx.array]:
        """Caches behind a short prompt, and its last logits [V]."""
        caches = self._model.make_caches(512, 128)
        return caches, self._prompt(caches)

    def _prompt(self, caches: list[Any]) -> mx.array:
        """Feed a prompt a token at a time, since wide passes would compile more; logits [V]."""
        first, *others = _ids(PROMPT)
        logits = self._model(first[None], caches, phase=Phase.PREFILL).logits
        mx.eval(logits)  # as a prompt is, before a step is compiled
        for token in others:
            logits = self.step(token[None], caches)
        return logits[-1]


class Theirs:
    """mlx-lm's model, as its own generation loop runs it."""

    name = "mlx-lm"

    def __init__(self, pair: Pair) -> None:
        self._model = pair.theirs

    def filled(self, context: int) -> list[Any]:
        caches = make_prompt_cache(self._model)
        mx.eval(self._prompt(caches))
        count = context - PROMPT
        for cache in caches:
            if count <= 0 or not hasattr(cache, "keys"):
                continue
            k, v = (
                _rows((1, rows.shape[1], count, rows.shape[3]))
                for rows in (cache.keys, cache.values)
            )
            mx.eval(cache.update_and_fetch(k, v))
        return caches

    def take_back(self, caches: list[Any], count: int) -> None:
        for cache in caches:
            if hasattr(cache, "trim") and cache.is_trimmable():
                cache.trim(count)

    def step(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        return self._model(tokens[None], cache=caches)[0]

    def choose(self, logits: mx.array) -> mx.array:
        return _argmax(logits)

    def prefill(self, count: int) -> mx.array:
        caches, ids = make_prompt_cache(self._model), _ids(count)
        self._model(ids[None, :-1], cache=caches)
        mx.eval([cache.state for cache in caches])  # as mlx-lm: no head over the prompt
        return self._model(ids[None, -1:], cache=caches)[0]

    def started(self) -> tuple[list[Any], mx.array]:
        caches = make_prompt_cache(self._model)
        return caches, self._prompt(caches)

    def _prompt(self, caches: list[Any]) -> mx.array:
        """As turbospark's."""
        for token in _ids(PROMPT):
            logits = self.step(token[None], caches)
        return logits[-1]


def decode_seconds(contender: Any, caches: list[Any], rows: int, steps: int) -> float:
    """Seconds a pass of `rows` rows, the host one pass behind.

    A pass of several rows is a verify that keeps none of them.
    """
    y = mx.array(np.arange(rows, dtype=np.int32))
    mx.eval(y)
    mx.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        following = contender.choose(contender.step(y, caches))
        mx.async_eval(following)
        np.asarray(y)  # a slice would be an operation behind the pass that has just begun
        y = following
        if rows > 1:
            contender.take_back(caches, rows)
    mx.eval(y)
    seconds = (time.perf_counter() - begin) / steps
    if rows == 1:
        contender.take_back(caches, steps)
    return seconds


def prefill_seconds(contender: Any, count: int) -> float:
    mx.synchronize()
    begin = time.perf_counter()
    mx.eval(contender.prefill(count))
    return time.perf_counter() - begin


def greedy_verdict(contenders: Sequence[Any], seconds: float) -> str:
    """How long greedy tokens agree; where they part, how open the choice was, how far logits are.

    Both go on together; after `seconds` no further token is compared.
    """
    deadline = time.perf_counter() + seconds
    states = [contender.started() for contender in contenders]
    for place in range(IDENTITY):
        if time.perf_counter() > deadline:
            return f"{place} greedy tokens equal mlx-lm's, then {seconds:.0f} s were over"
        ours, theirs = (row for _, row in states)
        token, other = mx.argmax(ours), mx.argmax(theirs)
        margin, apart = _margin(ours), mx.abs(ours.astype(mx.float32) - theirs).max()
        mx.eval(token, other, margin, apart)
        if token.item() != other.item():
            word = "within" if margin.item() < MARGIN else "OUTSIDE"
            return (
                f"tokens part at {place}, margin {margin.item():.3f} ({word} {MARGIN}), where "
                f"logits differ by up to {apart.item():.3f}"
            )
        y = mx.array([token.item()], mx.int32)
        states = [
            (caches, contender.step(y, caches)[-1])
            for contender, (caches, _) in zip(contenders, states, strict=True)
        ]
    return f"{IDENTITY} greedy tokens equal mlx-lm's"


def attended_bytes(caches: Sequence[Any], context: int) -> int:
    """Bytes of keys and values that a token at `context` reads."""
    return sum(
        2
        * min(context, getattr(cache, "window", context))
        * cache.num_kv_heads
        * (cache.head_dim + cache.value_dim)
        for cache in caches
        if not cache.recurrent
    )


def _margin(row: mx.array) -> mx.array:
    """By how much the largest logit is above the second one."""
    row = row.astype(mx.float32)
    others = mx.where(mx.arange(row.size) == mx.argmax(row), -mx.inf, row)
    return mx.max(row) - mx.max(others)


def _argmax(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1).astype(mx.int32)


def _rows(shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def _ids(count: int) -> mx.array:
    return mx.array(np.random.default_rng(count).integers(0, 512, count).astype(np.int32))
