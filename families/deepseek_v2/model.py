"""The network of deepseek_v2."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from families.deepseek_v2.config import DeepseekConfig
from turbospark.caches.latent import LatentCache
from turbospark.kernels.rope import Rope
from turbospark.nn.config import read_activation
from turbospark.nn.decoder import CausalLM, Decoder
from turbospark.nn.expert_weights import expert_weights
from turbospark.nn.latent import LatentAttention
from turbospark.nn.latent_weights import latent_weights
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.moe import Experts, PlainRouter, RoutedExperts, SharedExpert
from turbospark.nn.projected_mlp import ProjectedMLP
from turbospark.nn.projections import NormedProjections, ProjectedResidual, TokenEmbedding
from turbospark.nn.weights import text_weights
from turbospark.protocols import Phase

LATENT_EPS = 1e-6
"""Of the norms between two projections, whatever config.json says of the others."""


class DeepseekAttention(nn.Module):
    def __init__(self, config: DeepseekConfig, rope: Rope, scale: float, norm: RMSNorm) -> None:
        super().__init__()
        C, rank, bias = config.hidden_size, config.q_lora_rank, config.attention_bias
        sizes = config.sizes
        wide = sizes.num_heads * sizes.query_dim
        self.kv_a_proj_with_mqa = Linear(C, sizes.row_dim, bias)
        self.kv_a_layernorm = RMSNorm(sizes.latent_dim, LATENT_EPS)
        self.kv_b_proj = Linear(sizes.latent_dim, sizes.expanded)
        self.o_proj = Linear(sizes.num_heads * sizes.value_dim, C, bias)
        if rank is None:
            self.q_proj = first = Linear(C, wide)
            self.widen = None
        else:
            self.q_a_proj = first = Linear(C, rank, bias)
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS)
            self.q_b_proj = Linear(rank, wide)
            self.widen = NormedProjections(self.q_a_layernorm, [self.q_b_proj])
        self.project = NormedProjections(norm, [first, self.kv_a_proj_with_mqa])
        self.attend = LatentAttention(
            sizes, rope, norm=self.kv_a_layernorm, expand=self.kv_b_proj, scale=scale
        )
        self.output = ProjectedResidual(self.o_proj)

    def __call__(self, h: mx.array, cache: LatentCache, phase: Phase) -> mx.array:
        q, row = self.project(h, phase)  # [T, H * (N + R)] or [T, rank], [T, L + R]
        if self.widen is not None:
            (q,) = self.widen(q, phase)
        return self.attend(q, row, cache, phase)  # [T, H * V]


class DeepseekExperts(nn.Module):
    """Routed experts, and shared ones that see every row with no gate and no scale."""

    def __init__(self, config: DeepseekConfig, norm: RMSNorm) -> None:
        super().__init__()
        C, E, factor = config.hidden_size, config.n_routed_experts, config.routed_scaling_factor
        activation = read_activation("hidden_act", config.hidden_act)
        scale = None if factor == 1 else mx.array([factor] * E)
        self.gate = Linear(C, E)
        self.experts = Experts(E, C, config.moe_intermediate_size)
        shared = None
        if config.shared_size:
            self.shared_experts = MLP(
                C,
                config.shared_size,
                norm,
                activation=activation,
                bias=config.mlp_bias,
                residual=False,
            )
            shared = SharedExpert(self.shared_experts)
        self.routed = RoutedExperts(
            PlainRouter(norm, self.gate, scale, config.groups),
            self.experts,
            top_k=config.top_k,
            activation=activation,
            norm=norm,
            renormalise=False,
            shared=shared,
        )

    def __call__(self, h: mx.array, phase: Phase) -> mx.array:
        """Advance the stream h [T, C]."""
        return self.routed.advance(h, phase)


class DeepseekLayer(nn.Module):
    def __init__(self, config: DeepseekConfig, rope: Rope, scale: float, index: int) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(C, eps), RMSNorm(C, eps)
        self.self_attn = DeepseekAttention(config, rope, scale, self.input_layernorm)
        norm = self.post_attention_layernorm
        self.mlp: MLP | DeepseekExperts
        if config.feed_forward(index) == "experts":
            self.mlp = DeepseekExperts(config, norm)
        else:
            self.mlp = MLP(
                C,
                config.intermediate_size,
                norm,
                activation=read_activation("hidden_act", config.hidden_act),
                bias=config.mlp_bias,
            )

        self.finish = ProjectedMLP(self.self_attn.output, self.mlp)

    def __call__(self, h: mx.array, cache: LatentCache, phase: Phase) -> mx.array:
        attended = self.self_attn(h, cache, phase)  # [T, H * V]
        return self.finish(attended, h, phase)  # [T, C]


class DeepseekModel(CausalLM):
    def __init__(self, config: DeepseekConfig, rope: Rope, scale: float) -> None:
        layers = [
            DeepseekLayer(config, rope, scale, index) for index in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        decoder = Decoder(config, layers, norm)
        super().__init__(config, decoder, TokenEmbedding(decoder.embed_tokens))
        self.config = config

    def make_caches(self, max_context: int, slack: int) -> list[LatentCache]:
        sizes = self.config.sizes
        return [
            LatentCache(sizes.latent_dim, sizes.rope_dim, max_context)
            for _ in range(self.num_layers)
        ]

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        text = text_weights(weights, tied=self.config.tie_word_embeddings)
        named = latent_weights(text, self.config.sizes)
        return expert_weights(named, self.config.n_routed_experts)
