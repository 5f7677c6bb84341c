"""The uniform numbers behind sampling: one counter, one seed, no hidden state."""

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def fresh_seed() -> int:
    """64 bits from the operating system."""
    return secrets.randbits(64)


def seeded_uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on seed and step alone.

    Source: the SplitMix64 finalizer (Steele, Lea, Flood 2014) over seed xor step * golden ratio;
    the top 53 bits make the fraction.
    """
    z = ((seed & _MASK) ^ (step * _GOLDEN & _MASK)) + _GOLDEN & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53
