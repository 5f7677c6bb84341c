"""How the launches of routed experts are cut."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """Columns a SIMD-group, SIMD-groups a threadgroup; neither orders the sums."""

    rows: int
    simdgroups: int

    def groups(self, columns: int) -> int:
        """Threadgroups over so many columns."""
        return -(-columns // (self.rows * self.simdgroups))


def up_geometry(target: str, columns: int) -> ExpertGeometry:
    """The cut of the hidden rows; `columns` are those of all rows and experts together."""
    if target == "cuda":
        return ExpertGeometry(1, 8) if columns <= 8192 else ExpertGeometry(2, 8)
    return ExpertGeometry(2, 2)


def down_geometry(target: str, columns: int) -> ExpertGeometry:
    """The cut of the sum; `columns` are those of all rows together."""
    if target == "cuda":
        return ExpertGeometry(1, 8) if columns <= 4096 else ExpertGeometry(2, 8)
    return ExpertGeometry(2, 2)


def words_of(K: int) -> int:
    """Words of eight codes that a lane takes at a time; with K it gives the order of sums.

    Wide loads are cheap, lanes that find nothing left of a row are not.
    """
    return max(_WORTH, key=lambda words: _WORTH[words] * _busy(K, words))


_WORTH = {4: 1.0, 2: 0.95, 1: 0.85}


def _busy(K: int, words: int) -> float:
    """The part of all lanes' turns in which they have codes."""
    return K / (32 * 8 * words * -(-K // (32 * 8 * words)))


def ahead_of(K: int, words: int, rows: int) -> int:
    """Packs that a lane asks for before it uses the first."""
    packs = -(-K // (32 * 8 * words))
    if rows > 1:
        return 1
    return packs if packs <= 3 else max(2, 4 // words)


def batch_of(top_k: int, words: int, rows: int) -> int:
    """Experts whose packs a lane asks for before it uses the first."""
    most = max(1, 32 // (words * rows))
    return next(n for n in (16, 8, 6, 5, 4, 3, 2, 1) if n <= min(most, 8) and top_k % n == 0)
