"""What was found in a checkpoint, as a value that shows itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from turbospark.loading.planned import megabytes
from turbospark.loading.structure import Structure
from turbospark.protocols import CausalModel

_BRIEF = (
    "vocab_size", "hidden_size", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
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
        refused: why it cannot be loaded, as far as that is known without reading weights.
        structure: what the model is made of; None where no family builds it.
        drafter_refusals: "mtp" and "dflash" to why there is none; empty where there is one.
        drafters_beside: "mtp" and "dflash" to where one lies beside the model's files.
        model: with unset weights; None where no family builds it.
        abilities: what it can be used for, to whether it can, and how or why not.
    """

    path: str
    kind: str
    model_type: str
    implemented: bool
    config: dict[str, Any]
    quantization: dict[str, int]
    tokenizer: str
    tensors: tuple[TensorRow, ...]
    refused: str = ""
    structure: Structure | None = None
    drafter_refusals: Mapping[str, str] = field(default_factory=dict[str, str])
    drafters_beside: Mapping[str, str] = field(default_factory=dict[str, str])
    model: CausalModel | None = None
    abilities: Mapping[str, tuple[bool, str]] = field(default_factory=dict[str, tuple[bool, str]])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.nbytes for row in self.tensors)

    @property
    def parameters(self) -> int | None:
        """Numbers of the model, a tied head counted once; None where no family builds it."""
        return self.structure and self.structure.parameters

    @property
    def active_parameters(self) -> int | None:
        """Those of them that one token needs: of routed experts, the few it is sent to."""
        return self.structure and self.structure.active_parameters

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        made = self.structure
        names = [name for name in self.__slots__ if name not in {"tensors", "structure", "model"}]
        return {
            **{name: getattr(self, name) for name in names},
            "abilities": {
                name: {"served": served, "words": words}
                for name, (served, words) in self.abilities.items()
            },
            "tensors": [asdict(row) for row in self.tensors],
            "structure": made and asdict(made) | {"session_bytes": made.session_bytes},
            "nbytes": self.nbytes,
        }

    def __repr__(self) -> str:
        family = self.model_type + ("" if self.implemented else " (no family registered for it)")
        layouts = ", ".join(f"{count} x {name}" for name, count in self.quantization.items())
        files = len({row.file for row in self.tensors})
        rows: list[tuple[str, Any]] = [
            ("kind", f"{self.kind}, {files} file{'s' if files != 1 else ''}"),
            ("model type", family),
            ("tensors", f"{len(self.tensors)}, {megabytes(self.nbytes)}"),
            ("matrices", layouts or "none"),
            ("tokenizer", self.tokenizer),
            *([("loads", f"no: {self.refused}")] if self.refused else []),
            *([] if self.structure is None else self.structure.rows()),
            *self._summary(),
            *(
                (name, f"{'yes' if served else 'no'}: {words}")
                for name, (served, words) in self.abilities.items()
            ),
        ]
        return "\n".join([self.path, *(f"  {name:<13} {value}" for name, value in rows)])

    def _summary(self) -> list[tuple[str, Any]]:
        if self.kind == "safetensors":
            names = _SUMMARY if self.structure is None else _BRIEF
            return [(key, self.config[key]) for key in names if self.config.get(key) is not None]
        if self.structure is not None:
            return []
        prefix = self.model_type + "."
        return [
            (key.removeprefix(prefix), value)
            for key, value in self.config.items()
            if key.startswith(prefix)
        ]
