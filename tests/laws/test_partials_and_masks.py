"""Law 5: what is dead takes no part, whatever it holds; an empty row gives 0 and LSE -inf."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import KiviCache, Ring, SlotCache
from kvjax.ops import attend

HELD = (7, 0)


def poisoned(cache, value):
    """The cache with `value` in every slot that holds no token; codes of integers keep theirs."""

    def poison(name, leaf):
        live = live_slots(cache, name)
        mask = live.reshape(len(live), 1, -1, *(1,) * (leaf.ndim - 3))
        return jnp.where(mask, leaf, jnp.asarray(value).astype(leaf.dtype))

    leaves = {
        name: poison(name, leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for name, leaf in cache.leaves.items()
    }
    return replace(cache, leaves=leaves)


def live_slots(cache, name):
    """Bool (B, S) along the third axis of a leaf, or (num_pages, P) of pages."""
    if isinstance(cache, KiviCache):
        coded = cache.codec.encoded(cache.n)[:, None]
        if not name.endswith("_exact"):
            return jnp.arange(cache.groups) * cache.codec.group < coded
        ring = Ring(cache.codec.residual)
        return ring.held(jnp.arange(ring.slots), cache.n[:, None]) >= coded
    if isinstance(cache, SlotCache):
        slots = jnp.arange(cache.capacity)
        return cache.layout.held(slots, cache.n[:, None]) >= 0
    positions = jnp.arange(cache.capacity).reshape(-1, cache.page_size)
    held = positions < cache.n[:, None, None]
    pool = jnp.zeros((cache.num_pages, cache.page_size), bool)
    return pool.at[cache.page_table].set(held)


@pytest.mark.parametrize("count", [(1, 1), (6, 2)], ids=str)
def test_dead_slots_take_no_part(member, count):
    clean, _ = member.step(HELD, count, member.fill(*HELD))
    for value in (np.nan, np.inf):
        dirty, after = member.step(HELD, count, poisoned(member.fill(*HELD), value))
        assert after.n.tolist() == [HELD[0] + count[0], HELD[1] + count[1]]
        for row, n in enumerate(count):
            np.testing.assert_array_equal(dirty[row, :n], clean[row, :n])
            assert np.isfinite(dirty[row, :n]).all()


@pytest.mark.parametrize("count", [(1, 1), (6, 2)], ids=str)
def test_poison_in_a_live_slot_shows(member, count):
    """The test above can fail: of the poisoned slots of row 0, one counts as live."""
    cache = poisoned(member.fill(*HELD), np.nan)
    longer = replace(cache, n=cache.n + jnp.array([1, 0]))
    y, _ = member.step((HELD[0] + 1, 0), count, longer)
    clean, _ = member.step((HELD[0] + 1, 0), count, member.fill(HELD[0] + 1, 0))
    assert not np.array_equal(y[0, 0], clean[0, 0])
    np.testing.assert_array_equal(y[1, : count[1]], clean[1, : count[1]])


def test_an_empty_row_gives_0_and_minus_infinity(member):
    a = member.attention
    q = np.random.default_rng(0).normal(size=(2, 3, a.query_heads, a.key_dim)).astype(np.float32)
    cache = poisoned(member.fill(*HELD), np.nan)
    out, lse = jax.jit(attend)(q, cache, np.full((2, 3), 9, np.int32))
    assert lse.dtype == jnp.float32
    assert np.isfinite(out[0]).all()
    assert np.isfinite(lse[0]).all()
    assert not np.asarray(out[1]).any()
    assert np.isneginf(lse[1]).all()
