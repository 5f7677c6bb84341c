"""Modules that hold weights."""

import mlx.core as mx

from turbospark.nn.linear import RMSNorm


def test_an_offset_is_folded_into_a_norm_once() -> None:
    norm = RMSNorm(5, 1e-6, offset=1.0)
    norm.weight = mx.arange(5).astype(mx.bfloat16)
    folded = norm.value
    assert folded.weight is not None
    assert folded.weight.tolist() == [1, 2, 3, 4, 5]
    assert norm.value.weight is folded.weight
    assert list(norm.parameters()) == ["weight"]


def test_a_new_weight_is_folded_anew() -> None:
    norm = RMSNorm(2, 1e-6, offset=1.0)
    assert norm.value.weight is not None
    norm.weight = mx.zeros((2,))
    weight = norm.value.weight
    assert weight is not None
    assert weight.tolist() == [1, 1]
