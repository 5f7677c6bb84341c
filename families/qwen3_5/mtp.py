"""The head of qwen3_5 checkpoints that predicts the token after the next (multi-token prediction).

Row i joins the table's row of token i + 1 and the trunk's final norm at position i, and runs one
layer of full attention over rows of its own; the trunk's output head then gives logits of token
i + 2. A chained row takes the head's own final norm where the trunk has none yet.

Source: checkpoints Qwen/Qwen3.5-9B (`mtp.*`), mlx-community/Qwen3.8-27B-MTP-4bit; mlx-vlm 0.7.10.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from families.qwen3_5.config import Qwen3_5Config, qwen3_5_rope, read_qwen3_5
from families.qwen3_5.model import Qwen3_5Layer
from families.qwen3_5.weights import is_raw, layer_weights
from turbospark.caches.kv import KVCache
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import Rope
from turbospark.nn.linear import Embedding, Linear, Matrix, RMSNorm
from turbospark.nn.prediction_head import announces_head, head_tensors, shared_matrices
from turbospark.nn.projections import NormedProjections, OutputHead, TokenEmbedding
from turbospark.nn.weights import WITHOUT_OFFSET, average_of_norms, with_offset
from turbospark.protocols import Phase


@dataclass(frozen=True, slots=True)
class NormStorage:
    """How a file holds the head's norms, and what tells so."""

    holds: Literal["weight - 1", "weight"]
    reason: str


class MTPHead(nn.Module):
    """One layer over a trunk's table and output head.

    Attributes:
        norms: how the file that was read last held the norms; None before.
    """

    norms: NormStorage | None = None

    def __init__(self, config: Qwen3_5Config, rope: Rope, table: Embedding, matrix: Matrix) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.fc = Linear(2 * C, C)
        self.pre_fc_norm_embedding = RMSNorm(C, eps)
        self.pre_fc_norm_hidden = RMSNorm(C, eps)
        self.layers = [Qwen3_5Layer(config, "full_attention", rope)]
        self.norm = RMSNorm(C, eps)
        self.embed = TokenEmbedding(table)
        self.join = NormedProjections(None, [self.fc])
        self.head = OutputHead(None, matrix)

    @property
    def width(self) -> int:
        """Of a hidden row, C."""
        return self.config.hidden_size

    def make_caches(self, max_context: int) -> list[KVCache]:
        """Empty rows of the head's layer."""
        heads = self.config.heads
        return [KVCache(heads.num_kv_heads, heads.head_dim, max_context)]

    def __call__(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[KVCache], phase: Phase
    ) -> mx.array:
        """Advance the head by T rows.

        Args:
            tokens: [T] int32, the token behind each row.
            hidden: [T, C], the trunk's final norm of each row, or the head's own.
            caches: advanced by T.
            phase: prefill or decode.

        Returns:
            The head's final norm [T, C].
        """
        x, _ = self.layers[0](self._joined(tokens, hidden, phase), caches[0], phase)
        return rms_norm_reference(x, self.norm.value)

    def write(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[KVCache], phase: Phase
    ) -> None:
        """Append the rows that a call would append, and compute nothing else."""
        attention = self.layers[0].self_attn
        q, _, k, v = attention.project(self._joined(tokens, hidden, phase), phase)
        attention.attend.rotate(q, k, v, caches[0], phase)

    def logits(self, y: mx.array, phase: Phase) -> mx.array:
        """The trunk's logits [R, V] of the head's final norm [R, C]."""
        return self.head(y, phase)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The head's tensors under the module's names; idempotent.

        Args:
            weights: a checkpoint that holds the head beside its trunk, or a file of the head.
        """
        own = head_tensors(weights)
        self.norms = norm_storage(weights, own)
        found = layer_weights(self.config, own)
        if self.norms.holds == "weight":
            return found
        return {
            name: with_offset(value) if _is_norm(name, value) else value
            for name, value in found.items()
        }

    def _joined(self, tokens: mx.array, hidden: mx.array, phase: Phase) -> mx.array:
        """What goes into the layer, of the table's rows and the trunk's, both normed: [T, C]."""
        embedded = rms_norm_reference(self.embed(tokens), self.pre_fc_norm_embedding.value)
        stream = rms_norm_reference(hidden, self.pre_fc_norm_hidden.value)
        pair = mx.concatenate([embedded, stream.astype(embedded.dtype)], axis=-1)  # [T, 2 C]
        (x,) = self.join(pair, phase)
        return x


def norm_storage(weights: Mapping[str, Any], own: Mapping[str, Any]) -> NormStorage:
    """How a file holds a head's norms: as trained, which is weight - 1, or converted.

    Args:
        weights: every tensor of the file.
        own: those of the head, without prefix.
    """
    if is_raw(weights):
        return NormStorage("weight - 1", "the trunk beside it is as trained")
    if own.keys() <= weights.keys():
        return NormStorage("weight", "only converters leave the names without their prefix")
    middle = average_of_norms(value for name, value in own.items() if _is_norm(name, value))
    if middle < WITHOUT_OFFSET:
        return NormStorage("weight - 1", f"its norms average {middle:.2f}")
    return NormStorage("weight", f"its norms average {middle:.2f}")


def _is_norm(name: str, value: Any) -> bool:
    return "norm" in name and len(value.shape) == 1


def build_mtp(raw: Mapping[str, Any], model: Any) -> MTPHead | None:
    """The head of a trunk, with unset weights; None where the configuration announces none.

    Args:
        raw: the trunk's configuration.
        model: the trunk.

    Raises:
        UnsupportedError: the head has more than one layer.
    """
    config = read_qwen3_5(raw)
    if not announces_head(config.mtp_num_hidden_layers):
        return None
    return MTPHead(config, qwen3_5_rope(raw, config), *shared_matrices(model))
