"""A checkpoint without its weights: stand-ins of the right shapes that are never evaluated.

Everything that loading does with weights (joining quantized parts, renaming, splitting,
quantizing, changing the float type) works on them, so sizes come from the loading code itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from turbospark.kernels.weights import QuantizedWeight, Weight
from turbospark.loading import config as configs
from turbospark.loading.checkpoint import where_of
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_blocks import LAYOUTS
from turbospark.loading.gguf_header import GGUFTensor
from turbospark.loading.gguf_types import DENSE, require_readable
from turbospark.loading.gguf_weights import gguf_config, parameter_names
from turbospark.loading.install import Handling, check_fit, handled, parameter_slots
from turbospark.loading.opened import build_model, folder_family, gguf_family, sanitized
from turbospark.loading.row_files import RowFiles
from turbospark.loading.source import Source
from turbospark.loading.tables import UnreadTable, leave_tables
from turbospark.nn.moe import expert_shares
from turbospark.nn.ngram_table import table_shares
from turbospark.protocols import CausalModel


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A model that has shapes but no weights.

    Attributes:
        path: folder, file or Hub id, for messages.
        model: the family's model; only its shapes and caches may be used.
        config: normalised.
        weights: sanitized names to stand-ins.
        file_bytes: bytes of the tensors in the files.
        num_tensors: tensors in the files.
        left_bytes: bytes of tables that stay in the files.
        arrays: stand-ins of a folder's tensors by the names they are stored under.
    """

    path: str
    model: nn.Module
    config: dict[str, Any]
    weights: dict[str, Weight]
    file_bytes: int
    num_tensors: int
    left_bytes: int = 0
    arrays: Mapping[str, mx.array] = field(default_factory=dict[str, mx.array])

    @property
    def causal(self) -> CausalModel:
        """The model as the runner knows it."""
        return cast("CausalModel", self.model)

    def held_bytes(self, handling: Handling) -> tuple[int, int]:
        """Bytes of all weights once they are loaded, and those of them that one token needs.

        Raises:
            CheckpointError: the tensors are not those of the model.
        """
        sizes = held_sizes(self.model, self.weights, self.path, handling)
        shares = expert_shares(self.model) | table_shares(self.model)
        active = sum(size * shares.get(name, 1.0) for name, size in sizes.items())
        return sum(sizes.values()), round(active)


def held_sizes(
    model: nn.Module, weights: Mapping[str, Weight], where: str, handling: Handling
) -> dict[str, int]:
    """Bytes of every parameter of a model once it is loaded, by its name.

    Raises:
        CheckpointError: the tensors are not those of the model.
    """
    slots = parameter_slots(model)
    check_fit(slots, weights, where)
    return {
        name: handled(slot, name, weights[name], handling).nbytes for name, slot in slots.items()
    }


def outline(source: Source, dequantize: bool = False) -> Outline:
    """A checkpoint's model with stand-ins of its weights, from their headers.

    Raises:
        ConfigError: its configuration is damaged or not implemented.
        CheckpointError: a file is damaged or missing.
    """
    if source.kind == "gguf":
        return _gguf_outline(GGUFFile(source.path), dequantize)
    path = source.path / "config.json"
    raw = configs.read_config(source.path)
    config = configs.normalise(raw, path)
    model = build_model(folder_family(raw, path), config, path)
    slots = source.slots()
    kept = leave_tables(model, slots, RowFiles if source.remote is None else UnreadTable)
    left = slots.keys() - kept.keys()
    arrays = {name: mx.zeros(slot.shape, slot.dtype) for name, slot in slots.items()}
    read = {name: array for name, array in arrays.items() if name not in left}
    return Outline(
        path=source.name,
        model=model,
        config=config,
        weights=sanitized(
            model, read, configs.quantization(config, path), path, where_of(source.path, slots)
        ),
        file_bytes=sum(slot.nbytes for slot in slots.values()),
        num_tensors=len(slots),
        left_bytes=sum(slots[name].nbytes for name in left),
        arrays=arrays,
    )


def _gguf_outline(file: GGUFFile, dequantize: bool) -> Outline:
    family, mapping = gguf_family(file)
    config = gguf_config(file, mapping)
    model = build_model(family, config, file.path)
    names = parameter_names(file, mapping)
    weights = {
        parameter: _stand_in(file, file.tensors[name], dequantize)
        for name, parameter in names.items()
    }
    weights = cast("CausalModel", model).sanitize(weights)
    return Outline(str(file.path), model, config, weights, file.nbytes, len(file.tensors))


def _stand_in(file: GGUFFile, tensor: GGUFTensor, dequantize: bool) -> Weight:
    require_readable(tensor.type, f"{file.path}: tensor {tensor.name!r}", dequantize)
    layout = LAYOUTS.get(tensor.type.name)
    if layout is None:
        half = tensor.type.name in DENSE and tensor.type.block_bytes == 2
        return mx.zeros(tensor.shape, mx.float16 if half else mx.float32)
    *outer, width = tensor.shape
    scale_dtype = mx.float16 if layout.scale_dtype is np.float16 else mx.float32
    groups = (*outer, width // layout.group_size)
    return QuantizedWeight(
        mx.zeros((*outer, width * layout.bits // 32), mx.uint32),
        mx.zeros(groups, scale_dtype),
        mx.zeros(groups, scale_dtype) if layout.zero is None else None,
        bits=layout.bits,
        group_size=layout.group_size,
        zero=layout.zero,
    )
