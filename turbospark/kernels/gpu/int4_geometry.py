"""How products with 4-bit weights are cut up, for each target: one table."""

import functools
import re
from dataclasses import dataclass

import mlx.core as mx

from turbospark.kernels.gpu.int4_product import Int4Product


@dataclass(frozen=True, slots=True)
class VectorGeometry:
    """Of int4_gemv: columns a SIMD-group, SIMD-groups a threadgroup, words of 8 codes a lane."""

    rows: int
    simdgroups: int
    words: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the table is keyed by.

    Attributes:
        name: the target: metal, cuda, or that of a test.
        generation: of an Apple GPU: 13 is M1, 17 is M5; 0 elsewhere.
        is_large: an Apple chip of the classes Max and Ultra.
    """

    name: str
    generation: int = 0
    is_large: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    """A line of the table: the first one that fits a launch decides.

    Attributes:
        cut: columns a SIMD-group and SIMD-groups a threadgroup.
        target: its name, or empty for any.
        oldest, newest: generations.
        large: only chips of that class, or None.
        few: only weights of fewer columns than this, or of at most `short` values a column.
        rows: only launches of so many rows of x or more.
    """

    cut: tuple[int, int]
    target: str = ""
    oldest: int = 0
    newest: int = 99
    large: bool | None = None
    few: int = 0
    short: int = 0
    rows: int = 1


# Public sweeps on Apple GPUs: 4 columns by 8 SIMD-groups for large weights; short or few columns
# want more threadgroups, which M1 and M2 fill with more SIMD-groups; many rows of x want fewer
# registers. On CUDA this body stands in where the tensor cores' does not serve.
_TABLE = (
    _Rule((1, 4), few=512),
    _Rule((1, 8), target="cuda", few=4096, rows=5),
    _Rule((2, 8), target="cuda", rows=5),
    _Rule((2, 8), newest=14, target="metal", few=2048, short=2048),
    _Rule((1, 4), oldest=15, target="metal", large=True, few=2048, short=1024),
    _Rule((2, 4), few=2048, short=2048),
    _Rule((2, 8), rows=5),
    _Rule((4, 8)),
)
_LIVE_FLOATS = 80  # of a lane, beyond which registers spill on Apple GPUs


def vector_geometry(target: str, product: Int4Product, rows: int) -> VectorGeometry:
    """The cut of int4_gemv for so many rows of x; what orders the sums does not depend on them."""
    gpu, inner = _gpu(target), product.inner
    columns = sum(product.widths[: product.parts])
    matrices = len(product.weights) // product.parts
    cuts = (rule.cut for rule in _TABLE if _fits(rule, gpu, columns, inner, rows))
    per_group, simdgroups = next(cuts)
    per_group = max(1, per_group // matrices)
    while per_group > 1 and rows * (8 + matrices * per_group) > _LIVE_FLOATS:
        per_group //= 2
    return VectorGeometry(per_group, simdgroups, 2 if inner % 512 == 0 else 1)


def _fits(rule: _Rule, gpu: Gpu, columns: int, inner: int, rows: int) -> bool:
    is_small = columns < rule.few or inner <= rule.short
    return (
        rule.target in ("", gpu.name)
        and rule.oldest <= gpu.generation <= rule.newest
        and rule.large in (None, gpu.is_large)
        and (is_small or not (rule.few or rule.short))
        and rows >= rule.rows
    )


@functools.cache
def _gpu(target: str) -> Gpu:
    if target != "metal":
        return Gpu(target)
    info = mx.device_info()
    found = re.match(r"applegpu_g(\d+)(\w)", str(info.get("architecture", "")))
    name = str(info.get("device_name", ""))
    return Gpu(target, int(found[1]) if found else 0, "Max" in name or "Ultra" in name)
