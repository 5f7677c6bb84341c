"""The network of the llama flow."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from families.llama.config import ExpertPlan, LlamaConfig
from turbospark.kernels.rope import Rope
from turbospark.nn.attention import RotatedAttention
from turbospark.nn.config import read_activation
from turbospark.nn.decoder import Cache, CausalLM, Decoder, layer_caches
from turbospark.nn.expert_weights import expert_weights
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.moe import Experts, PlainRouter, RoutedExperts
from turbospark.nn.projected_mlp import ProjectedMLP
from turbospark.nn.projections import NormedProjections, ProjectedResidual, TokenEmbedding
from turbospark.nn.weights import text_weights
from turbospark.protocols import Phase


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, rope: Rope, window: int | None, norm: RMSNorm) -> None:
        super().__init__()
        C, heads, bias = config.hidden_size, config.heads, config.qkv_bias
        D = heads.head_dim
        self.q_proj = Linear(C, heads.num_heads * D, bias)
        self.k_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.v_proj = Linear(C, heads.num_kv_heads * D, bias)
        self.o_proj = Linear(heads.num_heads * D, C, config.output_bias)
        q_norm, k_norm = None, None
        if config.head_norms:
            self.q_norm = q_norm = RMSNorm(D, config.rms_norm_eps)
            self.k_norm = k_norm = RMSNorm(D, config.rms_norm_eps)
        self.project = NormedProjections(norm, [self.q_proj, self.k_proj, self.v_proj])
        self.attend = RotatedAttention(
            heads, rope, scale=D**-0.5, window=window, q_norm=q_norm, k_norm=k_norm
        )
        self.output = ProjectedResidual(self.o_proj)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        q, k, v = self.project(h, phase)  # [T, Hq * D], [T, Hkv * D] twice
        return self.attend(q, k, v, cache, phase)  # [T, Hq * D]; k, v are rows of the cache


class SparseMLP(nn.Module):
    """Routed experts in place of a dense MLP; router and experts read the same normed rows."""

    def __init__(self, config: LlamaConfig, plan: ExpertPlan, norm: RMSNorm) -> None:
        super().__init__()
        C = config.hidden_size
        self.gate = Linear(C, plan.count)
        self.experts = Experts(plan.count, C, plan.inner)
        self.routed = RoutedExperts(
            PlainRouter(norm, self.gate),
            self.experts,
            top_k=plan.top_k,
            activation=read_activation("hidden_act", config.hidden_act),
            norm=norm,
            renormalise=plan.renormalise,
        )

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Advance the stream h [T, C]."""
        return self.routed.advance(h, phase)


class LlamaLayer(nn.Module):
    def __init__(
        self, config: LlamaConfig, rope: Rope, window: int | None, plan: ExpertPlan | None
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, rope, window, self.input_layernorm)
        norm = self.post_attention_layernorm
        self.mlp: MLP | SparseMLP
        if plan is not None:
            self.mlp = SparseMLP(config, plan, norm)
        else:
            self.mlp = MLP(
                config.hidden_size,
                config.intermediate_size,
                norm,
                activation=read_activation("hidden_act", config.hidden_act),
                bias=config.mlp_bias,
            )
        self.finish = ProjectedMLP(self.self_attn.output, self.mlp)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        attended = self.self_attn(h, cache, phase)  # [T, Hq * D]
        return self.finish(attended, h, phase)  # [T, C]


class LlamaModel(CausalLM):
    def __init__(self, config: LlamaConfig, rope: Rope) -> None:
        kinds = zip(config.windows, config.expert_plans, strict=True)
        layers = [LlamaLayer(config, rope, window, plan) for window, plan in kinds]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        decoder = Decoder(config, layers, norm)
        super().__init__(config, decoder, TokenEmbedding(decoder.embed_tokens))
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        heads, windows = self.config.heads, self.config.windows
        return layer_caches([(heads, window) for window in windows], max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        text = text_weights(weights, tied=self.config.tie_word_embeddings)
        plan = next(filter(None, self.config.expert_plans), None)
        if plan is None:
            return text
        named = {name.replace(".block_sparse_moe.", ".mlp."): text[name] for name in text}
        return expert_weights(named, plan.count)
