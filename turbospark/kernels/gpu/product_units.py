"""Units of products on a GPU: the fused launch where it serves, one after the other where not."""

from collections.abc import Sequence

import mlx.core as mx

from turbospark.kernels.activations import activate_reference
from turbospark.kernels.gpu.int4_product import MAX_ROWS
from turbospark.kernels.gpu.products import Products
from turbospark.kernels.gpu.step_sums import StreamSum
from turbospark.kernels.target import AddProjected, Project, Transform
from turbospark.kernels.weights import Activation, Norm, Weight
from turbospark.protocols import Phase


def bind_projections(
    products: Products,
    norm: Norm | None,
    weights: Sequence[Weight],
    biases: Sequence[mx.array | None],
) -> Project | None:
    """A norm, if any, then every projection of the same input."""
    if not products.has_body(weights, norm):
        return None
    fused = products.fused("fused_projections", weights, biases, norm=norm)
    singles = [products.single(w, bias) for w, bias in zip(weights, biases, strict=True)]
    scores = products.scores(norm, weights[0], biases[0]) if len(weights) == 1 else None

    def run(x: mx.array, phase: Phase) -> tuple[mx.array, ...]:
        if scores is not None and phase is Phase.DECODE and x.shape[0] <= MAX_ROWS:
            scored = scores(x)
            if scored is not None:
                return (scored,)
        made = None if fused is None else fused(x, None, phase)
        if made is None:
            y = products.normed(x, norm)
            made = [single(y, phase) for single in singles]
        return tuple(made)

    return run


def bind_residual(
    products: Products, weight: Weight, bias: mx.array | None, post_norm: Norm | None
) -> AddProjected | None:
    """A projection, a norm behind it if any, and the residual."""
    if not products.has_body([weight], post_norm):
        return None
    return _residual(products, weight, bias, post_norm)


def bind_mlp(
    products: Products,
    norms: tuple[Norm | None, Norm | None],
    weights: tuple[Weight, Weight, Weight],
    biases: Sequence[mx.array | None],
    activation: Activation,
    *,
    residual: bool,
) -> Transform | None:
    """A gated MLP between two norms; the stream is added if `residual`."""
    (norm, post_norm), (gate, up, down) = norms, weights
    if not products.has_body(weights, norm, post_norm):
        return None
    fused = products.fused(
        "fused_gate_up", [gate, up], biases[:2], norm=norm, activation=activation
    )
    to_gate, to_up = (products.single(w, b) for w, b in zip((gate, up), biases, strict=False))
    added = _residual(products, down, biases[2], post_norm) if residual else None
    plain = products.single(down, biases[2])

    def run(h: mx.array, phase: Phase) -> mx.array:
        made = None if fused is None else fused(h, None, phase)
        if made is None:
            y = products.normed(h, norm)
            made = [activate_reference(to_gate(y, phase), activation) * to_up(y, phase)]
        if added is not None:
            return added(made[0], h, phase)
        return products.normed(plain(made[0], phase), post_norm)

    return run


def bind_head(
    products: Products,
    norm: Norm | None,
    weight: Weight,
    bias: mx.array | None,
    softcap: float | None,
) -> Transform | None:
    """float32 logits of the rows given."""
    if not products.has_body([weight], norm):
        return None
    fused = products.fused(
        "fused_head", [weight], [bias], norm=norm, softcap=softcap, dtype=mx.float32
    )
    single = products.single(weight, bias, mx.float32)

    def run(h: mx.array, phase: Phase) -> mx.array:
        made = None if fused is None else fused(h, None, phase)
        if made is not None:
            return made[0]
        logits = single(products.normed(h, norm), phase)
        return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    return run


def _residual(
    products: Products, weight: Weight, bias: mx.array | None, post_norm: Norm | None
) -> AddProjected:
    single = products.single(weight, bias)
    fused = (
        products.fused("fused_residual", [weight], [bias], residual=True)
        if post_norm is None
        else None
    )
    factors = products.factors_of_sum(post_norm)

    def run(x: mx.array, residual: mx.array, phase: Phase) -> mx.array:
        residual = products.sums.written(residual)
        made = None if fused is None else fused(x, residual, phase)
        if made is not None:
            return made[0]
        branch = single(x, phase)
        h = products.normed(branch, post_norm, residual)
        if factors is not None and phase is Phase.DECODE and branch.dtype == residual.dtype:
            products.sums.put(h, StreamSum(branch, residual, factors))
        return h

    return run
