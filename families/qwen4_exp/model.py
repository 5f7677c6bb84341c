"""The network of qwen4_exp: qwen3_5's mixers and experts over several residual streams.

Some layers add embeddings of hashed n-grams to the streams; attention reads chosen blocks of rows.

Source: transformers 5.24, models/qwen4_exp. Checkpoints: Qwen/Qwen3.8-Flash-Next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from families.qwen4_exp.config import Qwen4ExpConfig
from families.qwen4_exp.weights import trunk_weights
from turbospark.caches.kv import KVCache
from turbospark.caches.recurrent import RecurrentCache
from turbospark.kernels.rope import Rope
from turbospark.kernels.target import Said
from turbospark.nn.block_sparse import BlockSparseAttention, IndexedRows, SparseInputs
from turbospark.nn.decoder import CausalLM, Decoder
from turbospark.nn.delta_net import DeltaNet
from turbospark.nn.linear import Linear, RMSNorm
from turbospark.nn.ngram import NgramLayer
from turbospark.nn.ngram_table import NgramEmbedding, rows_in_files
from turbospark.nn.projections import NormedProjections, TokenEmbedding
from turbospark.nn.sparse_mlp import SparseMLP
from turbospark.nn.streams import Inject, StreamHead, StreamMixer
from turbospark.protocols import ForwardOutput, LogitRows, Phase, RowInputs

Cache = KVCache | RecurrentCache


@dataclass(frozen=True, slots=True)
class Ropes:
    """Rotary embeddings of one model.

    Attributes:
        heads: of attention heads.
        index: of index heads.
    """

    heads: Rope
    index: Rope


class Indexer(nn.Module):
    """Queries and key of the index, in one matrix, and their norms."""

    def __init__(self, config: Qwen4ExpConfig) -> None:
        super().__init__()
        index, eps = config.index, config.rms_norm_eps
        D = index.head_dim
        self.index_qk_proj = Linear(config.hidden_size, (index.num_heads + 1) * D)
        self.q_layernorm, self.k_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)


class SparseAttention(nn.Module):
    """Attention to chosen blocks, whose output is multiplied by a gate of every number."""

    def __init__(self, config: Qwen4ExpConfig, ropes: Ropes) -> None:
        super().__init__()
        C, eps, heads = config.hidden_size, config.rms_norm_eps, config.heads
        D, width = heads.head_dim, heads.num_heads * heads.head_dim
        self.q_proj = Linear(C, width)
        self.gate_proj = Linear(C, width)  # checkpoints keep it in q_proj, head by head
        self.k_proj = Linear(C, heads.num_kv_heads * D)
        self.v_proj = Linear(C, heads.num_kv_heads * D)
        self.o_proj = Linear(width, C)
        self.q_norm, self.k_norm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.indexer = Indexer(config)
        inputs = [self.q_proj, self.gate_proj, self.k_proj, self.v_proj]
        self.project = NormedProjections(None, [*inputs, self.indexer.index_qk_proj])
        self.attend = BlockSparseAttention(
            heads,
            ropes.heads,
            config.index,
            ropes.index,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            index_q_norm=self.indexer.q_layernorm,
            index_k_norm=self.indexer.k_layernorm,
        )
        self.output = NormedProjections(None, [self.o_proj])
        self._index_keys = config.index.head_dim

    def __call__(self, x: mx.array, caches: IndexedRows, phase: Phase) -> mx.array:
        """What the layer says to x [T, C]."""
        attended = self.attend(self._projected(x, phase), caches, phase)  # [T, Hq * D]
        (y,) = self.output(attended, phase)
        return y

    def write(self, x: mx.array, caches: IndexedRows, phase: Phase) -> None:
        """Append the rows that a call would append, and compute nothing else."""
        self.attend.append(self._projected(x, phase), caches, phase)

    def _projected(self, x: mx.array, phase: Phase) -> SparseInputs:
        q, gate, k, v, index = self.project(x, phase)
        split = index.shape[1] - self._index_keys
        return SparseInputs(q, gate, k, v, index[:, :split], index[:, split:])


class Qwen4ExpLayer(nn.Module):
    """A mixer and experts, each between a mixture of the streams and their shares of its output."""

    def __init__(
        self,
        config: Qwen4ExpConfig,
        *,
        is_linear: bool,
        ropes: Ropes,
        ngrams: NgramLayer | None = None,
    ) -> None:
        super().__init__()
        if ngrams is not None:
            self.ple = ngrams
        if is_linear:
            C, eps, gate = config.hidden_size, config.rms_norm_eps, config.output_gate
            self.linear_attn = DeltaNet(C, config.delta, None, eps, gate=gate, residual=False)
        else:
            self.self_attn = SparseAttention(config, ropes)
        self.mlp = SparseMLP(
            config.hidden_size,
            config.num_experts,
            top_k=config.num_experts_per_tok,
            inner=config.moe_intermediate_size,
            shared_inner=config.shared_expert_intermediate_size,
            norm=None,
        )
        self.attn_hyper_connection = stream_mixer(config)
        self.mlp_hyper_connection = stream_mixer(config)
        self.is_linear = is_linear

    @property
    def ngrams(self) -> NgramLayer | None:
        """What adds n-grams to the streams before the layer, if anything does."""
        return cast("NgramLayer | None", cast(Any, self).get("ple"))

    def __call__(
        self,
        h: mx.array,
        cache: Any,
        phase: Phase,
        said: Said | None = None,
        *,
        record: bool = False,
    ) -> tuple[mx.array, Said, RowInputs | None]:
        """Advance the streams h [T, G * C].

        Args:
            h: the streams.
            cache: a recurrent layer's, or the two of an attention layer.
            phase: prefill or decode.
            said: what the layer before said, if the streams do not hold it yet.
            record: whether a recurrent layer notes its row inputs.

        Returns:
            The streams; what the experts said, which they do not hold yet; the row inputs.
        """
        rows = None
        h, x, shares = self.attn_hyper_connection(h, phase, said)
        if self.is_linear:
            y, rows = self.linear_attn(x, cache, phase, record=record)
        else:
            y = self.self_attn(x, cache, phase)
        h, x, shares = self.mlp_hyper_connection(h, phase, (y, shares))
        return h, (self.mlp(x, phase), shares), rows

    def write(self, h: mx.array, caches: IndexedRows, phase: Phase) -> None:
        """Append the rows that a call would append, and compute nothing else."""
        self.self_attn.write(self.attn_hyper_connection(h, phase)[1], caches, phase)


class Qwen4ExpModel(CausalLM):
    """The model. Its caches lie in the order of the layers.

    Of each layer: the state of its n-grams if it has some, then that of its delta net, or its rows
    and their index.
    """

    def __init__(self, config: Qwen4ExpConfig, ropes: Ropes) -> None:
        hashed = config.ngram_layers
        layers = [
            Qwen4ExpLayer(
                config,
                is_linear=kind == "linear_attention",
                ropes=ropes,
                ngrams=_ngram_layer(config, hashed.index(i)) if i in hashed else None,
            )
            for i, kind in enumerate(config.schedule)
        ]
        decoder = Decoder(config, layers, None)
        decoder.hyper_connection_mixer = stream_mixer(config, injects=False)
        super().__init__(config, decoder, TokenEmbedding(decoder.embed_tokens))
        matrix = cast(Any, self).get("lm_head", decoder.embed_tokens)
        self.head = StreamHead(decoder.hyper_connection_mixer, matrix)
        self.inject = Inject()
        self.config = config

    @property
    def layers(self) -> list[Qwen4ExpLayer]:
        """In their order."""
        return cast("list[Qwen4ExpLayer]", self.model.layers)

    def make_caches(self, max_context: int, slack: int) -> list[Cache]:
        config, caches = self.config, list[Cache]()
        for layer in self.layers:
            ngrams = layer.ngrams
            if ngrams is not None:
                caches.append(RecurrentCache(ngrams.zero_state, max_context))
            if layer.is_linear:
                caches.append(RecurrentCache(config.delta.zero_state, max_context))
            else:
                caches += attention_caches(config, max_context)
        return caches

    def sanitize(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return trunk_weights(self.config, weights)

    def look_up(self, tokens: mx.array, caches: Sequence[Any]) -> list[mx.array]:
        """What a pass over tokens [T] needs of tables that lie in files; it waits for the tokens.

        Returns:
            [T, width] of each n-gram layer, or nothing where all tables lie in memory.
        """
        tables = [(ple.ple_embedding, cache) for ple, cache in self._ngram_layers(caches)]
        if not any(embedding.reader for embedding, _ in tables):
            return []
        return [
            embedding(tokens, cache.state[1]) if rows is None else rows
            for (embedding, cache), rows in zip(tables, rows_in_files(tables, tokens), strict=True)
        ]

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
        found: Sequence[mx.array] | None = None,
    ) -> ForwardOutput:
        """Feed tokens; `found` is what `look_up` gave for them, by default asked for now."""
        self.check_taps(taps)
        embedded = list(self.look_up(tokens, caches) if found is None else found)
        h = mx.tile(self.embed(tokens), (1, self.config.hc_count))  # [T, G * C]
        kept, noted, at = dict[int, mx.array](), dict[int, RowInputs](), 0
        said: Said | None = None
        for i, layer in enumerate(self.layers):
            ngrams = layer.ngrams
            if ngrams is not None:
                h, said = self.inject(h, said), None
                own = embedded.pop(0) if embedded else None
                h, rows = ngrams(h, tokens, caches[at], phase, embedded=own, record=record)
                at = _note(noted, at, rows, 1)
            count = 1 if layer.is_linear else 2
            cache = caches[at] if layer.is_linear else IndexedRows(*caches[at : at + 2])
            h, said, rows = layer(h, cache, phase, said, record=record)
            at = _note(noted, at, rows, count)
            if i in taps:
                h, said = self.inject(h, said), None
                kept[i] = h
        h = self.inject(h, said)
        return self.finish(h, logits, phase, kept, hidden=hidden, row_inputs=noted)

    def _ngram_layers(self, caches: Sequence[Any]) -> list[tuple[NgramLayer, Any]]:
        found, at = list[tuple[NgramLayer, Any]](), 0
        for layer in self.layers:
            ngrams = layer.ngrams
            if ngrams is not None:
                found.append((ngrams, caches[at]))
                at += 1
            at += 1 if layer.is_linear else 2
        return found


def stream_mixer(config: Qwen4ExpConfig, *, injects: bool = True) -> StreamMixer:
    """The weights around a block; around the head nothing is injected."""
    C, G = config.hidden_size, config.hc_count
    return StreamMixer(C, G, config.hc_lowrank, config.rms_norm_eps, injects=injects)


def attention_caches(config: Qwen4ExpConfig, max_context: int) -> list[KVCache]:
    """Empty rows of one attention layer, and its empty index."""
    heads, D = config.heads, config.indexer_head_dim
    return [KVCache(heads.num_kv_heads, heads.head_dim, max_context), KVCache(1, D, max_context)]


def _ngram_layer(config: Qwen4ExpConfig, index: int) -> NgramLayer:
    return NgramLayer(
        config.hidden_size,
        config.hc_count,
        NgramEmbedding(config.hashing(index), config.ngram_width),
        config.ngram_width,
        taps=config.ple_conv_kernel_size,
        dilation=config.ngram_size,
        eps=config.rms_norm_eps,
    )


def _note(noted: dict[int, RowInputs], at: int, rows: RowInputs | None, count: int) -> int:
    """Keep what the cache at `at` was fed; the place of the next cache."""
    if rows is not None:
        noted[at] = rows
    return at + count
