from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from kernels.cases_gpu import BACKWARDS, EMULATION, ROUNDING, TARGETS, mutated, resolve
from kernels.matrices import relative_error
from metal_emu import MetalRunError, require_emulator

from turbospark.caches.ring import RingCache
from turbospark.errors import ShapeError
from turbospark.kernels.gpu.attention_decode import attention_decode
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.kv_rows import KVRows, RowBlock

SCALE = 0.3
SLACK = 8


@dataclass(frozen=True)
class AttentionCase:
    """Positions [first, boundary) are sealed, [boundary, end) are in the tail."""

    T: int
    heads: tuple[int, int]  # query, key/value
    D: int
    end: int
    boundary: int
    first: int = 0
    sealed: int = 0  # capacities; 0 for no block
    tail: int = 0
    window: int | None = None
    sinks: bool = False
    dtype: mx.Dtype = mx.float32
    kv_dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        sizes = f"T{self.T}-H{self.heads[0]}:{self.heads[1]}-D{self.D}-{self.boundary}:{self.end}"
        kinds = f"-{self.dtype}-{self.kv_dtype}".replace("mlx.core.", "")
        ring = f"-ring{self.sealed}" if self.first else ""
        window = f"-w{self.window}" if self.window else ""
        return sizes + ring + window + ("-sinks" if self.sinks else "") + kinds

    def arrays(self) -> dict[str, np.ndarray]:
        """Queries, all rows by position, sinks: as the dtypes of the case hold them."""
        rng = np.random.default_rng(self.end)
        Hq, Hkv = self.heads
        drawn = {
            "q": (rng.normal(size=(self.T, Hq, self.D)), self.dtype),
            "k": (rng.normal(size=(Hkv, self.end, self.D)), self.kv_dtype),
            "v": (rng.normal(size=(Hkv, self.end, self.D)), self.kv_dtype),
            "sinks": (2 + rng.normal(size=Hq), mx.float32),
        }
        return {
            name: np.array(mx.array(a.astype(np.float32)).astype(dtype).astype(mx.float32))
            for name, (a, dtype) in drawn.items()
        }

    def rows(self) -> KVRows:
        """The cache's rows; rows that no position names hold NaN."""
        k, v = (self.arrays()[name] for name in ("k", "v"))
        positions = np.arange(self.first, self.boundary)
        sealed = self._block(k, v, self.sealed, positions, positions % max(self.sealed, 1))
        positions = np.arange(self.boundary, self.end)
        tail = self._block(k, v, self.tail, positions, positions - self.boundary)
        return KVRows(sealed, tail, self.first, self.boundary, self.end)

    def _block(self, k, v, capacity: int, positions, slots) -> RowBlock | None:
        if capacity == 0:
            return None
        arrays = []
        for values in (k, v):
            block = np.full((self.heads[1], capacity, self.D), np.nan, np.float32)
            block[:, slots] = values[:, positions]
            arrays.append(mx.array(block).astype(self.kv_dtype))
        return RowBlock(*arrays)

    def expected(self) -> np.ndarray:
        a = {name: values.astype(np.float64) for name, values in self.arrays().items()}
        Hq, Hkv = self.heads
        out = np.zeros((self.T, Hq, self.D))
        for t in range(self.T):
            position = self.end - self.T + t
            start = 0 if self.window is None else max(0, position - self.window + 1)
            for h in range(Hq):
                k, v = (a[name][h * Hkv // Hq, start : position + 1] for name in ("k", "v"))
                scores = k @ a["q"][t, h] * SCALE
                top = max(scores.max(), a["sinks"][h])
                weights = np.exp(scores - top)
                sink = np.exp(a["sinks"][h] - top) if self.sinks else 0.0
                out[t, h] = weights @ v / (weights.sum() + sink)
        return out.reshape(self.T, -1)

    def run(self, target: GpuTarget | None) -> mx.array:
        a = self.arrays()
        q = mx.array(a["q"]).astype(self.dtype)
        sinks = mx.array(a["sinks"]) if self.sinks else None
        return attention_decode(q, self.rows(), SCALE, self.window, sinks, target=target)

    def error(self, target: GpuTarget | None) -> float:
        y = self.run(target)
        assert y.dtype == self.dtype
        return relative_error(y.astype(mx.float32), self.expected())


BF16, F16 = mx.bfloat16, mx.float16
CASES = [
    AttentionCase(1, (3, 3), 64, end=1, boundary=0, tail=128),
    AttentionCase(1, (6, 2), 96, end=131, boundary=128, sealed=128, tail=7),
    AttentionCase(2, (4, 1), 80, end=257, boundary=257, sealed=260, dtype=F16, kv_dtype=F16),
    AttentionCase(3, (5, 1), 128, 300, 256, sealed=384, tail=128, dtype=BF16, kv_dtype=BF16),
    AttentionCase(5, (7, 1), 64, 150, 128, sealed=256, tail=128, sinks=True, kv_dtype=F16),
    AttentionCase(1, (2, 1), 512, 140, 128, sealed=128, tail=128, dtype=F16, kv_dtype=BF16),
    AttentionCase(2, (10, 2), 256, 37, 0, tail=128, sinks=True),
    # Windows: over whole blocks, and rings that have wrapped.
    AttentionCase(4, (4, 2), 64, 290, 256, sealed=256, tail=128, window=131, sinks=True),
    AttentionCase(3, (6, 3), 96, 413, 400, first=261, sealed=139, tail=17, window=130),
    AttentionCase(8, (3, 1), 32, 61, 58, first=36, sealed=22, tail=128, window=11),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_softmax_over_the_keys_seen(case: AttentionCase, target: str) -> None:
    assert case.error(resolve(target)) < SLACK * ROUNDING[case.dtype]


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("case", [CASES[3], CASES[7], CASES[8]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(case: AttentionCase, target: str) -> None:
    gpu = resolve(target)
    together, rows = case.run(gpu), case.rows()
    q = mx.array(case.arrays()["q"]).astype(case.dtype)
    sinks = mx.array(case.arrays()["sinks"]) if case.sinks else None
    for t in range(case.T):
        until = rows._replace(end=case.end - case.T + t + 1)
        alone = attention_decode(q[t : t + 1], until, SCALE, case.window, sinks, target=gpu)
        assert mx.array_equal(together[t : t + 1], alone)


def test_rows_that_straddle_a_chunk_equal_single_rows() -> None:
    """The verify begins a chunk more than its first rows alone, and ends one later."""
    case = AttentionCase(5, (2, 1), 32, 259, 256, sealed=256, tail=128, window=130)
    test_a_row_does_not_depend_on_its_neighbours(case, "emulation")


def test_order_of_threads_does_not_change_a_bit() -> None:
    require_emulator()
    assert mx.array_equal(CASES[7].run(EMULATION), CASES[7].run(BACKWARDS))


@pytest.mark.parametrize("target", TARGETS)
def test_the_rows_of_a_ring_cache_serve(target: str) -> None:
    cache = RingCache(1, 32, max_context=1000, window=150, slack=20)
    chunk = AttentionCase(1, (1, 1), 32, end=500, boundary=0).arrays()
    k, v = (mx.array(chunk[name]).swapaxes(0, 1) for name in ("k", "v"))
    for start in range(0, 500, 125):
        cache.append(k[start : start + 125], v[start : start + 125])
    q = mx.array(np.random.default_rng(0).normal(size=(3, 1, 32)).astype(np.float32))
    found = attention_decode(q, cache.rows(), SCALE, 150, target=resolve(target))
    scores = (q[:, 0] @ k[:, 0].T) * SCALE
    keys, queries = mx.arange(500), mx.arange(497, 500)[:, None]
    seen = (keys <= queries) & (keys > queries - 150)
    wanted = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1) @ v[:, 0]
    assert relative_error(found, np.array(wanted)) < SLACK * ROUNDING[mx.float32]


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
SCORES = "score[t * CHUNK + j] = is_seen ? dot[t] : masked;\n    }\n  }\n}\n"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "what"),
    [
        ("partials", SCORES + BARRIER, SCORES, "race on|uninitialised"),
        ("partials", "if (i < M * SHARE) {", "{", "out of bounds|conflicting"),
        ("partials", "p >= low && p < high", "p >= low", None),
        ("partials", "slot - sealed_capacity)", "slot)", "out of bounds"),
        ("partials", "i % SHARE", "0 * i", "conflicting|never written"),
        ("partials", "|| p > position - WINDOW", "|| p > position - WINDOW - 1", None),
        ("partials", "p <= position &&", "", None),
        ("partials", "* scale[0]", "", None),
        ("combine", "if (thread_index_in_simdgroup == 0)", "", "race on|conflicting"),
        ("combine", "group == 0 ? sum[i] : joined[column + i] + sum[i]", "sum[i]", None),
        ("combine", "metal::fma(weight, totals[n], total)", "total + totals[n]", None),
        ("combine", "metal::fast::exp(sink - top)", "0.0f", None),
    ],
)
def test_a_planted_mutation_is_caught(kernel: str, old: str, new: str, what: str | None) -> None:
    # A ring that wraps inside the chunk, and two tiles of queries, the second one partial.
    case = replace(CASES[9], sinks=True)
    target = mutated(f"attention_{kernel}", old, new)
    if what is None:
        assert not case.error(target) < SLACK * ROUNDING[case.dtype]
    else:
        with pytest.raises(MetalRunError, match=what):
            case.error(target)


def test_shapes_that_have_no_body_are_refused() -> None:
    rows = CASES[1].rows()
    for q in (mx.zeros((9, 6, 96)), mx.zeros((6, 96)), mx.zeros((0, 6, 96))):
        with pytest.raises(ShapeError, match="takes 1 to 8 query rows"):
            attention_decode(q, rows, SCALE)
    for q in (mx.zeros((1, 6, 64)), mx.zeros((1, 5, 96))):
        with pytest.raises(ShapeError, match="takes head dimensions"):
            attention_decode(q, rows, SCALE)
    with pytest.raises(ShapeError, match=r"takes sinks \(6,\)"):
        attention_decode(mx.zeros((1, 6, 96)), rows, SCALE, sinks=mx.zeros(5))
    with pytest.raises(ShapeError, match="holds none before 261"):
        attention_decode(mx.zeros((1, 6, 96)), CASES[8].rows(), SCALE, None)
