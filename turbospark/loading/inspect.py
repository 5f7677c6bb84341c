"""What a checkpoint holds, read from its headers only."""

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn

from turbospark.errors import ConfigError
from turbospark.loading import config as configs
from turbospark.loading.checkpoint import read_checkpoint
from turbospark.loading.gguf import GGUFFile
from turbospark.loading.gguf_blocks import LAYOUTS
from turbospark.loading.gguf_weights import architecture
from turbospark.loading.install import parameter_slots
from turbospark.loading.plan import megabytes, state_bytes
from turbospark.loading.safetensors import DTYPES, Slot
from turbospark.loading.source import Source, resolve_source
from turbospark.nn.moe import expert_shares
from turbospark.registry import GGUF_GROUP, GROUP, known_types, resolve_family

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_SUMMARY = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "sliding_window",
    "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "mtp_num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "rope_theta",
    "rope_scaling", "tie_word_embeddings",
)  # fmt: skip
_SHORT_TYPES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as its file holds it."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    file: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        path: the folder or file.
        kind: safetensors or gguf.
        model_type: config.json's model_type, or GGUF's general.architecture.
        implemented: whether a family is registered for it.
        config: the text part of config.json, or GGUF metadata without long lists.
        quantization: layout in words to the number of matrices that have it.
        tokenizer: which tokenizer it carries.
        tensors: every tensor, in the order of the files.
        state_bytes: of one session's recurrent layers; None where no family could say.
        parameters: of the model, a tied head counted once; None where no family could say.
        active_parameters: those that one token needs: of routed experts, the few it is sent to.
    """

    path: str
    kind: str
    model_type: str
    implemented: bool
    config: dict[str, Any]
    quantization: dict[str, int]
    tokenizer: str
    tensors: tuple[TensorRow, ...]
    state_bytes: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.nbytes for row in self.tensors)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self) | {"nbytes": self.nbytes}

    def __repr__(self) -> str:
        family = self.model_type + ("" if self.implemented else " (no family registered for it)")
        layouts = ", ".join(f"{count} x {name}" for name, count in self.quantization.items())
        files = len({row.file for row in self.tensors})
        lines = [
            self.path,
            f"  kind          {self.kind}, {files} file{'s' if files != 1 else ''}",
            f"  model type    {family}",
            f"  tensors       {len(self.tensors)}, {megabytes(self.nbytes)}",
            f"  matrices      {layouts or 'none'}",
            f"  tokenizer     {self.tokenizer}",
            *self._parameter_line(),
            *([f"  state         {megabytes(self.state_bytes)}"] if self.state_bytes else []),
            *(f"  {name:<13} {value}" for name, value in self._summary()),
        ]
        return "\n".join(lines)

    def _parameter_line(self) -> list[str]:
        if self.parameters is None:
            return []
        active = self.active_parameters
        note = "" if active in (None, self.parameters) else f", {active:,} active"
        return [f"  parameters    {self.parameters:,}{note}"]

    def _summary(self) -> list[tuple[str, Any]]:
        if self.kind == "gguf":
            prefix = self.model_type + "."
            return [
                (key.removeprefix(prefix), value)
                for key, value in self.config.items()
                if key.startswith(prefix)
            ]
        return [(key, self.config[key]) for key in _SUMMARY if self.config.get(key) is not None]


def inspect(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Inspection:
    """Read what a checkpoint holds; its family need not be implemented.

    Raises:
        SourceError: no checkpoint is there.
        ConfigError: its configuration is damaged.
        CheckpointError: its headers are damaged.
    """
    source = resolve_source(path_or_repo, revision=revision, local_files_only=local_files_only)
    return _inspect_gguf(source) if source.kind == "gguf" else _inspect_folder(source)


def _inspect_gguf(source: Source) -> Inspection:
    file = GGUFFile(source.path)
    name = architecture(file)
    rows = tuple(
        TensorRow(item.name, item.shape, item.type.name, item.nbytes, source.path.name)
        for item in file.tensors.values()
    )
    return Inspection(
        path=str(source.path),
        kind=f"gguf version {file.version}" if file.version != 3 else "gguf",
        model_type=name,
        implemented=name in known_types(GGUF_GROUP),
        config={key: _shortened(value) for key, value in file.metadata.items()},
        quantization=_count(_gguf_layout(row.type) for row in rows if len(row.shape) > 1),
        tokenizer=_gguf_tokenizer(file),
        tensors=rows,
    )


def _shortened(value: Any) -> Any:
    # Lists of a vocabulary's length help nobody here.
    length = _length(value)
    return value if length <= 64 else f"{length} values"


def _length(value: Any) -> int:
    return len(cast("list[Any]", value)) if isinstance(value, list) else 0


def _gguf_layout(kind: str) -> str:
    layout = LAYOUTS.get(kind)
    if layout is None:
        return kind
    return f"{kind} ({layout.bits} bits, groups of {layout.group_size})"


def _gguf_tokenizer(file: GGUFFile) -> str:
    kind = file.metadata.get("tokenizer.ggml.model")
    count = _length(file.metadata.get("tokenizer.ggml.tokens"))
    return f"in the file: {kind}, {count} tokens" if isinstance(kind, str) and count else "none"


def _inspect_folder(source: Source) -> Inspection:
    folder = source.path
    path = folder / "config.json"
    raw = configs.read_json(path)
    name = configs.model_type(raw, path)
    config = configs.normalise(raw, path)
    slots = read_checkpoint(folder)
    rows = tuple(
        TensorRow(name, slot.shape, _SHORT_TYPES[slot.dtype], slot.nbytes, slot.file.name)
        for name, slot in slots.items()
    )
    return Inspection(
        path=str(folder),
        kind="safetensors",
        model_type=name,
        implemented=name in known_types(GROUP),
        config=config,
        quantization=_count(_folder_layouts(slots, config)),
        tokenizer=_folder_tokenizer(folder),
        tensors=rows,
        **_sizes(name, config),
    )


def _sizes(name: str, config: dict[str, Any]) -> dict[str, int]:
    """What the family itself says of the model; nothing where there is none, or it refuses."""
    try:
        model = resolve_family(name).build(config)
    except ConfigError:
        return {}
    module = cast("nn.Module", model)
    shares = expert_shares(module)
    counts = {name: math.prod(slot.shape) for name, slot in parameter_slots(module).items()}
    active = sum(count * shares.get(name, 1.0) for name, count in counts.items())
    return {
        "state_bytes": state_bytes(model.make_caches(1, 0)),
        "parameters": sum(counts.values()),
        "active_parameters": round(active),
    }


def _folder_layouts(slots: dict[str, Slot], config: dict[str, Any]) -> Iterable[str]:
    given: Any = config.get("quantization") or config.get("quantization_config")
    default = cast("dict[str, Any]", given).get("group_size") if isinstance(given, dict) else None
    for name, slot in slots.items():
        if name.endswith("_blocks"):
            yield "mxfp4"
        if not name.endswith(".weight") or len(slot.shape) < 2:
            continue
        scales = slots.get(name.removesuffix("weight") + "scales")
        if scales is None:
            yield _SHORT_TYPES[slot.dtype]
        elif _SHORT_TYPES[scales.dtype] == "U8":
            yield "mxfp4"
        else:
            product = 32 * slot.shape[-1] // max(1, scales.shape[-1])
            size = default if isinstance(default, int) and default and not product % default else 64
            yield f"{product // size} bits, groups of {size}"


def _folder_tokenizer(folder: Path) -> str:
    found = [name for name in _TOKENIZER_FILES if (folder / name).exists()]
    return ", ".join(found) or "none"


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
