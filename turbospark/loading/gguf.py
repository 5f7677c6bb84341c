"""GGUF files: block formats become quantized weights without re-quantizing."""

import os
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark.errors import CheckpointError, UnsupportedError
from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading.arrays import Array, fresh, read_into
from turbospark.loading.gguf_blocks import EXPANDERS, LAYOUTS, Layout, Target
from turbospark.loading.gguf_header import GGUFTensor, read_header
from turbospark.loading.gguf_types import require_readable

SLAB_BYTES = 1 << 21
"""Raw bytes converted at a time."""

_DENSE = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.uint16}
_SCALE_DTYPES = {np.float16: mx.float16, np.float32: mx.float32}


class GGUFFile:
    """An open GGUF file: its metadata, its tensors, and their values on demand.

    Attributes:
        path: the file.
        metadata: key to plain Python value; arrays are lists.
        tensors: name to its row of the table, in the file's order.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the header; no weights yet.

        Raises:
            CheckpointError: the file is damaged, cut short, or one part of a split file.
            UnsupportedError: its version or byte order is not implemented.
        """
        self.path = Path(path)
        header = read_header(self.path)
        self.version, self.metadata, self.tensors = header.version, header.metadata, header.tensors
        _refuse_split(self.path, self.metadata.get("split.count", 0))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str, dequantize: bool = False) -> Weight:
        """One tensor, evaluated.

        Args:
            name: as in the file.
            dequantize: allow types without a lossless layout to become float32.

        Returns:
            A QuantizedWeight for block types, else a dense array in the file's float type.

        Raises:
            UnsupportedError: its type is not implemented.
            CheckpointError: the file became shorter since it was opened.
        """
        tensor = self.tensors[name]
        require_readable(tensor.type, f"{self.path}: tensor {name!r}", dequantize)
        kind = tensor.type.name
        if kind in LAYOUTS:
            return self._read_blocks(tensor, LAYOUTS[kind])
        if kind in EXPANDERS:
            return self._read_expanded(tensor)
        array, view = fresh(tensor.shape, _DENSE[kind])
        with self.path.open("rb") as file:
            self._fill(file.fileno(), view, tensor.offset, name)
        return array.view(mx.bfloat16) if kind == "BF16" else array

    def _read_blocks(self, tensor: GGUFTensor, layout: Layout) -> QuantizedWeight:
        *outer, width = tensor.shape
        groups = width // layout.group_size
        codes, code_view = fresh((*outer, width * layout.bits // 32), mx.uint32)
        scale_dtype = _SCALE_DTYPES[layout.scale_dtype]
        scales, scale_view = fresh((*outer, groups), scale_dtype)
        biases, bias_view = (
            fresh((*outer, groups), scale_dtype) if layout.zero is None else (None, None)
        )
        code_rows = code_view.view(np.uint8).reshape(
            -1, groups, layout.group_size * layout.bits // 8
        )
        scale_rows = scale_view.reshape(-1, groups)
        bias_rows = None if bias_view is None else bias_view.reshape(-1, groups)
        for rows, blocks in self._slabs(tensor):
            target = Target(
                code_rows[rows],
                scale_rows[rows],
                None if bias_rows is None else bias_rows[rows],
            )
            with _as_stored():
                layout.fill(blocks, target)
        return QuantizedWeight(
            codes, scales, biases, bits=layout.bits, group_size=layout.group_size, zero=layout.zero
        )

    def _read_expanded(self, tensor: GGUFTensor) -> mx.array:
        array, view = fresh(tensor.shape, mx.float32)
        flat = view.reshape(-1, tensor.shape[-1])
        for rows, blocks in self._slabs(tensor):
            with _as_stored():
                flat[rows] = EXPANDERS[tensor.type.name](blocks).reshape(blocks.shape[0], -1)
        return array

    def _slabs(self, tensor: GGUFTensor) -> Iterator[tuple[slice, Array]]:
        """Slices of rows with their raw blocks [rows, blocks a row, bytes a block]."""
        blocks = tensor.shape[-1] // tensor.type.values
        row_bytes = blocks * tensor.type.block_bytes
        num_rows = tensor.nbytes // row_bytes
        step = max(1, min(num_rows, SLAB_BYTES // row_bytes))
        buffer = np.empty((step, blocks, tensor.type.block_bytes), np.uint8)
        with self.path.open("rb") as file:
            for start in range(0, num_rows, step):
                part = buffer[: min(step, num_rows - start)]
                offset = tensor.offset + start * row_bytes
                self._fill(file.fileno(), part, offset, tensor.name)
                yield slice(start, start + len(part)), part

    def _fill(self, descriptor: int, target: Array, offset: int, name: str) -> None:
        if read_into(descriptor, target, offset) != target.nbytes:
            raise CheckpointError(
                f"{self.path} became shorter while tensor {name!r} was read "
                f"({os.fstat(descriptor).st_size} bytes now)"
            )


def _refuse_split(path: Path, count: object) -> None:
    if isinstance(count, int) and count > 1:
        raise UnsupportedError(
            f"{path} is one part of a GGUF file split into {count}; join them with llama.cpp's "
            f"`llama-gguf-split --merge {path.name} joined.gguf` (give it the first part)"
        )


def _as_stored() -> np.errstate:
    # Infinite scales of a damaged file are taken as they are; the forward pass reports them.
    return np.errstate(invalid="ignore", over="ignore")
