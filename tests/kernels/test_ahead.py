"""What a launch brings near for the next one changes no result and stays within its bundle."""

import mlx.core as mx
import pytest
from kernels.cases_gpu import resolve
from kernels.cases_gpu_int4_product import CASES, ProductCase
from kernels.int4_emulation import int4_emulation
from metal_emu.errors import MetalRunError

from turbospark.kernels.gpu.ahead import Ahead, LaunchOrder, reads_ahead
from turbospark.kernels.gpu.int4_mma import int4_mma
from turbospark.kernels.gpu.int4_product import Int4Product
from turbospark.kernels.gpu.kernel import GpuTarget

SMALL, LARGE = (ProductCase(1, (N,), 4096, residual=True) for N in (37, 333))


def target(name: str) -> GpuTarget:
    if name == "emulation":
        return int4_emulation()
    found = resolve(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["emulation", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", [c.in_groups_of_64() for c in CASES], ids=str)
def test_reading_ahead_changes_no_bit(case: ProductCase, name: str) -> None:
    gpu = target(name)
    product, following = case.product().bundled(), LARGE.product().bundled()
    order = LaunchOrder()
    order.note(product)
    order.note(following)
    ahead = order.ahead_of(product)
    assert ahead is not None
    wanted = int4_mma(product, case.x(), case.added(), gpu)
    found = int4_mma(product, case.x(), case.added(), gpu, ahead=ahead)
    assert all(map(mx.array_equal, found, wanted))


def test_reading_behind_a_bundle_is_seen() -> None:
    case = CASES[0].in_groups_of_64()
    product, following = case.product().bundled(), LARGE.product().bundled()
    assert following.bundle is not None
    words = following.bundle.words
    whole = Ahead(words, 0, 4 * words.size // 4096 * 4096)
    int4_mma(product, case.x(), None, int4_emulation(), ahead=whole)
    shifted = Ahead(words, words.size // 2048 * 1024, whole.nbytes)
    with pytest.raises(MetalRunError, match="out of bounds"):
        int4_mma(product, case.x(), None, int4_emulation(), ahead=shifted)


def test_an_order_is_learnt_and_followed_round() -> None:
    first, second, third = (SMALL.product().bundled() for _ in range(3))
    order = LaunchOrder()
    assert order.ahead_of(first) is None
    for product in (first, second, third, first):
        order.note(product)
    for before, after in ((first, second), (second, third), (third, first)):
        ahead = order.ahead_of(before)
        assert ahead is not None
        assert after.bundle is not None
        assert ahead.words is after.bundle.words


def test_products_of_one_bundle_are_read_from_where_they_begin() -> None:
    one, other = LARGE.product(), LARGE.product()
    joined = Int4Product(one.weights + other.weights, (None, None)).bundled()
    assert joined.bundle is not None
    parts = [
        Int4Product((w,), (None,), residual=True, bundle=joined.bundle) for w in joined.weights
    ]
    order = LaunchOrder()
    for part in parts:
        order.note(part)
    ahead = order.ahead_of(parts[0], limit=10_000)
    assert ahead is not None
    assert ahead.first == joined.bundle.place(parts[1].weights[0].codes)
    assert ahead.nbytes == 8192


def test_what_lies_in_no_bundle_is_left_alone() -> None:
    order = LaunchOrder()
    loose, bundled = SMALL.product(), SMALL.product().bundled()
    order.note(bundled)
    order.note(loose)
    assert order.ahead_of(bundled) is None


def test_a_cpu_reads_nothing_ahead() -> None:
    if mx.default_device() == mx.cpu:
        assert not reads_ahead()
