"""The gated delta net: a causal filter, then a memory of fast weights that every row rewrites.

Source: arXiv 2412.06464 (the rule), transformers 5.24, models/qwen3_5 (the layer around it).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from turbospark.errors import ShapeError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.target import DeltaGeometry, DeltaState
from turbospark.kernels.weights import DeltaWeights, Norm, OutputGate

CHUNK = 64
_HEAD_EPS = 1e-6

Fold = Callable[["DeltaRows"], mx.array]
"""Row inputs -> the fast weights after all of their rows."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRows:
    """What T rows did to a layer's state.

    Attributes:
        state: before the rows.
        qkv: [T, channels], before the convolution.
        k: [T, Hk, Dk], normed.
        v: [T, Hv, Dv].
        decay: [T, Hv], what is left of the state at each row.
        beta: [T, Hv], how strongly a row is written.
        fold: applies the rows to the fast weights in the arithmetic of the pass.
    """

    state: DeltaState
    qkv: mx.array
    k: mx.array
    v: mx.array
    decay: mx.array
    beta: mx.array
    fold: Fold

    @property
    def rows(self) -> int:
        """T."""
        return self.qkv.shape[0]

    def arrays(self) -> tuple[mx.array, ...]:
        """Everything it holds."""
        return (*self.state, self.qkv, self.k, self.v, self.decay, self.beta)

    def like(self, arrays: Sequence[mx.array]) -> "DeltaRows":
        """Row inputs over other arrays, in the order of `arrays`."""
        tail, S, qkv, k, v, decay, beta = arrays
        return DeltaRows((tail, S), qkv, k, v, decay, beta, self.fold)

    def replay(self, keep: int) -> DeltaState:
        """The state after the first `keep` rows, 1 <= keep <= T.

        Raises:
            ShapeError: there are not so many rows.
        """
        if not 1 <= keep <= self.rows:
            raise ShapeError(f"{keep} rows cannot be kept of {self.rows} that were recorded")
        kept = DeltaRows(
            self.state,
            self.qkv[:keep],
            self.k[:keep],
            self.v[:keep],
            self.decay[:keep],
            self.beta[:keep],
            self.fold,
        )
        return next_tail(kept.qkv, self.state[0]), self.fold(kept)


def next_tail(qkv: mx.array, tail: mx.array) -> mx.array:
    """The last rows before the next one, float32: as many as `tail` has.

    Args:
        qkv: [T, channels].
        tail: those before the first of them.
    """
    count = tail.shape[0]
    # Only the last rows are joined, so that the tail does not hold on to a whole chunk.
    rows = mx.concatenate([tail, qkv[-count:].astype(mx.float32)])
    return rows[rows.shape[0] - count :]


def causal_conv_reference(qkv: mx.array, tail: mx.array, conv: mx.array) -> mx.array:
    """Filter every channel over its own row and those before it, then silu.

    Args:
        qkv: [T, channels].
        tail: [taps - 1, channels], the rows before them.
        conv: [channels, taps, 1].

    Returns:
        [T, channels] float32.
    """
    T, conv = qkv.shape[0], conv.astype(mx.float32)
    rows = mx.concatenate([tail, qkv.astype(mx.float32)])
    total = rows[:T] * conv[:, 0, 0]
    for tap in range(1, conv.shape[1]):
        total = total + rows[tap : tap + T] * conv[:, tap, 0]
    return activate_reference(total, "silu")


def split_heads_reference(
    rows: mx.array, heads: DeltaGeometry
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys of length 1 (queries times Dk^-1/2), and values.

    The epsilon stands beside the sum of squares, not their mean.

    Args:
        rows: [T, channels], filtered.
        heads: their sizes.

    Returns:
        q and k [T, Hk, Dk], v [T, Hv, Dv].
    """
    T, Hk, Dk = rows.shape[0], heads.num_key_heads, heads.key_dim
    q = mx.reshape(rows[:, : heads.keys], (T, Hk, Dk))
    k = mx.reshape(rows[:, heads.keys : 2 * heads.keys], (T, Hk, Dk))
    v = mx.reshape(rows[:, 2 * heads.keys :], (T, heads.num_value_heads, heads.value_dim))
    q, k = (mx.fast.rms_norm(x, None, _HEAD_EPS / Dk) for x in (q, k))
    return q / Dk, k * Dk**-0.5, v


def gates_reference(
    a: mx.array, b: mx.array, log_rate: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    """How much of the state every row leaves, as a logarithm, and how strongly it writes.

    Args:
        a: [T, Hv].
        b: [T, Hv].
        log_rate: [Hv].
        dt_bias: [Hv].

    Returns:
        Logarithms of the decay and betas, [T, Hv] float32 each.
    """
    step = a.astype(mx.float32) + dt_bias.astype(mx.float32)
    softplus = mx.logaddexp(step, mx.array(0.0))
    rate = mx.exp(log_rate.astype(mx.float32))
    return -rate * softplus, mx.sigmoid(b.astype(mx.float32))


def delta_rule_reference(q: mx.array, rows: DeltaRows) -> tuple[mx.array, mx.array]:
    """Rewrite the fast weights row by row, and read each row's output from them.

    Per head and row: S = decay S; S = S + beta (v - S k) k^T; y = S q.

    Args:
        q: [T, Hk, Dk].
        rows: the rest; `rows.state[1]` is S before.

    Returns:
        y [T, Hv, Dv] and S after.
    """
    S, outputs, repeats = rows.state[1], list[mx.array](), _repeats(rows)
    q = mx.repeat(q, repeats, axis=1)
    k = mx.repeat(rows.k, repeats, axis=1)  # [T, Hv, Dk]
    for t in range(rows.rows):
        S = _written(S, k[t], rows.v[t], rows.decay[t], rows.beta[t])
        outputs.append((S * q[t][:, None]).sum(axis=-1))
    return mx.stack(outputs), S


def fold_reference(rows: DeltaRows) -> mx.array:
    """The fast weights after the rows, bit for bit as `delta_rule_reference` leaves them."""
    S, k = rows.state[1], mx.repeat(rows.k, _repeats(rows), axis=1)
    for t in range(rows.rows):
        S = _written(S, k[t], rows.v[t], rows.decay[t], rows.beta[t])
    return S


def delta_chunks_reference(
    q: mx.array, rows: DeltaRows, log_decay: mx.array
) -> tuple[mx.array, mx.array]:
    """The same as `delta_rule_reference` but for rounding, CHUNK rows at a time.

    Within a chunk of keys K, values V and summed log decays G, the values that are really written
    are U = (I + strict_lower(beta_t e^(G_t - G_j) k_t . k_j))^-1 beta (V - e^G K S^T).

    Args:
        q: [T, Hk, Dk].
        rows: the rest; `decay` is not read.
        log_decay: [T, Hv].
    """
    T, repeats = rows.rows, _repeats(rows)
    q, k, v = (
        _chunked(x) for x in (mx.repeat(q, repeats, 1), mx.repeat(rows.k, repeats, 1), rows.v)
    )
    beta, log_decay = (_chunked(x[..., None]) for x in (rows.beta, log_decay))
    G = mx.cumsum(log_decay, axis=2)  # [n, Hv, CHUNK, 1]
    seen = mx.tril(mx.ones((CHUNK, CHUNK)))
    fading = mx.exp(mx.where(seen > 0, G - G.swapaxes(-1, -2), -mx.inf))  # e^(G_t - G_j)
    mixed = _unit_lower_inverse(mx.tril(beta * fading * (k @ k.swapaxes(-1, -2)), -1))
    written, erased = mixed @ (beta * v), mixed @ (beta * mx.exp(G) * k)
    scores = fading * (q @ k.swapaxes(-1, -2))
    S, outputs = rows.state[1], list[mx.array]()
    for i in range(q.shape[0]):
        U = written[i] - erased[i] @ S.swapaxes(-1, -2)  # [Hv, CHUNK, Dv]
        outputs.append(mx.exp(G[i]) * (q[i] @ S.swapaxes(-1, -2)) + scores[i] @ U)
        last = G[i][:, -1:]
        S = mx.exp(last) * S + (mx.exp(last - G[i]) * U).swapaxes(-1, -2) @ k[i]
    y = mx.stack(outputs).transpose(0, 2, 1, 3)  # [n, CHUNK, Hv, Dv]
    return mx.reshape(y, (-1, *y.shape[2:]))[:T], S


def gated_norm_reference(
    y: mx.array, z: mx.array, norm: Norm, gate: OutputGate = "silu"
) -> mx.array:
    """rms_norm(y) * gate(z), head by head.

    Args:
        y: [T, Hv, Dv].
        z: [T, Hv * Dv].
        norm: of one head.
        gate: silu, or sigmoid alone.

    Returns:
        [T, Hv * Dv] float32.
    """
    z = z.astype(mx.float32)
    factors = mx.sigmoid(z) if gate == "sigmoid" else activate_reference(z, "silu")
    return mx.reshape(rms_norm_reference(y, norm), factors.shape) * factors


def check_delta_weights(heads: DeltaGeometry, weights: DeltaWeights) -> None:
    """Refuse weights of other sizes.

    Raises:
        ShapeError: they are not those of `heads`.
    """
    Hv = heads.num_value_heads
    found = [weights.conv.shape, weights.log_rate.shape, weights.dt_bias.shape]
    wanted = [(heads.channels, heads.taps, 1), (Hv,), (Hv,)]
    if found != wanted or Hv % heads.num_key_heads:
        raise ShapeError(f"delta-net weights {found} given where {heads} needs {wanted}")


def _repeats(rows: DeltaRows) -> int:
    return rows.v.shape[1] // rows.k.shape[1]


def _written(S: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array) -> mx.array:
    """S [Hv, Dv, Dk] after one row: k [Hv, Dk], v [Hv, Dv], decay and beta [Hv]."""
    S = S * decay[:, None, None]
    delta = (v - (S * k[:, None]).sum(axis=-1)) * beta[:, None]
    return S + delta[..., None] * k[:, None]


def _chunked(x: mx.array) -> mx.array:
    """[T, Hv, D] as [n, Hv, CHUNK, D]; zeros at the end change nothing."""
    x = mx.pad(x, [(0, -x.shape[0] % CHUNK), (0, 0), (0, 0)])
    return mx.reshape(x, (-1, CHUNK, *x.shape[1:])).swapaxes(1, 2)


def _unit_lower_inverse(A: mx.array) -> mx.array:
    """(I + A)^-1 of strictly lower triangular A [..., n, n], n a power of two.

    Halves are inverted side by side, because powers of A may overflow what they cancel to.
    """
    n = A.shape[-1]
    if n == 1:
        return mx.ones_like(A)
    h = n // 2
    upper, lower = _unit_lower_inverse(mx.stack([A[..., :h, :h], A[..., h:, h:]]))
    below = -(lower @ (A[..., h:, :h] @ upper))
    top = mx.concatenate([upper, mx.zeros_like(below)], axis=-1)
    return mx.concatenate([top, mx.concatenate([below, lower], axis=-1)], axis=-2)
