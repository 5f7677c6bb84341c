"""Reading a cache row by row, by the rule that `KVRows` documents."""

import mlx.core as mx
import numpy as np

from turbospark.kernels.kv_rows import KVRows

HEADS, DIM = 3, 5


def numbered(start: int, count: int) -> tuple[mx.array, mx.array]:
    """Rows of keys and values that tell their number and their head."""
    serial = np.arange(start, start + count, dtype=np.float32)
    k = serial[:, None, None] + np.arange(HEADS, dtype=np.float32)[None, :, None] / 4
    k = k + np.arange(DIM, dtype=np.float32) / 32
    return mx.array(k), mx.array(-k)


def numbers(rows: KVRows, begin: int) -> list[int]:
    """The numbers of the rows at positions [begin, end), after checking that each is whole."""
    blocks = {}
    for name in ("sealed", "tail"):
        block = getattr(rows, name)
        if block is not None:
            blocks[name] = np.array(block.k), np.array(block.v)
    found = []
    for position in range(begin, rows.end):
        if position < rows.boundary:
            k, v = blocks["sealed"]
            row = position % k.shape[1]
        else:
            k, v = blocks["tail"]
            row = position - rows.boundary
        number = int(k[0, row, 0])
        expected, negated = numbered(number, 1)
        np.testing.assert_array_equal(k[:, row], np.array(expected)[0])
        np.testing.assert_array_equal(v[:, row], np.array(negated)[0])
        found.append(number)
    return found
