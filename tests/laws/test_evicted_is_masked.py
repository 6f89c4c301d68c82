"""Law 1 for eviction: a smaller cache is the one it was made of, with the others hidden."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Block, KiviCache, LayerCache, SlotCache
from laws import checks

HELD = (9, 5)
ROOM = 4
keep = jax.jit(lambda cache, indices: cache.keep(indices, ROOM))


@partial(
    jax.tree_util.register_dataclass, data_fields=("cache", "visible", "evicted_at"), meta_fields=()
)
@dataclass(frozen=True)
class Masked:
    """All that a cache holds, of which heads see tokens up to `evicted_at` where `visible` says.

    visible (B, K or 1, positions) bool.
    """

    cache: LayerCache
    visible: jax.Array
    evicted_at: jax.Array

    @property
    def n(self):
        return self.cache.n

    @property
    def sight(self):
        return self.cache.sight

    def append(self, record, count):
        return replace(self, cache=self.cache.append(record, count))

    def first_block(self, oldest):
        return self.cache.first_block(oldest)

    def blocks(self):
        return self.cache.blocks()

    def operands(self):
        return None

    def block(self, i):
        block = self.cache.block(i)
        pos = jnp.broadcast_to(block.pos, (*self.visible.shape[:2], block.k.shape[2]))
        seen = jnp.take_along_axis(self.visible, jnp.maximum(pos, 0), axis=2)
        return Block(
            block.k, block.v, jnp.where(seen | (pos >= self.evicted_at[:, None, None]), pos, -1)
        )


def positions(cache) -> np.ndarray:
    """(B, S), of the token in each slot that `keep` may name; -1 where there is none."""
    if isinstance(cache, SlotCache):
        return checks.held(cache, "k")
    slots = np.arange(cache.capacity)
    return np.where(slots < np.asarray(cache.n)[:, None], slots, -1)


def pair(member):
    """The same eviction twice, for real and masked: each head keeps three tokens of four."""
    a = member.attention
    # None has a choice of its own where keys and values have different heads.
    heads = a.kv_heads if a.kv_heads == a.value_heads else 1
    cache, rng = member.fill(*HELD), np.random.default_rng(4)
    if isinstance(cache, KiviCache):
        with pytest.raises(ValueError, match=r"keep: .* share a scale"):
            cache.keep(np.zeros((len(HELD), 1, 1), int))
        pytest.skip("refused, as it should be")
    pos = positions(cache)[:, None]
    wanted = [[rng.permutation(pos.shape[2]) for _ in range(heads)] for _ in HELD]
    indices = np.array(wanted)[:, :, : 3 * pos.shape[2] // 4]
    named = np.broadcast_to(pos, (len(HELD), heads, pos.shape[2]))
    visible = np.zeros((len(HELD), heads, 32), bool)
    for row, head, slot in np.ndindex(indices.shape):
        position = named[row, head, indices[row, head, slot]]
        if position >= 0:
            visible[row, head, position] = True
    masked = Masked(cache, jnp.asarray(visible), jnp.copy(cache.n))
    return keep(cache, indices), masked, visible


@pytest.mark.parametrize(
    "counts",
    [[(1, 1), (1, 0)], pytest.param([(3, 2), (1, 1)], marks=pytest.mark.slow)],
    ids=["tokens", "chunk and token"],
)
def test_a_smaller_cache_is_a_masked_one(member, counts):
    kept, masked, _ = pair(member)
    start = np.array(HELD)
    for count in counts:
        got, kept = member.step(start, count, kept)
        want, masked = member.step(start, count, masked)
        for row, n in enumerate(count):
            np.testing.assert_allclose(got[row, :n], want[row, :n], rtol=1e-5, atol=2e-6)
        start = start + count
    kept.check()
    assert kept.n.tolist() == start.tolist()


@pytest.mark.control
def test_a_token_too_few_shows(member):
    """The comparison can fail: one head of each row has lost one more token."""
    kept, masked, visible = pair(member)
    window = member.init().sight.window or 99
    for row, n in enumerate(HELD):
        seen = [p for p in np.flatnonzero(visible[row, 0]) if p > n - window]
        visible[row, 0, seen[-1]] = False
    got, _ = member.step(HELD, (1, 1), kept)
    want, _ = member.step(HELD, (1, 1), replace(masked, visible=jnp.asarray(visible)))
    assert np.abs(got - want).max(axis=2)[:, 0].min() > 1e-4


@pytest.mark.control
def test_an_eviction_of_nothing_changes_nothing(member):
    _, masked, _ = pair(member)
    every = np.tile(np.arange(masked.cache.capacity), (len(HELD), 1, 1))
    got, _ = member.step(HELD, (1, 1), keep(masked.cache, every))
    want, _ = member.step(HELD, (1, 1), masked.cache)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
