"""Gemma 4, text: `gemma4_text`, and the text part of `gemma4`.

Full layers have wider heads than sliding ones, rotate a quarter of their pairs, and may take
their values from the key projection. A value row has a norm without weight. The last layers may
read the keys and values of an earlier layer instead of their own. A layer may mix in a vector
looked up for it by token, may run routed experts beside its MLP, and ends by scaling the stream.

Source: transformers 5.24, models/gemma4. Checkpoints: google/gemma-4-E2B-it, -31B-it, -26B-A4B-it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.errors import ConfigError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Activation, Norm
from turbospark.nn.attention import RotatedAttention
from turbospark.nn.config import (
    Count,
    Depth,
    LayerType,
    Length,
    Positive,
    Range,
    Size,
    check_heads,
    layer_schedule,
    read_activation,
    read_config,
    read_value,
    refuse,
)
from turbospark.nn.decoder import Cache, CausalLM, Decoder, layer_caches
from turbospark.nn.linear import Embedding, Linear, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.moe import Closing, Experts, RoutedExperts, Router, SharedExpert
from turbospark.nn.projected_mlp import ProjectedMLP
from turbospark.nn.projections import NormedProjections, ProjectedResidual
from turbospark.nn.rope import read_rope
from turbospark.nn.scaled_embedding import ScaledEmbedding
from turbospark.nn.weights import split_rows, text_weights
from turbospark.protocols import Family, ForwardOutput, LogitRows, Phase

BESIDE_TEXT = (
    "vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector",
    "vision_embedder",
)  # fmt: skip
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer is: its kind, heads, MLP width, and whose cache it reads.

    `source` is the layer that writes the rows; another one than itself where they are shared.
    """

    index: int
    kind: LayerType
    heads: HeadGeometry
    window: int | None
    inner: int
    source: int

    @property
    def shares(self) -> bool:
        return self.source != self.index


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    vocab_size: Size = 262_144
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Depth = 30
    num_attention_heads: Size = 8
    num_key_value_heads: Size = 4
    head_dim: Size = 256
    global_head_dim: Size = 512
    num_global_key_value_heads: Size | None = None
    per_layer_config: Mapping[str, Mapping[str, int]] | None = None
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Length = 131_072
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    sliding_window: Length = 512
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: Depth = 6
    num_kv_shared_layers: Count = 0
    use_double_wide_mlp: bool = False
    final_logit_softcapping: Positive | None = None
    hidden_size_per_layer_input: Annotated[int, Range(0, 2**16)] | None = 256
    vocab_size_per_layer_input: Size = 262_144
    enable_moe_block: bool = False
    num_experts: Size | None = None
    top_k_experts: Size | None = None
    moe_intermediate_size: Size | None = None

    @property
    def activation(self) -> Activation:
        return read_activation("hidden_activation", self.hidden_activation)

    @property
    def first_shared(self) -> int:
        """The first layer that has no keys and values of its own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def plans(self) -> list[LayerPlan]:
        """What every layer is.

        Raises:
            ConfigError: heads do not fit, or shared layers have nothing to share.
        """
        schedule = layer_schedule(
            self.num_hidden_layers, self.layer_types, self.sliding_window_pattern
        )
        # The reference makes the last layer a full one whatever the configuration says.
        schedule = (*schedule[:-1], "full_attention")
        return [self._plan(i, schedule) for i in range(self.num_hidden_layers)]

    def _plan(self, i: int, schedule: Sequence[LayerType]) -> LayerPlan:
        kind, source, inner = schedule[i], i, self.intermediate_size
        if i >= self.first_shared:
            owners = [j for j in range(max(0, self.first_shared)) if schedule[j] == kind]
            if not owners:
                raise ConfigError(
                    f"config.json: num_kv_shared_layers={self.num_kv_shared_layers} leaves layer "
                    f"{i} no {kind} layer to share keys and values with"
                )
            source = owners[-1]
            inner *= 2 if self.use_double_wide_mlp else 1
        window = self.sliding_window if kind == "sliding_attention" else None
        return LayerPlan(i, kind, self._heads(i, kind), window, inner, source)

    def _heads(self, i: int, kind: LayerType) -> HeadGeometry:
        D, Hkv = self.head_dim, self.num_key_value_heads
        if self.per_layer_config is not None:
            own = self.per_layer_config.get(str(i), {})
            strangers = set(own) - {"head_dim", "num_key_value_heads"}
            if strangers:
                raise ConfigError(f"config.json: per_layer_config.{i} has {sorted(strangers)}")
            name = f"config.json: per_layer_config.{i}"
            D = read_value(f"{name}.head_dim", own.get("head_dim", D), Size)
            Hkv = read_value(
                f"{name}.num_key_value_heads", own.get("num_key_value_heads", Hkv), Size
            )
        elif kind == "full_attention":
            D = self.global_head_dim
            if self.attention_k_eq_v:
                Hkv = self.num_global_key_value_heads or Hkv
        check_heads(self.num_attention_heads, Hkv, D)
        return HeadGeometry(self.num_attention_heads, Hkv, D)


class Gemma4Attention(nn.Module):
    def __init__(
        self, config: Gemma4Config, plan: LayerPlan, rope: Rope, norm: RMSNorm, post: RMSNorm
    ) -> None:
        super().__init__()
        C, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        heads, D = plan.heads, plan.heads.head_dim
        self.q_proj = Linear(C, heads.num_heads * D, bias)
        self.o_proj = Linear(heads.num_heads * D, C, bias)
        self.q_norm = RMSNorm(D, eps)
        parts, k_norm, v_norm = [self.q_proj], None, None
        if not plan.shares:
            self.k_proj = Linear(C, heads.num_kv_heads * D, bias)
            self.k_norm = k_norm = RMSNorm(D, eps)
            v_norm = Norm(None, eps)
            parts.append(self.k_proj)
            if plan.window or not config.attention_k_eq_v:
                self.v_proj = Linear(C, heads.num_kv_heads * D, bias)
                parts.append(self.v_proj)
        self.project = NormedProjections(norm, parts)
        self.attend = RotatedAttention(
            heads,
            rope,
            scale=1.0,
            window=plan.window,
            q_norm=self.q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
        )
        self.output = ProjectedResidual(self.o_proj, post)

    def __call__(self, h: mx.array, cache: Cache, phase: Phase) -> mx.array:
        q, *kv = self.project(h, phase)  # [T, Hq * D], [T, Hkv * D] twice, once or not at all
        k, v = (kv[0], kv[-1]) if kv else (None, None)
        return self.attend(q, k, v, cache, phase)  # [T, Hq * D]


class RouterNorm(RMSNorm):
    """rms(x) * weight / sqrt(C); checkpoints call the weight `router.scale`."""

    @property
    def value(self) -> Norm:
        dims = self.weight.shape[0]
        return Norm(self.weight.astype(mx.float32) * dims**-0.5, self._eps)


class Gemma4Layer(nn.Module):
    def __init__(self, config: Gemma4Config, plan: LayerPlan, rope: Rope) -> None:
        super().__init__()
        C, P, eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
        self.input_layernorm = RMSNorm(C, eps)
        self.post_attention_layernorm = RMSNorm(C, eps)
        self.pre_feedforward_layernorm = RMSNorm(C, eps)
        self.post_feedforward_layernorm = RMSNorm(C, eps)
        self.layer_scalar = mx.ones((1,))
        self.self_attn = Gemma4Attention(
            config, plan, rope, self.input_layernorm, self.post_attention_layernorm
        )
        post = self.post_feedforward_layernorm
        if config.enable_moe_block:
            self.post_feedforward_layernorm_1 = post = RMSNorm(C, eps)
        self.mlp = MLP(
            C,
            plan.inner,
            self.pre_feedforward_layernorm,
            activation=config.activation,
            post_norm=post,
            residual=not config.enable_moe_block,
        )
        self.routed = self._add_experts(config) if config.enable_moe_block else None
        self.finish = ProjectedMLP(
            self.self_attn.output, self.mlp if self.routed is None else self.routed.advance
        )
        self._activation: Activation = config.activation
        if P:
            self.per_layer_input_gate = Linear(C, P)
            self.per_layer_projection = Linear(P, C)
            self.post_per_layer_input_norm = RMSNorm(C, eps)
            self.gate_input = NormedProjections(None, [self.per_layer_input_gate])
            self.add_input = ProjectedResidual(
                self.per_layer_projection,
                self.post_per_layer_input_norm,
                lambda: self.layer_scalar,
            )

    def _add_experts(self, config: Gemma4Config) -> RoutedExperts:
        C, eps = config.hidden_size, config.rms_norm_eps
        E, k, inner = config.num_experts, config.top_k_experts, config.moe_intermediate_size
        if E is None or k is None or inner is None or k > E:
            raise ConfigError(
                f"config.json: enable_moe_block needs num_experts={E}, top_k_experts={k} (no more "
                f"than the experts) and moe_intermediate_size={inner}"
            )
        self.pre_feedforward_layernorm_2 = RMSNorm(C, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(C, eps)
        self.router = Router(E, RouterNorm(C, eps), expert_scale=True)
        self.experts = Experts(E, C, inner)
        return RoutedExperts(
            self.router,
            self.experts,
            top_k=k,
            activation=config.activation,
            norm=self.pre_feedforward_layernorm_2,
            shared=SharedExpert(self.mlp),
            closing=Closing(
                self.post_feedforward_layernorm_2,
                self.post_feedforward_layernorm,
                None if config.hidden_size_per_layer_input else lambda: self.layer_scalar,
            ),
        )

    def __call__(self, h: mx.array, given: mx.array | None, cache: Cache, phase: Phase) -> mx.array:
        """Advance the stream h [T, C]; `given` [T, P] is this layer's own input, if any."""
        attended = self.self_attn(h, cache, phase)  # [T, Hq * D]
        h = self.finish(attended, h, phase)
        if given is not None:
            (gate,) = self.gate_input(h, phase)  # [T, P]
            return self.add_input(activate_reference(gate, self._activation) * given, h, phase)
        if self.routed is not None:
            return h  # the experts' closing has scaled it
        return h * self.layer_scalar.astype(h.dtype)


class Gemma4Decoder(Decoder):
    """A decoder that may look up a vector for every layer of every token."""

    def __init__(self, config: Gemma4Config, layers: Sequence[Gemma4Layer]) -> None:
        C, L, P = config.hidden_size, config.num_hidden_layers, config.hidden_size_per_layer_input
        super().__init__(config, layers, RMSNorm(C, config.rms_norm_eps))
        self._inputs_shape = (-1, L, P)
        if P:
            self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, L * P)
            self.per_layer_model_projection = Linear(C, L * P)
            self.per_layer_projection_norm = RMSNorm(P, config.rms_norm_eps)
            self.look_up = ScaledEmbedding(self.embed_tokens_per_layer, P)
            self.project = NormedProjections(None, [self.per_layer_model_projection])

    def layer_inputs(self, tokens: mx.array, h: mx.array, phase: Phase) -> mx.array:
        """A vector for every layer, from the token and from its embedding: [T, L, P]."""
        (context,) = self.project(h, phase)
        context = (context * h.shape[-1] ** -0.5).reshape(self._inputs_shape)
        context = rms_norm_reference(context, self.per_layer_projection_norm.value)
        return (context + self.look_up(tokens).reshape(self._inputs_shape)) * 2**-0.5


class Gemma4Model(CausalLM):
    def __init__(
        self, config: Gemma4Config, plans: Sequence[LayerPlan], ropes: Sequence[Rope]
    ) -> None:
        layers = [Gemma4Layer(config, *pair) for pair in zip(plans, ropes, strict=True)]
        decoder = Gemma4Decoder(config, layers)
        super().__init__(
            config,
            decoder,
            ScaledEmbedding(decoder.embed_tokens, config.hidden_size),
            softcap=config.final_logit_softcapping,
        )
        self.config = config
        self._plans = list(plans)

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        """One cache for every layer that has keys and values of its own."""
        own = self._plans[: self.config.first_shared]
        return layer_caches([(plan.heads, plan.window) for plan in own], max_context, slack)

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        text: dict[str, Any] = {}
        tied = self.config.tie_word_embeddings
        for name, value in text_weights(weights, BESIDE_TEXT, tied=tied).items():
            if not self._unused(name):
                text.update(renamed(name, value))
        return text

    def _unused(self, name: str) -> bool:
        """Whether the reference ignores a tensor that published checkpoints may hold."""
        if name.endswith((".input_min", ".input_max", ".output_min", ".output_max")):
            return True  # ranges of a quantized export
        parts = name.split(".")
        if parts[:2] != ["model", "layers"] or len(parts) < 5 or not parts[2].isdigit():
            return False
        shares = int(parts[2]) >= self.config.first_shared and parts[3] == "self_attn"
        return shares and parts[4] in {"k_proj", "v_proj", "k_norm", "v_norm"}

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
        h = self.embed(tokens)  # [T, C]
        given = None
        if self.config.hidden_size_per_layer_input:
            decoder = cast("Gemma4Decoder", self.model)
            given = decoder.layer_inputs(tokens, h, phase)  # [T, L, P]
        kept: dict[int, mx.array] = {}
        every_row = hidden or any(i >= self.config.first_shared for i in taps)
        for plan, layer in zip(self._plans, self.model.layers, strict=True):
            if plan.index == self.config.first_shared and not every_row:
                # These layers write no rows, so only rows that need logits go through them.
                if logits == "none":
                    break
                if logits == "last":
                    h, given = h[-1:], None if given is None else given[-1:]
            own = None if given is None else given[:, plan.index]
            h = cast("mx.array", layer(h, own, caches[plan.source], phase))
            if plan.index in taps:
                kept[plan.index] = h
        return self.finish(h, logits, phase, kept, hidden=hidden)


def renamed(name: str, value: Any) -> dict[str, Any]:
    """A checkpoint's router and expert tensors under this model's names; others as they are."""
    name = name.replace(".experts.switch_glu.", ".experts.")
    if name.endswith(".router.scale"):
        return {name.replace(".router.scale", ".router.norm.weight"): value}
    head, marker, leaf = name.rpartition(".experts.")
    if not marker:
        return {name: value}
    leaf = leaf.removesuffix(".weight")
    if leaf == "gate_up_proj":
        gate, up = split_rows(name, value)
        return {
            f"{head}.experts.gate_proj.weight": gate,
            f"{head}.experts.up_proj.weight": up,
        }
    return {f"{head}.experts.{leaf}.weight": value}


def build(raw: Mapping[str, Any]) -> Gemma4Model:
    """A Gemma 4 text model with unset weights."""
    config = read_config(Gemma4Config, raw)
    refuse(raw, "use_bidirectional_attention", "vision", why="text is generated left to right")
    if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input < config.vocab_size:
        raise ConfigError(
            f"config.json: vocab_size_per_layer_input={config.vocab_size_per_layer_input} is less "
            f"than vocab_size={config.vocab_size}"
        )
    plans = config.plans()
    ropes: dict[tuple[LayerType, int], Rope] = {}
    for plan in plans:
        key = (plan.kind, plan.heads.head_dim)
        if key not in ropes:
            ropes[key] = read_rope(
                raw,
                plan.heads.head_dim,
                config.max_position_embeddings,
                layer_type=plan.kind,
                theta=1e6 if plan.kind == "full_attention" else 10_000.0,
                absent=FULL_ROPE if plan.kind == "full_attention" else None,
            )
    return Gemma4Model(config, plans, [ropes[plan.kind, plan.heads.head_dim] for plan in plans])


FAMILY = Family(name="gemma4", build=build)
