"""Hashed n-grams against the rule spelled out token by token, on the host and on the device."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.kernels.ngram import NgramHash, next_context

EOS = 5
REAL = {
    "vocab_size": 248_320, "ngram_size": 3, "heads_per_ngram": 8, "base": 20_000_000,
    "divisor": 128, "seed": 1234, "eos": 248_044,
}  # fmt: skip
SIZES = {"three": (3, 2), "two": (2, 3), "five": (5, 2)}


def build(ngram_size, heads, index=0, vocab_size=67):
    return NgramHash.build(
        vocab_size=vocab_size, ngram_size=ngram_size, heads_per_ngram=heads, base=31, divisor=7,
        seed=9, index=index, eos=EOS,
    )  # fmt: skip


def by_register(hashing, tokens, heads):
    """Rows [T, heads] from the last tokens as a register that an end of text empties."""
    register, rows = [hashing.eos] * hashing.context, []
    for token in map(int, tokens):
        features, row, mixed = [token, *register], [], 0
        for place, feature in enumerate(features):
            mixed ^= feature * hashing.multipliers[place]
            if place:
                own = range((place - 1) * heads, place * heads)
                row += [mixed % hashing.primes[j] + hashing.offsets[j] for j in own]
        rows.append(row)
        if token == hashing.eos:
            register = [hashing.eos] * hashing.context
        else:
            register = [token, *register][: hashing.context]
    return np.array(rows)


def tokens_of(count=60, vocab=67):
    tokens = np.random.default_rng(4).integers(0, vocab, size=count).astype(np.int32)
    tokens[[7, 8, 20, 22, 41]] = EOS
    return tokens


def test_the_numbers_of_the_published_model():
    hashing = NgramHash.build(index=0, **REAL)
    assert hashing.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert len(hashing.primes) == 16
    assert sum(hashing.primes) == 320_001_446
    assert hashing.rows == 320_001_536
    assert hashing.primes[0] >= 20_000_000


def test_no_product_with_a_token_is_cut():
    hashing = NgramHash.build(index=0, **REAL)
    last = REAL["vocab_size"] - 1
    assert all(multiplier * last < 2**63 for multiplier in hashing.multipliers)
    tokens = np.array([last] * 4, np.int32)
    assert np.array_equal(
        hashing.numbers(tokens, np.full(2, REAL["eos"])), by_register(hashing, tokens, 8)
    )


def test_a_later_layer_goes_on_with_the_next_primes():
    first, second = (build(3, 2, index) for index in (0, 1))
    both = NgramHash.build(
        vocab_size=67, ngram_size=3, heads_per_ngram=4, base=31, divisor=7, seed=9, index=0, eos=EOS
    )
    assert first.primes + second.primes == both.primes
    assert first.multipliers != second.multipliers


@pytest.mark.parametrize("kind", sorted(SIZES))
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 1, 30, 22]])
def test_rows_are_those_of_the_register(kind, on_device, sizes):
    hashing, tokens = build(*SIZES[kind]), tokens_of()
    before, at, found = mx.full((hashing.context,), EOS, mx.int32), 0, []
    for size in sizes:
        part = mx.array(tokens[at : at + size])
        if on_device:
            found.append(np.array(hashing.numbers_reference(part, before)))
        else:
            found.append(hashing.numbers(np.array(part), np.array(before)))
        before, at = next_context(part, before), at + size
    assert np.array_equal(np.concatenate(found), by_register(hashing, tokens, SIZES[kind][1]))


def test_an_end_of_text_empties_the_window():
    """A hash that reads across it gives other rows behind it."""
    hashing, tokens = build(3, 2), tokens_of()
    own = hashing.numbers(tokens, np.full(2, EOS))
    blind = NgramHash(hashing.multipliers, hashing.primes, hashing.divisor, -1)
    differ = np.flatnonzero((blind.numbers(tokens, np.full(2, EOS)) != own).any(axis=1))
    assert differ.tolist() == [8, 21, 23, 42]  # at 9 the token before the last is one itself


def test_primes_are_those_of_trial_division():
    hashing = build(2, 400)
    numbers = (n for n in range(31, 10_000) if all(n % d for d in range(2, int(n**0.5) + 1)))
    assert hashing.primes == tuple(next(numbers) for _ in range(400))
