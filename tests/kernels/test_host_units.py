"""Fused host calls against the units' references."""

import functools

import mlx.core as mx
import numpy as np
import pytest
from kernels.matrices import quantized, relative_error, rows

from turbospark.errors import OptionError
from turbospark.kernels.activations import activate_reference
from turbospark.kernels.embedding import embedding_reference
from turbospark.kernels.host.target import HostKernels
from turbospark.kernels.quantized_matmul import quantized_matmul_reference
from turbospark.kernels.rms_norm import rms_norm_reference
from turbospark.kernels.weights import Norm, QuantizedWeight
from turbospark.protocols import Phase
from turbospark.settings import KernelPolicy

PHASES = [Phase.DECODE, Phase.PREFILL]
# exact: float32 in another order than MLX's; pair: 15-bit activations.
TOLERANCES = {"exact": 3e-5, "pair": 3e-3}
T, C, INNER = 19, 96, 160


@functools.cache
def host(mode):
    return HostKernels(KernelPolicy(activations=mode, threads=2))


@functools.cache
def matrix(N, K, seed, bits=4):
    return quantized(N, K, bits, 32, seed=seed, zero=bits == 5)[0]


def vector(N, seed):
    return rows(1, N, seed=seed)[0]


def close(got, expected, mode):
    assert got.dtype == mx.float32
    assert got.shape == expected.shape
    assert relative_error(got, np.array(expected).astype(np.float64)) < TOLERANCES[mode]


def rows_are_independent(run, x, together):
    for first, last in ((0, 1), (18, 19), (2, 9)):
        assert mx.array_equal(run(x[first:last], slice(first, last)), together[first:last])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["exact", "pair"])
def test_normed_projections_of_several_widths(mode, phase):
    weights = [matrix(37, C, 1), matrix(24, C, 2, bits=5), rows(17, C, seed=3)]
    biases = [None, vector(24, 4), None]
    norm, x = Norm(vector(C, 5), 1e-5), rows(T, C, seed=6)
    run = host(mode).normed_projections(norm, weights, biases)
    got = run(x, phase)
    y = rms_norm_reference(x, norm)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        close(got[index], quantized_matmul_reference(y, weight, bias), mode)
        rows_are_independent(lambda part, _, i=index: run(part, phase)[i], x, got[index])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["exact", "pair"])
@pytest.mark.parametrize("post", [False, True])
def test_projected_residual(mode, phase, post):
    weight, bias = matrix(C, INNER, 7), vector(C, 8)
    after = Norm(vector(C, 9), 1e-3) if post else None
    x, residual = rows(T, INNER, seed=10), rows(T, C, seed=11)
    run = host(mode).projected_residual(weight, bias, after)
    got = run(x, residual, phase)
    y = quantized_matmul_reference(x, weight, bias)
    close(got, residual + rms_norm_reference(y, after), mode)
    rows_are_independent(lambda part, which: run(part, residual[which], phase), x, got)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["exact", "pair"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("residual", [True, False])
def test_gated_mlp(mode, phase, activation, residual):
    gate, up, down = matrix(INNER, C, 12), matrix(INNER, C, 13, bits=5), matrix(C, INNER, 14)
    biases = [vector(INNER, 15), None, vector(C, 16)]
    norm, after = Norm(vector(C, 17), 1e-5), Norm(None, 1e-4)
    h = rows(T, C, seed=18)
    args = (norm, gate, up, down, biases, activation, after, residual)
    run = host(mode).gated_mlp(*args)
    got = run(h, phase)
    y = rms_norm_reference(h, norm)
    act = activate_reference(quantized_matmul_reference(y, gate, biases[0]), activation)
    out = quantized_matmul_reference(act * quantized_matmul_reference(y, up), down, biases[2])
    out = rms_norm_reference(out, after)
    close(got, h + out if residual else out, mode)
    rows_are_independent(lambda part, _: run(part, phase), h, got)


@pytest.mark.parametrize("mode", ["exact", "pair"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head(mode, softcap):
    weight, norm, h = matrix(2053, C, 19, bits=5), Norm(vector(C, 20), 1e-5), rows(T, C, seed=21)
    run = host(mode).output_head(norm, weight, None, softcap)
    got = run(h, Phase.DECODE)
    logits = quantized_matmul_reference(rms_norm_reference(h, norm), weight)
    close(got, mx.tanh(logits / softcap) * softcap if softcap else logits, mode)
    rows_are_independent(lambda part, _: run(part, Phase.DECODE), h, got)
    assert mx.array_equal(run(h, Phase.PREFILL), got)


@pytest.mark.parametrize("table", [matrix(41, C, 22), matrix(41, C, 23, bits=5)])
def test_embedding_rows(table):
    tokens = mx.array([40, 0, 7, 7], mx.int32)
    got = host("exact").embedding(table, 2.5)(tokens)
    np.testing.assert_allclose(
        np.array(got), np.array(embedding_reference(tokens, table, 2.5)), rtol=1e-6, atol=1e-6
    )


def test_embedding_rows_of_a_dense_table():
    table, tokens = rows(11, 5).astype(mx.bfloat16), mx.array([10, 3], mx.int32)
    got = host("exact").embedding(table, 1.0)(tokens)
    assert mx.array_equal(got, table[tokens].astype(mx.float32))


def test_embedding_rows_of_four_bit_floats_are_exact():
    words = np.arange(256, dtype=np.uint8).view(np.uint32).reshape(16, 4)  # every pair of codes
    scales = (np.arange(16, dtype=np.uint8) * 16 + 2)[:, None]
    table = QuantizedWeight(mx.array(words), mx.array(scales), None, 4, 32, mode="mxfp4")
    got = host("exact").embedding(table, 1.0)(mx.arange(16))
    assert mx.array_equal(got, embedding_reference(mx.arange(16), table, 1.0))


@pytest.mark.parametrize("token", [-1, 41])
def test_a_token_outside_the_table_is_refused(token):
    run = host("exact").embedding(matrix(41, C, 22), 1.0)
    with pytest.raises(OptionError, match=r"41 rows"):
        run(mx.array([3, token], mx.int32))
