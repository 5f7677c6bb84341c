"""What a target offers: one binder a fusion unit.

A binder takes a unit's weights once and returns the function that runs every step, or None where
the target has no body for these weights; the unit then runs its reference and says so in its
report. Shapes: T rows of one sequence; there is no batch axis.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.kernels.block_sparse import IndexGeometry
from turbospark.kernels.latent import LatentLayer
from turbospark.kernels.weights import (
    Activation,
    DeltaWeights,
    ExpertBlock,
    ExpertWeights,
    Norm,
    StreamWeights,
    Weight,
)
from turbospark.protocols import Phase, RowInputs

Embed = Callable[[mx.array], mx.array]
"""tokens [T] int32 -> rows [T, C]."""
Project = Callable[[mx.array, Phase], tuple[mx.array, ...]]
"""x [T, K] -> one [T, N] a weight."""
Rotate = Callable[[mx.array, mx.array | None, mx.array | None, Any, Phase], mx.array]
"""q [T, Hq * D], k and v [T, Hkv * D] or None, cache -> rotated q [T, Hq, D]; k, v rows cached."""
Attend = Callable[[mx.array, Any, Phase], mx.array]
"""q [T, Hq, D] whose own rows are already in the cache -> [T, Hq * D]."""
RotateAttend = Callable[
    [mx.array, mx.array | None, mx.array | None, mx.array | None, Any, Phase], mx.array
]
"""q, k and v as `Rotate` takes them, the gate if any, cache -> [T, Hq * D]."""
AttendLatents = Callable[[mx.array, mx.array, Any, Phase], mx.array | None]
"""q [T, H * (N + R)], row [T, L + R], cache, which takes the rows -> [T, H * V]; None where no body
serves, and then the cache has not moved."""
AttendChosen = Callable[[mx.array, Any, mx.array, Sequence[int]], mx.array]
"""q [T, Hq, D], the cache's rows, positions [T, L] int32, how many of them each query reads, the
first ones -> [T, Hq * D]."""
AppendIndex = Callable[[mx.array, Any], bool]
"""raw index keys [T, Di], the index's cache -> whether the rows were written; if not, nothing was
and the unit does it."""
AddProjected = Callable[[mx.array, mx.array, Phase], mx.array]
"""x [T, K], residual [T, C] -> [T, C]."""
FinishLayer = Callable[[mx.array, mx.array, Phase], mx.array | None]
"""x [T, K], residual [T, C] -> [T, C], or None where no body serves these rows."""
Close = Callable[[mx.array, mx.array], mx.array]
"""y [T, C], residual [T, C] -> [T, C]."""
Transform = Callable[[mx.array, Phase], mx.array]
"""h [T, C] -> [T, C], or [R, C] -> [R, V]."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """What a delta-net step is fed: projections of T rows.

    Attributes:
        qkv: [T, channels], queries, keys and values of all heads before the convolution.
        z: [T, Hv * Dv], the gate of the output.
        b: [T, Hv], how strongly a row is written.
        a: [T, Hv], how much of the state is forgotten.
    """

    qkv: mx.array
    z: mx.array
    b: mx.array
    a: mx.array


DeltaState = tuple[mx.array, ...]
"""Of a delta-net layer: the last taps - 1 rows of `qkv` [taps - 1, channels] and the fast weights
[Hv, Dv, Dk], both float32."""
DeltaNet = Callable[
    [DeltaInputs, DeltaState, Phase, bool], tuple[mx.array, DeltaState, RowInputs | None]
]
"""inputs, state, phase, whether to record -> [T, Hv * Dv], a new state, the row inputs if so."""
SharedRows = tuple[mx.array, mx.array]
"""What a shared expert makes of every row [T, C], and the score of its gate [T, 1]."""
Said = tuple[mx.array, mx.array]
"""What a block made of a mixture [T, C], and how much of it each stream takes [T, G]."""
MixStreams = Callable[[mx.array, Said | None, Phase], tuple[mx.array, mx.array, mx.array | None]]
"""streams h [T, G * C], what is added to them first -> the streams with it, their mixture [T, C]
for the next block, and the shares [T, G] of what that will say, if one follows."""
MixExperts = Callable[[mx.array, mx.array, SharedRows | None, Phase], mx.array]
"""h [T, C], the router's scores [T, E], the shared expert's rows if any -> [T, C]."""
RunBlock = Callable[[mx.array, bool, Phase], mx.array | None]
"""h [T, C], whether to add h -> [T, C], or None where no body serves so many rows."""


@dataclass(frozen=True, slots=True)
class HeadGeometry:
    """Sizes of one attention layer: query heads, key/value heads, head dimension."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """What a layer does between its projections.

    Attributes:
        heads: their sizes.
        rope: rotates queries and keys.
        norms: of the heads of queries, keys and values; None for none.
        scale: factor of the scores.
        window: keys a query sees, its own included; None for all.
        sinks: [Hq] scores that join each head's softmax and add no value.
    """

    heads: HeadGeometry
    rope: Any
    norms: tuple[Norm | None, Norm | None, Norm | None]
    scale: float
    window: int | None = None
    sinks: mx.array | None = None


@dataclass(frozen=True, slots=True)
class DeltaGeometry:
    """Sizes of one delta-net layer: key and value heads, their dimensions, taps of the filter.

    Key head j // (Hv / Hk) serves value head j.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Numbers of all key heads in one row."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all value heads in one row."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers in one row of queries, keys and values."""
        return 2 * self.keys + self.values

    def zero_state(self) -> DeltaState:
        """The state of position 0."""
        weights = (self.num_value_heads, self.value_dim, self.key_dim)
        return mx.zeros((self.taps - 1, self.channels)), mx.zeros(weights)


class KernelSet(ABC):
    """The kernel bodies of one target, which has those whose binders it overrides.

    Attributes:
        name: metal, cuda, host or reference.
    """

    name: str

    @abstractmethod
    def describe(self) -> str:
        """One line for humans: target, instruction set, threads, activations."""

    def embedding(self, weight: Weight, scale: float, norm: Norm | None = None) -> Embed | None:
        """Rows of a table, times `scale`, normed if there is a norm."""
        return None

    def normed_projections(
        self, norm: Norm | None, weights: Sequence[Weight], biases: Sequence[mx.array | None]
    ) -> Project | None:
        """rms-norm (if any), then every projection of the same input."""
        return None

    def head_norm_rope(
        self,
        heads: HeadGeometry,
        q_norm: Norm | None,
        k_norm: Norm | None,
        v_norm: Norm | None,
        rope: Any,
    ) -> Rotate | None:
        """Per-head norms, RoPE on q and k, k and v rows written into the cache."""
        return None

    def attend(
        self, heads: HeadGeometry, scale: float, window: int | None, sinks: mx.array | None
    ) -> Attend | None:
        """Causal attention over a cache; a query sees itself and window - 1 rows before it."""
        return None

    def append_index(self, index: IndexGeometry, norm: Norm, rope: Any) -> AppendIndex | None:
        """Rows of a block index: raw keys, and the normed and rotated keys of complete blocks."""
        return None

    def attend_chosen(self, heads: HeadGeometry, scale: float) -> AttendChosen | None:
        """Attention to rows of a cache that every query names."""
        return None

    def rotated_attention(self, layer: AttentionLayer) -> RotateAttend | None:
        """`head_norm_rope`, `attend` and the gate's sigmoid as one unit."""
        return None

    def latent_attention(self, layer: LatentLayer) -> AttendLatents | None:
        """Norm and RoPE of latent rows, which go into the cache, then attention over it."""
        return None

    def projected_residual(
        self, weight: Weight, bias: mx.array | None, post_norm: Norm | None
    ) -> AddProjected | None:
        """Compute residual + post_norm(weight @ x + bias)."""
        return None

    def gated_mlp(
        self,
        norm: Norm | None,
        gate: Weight,
        up: Weight,
        down: Weight,
        biases: Sequence[mx.array | None],
        activation: Activation,
        post_norm: Norm | None,
        residual: bool,
    ) -> Transform | None:
        """Compute h + post_norm(down(act(gate y) * up y)), y = norm(h); `h +` if `residual`."""
        return None

    def projected_mlp(
        self,
        weights: Sequence[Weight],
        biases: Sequence[mx.array | None],
        norm: Norm | None,
        activation: Activation,
        post_norms: tuple[Norm, Norm] | None,
    ) -> FinishLayer | None:
        """`projected_residual`, then `gated_mlp`: weights of output, gate, up and down."""
        return None

    def delta_net(self, heads: DeltaGeometry, weights: DeltaWeights) -> DeltaNet | None:
        """Convolution, norms of the heads, delta rule, gated norm of T rows of one layer."""
        return None

    def mix_streams(self, weights: StreamWeights) -> MixStreams | None:
        """Shares of what a block said into the streams, and a mixture of them."""
        return None

    def routed_experts(self, norm: Norm | None, experts: ExpertWeights) -> MixExperts | None:
        """Weighted sum of every row's experts over norm(h); plus sigmoid(score) * shared rows."""
        return None

    def expert_block(self, block: ExpertBlock) -> RunBlock | None:
        """A router, experts, a shared one and the stream they advance, for a few rows."""
        return None

    def closing(self, norm: Norm, factor: mx.array) -> Close | None:
        """Compute (residual + norm(y)) * factor, the factor being [1]."""
        return None

    def output_head(
        self, norm: Norm | None, weight: Weight, bias: mx.array | None, softcap: float | None
    ) -> Transform | None:
        """float32 logits of the rows given: softcap(weight @ norm(h) + bias)."""
        return None
