import math

import mlx.core as mx
import numpy as np
import pytest
from golden.fixtures import kernel_sets
from kernels.matrices import quantized, rows

from turbospark.nn.linear import Embedding, Linear, RMSNorm
from turbospark.nn.projections import (
    GatedMLP,
    NormedProjections,
    OutputHead,
    ProjectedResidual,
    TokenEmbedding,
)
from turbospark.nn.unit import units_of
from turbospark.protocols import Phase

T, C, INNER = 5, 96, 160


def linear(inputs, outputs, seed, bias=False):
    module = Linear(inputs, outputs, bias=bias)
    weight, values = quantized(outputs, inputs, 4, 32, seed=seed)
    module.assign(weight)
    if bias:
        module.bias = rows(1, outputs, seed=seed + 100)[0]
        return module, values, np.array(module.bias).astype(np.float64)
    return module, values, 0.0


def norm(seed, offset=0.0):
    module = RMSNorm(C, 1e-5, offset)
    module.weight = rows(1, C, seed=seed)[0]
    return module


def normed(x, module, offset=0.0):
    scale = np.array(module.weight).astype(np.float64) + offset
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * scale


def wide(x):
    return np.array(x).astype(np.float64)


def close(got, expected):
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-4, atol=1e-4)


def test_normed_projections_share_one_normed_input():
    before = norm(1, offset=1.0)
    q, wq, bq = linear(C, 37, 2, bias=True)
    k, wk, _ = linear(C, 24, 3)
    x = rows(T, C)
    y = normed(wide(x), before, 1.0)
    got = NormedProjections(before, [q, k])(x, Phase.PREFILL)
    close(got[0], y @ wq.T + bq)
    close(got[1], y @ wk.T)
    (plain,) = NormedProjections(None, [k])(x, Phase.DECODE)
    close(plain, wide(x) @ wk.T)


@pytest.mark.parametrize("post", [False, True])
def test_projected_residual_adds_the_normed_product(post):
    projection, w, b = linear(64, C, 4, bias=True)
    after = norm(5) if post else None
    x, residual = rows(T, 64, seed=6), rows(T, C, seed=7)
    y = wide(x) @ w.T + b
    expected = wide(residual) + (normed(y, after) if post else y)
    close(ProjectedResidual(projection, after)(x, residual, Phase.DECODE), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("residual", [True, False])
def test_gated_mlp_composes_its_parts(activation, residual):
    before, after = norm(8), norm(9)
    gate, wg, _ = linear(C, INNER, 10)
    up, wu, _ = linear(C, INNER, 11)
    down, wd, _ = linear(INNER, C, 12)
    h = rows(T, C, seed=13)
    y = normed(wide(h), before)
    g = y @ wg.T
    if activation == "silu":
        act = g / (1 + np.exp(-g))
    elif activation == "gelu_erf":
        act = 0.5 * g * (1 + np.vectorize(math.erf)(g / np.sqrt(2)))
    else:
        act = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    expected = normed((act * (y @ wu.T)) @ wd.T, after) + (wide(h) if residual else 0)
    unit = GatedMLP(
        before, gate, up, down, activation=activation, post_norm=after, residual=residual
    )
    close(unit(h, Phase.PREFILL), expected)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_head_gives_float32_logits(softcap):
    table = Embedding(41, C)
    weight, values = quantized(41, C, 8, 32, zero=True)
    table.assign(weight)
    before = norm(14)
    h = rows(3, C, seed=15)
    expected = normed(wide(h), before) @ values.T
    if softcap:
        expected = softcap * np.tanh(expected / softcap)
    logits = OutputHead(before, table, softcap=softcap)(h, Phase.DECODE)
    assert logits.dtype == mx.float32
    close(logits, expected)
    close(TokenEmbedding(table, 3.0)(mx.array([40, 1], mx.int32)), 3.0 * values[[40, 1]])


def test_units_own_no_parameter_and_are_found_by_path():
    table = Embedding(41, C)
    table.embed = TokenEmbedding(table)
    assert [path for path, _ in units_of(table)] == ["embed"]
    assert list(table.parameters()) == ["weight"]
    assert table.embed.body == "reference"


@pytest.mark.parametrize("name", kernel_sets())
def test_a_factor_is_of_the_sum_and_is_read_anew(name):
    (projection, weight, _), after = linear(64, C, 5), norm(6)
    factors = [mx.array([0.5])]
    unit = ProjectedResidual(projection, after, lambda: factors[-1])
    unit.bind(kernel_sets()[name])
    x, residual = rows(T, 64), rows(T, C, seed=7)
    wanted = wide(residual) + normed(wide(x) @ weight.T, after)
    close(unit(x, residual, Phase.DECODE), 0.5 * wanted)
    factors.append(mx.array([-3.0]))
    close(unit(x, residual, Phase.DECODE), -3.0 * wanted)
