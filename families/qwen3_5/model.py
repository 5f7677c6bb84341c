"""The network of qwen3_5: three recurrent layers, then one of gated attention, and so on.

Source: transformers 5.24, models/{qwen3_5,qwen3_5_moe}. Checkpoints: Qwen/Qwen3.5-9B,
Qwen/Qwen3.5-35B-A3B.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from families.qwen3_5.config import LayerKind, Qwen3_5Config, Qwen3_5MoeConfig
from families.qwen3_5.weights import trunk_weights
from turbospark.caches.kv import KVCache
from turbospark.caches.recurrent import RecurrentCache
from turbospark.kernels.rope import Rope
from turbospark.nn.attention import RotatedAttention
from turbospark.nn.decoder import CausalLM, Decoder
from turbospark.nn.delta_net import DeltaNet
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.projected_mlp import ProjectedMLP
from turbospark.nn.projections import NormedProjections, ProjectedResidual, TokenEmbedding
from turbospark.nn.sparse_mlp import SparseMLP
from turbospark.protocols import ForwardOutput, LogitRows, Phase, RowInputs

Cache = KVCache | RecurrentCache


class GatedAttention(nn.Module):
    """Attention whose output is multiplied by a gate of every number."""

    def __init__(self, config: Qwen3_5Config, rope: Rope, norm: RMSNorm) -> None:
        super().__init__()
        C, eps, heads = config.hidden_size, config.rms_norm_eps, config.heads
        D, width = heads.head_dim, heads.num_heads * heads.head_dim
        self.q_proj = Linear(C, width)
        self.gate_proj = Linear(C, width)  # checkpoints keep it in q_proj, head by head
        self.k_proj = Linear(C, heads.num_kv_heads * D)
        self.v_proj = Linear(C, heads.num_kv_heads * D)
        self.o_proj = Linear(width, C)
        self.q_norm, self.k_norm = RMSNorm(D, eps), RMSNorm(D, eps)
        inputs = [self.q_proj, self.gate_proj, self.k_proj, self.v_proj]
        self.project = NormedProjections(norm, inputs)
        self.attend = RotatedAttention(
            heads, rope, scale=D**-0.5, q_norm=self.q_norm, k_norm=self.k_norm
        )
        self.output = ProjectedResidual(self.o_proj)

    def __call__(self, h: mx.array, cache: KVCache, phase: Phase) -> mx.array:
        q, gate, k, v = self.project(h, phase)  # [T, Hq * D] and [T, Hkv * D], twice each
        return self.attend(q, k, v, cache, phase, gate)  # [T, Hq * D]; k, v are cached


class Qwen3_5Layer(nn.Module):  # noqa: N801 - the model type's own name
    def __init__(self, config: Qwen3_5Config, kind: LayerKind, rope: Rope) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(C, eps), RMSNorm(C, eps)
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(C, config.delta, self.input_layernorm, eps)
            output = self.linear_attn.output
        else:
            self.self_attn = GatedAttention(config, rope, self.input_layernorm)
            output = self.self_attn.output
        assert output is not None
        self._is_linear = kind == "linear_attention"
        norm = self.post_attention_layernorm
        self.mlp: SparseMLP | MLP
        if isinstance(config, Qwen3_5MoeConfig):
            self.mlp = SparseMLP(
                C,
                config.num_experts,
                top_k=config.num_experts_per_tok,
                inner=config.moe_intermediate_size,
                shared_inner=config.shared_expert_intermediate_size,
                norm=norm,
            )
        else:
            self.mlp = MLP(C, config.intermediate_size, norm, activation="silu")
        self.finish = ProjectedMLP(output, self.mlp)

    def __call__(
        self, h: mx.array, cache: Any, phase: Phase, *, record: bool = False
    ) -> tuple[mx.array, RowInputs | None]:
        """Advance the stream h [T, C]; a recurrent layer notes its row inputs if `record`."""
        rows = None
        if self._is_linear:
            mixed, rows = self.linear_attn.mix(h, cache, phase, record=record)  # [T, Hv * Dv]
        else:
            mixed = self.self_attn(h, cache, phase)  # [T, Hq * D]
        return self.finish(mixed, h, phase), rows


class Qwen3_5Model(CausalLM):  # noqa: N801
    def __init__(self, config: Qwen3_5Config, rope: Rope) -> None:
        layers = [Qwen3_5Layer(config, kind, rope) for kind in config.schedule]
        decoder = Decoder(config, layers, RMSNorm(config.hidden_size, config.rms_norm_eps))
        super().__init__(config, decoder, TokenEmbedding(decoder.embed_tokens))
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        heads, delta = self.config.heads, self.config.delta
        return [
            RecurrentCache(delta.zero_state, max_context)
            if kind == "linear_attention"
            else KVCache(heads.num_kv_heads, heads.head_dim, max_context)
            for kind in self.config.schedule
        ]

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return trunk_weights(self.config, weights)

    def __call__(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        *,
        phase: Phase,
        logits: LogitRows = "last",
        taps: Sequence[int] = (),
        hidden: bool = False,
        record: bool = False,
    ) -> ForwardOutput:
        self.check_taps(taps)
        h, kept, noted = self.embed(tokens), dict[int, mx.array](), dict[int, RowInputs]()
        layers = cast("list[Qwen3_5Layer]", self.model.layers)
        for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            h, rows = layer(h, cache, phase, record=record)
            if i in taps:
                kept[i] = h
            if rows is not None:
                noted[i] = rows
        return self.finish(h, logits, phase, kept, hidden=hidden, row_inputs=noted)
