"""Sizes of delta-net layers, inputs for them, and the same arithmetic in float64, row by row."""

import mlx.core as mx
import numpy as np

from turbospark.kernels.target import DeltaGeometry, DeltaInputs
from turbospark.kernels.weights import DeltaWeights, Norm

GEOMETRIES = {
    "odd": DeltaGeometry(3, 6, 7, 5, 4),
    "one_key_head": DeltaGeometry(1, 5, 19, 11, 2),
    "equal_heads": DeltaGeometry(2, 2, 33, 17, 5),
    "real_heads": DeltaGeometry(2, 4, 128, 128, 4),
}
EPS = 3e-5


def weights_of(heads, seed=3, gate="silu"):
    rng = np.random.default_rng(seed)
    Hv = heads.num_value_heads
    return DeltaWeights(
        mx.array(rng.normal(size=(heads.channels, heads.taps, 1)).astype(np.float32)),
        mx.array(np.log(rng.uniform(0.2, 3.2, size=Hv)).astype(np.float32)),
        mx.array(rng.normal(size=Hv).astype(np.float32)),
        Norm(mx.array(rng.uniform(0.5, 1.5, size=heads.value_dim).astype(np.float32)), EPS),
        gate,
    )


def inputs_of(heads, rows, seed=5):
    rng = np.random.default_rng(seed)
    Hv = heads.num_value_heads
    widths = (heads.channels, heads.values, Hv, Hv)
    return DeltaInputs(*(mx.array(rng.normal(size=(rows, n)).astype(np.float32)) for n in widths))


def state_of(heads, seed=7):
    rng = np.random.default_rng(seed)
    return tuple(mx.array(rng.normal(size=x.shape).astype(np.float32)) for x in heads.zero_state())


def some_rows(inputs, start, end):
    return DeltaInputs(
        inputs.qkv[start:end], inputs.z[start:end], inputs.b[start:end], inputs.a[start:end]
    )


def exact_step(heads, weights, inputs, state):
    """Outputs [T, Hv * Dv], tail and fast weights after the rows, in float64."""
    qkv, z, b, a = (np.array(x, np.float64) for x in (inputs.qkv, inputs.z, inputs.b, inputs.a))
    conv = np.array(weights.conv, np.float64)[:, :, 0]
    rate = np.exp(np.array(weights.log_rate, np.float64))
    bias, scale = (np.array(x, np.float64) for x in (weights.dt_bias, weights.norm.weight))
    tail, S = (np.array(x, np.float64) for x in state)
    Hk, Hv, Dk, Dv = heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim
    outs = []
    for t in range(len(qkv)):
        window = np.concatenate([tail, qkv[t : t + 1]])
        x = silu((window * conv.T).sum(axis=0))
        tail = window[1:]
        q, k = (part.reshape(Hk, Dk) for part in (x[: Hk * Dk], x[Hk * Dk : 2 * Hk * Dk]))
        q, k = (part / np.sqrt((part**2).sum(axis=1, keepdims=True) + 1e-6) for part in (q, k))
        v = x[2 * Hk * Dk :].reshape(Hv, Dv)
        decay = np.exp(-rate * np.log1p(np.exp(a[t] + bias)))
        row = []
        for j in range(Hv):
            key, query = k[j // (Hv // Hk)], q[j // (Hv // Hk)] * Dk**-0.5
            S[j] *= decay[j]
            delta = (v[j] - S[j] @ key) / (1 + np.exp(-b[t, j]))
            S[j] += np.outer(delta, key)
            y = S[j] @ query
            y = y / np.sqrt((y**2).mean() + weights.norm.eps) * scale
            gate = z[t].reshape(Hv, Dv)[j]
            row.append(y * (silu(gate) if weights.gate == "silu" else 1 / (1 + np.exp(-gate))))
        outs.append(np.concatenate(row))
    return np.array(outs), tail, S


def silu(x):
    return x / (1 + np.exp(-x))
