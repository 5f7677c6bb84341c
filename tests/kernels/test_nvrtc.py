"""Modules that MLX finds instead of compiling kernels anew in every process."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from turbospark.kernels.gpu import nvrtc
from turbospark.kernels.gpu.kernel import CUDA

NAMES: dict[str, Any] = {
    "name": "twice",
    "input_names": ["x", "w"],
    "output_names": ["y"],
    "source": "y[0] = x[0] * 2 + w[w_shape[0] - 1];",
    "header": "// none\n",
}
CALL: dict[str, Any] = {
    "inputs": [mx.zeros((3,)), mx.zeros((2,), mx.bfloat16)],
    "output_dtypes": [mx.float32],
    "template": [("T", mx.bfloat16), ("N", 7), ("FLAG", True)],
}
SOURCE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// none
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_twice_bfloat16_t_7_t(
    const float* x,
    const __nv_bfloat16* w,
    const __grid_constant__ Shape w_shape,
    float* y) {
  using T = __nv_bfloat16;
  constexpr int N = 7;
  constexpr bool FLAG = true;

y[0] = x[0] * 2 + w[w_shape[0] - 1];
}

} // namespace mlx::core::cu
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"", 0x553E93901E462A6E),
        (b"a", 0x454DDEE488C1ED6B),
        (b"12345678", 0x8C5B90A33A04DCA5),
        (b"hello, a longer text of odd size", 0xCAA7B3910B6836F6),
    ],
)
def test_the_hash_is_that_of_gnus_library(text: bytes, value: int) -> None:
    assert nvrtc.string_hash(text) == value


def test_name_and_source_are_those_that_mlx_makes() -> None:
    name = nvrtc.kernel_name(NAMES, CALL)
    assert name == "custom_kernel_twice_bfloat16_t_7_t"
    assert nvrtc.kernel_source(name, NAMES, CALL) == SOURCE


def test_names_too_long_for_a_file_become_folders() -> None:
    assert nvrtc.module_path(Path("f"), "a" * 245) == Path("f", "a" * 245 + ".ptx")
    found = nvrtc.module_path(Path("f"), "a" * 245 + "b" * 245 + "c")
    assert found == Path("f", "a" * 245, "b" * 245, "c.ptx")


class Recorder:
    """A compiler that compiles nothing."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.compiled = fails, list[str]()

    def compile(self, source: str, name: str) -> tuple[bytes, str]:
        self.compiled.append(name)
        assert source == SOURCE
        if self.fails:
            raise RuntimeError("no such instruction")
        return b"module", "_Zlowered"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_module_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Recorder()
    monkeypatch.setattr(nvrtc, "_compiler", lambda: compiler)
    for _ in range(2):
        nvrtc.compile_ahead(NAMES, CALL)
    symbol = "mlx::core::cu::custom_kernel_twice_bfloat16_t_7_t"
    assert compiler.compiled == [symbol]
    stem = f"custom_kernel_twice_bfloat16_t_7_t_{nvrtc.string_hash(SOURCE.encode()):x}"
    assert sorted(file.name for file in folder.iterdir()) == [f"{stem}.ptx", f"{stem}.txt"]
    assert (folder / f"{stem}.ptx").read_bytes() == b"module"
    assert (folder / f"{stem}.txt").read_text() == f"{symbol}\t_Zlowered\n"


def test_a_kernel_is_looked_up_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    monkeypatch.setattr(
        nvrtc, "compile_ahead", lambda names, call: looked_up.append(call["template"][1][1])
    )
    kernel = nvrtc.caching(lambda **_names: lambda **call: call["template"])(**NAMES)
    for size in (7, 8, 7):
        template = [("T", mx.bfloat16), ("N", size), ("FLAG", True)]
        assert kernel(**CALL | {"template": template}) == template
    assert looked_up == [7, 8]


def test_what_does_not_compile_is_left_to_mlx(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "_compiler", lambda: Recorder(fails=True))
    nvrtc.compile_ahead(NAMES, CALL)
    assert list(folder.iterdir()) == []


def test_a_dtype_without_a_name_is_left_to_mlx(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "_compiler", Recorder)
    nvrtc.compile_ahead(NAMES, CALL | {"output_dtypes": [mx.complex64]})
    assert list(folder.iterdir()) == []


@pytest.mark.cuda
def test_mlx_takes_the_module_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of another body under the kernel's name: what runs tells which was taken."""
    if not mx.cuda.is_available():
        pytest.skip("MLX has no cuda back end here")
    compiler, folder = nvrtc._compiler(), nvrtc.modules_folder()
    assert compiler is not None

    class Swapped:
        def compile(self, source: str, name: str) -> tuple[bytes, str]:
            return compiler.compile(source.replace("+ 1.0f", "+ 2.0f"), name)

    monkeypatch.setattr(nvrtc, "_compiler", Swapped)
    kernel = CUDA.builder(
        name="swapped_by_a_test",
        input_names=["x"],
        output_names=["y"],
        source="y[threadIdx.x] = x[threadIdx.x] + 1.0f;",
        header="",
    )
    (y,) = kernel(
        inputs=[mx.zeros((32,))],
        template=[("N", 1)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )
    mx.eval(y)
    for file in folder.glob("custom_kernel_swapped_by_a_test*"):
        file.unlink()
    assert y.tolist() == [2.0] * 32
