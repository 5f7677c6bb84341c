"""MLX arrays that are filled in place, so that loading needs no second copy of a tensor."""

import os
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def fresh(shape: Sequence[int], dtype: mx.Dtype) -> tuple[mx.array, Array]:
    """An evaluated array of zeros and a writable numpy view of its memory.

    bfloat16 has no numpy type: ask for uint16 and call `.view(mx.bfloat16)` when it is filled.
    """
    # The CPU stream allocates host memory on every back end.
    array = mx.zeros(tuple(shape), dtype, stream=mx.cpu)
    evaluate(array)
    return array, cast("Array", np.asarray(array))


def evaluate(*arrays: mx.array) -> None:
    """Compute arrays now."""
    mx.eval(*arrays)  # pyright: ignore[reportUnknownMemberType]


def read_into(descriptor: int, target: Array, offset: int) -> int:
    """Fill a contiguous array from a file; return the bytes read, fewer at the file's end."""
    view = memoryview(cast("bytearray", target.reshape(-1).view(np.uint8)))
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
