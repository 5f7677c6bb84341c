"""The emulator's Metal agrees with Metal: source text, vectors, scans, atomics."""

import subprocess
import sys

import mlx.core as mx
import pytest

from metal_emu import metal_kernel, require_emulator

EXPORT = """
import sys
import mlx.core as mx
from metal_emu import assemble

body = "uint i = thread_position_in_grid.x; y[i] = T(x[i] * s) + x_shape[0] + x_strides[0] + z[0]"
body += " + x_ndim; // threads_per_simdgroup"
inputs = {"x": mx.ones((16, 2)), "s": mx.array(2.0), "z": mx.zeros((3,), mx.uint8)}
outputs = {"y": mx.bfloat16, "w": mx.int64}
template = [("T", mx.bfloat16), ("N", 3), ("B", True)]
kernel = mx.fast.metal_kernel("foo", list(inputs), list(outputs), body, header="// header\\n")

def call(*arrays):
    return kernel(inputs=list(arrays), template=template, grid=(8, 1, 1), threadgroup=(8, 1, 1),
                  output_shapes=[(8,), (2,)], output_dtypes=list(outputs.values()), verbose=True)

mx.export_function(sys.argv[1], call, *inputs.values())
sys.stdout.flush()
print("=====")
print(assemble("foo", inputs, outputs, body, header="// header\\n", template=template).source)
"""


def test_source_is_what_mlx_assembles(tmp_path) -> None:
    """MLX prints the source it made when a call is exported, which needs no Metal."""
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, str(tmp_path / "call.mlxfn")],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    theirs, ours = done.stdout.split("=====\n")
    assert theirs.split("```")[1].split() == ours.split()


def test_vectors_scans_and_shuffles() -> None:
    require_emulator()
    body = """
        uint i = thread_position_in_grid.x;
        float4 a = *(const device float4*)(x + 4 * i);
        half4 h = half4(a);
        float2 p = float2(h.xz);
        float4 b(a.wzyx);
        uint4 u = as_type<uint4>(float4(p, 1.0, 2.0));
        float s = dot(a, b) + float(h.y) + select(0.0f, 1.0f, u.z == 0x3f800000u);
        s += simd_prefix_exclusive_sum(1.0f) + simd_broadcast(float(i), 3);
        s += simd_shuffle_down(s, 1) * 0 + metal::precise::exp(0.0f) + (simd_any(i == 5) ? 1 : 0);
        y[i] = s;"""
    x = mx.arange(128).astype(mx.float32)
    (y,) = metal_kernel("vectors", ["x"], ["y"], body)(
        inputs=[x],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )
    a = x.reshape(32, 4)
    assert mx.allclose(y, (a * a[:, ::-1]).sum(-1) + a[:, 1] + 1 + mx.arange(32) + 3 + 1 + 1)


def test_matrix_product_of_a_simdgroup() -> None:
    require_emulator()
    body = """
        simdgroup_matrix<float, 8, 8> a, b, c;
        simdgroup_load(a, x, 8);
        simdgroup_load(b, x + 64, 8);
        simdgroup_multiply(c, a, b);
        simdgroup_store(c, y, 8);"""
    x = mx.random.normal((2, 8, 8))
    (y,) = metal_kernel("matrix", ["x"], ["y"], body)(
        inputs=[x],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
    )
    assert mx.allclose(y, x[0] @ x[1], atol=1e-5)


def test_atomics_add_up() -> None:
    require_emulator()
    body = (
        "uint i = thread_position_in_grid.x; "
        "atomic_fetch_add_explicit(&y[i % 3], x[i], memory_order_relaxed);"
    )
    (y,) = metal_kernel("atomics", ["x"], ["y"], body, atomic_outputs=True)(
        inputs=[mx.ones(64)],
        grid=(64, 1, 1),
        threadgroup=(16, 1, 1),
        output_shapes=[(3,)],
        output_dtypes=[mx.float32],
        init_value=0,
    )
    assert y.tolist() == [22, 21, 21]


@pytest.mark.parametrize("order", [0, 1, 5])
def test_reductions_do_not_depend_on_whose_turn_it_is(order: int) -> None:
    require_emulator()
    body = "uint i = thread_position_in_grid.x; y[i] = simd_sum(x[i]) + simd_max(x[i]);"
    x = mx.random.normal((96,))
    (y,) = metal_kernel("reduce", ["x"], ["y"], body, order=order)(
        inputs=[x],
        grid=(96, 1, 1),
        threadgroup=(96, 1, 1),
        output_shapes=[(96,)],
        output_dtypes=[mx.float32],
    )
    rows = x.reshape(3, 32)
    want = rows.sum(-1, keepdims=True) + rows.max(-1, keepdims=True)
    assert mx.allclose(y.reshape(3, 32), mx.broadcast_to(want, (3, 32)), atol=1e-5)
