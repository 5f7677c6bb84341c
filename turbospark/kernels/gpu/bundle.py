"""Arrays that never change, side by side in one, so that a launch takes a single argument."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from turbospark.errors import KernelError

_ALIGNED_BYTES = 256
_MAX_WORDS = 2**31  # bodies add 32-bit offsets


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Weights of one launch, or of several, in one array.

    Every array that a launch takes costs the host about a microsecond with MLX's CUDA back end,
    as much as half the launch itself.

    Attributes:
        words: [n] uint32, what launches take.
        places: the first word of each array, by the array's id.
        members: those arrays, kept so that no other array gets their ids.
    """

    words: mx.array
    places: Mapping[int, int]
    members: tuple[mx.array, ...]

    @classmethod
    def of(cls, moved: Iterable[mx.array], copied: Iterable[mx.array] = ()) -> "Bundle":
        """Lay arrays side by side.

        Args:
            moved: become views into the bundle, wherever they are held, so that their values are in
                memory once. An array belongs to one bundle only.
            copied: small ones that other launches share.

        Raises:
            KernelError: they are too large for one bundle.
        """
        moving = {id(array): array for array in moved}
        members = moving | {id(array): array for array in copied}
        parts = [_words(array) for array in members.values()]
        if sum(part.size for part in parts) >= _MAX_WORDS:
            raise KernelError("the weights of one launch take 8 GiB or more")
        words = mx.concatenate(parts)
        mx.eval(words)  # pyright: ignore[reportUnknownMemberType]
        places, first = dict[int, int](), 0
        for key, part in zip(members, parts, strict=True):
            places[key] = first
            first += part.size
        for key, array in moving.items():
            _move(array, words, places[key])
        mx.eval(list(moving.values()))  # pyright: ignore[reportUnknownMemberType]
        return cls(words, places, tuple(members.values()))

    def place(self, array: mx.array) -> int | None:
        """The first word of an array, or None of one that is not in here."""
        return self.places.get(id(array))


def _words(array: mx.array) -> mx.array:
    """An array's bytes, with zeros up to the next boundary."""
    octets = mx.reshape(array, (-1,)).view(mx.uint8)
    padding = -octets.size % _ALIGNED_BYTES
    if padding:
        octets = mx.concatenate([octets, mx.zeros((padding,), mx.uint8)])
    return octets.view(mx.uint32)


def _move(array: mx.array, words: mx.array, first: int) -> None:
    """Make an array a view of its values in `words`; all who hold it hold the view."""
    octets = words[first : first - (-array.nbytes // 4)].view(mx.uint8)[: array.nbytes]
    array[...] = mx.reshape(octets.view(array.dtype), array.shape)
