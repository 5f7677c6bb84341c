"""DFlash 2 and DFlash: drafters that propose a block of tokens in one pass.

The streams of some layers of the trunk, through one projection, give keys and values to every
layer of the drafter: the context. A block is the token just chosen and masks, which see the
context and one another. Around attention and MLP lie convolutions over the block's rows whose
kernels are computed row by row (DFlash 2 only), and a selector walks over the rows' best
candidates (DFlash 2 only). Table and output head are the trunk's.

Source: incoai/Qwen3.8-27B-DFlash2 and its reader in mlx-vlm 0.7.10 (window rule); z-lab's DFlash
checkpoints and dflash-mlx 0.1.8 for the first version. All norms multiply plainly.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from turbospark.caches.base import RowCache
from turbospark.kernels.kv_rows import newest_rows
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.rope import Rope, rope_reference
from turbospark.nn.decoder import layer_caches
from turbospark.nn.dflash_config import DFlashConfig, check_trunk, read_dflash
from turbospark.nn.linear import Embedding, Linear, Matrix, RMSNorm
from turbospark.nn.mlp import MLP
from turbospark.nn.projections import NormedProjections, OutputHead, TokenEmbedding
from turbospark.nn.rope import read_rope
from turbospark.protocols import Phase

Kernels = tuple[mx.array | None, mx.array | None]
"""Of the two convolutions around a part of a layer, [R, taps, C] each."""


class DynamicConv(nn.Module):
    """The two convolutions around a part of a layer; their kernels come from its normed input."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        C, taps = config.hidden_size, config.conv_kernel_size or 1
        self._taps, self._group = taps, config.conv_group_size
        self.base_kernel = mx.zeros((2, taps, C))
        self.kernel_projection = Linear(C, 2 * taps * (C // config.conv_group_size))
        self.project = NormedProjections(None, [self.kernel_projection])

    def __call__(self, n: mx.array, phase: Phase) -> Kernels:
        """Kernels [R, taps, C] of the convolution before the part, and of the one behind it."""
        (delta,) = self.project(n, phase)
        delta = mx.reshape(delta, (n.shape[0], 2, self._taps, -1))  # [R, 2, taps, C / group]
        kernels = self.base_kernel.astype(n.dtype) + mx.repeat(delta, self._group, axis=-1)
        return kernels[:, 0], kernels[:, 1]


def convolve(x: mx.array, kernels: mx.array | None) -> mx.array:
    """Sum of kernels[i, t] * x[i - t] over the taps t; before the block there is nothing.

    Args:
        x: [R, C].
        kernels: [R, taps, C], or None to hand x on.
    """
    if kernels is None:
        return x
    out = kernels[:, 0] * x
    for t in range(1, kernels.shape[1]):
        out = out + kernels[:, t] * mx.pad(x, [(t, 0), (0, 0)])[: x.shape[0]]
    return out


class DFlashAttention(nn.Module):
    """Attention of a block's rows to the context and to one another.

    Args:
        config: of the drafter.
        rope: of every layer.
        reach: rows of the context that the first row sees; None for all.
        causal: no row sees a later row of the block.
        slides: every row sees as far back as the first one; else as far as the first one sees.
    """

    def __init__(
        self, config: DFlashConfig, rope: Rope, reach: int | None, *, causal: bool, slides: bool
    ) -> None:
        super().__init__()
        C, heads = config.hidden_size, config.heads
        D = heads.head_dim
        self._rope, self._reach = rope, reach
        self._causal, self._slides = causal, slides
        self.q_proj = Linear(C, heads.num_heads * D)
        self.k_proj = Linear(C, heads.num_kv_heads * D)
        self.v_proj = Linear(C, heads.num_kv_heads * D)
        self.o_proj = Linear(heads.num_heads * D, C)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.project = NormedProjections(None, [self.q_proj, self.k_proj, self.v_proj])
        self.output = NormedProjections(None, [self.o_proj])

    def heads(self, x: mx.array, norm: RMSNorm, position: int) -> mx.array:
        """Normed and rotated heads [T, H, D] of x [T, H * D]."""
        rows = mx.reshape(x, (x.shape[0], -1, self._rope.head_dim))
        return rope_reference(rms_norm_reference(rows, norm.value), self._rope, position)

    def value_heads(self, v: mx.array) -> mx.array:
        """Heads [T, Hkv, D] of v [T, Hkv * D]."""
        return mx.reshape(v, (v.shape[0], -1, self._rope.head_dim))

    def __call__(self, u: mx.array, cache: RowCache, phase: Phase) -> mx.array:
        base, R = cache.offset, u.shape[0]
        q, k, v = self.project(u, phase)
        q = self.heads(q, self.q_norm, base).swapaxes(0, 1)  # [Hq, R, D]
        k = self.heads(k, self.k_norm, base).swapaxes(0, 1)  # [Hkv, R, D]
        v = self.value_heads(v).swapaxes(0, 1)
        seen = base if self._reach is None else min(base, self._reach)
        if seen:
            rows = newest_rows(cache.rows(), base - seen)
            k = mx.concatenate([rows[0].astype(q.dtype), k], axis=1)  # [Hkv, seen + R, D]
            v = mx.concatenate([rows[1].astype(q.dtype), v.astype(q.dtype)], axis=1)
        out = mx.fast.scaled_dot_product_attention(
            q[None], k[None], v[None], scale=self._rope.head_dim**-0.5, mask=self._mask(seen, R)
        )
        (y,) = self.output(mx.reshape(out[0].swapaxes(0, 1), (R, -1)), phase)
        return y

    def _mask(self, seen: int, R: int) -> mx.array | None:
        """Which of the keys [seen + R] each of R rows sees; None for all."""
        age = mx.arange(seen, seen + R)[:, None] - mx.arange(seen + R)
        mask = age >= 0 if self._causal else None
        if self._slides and self._reach is not None:
            near = mx.abs(age) <= self._reach
            mask = near if mask is None else mask & near
        return mask


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig, rope: Rope, index: int, inclusive: bool) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(C, eps)
        self.post_attention_layernorm = RMSNorm(C, eps)
        self.self_attn = DFlashAttention(
            config,
            rope,
            config.reaches(inclusive)[index],
            causal=config.is_causal(index),
            slides=inclusive,
        )
        self.mlp = MLP(C, config.intermediate_size, None, activation="silu", residual=False)
        self._has_convs = config.conv_kernel_size is not None
        if self._has_convs:
            self.attention_conv = DynamicConv(config)
            self.mlp_conv = DynamicConv(config)

    def __call__(self, x: mx.array, cache: RowCache, phase: Phase) -> mx.array:
        n = rms_norm_reference(x, self.input_layernorm.value)
        before, behind = self.attention_conv(n, phase) if self._has_convs else (None, None)
        x = x + convolve(self.self_attn(convolve(n, before), cache, phase), behind)
        n = rms_norm_reference(x, self.post_attention_layernorm.value)
        before, behind = self.mlp_conv(n, phase) if self._has_convs else (None, None)
        return x + convolve(self.mlp(convolve(n, before), phase), behind)


class CandidateSelector(nn.Module):
    """Chooses among the best candidates of each row by the token chosen before."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        V, rank = config.vocab_size, config.selector_rank or 1
        self._top_k = config.selector_top_k or 1
        self.predecessor_codebook = mx.zeros((V, rank))
        self.successor_codebook = mx.zeros((V, rank))
        self.hidden_projection = Linear(config.hidden_size, rank)
        self.project = NormedProjections(None, [self.hidden_projection])

    def __call__(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, phase: Phase
    ) -> mx.array:
        """Walk over rows hidden [B, C] with logits [B, V] from anchor [1]: tokens [B].

        Of equal scores the lower id wins: candidates stand in the order of their ids.
        """
        best = mx.argpartition(-logits, kth=self._top_k - 1, axis=-1)[:, : self._top_k]
        candidates = mx.sort(best, axis=-1)  # [B, k]
        unary = mx.take_along_axis(logits, candidates, axis=-1)
        (projected,) = self.project(hidden, phase)
        projected = projected.astype(mx.float32)
        chosen, previous = list[mx.array](), anchor
        for row in range(hidden.shape[0]):
            query = self.predecessor_codebook[previous].astype(mx.float32) * projected[row]
            keys = self.successor_codebook[candidates[row]].astype(mx.float32)  # [k, rank]
            pairs = (keys * query).sum(axis=-1)
            place = mx.argmax(unary[row] + pairs, keepdims=True)
            previous = candidates[row][place]
            chosen.append(previous)
        return mx.concatenate(chosen)


class DFlash(nn.Module):
    """A block drafter over a trunk's table and output head.

    Args:
        config: of its checkpoint.
        rope: of every layer.
        table: the trunk's.
        matrix: the trunk's output head.
        taps: layers of the trunk whose streams make a context row.
        inclusive: each row of a block sees a window of rows before its own; else all rows see
            what the first one does, a window with its own row among it.

    Attributes:
        taps: layers of the trunk whose streams make a context row.
        rows: of a block: the anchor's, and one a proposal.
    """

    def __init__(
        self,
        config: DFlashConfig,
        rope: Rope,
        table: Embedding,
        matrix: Matrix,
        taps: Sequence[int],
        *,
        inclusive: bool = False,
    ) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.fc = Linear(C * len(taps), C)
        self.hidden_norm = RMSNorm(C, eps)
        self._reaches = config.reaches(inclusive)
        self.layers = [
            DFlashLayer(config, rope, i, inclusive) for i in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(C, eps)
        self._has_selector = config.selector_rank is not None
        if self._has_selector:
            self.candidate_selector = CandidateSelector(config)
        self._taps = tuple(taps)
        attentions = [layer.self_attn for layer in self.layers]
        sources = [matrix for one in attentions for matrix in (one.k_proj, one.v_proj)]
        self.join = NormedProjections(None, [self.fc])
        self.spread = NormedProjections(self.hidden_norm, sources)
        self.embed = TokenEmbedding(table, config.input_embedding_scale)
        self.head = OutputHead(None, matrix, softcap=config.final_logit_softcapping)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the trunk whose streams make a context row, in their order."""
        return self._taps

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.config.rows

    @property
    def width(self) -> int:
        """Of a position's streams, taps * C."""
        return self.config.hidden_size * len(self._taps)

    def make_caches(self, max_context: int, slack: int) -> list[RowCache]:
        """Empty context rows of every layer, as far back as it sees."""
        layers = [(self.config.heads, reach) for reach in self._reaches]
        return [*layer_caches(layers, max_context, slack)]

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Published names are the module's own."""
        return {name.removeprefix("model."): value for name, value in weights.items()}

    def write(self, streams: mx.array, caches: Sequence[RowCache], phase: Phase) -> None:
        """Append context rows of positions that stand behind those written.

        Args:
            streams: [T, taps * C], the trunk's stream behind every tap, in their order.
            caches: of every layer; advanced by T.
            phase: prefill or decode.
        """
        (rows,) = self.join(sturdy(streams), phase)
        spread = self.spread(rows, phase)  # k and v of every layer
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            attention = layer.self_attn
            keys = attention.heads(spread[2 * i], attention.k_norm, cache.offset)
            cache.append(keys, attention.value_heads(spread[2 * i + 1]))

    def hidden(self, tokens: mx.array, caches: Sequence[RowCache], phase: Phase) -> mx.array:
        """Normed rows [R, C] of a block of tokens [R] that stands behind the context.

        The caches stay as they are.
        """
        x = sturdy(self.embed(tokens))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, phase)
        return rms_norm_reference(x, self.norm.value)

    def logits(self, hidden: mx.array, phase: Phase) -> mx.array:
        """The trunk's logits [R, V] of normed rows."""
        factor = self.config.output_multiplier
        return self.head(hidden if factor == 1.0 else hidden * factor, phase)

    def propose(self, anchor: int, caches: Sequence[RowCache]) -> tuple[mx.array, mx.array]:
        """One block behind the context.

        Args:
            anchor: the token that stands there.
            caches: context rows; they stay as they are.

        Returns:
            Tokens [rows - 1] int32 for the positions behind the anchor's, and the rows
            [rows - 1, C] they were chosen from.
        """
        masks = [self.config.mask_token_id] * (self.rows - 1)
        tokens = mx.array([anchor, *masks], mx.int32)
        hidden = self.hidden(tokens, caches, Phase.DECODE)[1:]
        logits = self.logits(hidden, Phase.DECODE)
        if not self._has_selector:
            return mx.argmax(logits, axis=-1).astype(mx.int32), hidden
        chosen = self.candidate_selector(hidden, logits, tokens[:1], Phase.DECODE)
        return chosen.astype(mx.int32), hidden


def sturdy(x: mx.array) -> mx.array:
    """Rows whose sums cannot overflow: the drafter's stream leaves float16's range."""
    return x.astype(mx.bfloat16) if x.dtype == mx.float16 else x


def build_dflash(raw: Mapping[str, Any], model: Any) -> DFlash:
    """A block drafter for a trunk, with unset weights.

    Args:
        raw: the drafter checkpoint's config.json.
        model: the trunk.

    Raises:
        ConfigError: the config is damaged, or the drafter was made for another model.
    """
    config = read_dflash(raw)
    table = cast("Embedding", model.model.embed_tokens)
    matrix = cast("Matrix", model.get("lm_head", table))
    vocab_size, width = table.value.shape
    layers = cast("int", model.num_layers)
    check_trunk(config, width=width, vocab_size=vocab_size, layers=layers)
    rope = read_rope(raw, config.head_dim, config.max_position_embeddings)
    return DFlash(config, rope, table, matrix, config.taps(layers))
