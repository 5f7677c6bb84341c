"""The uniform numbers behind sampling: one counter, one seed, no hidden state.

A generation has one seed. Every number it draws is named by a step, which counts generated
tokens, and a stream, which says what the number is for; no two draws share one.
"""

import secrets
from typing import Any, overload

from numpy import float64, uint64
from numpy.typing import NDArray

TARGET = 0  # draws from the model's own distribution
PROPOSAL = 1  # draws from a drafter's
ACCEPTANCE = 2  # whether a proposal is kept
RESIDUAL = 3  # what takes the place of one that is not

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 0xD1342543DE82EF95


def fresh_seed() -> int:
    """64 bits from the operating system."""
    return secrets.randbits(64)


@overload
def seeded_uniform(seed: int, step: int, stream: int = TARGET) -> float: ...
@overload
def seeded_uniform(seed: NDArray[uint64], step: int, stream: int = TARGET) -> NDArray[float64]: ...
def seeded_uniform(seed: Any, step: int, stream: int = TARGET) -> Any:
    """A number in [0, 1) that depends on seed, step and stream alone.

    Source: the SplitMix64 finalizer (Steele, Lea, Flood 2014) over seed xor step * golden ratio;
    the top 53 bits make the fraction. Streams other than 0 finalize the seed beforehand, with
    the stream mixed in.

    Args:
        seed: 64 bits, or an array of such words to get an array of numbers.
        step: the token it is drawn for, counted from the first generated one.
        stream: what it is drawn for.
    """
    if stream:
        seed = _finalized(seed ^ (stream * _STREAM & _MASK))
    return (_finalized((seed & _MASK) ^ (step * _GOLDEN & _MASK)) >> 11) * 2.0**-53


def _finalized(word: Any) -> Any:
    z = word + _GOLDEN & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
