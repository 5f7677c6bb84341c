"""The head of qwen4_exp checkpoints that predicts the token after the next.

Row i joins the table's row of token i + 1 to the trunk's streams at position i, and runs one layer
of attention and experts over rows of its own; a mixture of its streams goes through the trunk's
output head and gives logits of token i + 2. A chained row takes the head's own streams where the
trunk has none yet.

Source: checkpoints Qwen/Qwen3.8-Flash-Next (`mtp.*`); mlx-vlm 0.7.10.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from families.qwen4_exp.config import Qwen4ExpConfig, read_qwen4_exp, read_ropes
from families.qwen4_exp.model import Qwen4ExpLayer, Ropes, attention_caches, stream_mixer
from families.qwen4_exp.weights import holds_offsets, is_offset_norm, layer_weights
from turbospark.caches.kv import KVCache
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.nn.block_sparse import IndexedRows
from turbospark.nn.linear import Embedding, Linear, Matrix, RMSNorm
from turbospark.nn.prediction_head import announces_head, head_tensors, shared_matrices
from turbospark.nn.projections import NormedProjections, TokenEmbedding
from turbospark.nn.streams import Inject, StreamHead
from turbospark.nn.weights import with_offset
from turbospark.protocols import Phase


class MTPHead(nn.Module):
    """One layer over a trunk's table and output head."""

    def __init__(
        self, config: Qwen4ExpConfig, ropes: Ropes, table: Embedding, matrix: Matrix
    ) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.fc_embedding, self.fc_hidden = Linear(C, C), Linear(C, C)
        self.pre_fc_norm_embedding = RMSNorm(C, eps)
        self.pre_fc_norm_hidden = RMSNorm(config.streams, eps)  # one for all streams together
        self.layers = [Qwen4ExpLayer(config, is_linear=False, ropes=ropes)]
        self.hyper_connection_mixer = stream_mixer(config, injects=False)
        self.inject = Inject()
        self.embed = TokenEmbedding(table)
        self.enter = NormedProjections(self.pre_fc_norm_embedding, [self.fc_embedding])
        self.join = NormedProjections(None, [self.fc_hidden])
        self.head = StreamHead(self.hyper_connection_mixer, matrix)

    @property
    def width(self) -> int:
        """Of a hidden row: all streams."""
        return self.config.streams

    def make_caches(self, max_context: int) -> list[KVCache]:
        """Empty rows of the head's layer, and its index."""
        return attention_caches(self.config, max_context)

    def __call__(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[KVCache], phase: Phase
    ) -> mx.array:
        """Advance the head by T rows.

        Args:
            tokens: [T] int32, the token behind each row.
            hidden: [T, G * C], the trunk's streams of each row, or the head's own.
            caches: advanced by T.
            phase: prefill or decode.

        Returns:
            The head's streams [T, G * C].
        """
        h = self._joined(tokens, hidden, phase)
        h, said, _ = self.layers[0](h, IndexedRows(*caches), phase)
        return self.inject(h, said)

    def write(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[KVCache], phase: Phase
    ) -> None:
        """Append the rows that a call would append, and compute nothing else."""
        self.layers[0].write(self._joined(tokens, hidden, phase), IndexedRows(*caches), phase)

    def logits(self, y: mx.array, phase: Phase) -> mx.array:
        """The trunk's logits [R, V] of the head's streams [R, G * C]."""
        return self.head(y, phase)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The head's tensors under the module's names; idempotent.

        Args:
            weights: a checkpoint that holds the head beside its trunk, or a file of the head.
        """
        own = head_tensors(weights)
        raw = holds_offsets(self.config, own)
        return {
            name: with_offset(value) if raw and is_offset_norm(name, value) else value
            for name, value in layer_weights(self.config, own).items()
        }

    def _joined(self, tokens: mx.array, hidden: mx.array, phase: Phase) -> mx.array:
        """What goes into the layer, of the table's rows and the trunk's streams: [T, G * C]."""
        T, G = tokens.shape[0], self.config.hc_count
        (token,) = self.enter(self.embed(tokens), phase)
        normed = rms_norm_reference(hidden, self.pre_fc_norm_hidden.value)
        (streams,) = self.join(mx.reshape(normed, (T * G, -1)), phase)
        joined = mx.reshape(streams, (T, G, -1)) + token[:, None]
        return mx.reshape(joined, hidden.shape).astype(token.dtype)


def build_mtp(raw: Mapping[str, Any], model: Any) -> MTPHead | None:
    """The head of a trunk, with unset weights; None where the configuration announces none.

    Args:
        raw: the trunk's configuration.
        model: the trunk.

    Raises:
        UnsupportedError: the head has more than one layer.
    """
    config = read_qwen4_exp(raw)
    if not announces_head(config.mtp_num_hidden_layers):
        return None
    return MTPHead(config, Ropes(*read_ropes(raw, config)), *shared_matrices(model))
