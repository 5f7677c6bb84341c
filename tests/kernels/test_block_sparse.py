"""The index of block-sparse attention and the rows it chooses, against plain loops."""

import mlx.core as mx
import numpy as np
import pytest
from kernels.host_bodies import ISAS, host_kernels

from turbospark.caches.kv import KVCache
from turbospark.errors import ShapeError
from turbospark.kernels.attention import attend_reference
from turbospark.kernels.block_sparse import (
    IndexGeometry,
    attend_at_reference,
    best_blocks_reference,
    block_scores_reference,
    chosen_rows_reference,
    pooled_keys_reference,
    rows_at,
)
from turbospark.kernels.kv_rows import StepRows
from turbospark.kernels.rope import Rope, rope_reference
from turbospark.kernels.target import HeadGeometry
from turbospark.kernels.weights import Norm
from turbospark.protocols import Phase


def draw(*shape, seed=1):
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def best_by_sorting(scores, visible, count):
    order = np.lexsort((np.arange(visible), -scores[:visible]))
    return sorted(order[:count].tolist())


@pytest.mark.parametrize("levels", [1, 2, 3, 50])
@pytest.mark.parametrize(("n", "count"), [(13, 4), (13, 13), (5, 7), (64, 9)])
def test_equal_scores_are_taken_by_the_lowest_block(levels, n, count):
    rng = np.random.default_rng(n + levels)
    scores = rng.integers(0, levels, size=(11, n)).astype(np.float32)
    visible = rng.integers(0, n + 1, size=11).astype(np.int32)
    chosen = np.array(best_blocks_reference(mx.array(scores), mx.array(visible), count))
    for row in range(11):
        wanted = best_by_sorting(scores[row], visible[row], count)
        assert chosen[row].tolist() == wanted + [n] * (count - len(wanted))


def test_all_zeros_choose_the_first_blocks():
    chosen = best_blocks_reference(mx.zeros((2, 9)), mx.array([9, 6]), 3)
    assert np.array(chosen).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_scores_are_sums_of_positive_products():
    q, keys = draw(5, 3, 8), draw(7, 8, seed=2)
    got = np.array(block_scores_reference(q, keys))
    products = np.einsum("thd,nd->thn", np.array(q, np.float64), np.array(keys, np.float64))
    np.testing.assert_allclose(got, np.maximum(products, 0).sum(axis=1) / 8**0.5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 3, 17])
@pytest.mark.parametrize("count", [1, 9, 33, 200])
def test_scores_do_not_depend_on_neighbours(T, count):
    q, keys = draw(20, 4, 16), draw(200, 16, seed=2)
    whole = np.array(block_scores_reference(q, keys))
    part = np.array(block_scores_reference(q[2 : 2 + T], keys[:count]))
    assert np.array_equal(part, whole[2 : 2 + T, :count])


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[23], [1] * 23, [5, 2, 16]])
def test_a_block_gets_its_key_with_its_last_row(ratio, sizes):
    raw, norm = draw(23, 6), Norm(1 + draw(6, seed=3) / 4, 1e-5)
    rope = Rope.build("default", 100.0, 6, partial_rotary_factor=2 / 3)
    rope = Rope(rope.inv_freq, 6)
    before, at, found = mx.zeros((ratio - 1, 6)), 0, []
    for size in sizes:
        rows = raw[at : at + size]
        found.append(pooled_keys_reference(rows, before, norm, rope, at))
        at += size
        before = mx.concatenate([mx.zeros((ratio, 6)), raw[:at]])[ratio + at - (ratio - 1) :]
    got = np.array(mx.concatenate(found))
    for end in range(23):
        if (end + 1) % ratio:
            assert not got[end].any()
            continue
        first = end + 1 - ratio
        mean = np.array(raw)[first : end + 1].mean(axis=0)
        scaled = mean / np.sqrt((mean**2).mean() + 1e-5) * np.array(norm.weight)
        turned = rope_reference(mx.array(scaled)[None, None], rope, first)[0, 0]
        np.testing.assert_allclose(got[end], np.array(turned), atol=1e-5)


@pytest.mark.parametrize("count", [3, 5])
def test_rows_of_chosen_blocks_and_the_rest_are_read(count):
    blocks = mx.array([[0, 2, 5], [1, 3, 4]], mx.int32)[:, :count]
    positions, counts = chosen_rows_reference(blocks, mx.array([22, 19], mx.int32), 4, 5)
    rows = [np.array(p)[np.array(c)].tolist() for p, c in zip(positions, counts, strict=True)]
    assert rows[0] == [0, 1, 2, 3, 8, 9, 10, 11, 20, 21, 22]
    assert rows[1] == [4, 5, 6, 7, 12, 13, 14, 15, 16, 17, 18, 19]


def filled(count, heads=2, dim=5, chunk=37):
    cache, k, v = KVCache(heads, dim, 512), draw(count, heads, dim), draw(count, heads, dim, seed=7)
    for start in range(0, count, chunk):
        cache.append(k[start : start + chunk], v[start : start + chunk])
    return cache, k, v


@pytest.mark.parametrize("count", [9, 128, 150, 300])
def test_rows_are_found_in_sealed_rows_and_tail(count):
    cache, k, v = filled(count)
    positions = mx.array(np.random.default_rng(2).integers(0, count, size=(3, 11)).astype(np.int32))
    for name, wanted in (("k", k), ("v", v)):
        got = rows_at(cache.rows(), name, positions)
        assert np.array_equal(got, wanted[positions].transpose(2, 0, 1, 3))


@pytest.mark.parametrize("count", [150, 300])
def test_rows_inside_a_compiled_step_are_the_same(count):
    cache, k, _ = filled(count)
    sealed, tail, boundary = cache.step_blocks(1)
    rows = StepRows(sealed, tail, mx.array([boundary, count], mx.int32))
    positions = mx.array(np.arange(count, dtype=np.int32))
    assert np.array_equal(rows_at(rows, "k", positions), k.swapaxes(0, 1))


@pytest.mark.parametrize("T", [1, 5, 40])
def test_attention_to_all_rows_is_plain_attention(T):
    cache, _, _ = filled(90)
    q = draw(T, 6, 5, seed=9)
    wanted = attend_reference(q, cache.rows(), 0.3)
    queries = mx.arange(90 - T, 90)
    positions = mx.broadcast_to(mx.arange(95), (T, 95))
    got = attend_at_reference(q, cache.rows(), positions, positions <= queries[:, None], 0.3)
    np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-5)


def test_what_does_not_count_adds_nothing_even_where_it_is_no_number():
    cache, _, _ = filled(9)
    rows = cache.rows()
    rows.tail.v[:, 9:] = mx.nan
    positions = mx.array([[0, 3, 40]], mx.int32)
    counts = mx.array([[True, True, False]])
    got = attend_at_reference(draw(1, 2, 5, seed=9), rows, positions, counts, 0.3)
    less = attend_at_reference(draw(1, 2, 5, seed=9), rows, positions[:, :2], counts[:, :2], 0.3)
    np.testing.assert_allclose(np.array(got), np.array(less), atol=1e-6)


def test_the_rows_that_are_read_without_a_choice():
    index = IndexGeometry(3, 8, 12, 4)
    assert (index.blocks, index.dense_rows) == (3, 15)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [40, 150, 300])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_host_attends_to_chosen_rows_where_they_lie(isa, count, rows):
    """Bit for bit as if they had been gathered into a cache of their own."""
    heads, kernels = HeadGeometry(6, 2, 21), host_kernels(isa)
    cache, k, v = filled(count, 2, 21)
    rng = np.random.default_rng(count)
    positions = np.array([rng.permutation(count)[:37] for _ in range(rows)], np.int32)
    lengths = [37, 1, 20][:rows]
    q = draw(rows, 6, 21, seed=9)
    got = kernels.attend_chosen(heads, 0.3)(q, cache.rows(), mx.array(positions), lengths)
    attend = kernels.attend(heads, 0.3, None, None)
    for row, length in enumerate(lengths):
        own = KVCache(2, 21, 64)
        chosen = mx.array(positions[row, :length])
        own.append(k[chosen], v[chosen])
        wanted = attend(q[row : row + 1], own, Phase.DECODE)
        assert np.array_equal(got[row : row + 1], wanted)
    exact = attend_at_reference(
        q, cache.rows(), mx.array(positions),
        mx.arange(37)[None] < mx.array(lengths)[:, None], 0.3,
    )  # fmt: skip
    np.testing.assert_allclose(np.array(got), np.array(exact), atol=1e-5)


@pytest.mark.parametrize("lengths", [[0, 3], [3, 38], [3]])
def test_the_host_refuses_lengths_that_no_row_has(lengths):
    cache, _, _ = filled(40, 2, 21)
    attend = host_kernels(ISAS[0]).attend_chosen(HeadGeometry(6, 2, 21), 0.3)
    with pytest.raises(ShapeError):
        attend(draw(2, 6, 21), cache.rows(), mx.zeros((2, 37), mx.int32), lengths)
