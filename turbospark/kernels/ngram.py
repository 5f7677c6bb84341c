"""Hashed n-grams: which rows of a table stand for a token and those before it.

Source: transformers 5.24, models/qwen4_exp. A row number is a function of the last tokens, their
multipliers and one prime a head; every number is a whole one of at most 63 bits.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STEP = 10_007
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


@dataclass(frozen=True, slots=True)
class NgramHash:
    """How one layer numbers the n-grams of 2, 3, ... tokens that end at a token.

    Attributes:
        multipliers: one a place, the token's own first.
        primes: of each head; the heads of 2 tokens first, then those of 3, ...
        divisor: the table's number of rows is a multiple of it.
        eos: what stands before a text begins, and before an end of text.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    divisor: int
    eos: int

    @classmethod
    def build(
        cls,
        *,
        vocab_size: int,
        ngram_size: int,
        heads_per_ngram: int,
        base: int,
        divisor: int,
        seed: int,
        index: int,
        eos: int,
    ) -> Self:
        """The hash of the `index`-th layer that has one.

        Args:
            vocab_size: token ids are below it.
            ngram_size: tokens of the longest n-gram.
            heads_per_ngram: heads for each length.
            base: primes start from it.
            divisor: of the number of rows.
            seed: of the multipliers.
            index: counted from 0 among the layers that hash.
            eos: id of the end of text.
        """
        heads = (ngram_size - 1) * heads_per_ngram
        primes = _primes_from(base, (index + 1) * heads)[index * heads :]
        multipliers = _multipliers(vocab_size, ngram_size, seed + _LAYER_STEP * index)
        return cls(multipliers, primes, divisor, eos)

    @property
    def context(self) -> int:
        """Tokens before a row's own that it depends on."""
        return len(self.multipliers) - 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """The table's first row of each head."""
        return tuple(sum(self.primes[:head]) for head in range(len(self.primes)))

    @property
    def rows(self) -> int:
        """Rows of the table, those included that no n-gram has."""
        return math.ceil(sum(self.primes) / self.divisor) * self.divisor

    def numbers(self, tokens: Numbers, before: Numbers) -> Numbers:
        """The table's rows of T tokens, on the host: [T, heads] int64.

        Args:
            tokens: [T].
            before: [context], those fed before them, the newest last.
        """
        return self._numbers(np, np.concatenate([before, tokens]).astype(np.int64), _host)

    def numbers_reference(self, tokens: mx.array, before: mx.array) -> mx.array:
        """The same on the device: [T, heads] int32.

        Args:
            tokens: [T] int32.
            before: [context] int32.
        """
        history = mx.concatenate([before, tokens]).astype(mx.int64)
        return self._numbers(mx, history, _device).astype(mx.int32)

    def _numbers(self, xp: Any, history: Any, constant: Any) -> Any:
        n = self.context
        count = history.shape[0] - n
        mixed = history[n:] * constant([self.multipliers[0]])
        ended = history[n:] < 0  # nothing has ended yet
        per_length = len(self.primes) // n
        found: list[Any] = []
        for place in range(1, n + 1):
            token = history[n - place : n - place + count]
            seen = xp.where(ended, constant([self.eos]), token)
            ended = ended | (token == self.eos)
            mixed = mixed ^ (seen * constant([self.multipliers[place]]))
            heads = slice((place - 1) * per_length, place * per_length)
            within = mixed[:, None] % constant(self.primes[heads])[None]
            found.append(within + constant(self.offsets[heads])[None])
        return xp.concatenate(found, axis=1)


def next_context(tokens: mx.array, before: mx.array) -> mx.array:
    """The last tokens before the next one: as many as `before` has, int32."""
    history = mx.concatenate([before, tokens[-before.shape[0] :].astype(mx.int32)])
    return history[history.shape[0] - before.shape[0] :]


def _host(values: Any) -> Numbers:
    return np.array(values, np.int64)  # host memory: numbers of the configuration


def _device(values: Any) -> mx.array:
    return mx.array(list(values), mx.int64)


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _multipliers(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    """Odd numbers whose product with a token id has at most 63 bits."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    hashed = (_splitmix64((seed + _GAMMA * (i + 1)) & _MASK) for i in range(count))
    return tuple(2 * (value % half) + 1 for value in hashed)


def _primes_from(base: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are `base` or larger."""
    found: list[int] = []
    number = max(2, base)
    while len(found) < count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return tuple(found)


def _is_prime(number: int) -> bool:
    """By Miller and Rabin, to bases that leave no doubt below 3 * 10^24."""
    if number in _BASES:
        return True
    if number < 2 or any(number % base == 0 for base in _BASES):
        return False
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    for base in _BASES:
        power = pow(base, (number - 1) >> twos, number)
        powers = [pow(power, 1 << i, number) for i in range(twos)]
        if power != 1 and number - 1 not in powers:
            return False
    return True
