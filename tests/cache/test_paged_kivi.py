"""KIVI's codes in pages: the same codes wherever they lie; missing pages, shared rows, bytes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache.kivi_rows import SMALL, append, assert_same, draw, empty, fill, live, tokens_of
from quick import rest_slow

from kvjax import sizing
from kvjax.cache import CapacityError, Kivi, KiviCache, Paged, Record, init_layer_cache
from kvjax.ops import attend


def shuffled(cache: KiviCache) -> KiviCache:
    """Whose rows have their pages in no order."""
    entries = np.random.default_rng(1).permutation(cache.page_table.size)
    table = jnp.asarray(entries.reshape(cache.page_table.shape), jnp.int32)
    return replace(cache, page_table=table)


@pytest.mark.parametrize("page_size", rest_slow([4, 12], [12]))
def test_codes_are_those_of_the_dense_layout(page_size):
    """Whatever the steps and the order of the pages; and so is what attention gives."""
    record, lengths = draw(2, 2, 40, 8), (40, 21)
    dense = fill(empty(), record, lengths, [40])
    paged = fill(shuffled(empty(layout=Paged(page_size))), record, lengths, (7, 1, 1, 9))
    q = np.random.default_rng(5).normal(size=(2, 1, 4, 8)).astype(np.float32)
    positions = np.array(lengths)[:, None] - 1
    for x, y in zip(attend(q, paged, positions), attend(q, dense, positions), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    for row in (0, 1):
        assert_same(live(paged, row), live(dense, row))
        found, expected = tokens_of(paged, row), tokens_of(dense, row)
        for position, (_, *parts) in found.items():
            for x, y in zip(parts, expected[position][1:], strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("missing", rest_slow([-1, 3, 99], [-1, 3]))
def test_a_page_that_is_none_is_neither_read_nor_written(missing):
    """Three pages of a group; row 0 has two and then none, row 1 has none at all."""
    record, table = draw(2, 2, 21, 8), [[2, 0, missing], [missing] * 3]
    cache = replace(
        empty(capacity=12, layout=Paged(4, num_pages=3)), page_table=jnp.array(table, jnp.int32)
    )
    assert cache.capacity == 20
    cache = fill(cache, record, (16, 8), [16])
    before = jax.tree.map(np.asarray, cache.leaves)
    assert not before["k"][1].any()
    new = Record(*(x[:, :, 16:21] for x in record))
    with pytest.raises(
        CapacityError, match=r"room for \[16, 8\].*hold \[16, 8\].*take \[1, 1\] more"
    ):
        cache.append(Record(*(x[:, :, :1] for x in new)), jnp.array([1, 1]))
    after = append(cache, new, jnp.array([5, 0]))
    assert (after.n.tolist(), after.overflow.tolist()) == ([16, 8], [True, False])
    after = append(after, new, jnp.array([0, 1]))
    assert (after.n.tolist(), after.overflow.tolist()) == ([16, 8], [True, True])
    assert_same(before, jax.tree.map(np.asarray, after.leaves))
    with pytest.raises(CapacityError, match=r"rows \[0, 1\] dropped.*room for \[16, 8\]"):
        after.check()
    tokens_of(after, 0), tokens_of(after, 1)


def test_a_hole_inside_the_length_is_masked():
    cache = fill(empty(batch=1, layout=Paged(4)), draw(1, 2, 24, 8), [24], [24])
    holed = replace(cache, page_table=cache.page_table.at[0, 1].set(-1))
    blocks = [holed.block(jnp.int32(i)).pos for i in range(int(holed.blocks()))]
    held = sorted(int(p) for pos in blocks for p in pos.ravel() if p >= 0)
    assert held == [p for p in range(24) if p not in range(4, 8)]


def test_rows_share_pages():
    cache = fill(empty(layout=Paged(8)), draw(2, 2, 30, 8), (30, 13), [30])
    chosen = cache.select(jnp.array([1, 0, 0]))
    assert chosen.leaves["k"].shape == cache.leaves["k"].shape
    for new, old in enumerate((1, 0, 0)):
        assert_same(live(chosen, new), live(cache, old))
    assert chosen.rollback(jnp.array([0, 1, 0])).n.tolist() == [13, 29, 30]
    with pytest.raises(ValueError, match=r"of which \[8, 24, 24\] are codes"):
        chosen.rollback(jnp.array([0, 2, 0]))


@pytest.mark.parametrize("capacity", [1, 8, 9, 13, 40])
@pytest.mark.parametrize("page_size", [4, 12])
def test_bytes_are_those_of_sizing(capacity, page_size):
    """Pages hold all but the residual, and the table names these pages alone."""
    cache = init_layer_cache(
        3, capacity, kv_heads=2, key_dim=8, value_dim=16, layout=Paged(page_size), codec=SMALL
    )
    spec = sizing.ModelSpec("test", 64, (sizing.LayerSpec(2, 2, 8, 16),))
    said = spec.cache_bytes(capacity, 3, SMALL.spec, page_size=page_size)
    assert cache.nbytes == said.allocated + said.tables
    pages = -(-max(capacity - 8, 0) // page_size)
    assert said.tables == 3 * (5 + 4 * pages)
    assert cache.capacity == 8 + pages * page_size >= capacity


def test_fewer_pages_than_rows_take_are_refused():
    with pytest.raises(
        ValueError, match="num_pages=3: 2 rows of 12 tokens of codes take 4 pages of 8"
    ):
        empty(capacity=20, layout=Paged(8, num_pages=3))
    assert len(empty(capacity=20, layout=Paged(8, num_pages=9)).leaves["k"]) == 9


@pytest.mark.parametrize("tokens", rest_slow([1, 8], [8]))
def test_a_step_writes_in_place_whatever_the_pool(tokens):
    """The donated pool is handed through, and temporaries do not grow with it."""

    def step(cache, record, q, count):
        attended, _ = attend(q, cache, cache.n[:, None] + jnp.arange(tokens))
        attended, cache = jax.lax.optimization_barrier((attended, cache))
        return attended, cache.append(record, count)

    def memory(capacity):
        codec = Kivi(2, group=32, residual=128)
        cache = jax.eval_shape(lambda: empty(codec, 2, capacity, 2, 32, Paged(64)))
        k = jax.ShapeDtypeStruct((2, 2, tokens, 32), jnp.float32)
        q = jax.ShapeDtypeStruct((2, tokens, 8, 32), jnp.float32)
        count = jax.ShapeDtypeStruct((2,), jnp.int32)
        compiled = jax.jit(step, donate_argnums=0).lower(cache, Record(k, k), q, count).compile()
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        return nbytes, compiled.memory_analysis()

    nbytes, short = memory(8192)
    assert short.alias_size_in_bytes == nbytes
    assert abs(memory(65536)[1].temp_size_in_bytes - short.temp_size_in_bytes) <= 64 * 1024
