"""What a launch brings near for the next one: weights are known before their turn comes."""

from dataclasses import dataclass

import mlx.core as mx

from turbospark.kernels.device import on_cpu
from turbospark.kernels.gpu.int4_product import Int4Product

AHEAD_BYTES = 24 << 20
"""At most so much is brought near: about half of the cache of the GPUs that do it."""

_PIECE_BYTES = 4096
_CACHED_MAJORS = (9, 10)  # Hopper and Blackwell data centre GPUs: 50 MB of cache and more


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Bytes in a bundle.

    Attributes:
        words: the bundle's.
        first: word at which they begin.
        nbytes: a multiple of 4096.
    """

    words: mx.array
    first: int
    nbytes: int


class LaunchOrder:
    """The order in which a model's products run, learnt from one pass to the next.

    Every pass, a prefill too, asks its products in the same order; a wrong guess costs time and
    changes no result.
    """

    def __init__(self) -> None:
        self._after: dict[int, Int4Product] = {}
        self._last: Int4Product | None = None

    def note(self, product: Int4Product) -> None:
        """A product's turn has come."""
        if self._last is not None:
            self._after[id(self._last)] = product
        self._last = product

    def ahead_of(self, product: Int4Product, limit: int = AHEAD_BYTES) -> Ahead | None:
        """What the product after this one reads first, if that is known and worth while."""
        following = self._after.get(id(product))
        if following is None or following.bundle is None:
            return None
        bundle = following.bundle
        places = [bundle.place(array) for w in following.weights for array in (w.codes, w.scales)]
        first = min((place for place in places if place is not None), default=0)
        nbytes = min(limit, 4 * (bundle.words.size - first)) // _PIECE_BYTES * _PIECE_BYTES
        return Ahead(bundle.words, first, nbytes) if nbytes else None


def reads_ahead() -> bool:
    """Whether the GPU that MLX computes on has the cache for it."""
    if on_cpu() or not mx.cuda.is_available():
        return False
    return mx.device_info().get("compute_capability_major") in _CACHED_MAJORS
