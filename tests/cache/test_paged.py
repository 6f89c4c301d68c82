"""Pages in any order: shuffled tables, missing pages, stale entries, shared rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CapacityError, Paged, PagedCache, Record
from kvjax.cache import paged as paged_module
from kvjax.cache.codecs import build_codec

HEADS, DIM = 2, 4


def empty(batch: int, capacity: int, pages: Paged, codec: str = "f32") -> PagedCache:
    return PagedCache.init(batch, capacity, pages, HEADS, DIM, DIM, build_codec(codec, DIM, DIM))


def record(batch: int, tokens: int, seed: int = 0) -> Record:
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, batch, HEADS, tokens, DIM)).astype(np.float32)
    return Record(jnp.asarray(k), jnp.asarray(v))


append = jax.jit(PagedCache.append)


def read(cache: PagedCache, row: int) -> dict[int, np.ndarray]:
    """Position -> key (K, H)."""
    found = {}
    for i in range(int(cache.blocks())):
        block = cache.block(jnp.int32(i))
        for slot, position in enumerate(np.asarray(block.pos[row, 0])):
            if position >= 0:
                assert position not in found
                found[int(position)] = np.asarray(block.k[row, :, slot])
    return found


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 700])
@pytest.mark.parametrize("block", [2, 8, 512])
def test_a_shuffled_table_reads_as_if_in_order(page_size, block, monkeypatch):
    monkeypatch.setattr(paged_module, "BLOCK", block)
    cache = empty(2, 17, Paged(page_size))
    entries = np.random.default_rng(1).permutation(cache.page_table.size)
    table = jnp.asarray(entries.reshape(cache.page_table.shape), jnp.int32)
    new = record(2, 17)
    cache = replace(cache, page_table=table)
    for start, width in ((0, 5), (5, 1), (6, 11)):
        part = Record(*(x[:, :, start : start + width] for x in new))
        cache = append(cache, part, jnp.array([width, width]))
    for row in range(2):
        found = read(cache, row)
        assert list(found) == list(range(17))
        for position, key in found.items():
            np.testing.assert_array_equal(key, new.k[row, :, position])


def test_only_full_pages_are_allocated():
    cache = empty(3, 17, Paged(8))
    assert (cache.num_pages, cache.capacity) == (9, 24)
    assert cache.nbytes == 9 * 8 * 2 * HEADS * DIM * 4 + 3 * (5 + 3 * 4)
    assert empty(3, 17, Paged(8, num_pages=20)).num_pages == 20
    with pytest.raises(ValueError, match="num_pages=8: 3 rows of 17 tokens take 9 pages of 8"):
        empty(3, 17, Paged(8, num_pages=8))


@pytest.mark.parametrize("missing", [-1, 2, 99])
def test_a_page_that_is_none_is_neither_read_nor_written(missing):
    """Two pages of 4; row 0 has one and then none, row 1 has none at all."""
    cache = empty(2, 4, Paged(4))
    cache = replace(cache, page_table=jnp.array([[1, missing], [missing, missing]], jnp.int32))
    new = record(2, 5)
    with pytest.raises(CapacityError, match=r"hold \[0, 0\].*\[4, 1\].*room for \[4, 0\]"):
        cache.append(Record(new.k[:, :, :4], new.v[:, :, :4]), jnp.array([4, 1]))
    after = append(cache, new, jnp.array([4, 1]))
    assert after.n.tolist() == [4, 0]
    assert after.overflow.tolist() == [False, True]
    np.testing.assert_array_equal(after.leaves["k"][1], new.k[0, :, :4])
    assert not after.leaves["k"][0].any()
    assert list(read(after, 0)) == [0, 1, 2, 3]
    with pytest.raises(CapacityError, match=r"rows \[1\] had no page"):
        after.check()
    over = append(after, record(2, 1, seed=1), jnp.array([1, 0]))
    np.testing.assert_array_equal(over.leaves["k"], after.leaves["k"])
    assert over.n.tolist() == [4, 0]


def test_a_hole_inside_the_length_is_masked():
    """A page that was taken away: its tokens are not seen, the others are."""
    cache = empty(1, 12, Paged(4))
    full = cache.append(record(1, 12), jnp.array([12]))
    holed = replace(full, page_table=full.page_table.at[0, 1].set(-1))
    assert sorted(read(holed, 0)) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_entries_beyond_the_length_may_be_anything():
    full = empty(1, 12, Paged(4)).append(record(1, 12), jnp.array([4]))
    stale = replace(full, page_table=jnp.array([[0, 77, -5]], jnp.int32))
    assert list(read(stale, 0)) == [0, 1, 2, 3]
    assert list(read(full, 0)) == [0, 1, 2, 3]


def test_rows_may_share_pages():
    full = empty(2, 8, Paged(4)).append(record(2, 8), jnp.array([8, 3]))
    both = full.select(jnp.array([0, 0]))
    for position, key in read(both, 1).items():
        np.testing.assert_array_equal(key, read(full, 0)[position])
    assert both.rollback(jnp.array([3, 0])).n.tolist() == [5, 8]
    with pytest.raises(ValueError, match="rollback of 9 tokens"):
        both.rollback(9)


@pytest.mark.parametrize("tokens", [4, -1])
def test_a_row_that_holds_too_few_is_not_rolled_back(tokens):
    full = empty(2, 8, Paged(4)).append(record(2, 8), jnp.array([8, 3]))
    asked = jnp.array([3, tokens])
    with pytest.raises(ValueError, match=r"rollback of .* tokens; rows hold \[8, 3\]"):
        full.rollback(asked)
    after = jax.jit(PagedCache.rollback)(full, asked)
    assert after.n.tolist() == [5, 3]
    assert after.overflow.tolist() == [False, True]
    with pytest.raises(CapacityError, match=r"rows \[1\]"):
        after.check()
