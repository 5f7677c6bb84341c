"""How the launches of routed experts are cut."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """How much a threadgroup makes; it does not order the sums.

    Attributes:
        columns: that a SIMD-group makes of what it holds of a row, at most 32.
        ahead: columns whose codes a lane asks for before it uses the first: 1, 2, 4 or 8.
        simdgroups: of a threadgroup, at most.
    """

    columns: int
    ahead: int
    simdgroups: int


def up_geometry(target: str, K: int, *, shared: bool) -> ExpertGeometry:
    """The cut of the hidden rows of K values each, `shared` if an expert is common to all rows.

    Beside one, with few parts of a row, four columns ahead take more registers than there are.
    """
    if target != "cuda":
        return ExpertGeometry(4, 2, 4)
    is_tight = shared and parts_of(K, words_of(K)) <= 2
    return ExpertGeometry(8, 2 if is_tight else 4, 6)


def down_geometry(target: str, columns: int) -> ExpertGeometry:
    """The cut of the sum; `columns` are those of all rows together."""
    if target != "cuda":
        return ExpertGeometry(4, 4, 4)
    # An H200 has 132 multiprocessors, which have room for 16 SIMD-groups each.
    per_multiprocessor = -(-columns // (8 * 132))
    return ExpertGeometry(8, 8, min(8, max(4, 16 // per_multiprocessor)))


def words_of(K: int) -> int:
    """Words of eight codes that a lane takes at a time; with K it gives the order of sums.

    Wide loads are cheap, lanes that find nothing left of a row are not.
    """
    return min(_COSTS, key=lambda words: _COSTS[words] * parts_of(K, words))


_COSTS = {4: 91, 2: 51, 1: 31}
"""Instructions for a lane's words of one column."""


def parts_of(K: int, words: int) -> int:
    """Parts of a row of which every lane has a number of words."""
    return -(-K // (256 * words))


def spread(parts: int, simdgroups: int) -> int:
    """SIMD-groups that take parts in turns, as few as do with as few turns."""
    turns = -(-parts // simdgroups)
    return -(-parts // turns)
