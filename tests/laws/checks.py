"""The comparisons that the laws make of a member, for their tests and for planted faults."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Block, CapacityError, KiviCache, LayerCache, SlotCache
from laws.members import X, build, left_behind

LENGTHS = np.array([13, 7])
SPLITS = {
    "chunks": [(6, 6)],
    "token by token": [(1, 1)],
    "uneven": [(2, 6), (1, 1), (5, 0), (1, 3)],
}


@jax.jit
def read_block(cache: LayerCache, i: int) -> Block:
    return cache.block(i)


def gap(member, splits) -> float:
    """The largest difference from the definition, rows taken in steps of `splits` tokens."""
    full, cache, done, splits = member.forward(), member.init(), LENGTHS * 0, cycle(splits)
    largest = 0.0
    while (done < LENGTHS).any():
        count = np.minimum(next(splits), LENGTHS - done)
        y, cache = member.step(done, count, cache)
        for row, (start, n) in enumerate(zip(done, count, strict=True)):
            difference = np.abs(y[row, :n] - full[row, start : start + n])
            # Of NaN the larger of two would be either.
            largest = max(largest, np.nan_to_num(difference, nan=np.inf).max(initial=0))
        done = done + count
    cache.check()
    assert cache.n.tolist() == LENGTHS.tolist()
    return largest


def assert_one_function(member) -> None:
    """Law 1: any split into steps gives what is defined."""
    for name, splits in SPLITS.items():
        assert gap(member, splits) <= member.tolerance, name


def held(cache: LayerCache, name: str) -> np.ndarray:
    """The position that each slot of a leaf holds, (B, S), or (num_pages, P) of pages; -1: none.

    Of a group of tokens the first. Told here token by token, not asked of the layout.
    """
    lengths = np.asarray(cache.n).tolist()
    if isinstance(cache, SlotCache):
        sinks = getattr(cache.layout, "sink_tokens", 0)
        return np.stack([in_turn(cache.capacity, range(n), sinks) for n in lengths])
    if not isinstance(cache, KiviCache):
        return in_pages([in_turn(cache.capacity, range(n)) for n in lengths], cache, name)
    group, most = cache.codec.group, cache.codec.residual
    coded = [-(-max(n - most, 0) // group) * group for n in lengths]
    if name.endswith("_exact"):
        rows = zip(coded, lengths, strict=True)
        return np.stack([in_turn(most, range(first, n)) for first, n in rows])
    groups = np.stack([in_turn(cache.groups, range(n // group)) for n in coded])
    groups = np.where(groups >= 0, groups * group, -1)
    return groups if cache.page_table is None else in_pages(groups, cache, name)


def in_turn(slots: int, positions: range, sinks: int = 0) -> np.ndarray:
    """(S,): tokens written one after the other, the first `sinks` each to a slot of its own."""
    found = np.full(slots, -1)
    for p in positions:
        found[p if p < sinks else sinks + (p - sinks) % (slots - sinks)] = p
    return found


def in_pages(positions: Sequence[np.ndarray], cache: LayerCache, name: str) -> np.ndarray:
    """Positions (B, S) of rows' slots -> (num_pages, P), where the rows' pages are."""
    pool = np.full((cache.leaves[name].shape[0], cache.leaves[name].shape[2]), -1)
    pool[np.asarray(cache.page_table)] = np.reshape(positions, (len(positions), -1, pool.shape[1]))
    return pool


def assert_nothing_is_encoded_twice(member) -> None:
    """A step leaves of older tokens the very bits that were there before it."""
    for count in ((1, 1), (6, 2)):
        before = member.fill(7, 3)
        _, after = member.step((7, 3), count, before)
        for name in before.leaves:
            stay = held(before, name)
            stay = (stay >= 0) & (held(after, name) == stay)
            assert stay.any() or name.endswith("_exact") or isinstance(before, KiviCache)
            old, new = (np.moveaxis(np.asarray(c.leaves[name]), 2, 1) for c in (before, after))
            np.testing.assert_array_equal(old[stay], new[stay], err_msg=name)


def assert_records_are_within_the_bound(member) -> None:
    """Law 1 of lossy codecs: what is read back of each token is as near as the codec says."""
    a, lengths = member.attention, (13, 7)
    cache = member.fill(*lengths)
    positions = np.broadcast_to(np.arange(13, dtype=np.int32), (len(lengths), 13))
    exact = left_behind(build(a), X[:, :13], positions)
    seen = 0
    for i in range(int(cache.blocks())):
        *got, pos = map(np.asarray, read_block(cache, i))
        for row, slot in np.argwhere(np.broadcast_to(pos, got[0].shape[:3])[:, 0] >= 0):
            for part, whole in zip(got, exact, strict=True):
                want = np.asarray(whole)[row, pos[row, 0, slot]]
                # Keys may share scales along tokens, too: any token counts.
                every = np.asarray(whole)[row]
                # Codes with a zero of their own share the range, of others the largest number.
                most = np.ptp(every) if isinstance(cache, KiviCache) else np.abs(every).max()
                error = np.abs(part[row, :, slot].astype(np.float32) - want).max()
                assert error <= 1e-5 + member.cache_case.error * most
            seen += 1
    assert seen == sum(min(n, cache.capacity) for n in lengths)


def poisoned(cache: LayerCache, value: float) -> LayerCache:
    """The cache with `value` in every slot that holds no token; NaN of fp8 where leaves are bytes.

    To codes of integers that is one more number.
    """

    def poison(name: str, leaf: np.ndarray) -> np.ndarray:
        live = held(cache, name) >= 0
        mask = live.reshape(len(live), 1, -1, *(1,) * (leaf.ndim - 3))
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        return np.where(mask, leaf, np.array(value if floats else 0x7F).astype(leaf.dtype))

    leaves = {name: jnp.asarray(poison(name, np.asarray(x))) for name, x in cache.leaves.items()}
    return replace(cache, leaves=leaves)


def assert_dead_slots_take_no_part(member, count) -> None:
    """Law 5, of rows of 7 and of no tokens."""
    start = (7, 0)
    clean, _ = member.step(start, count, member.fill(*start))
    for value in (np.nan, np.inf):
        dirty, after = member.step(start, count, poisoned(member.fill(*start), value))
        assert after.n.tolist() == [start[0] + count[0], start[1] + count[1]]
        for row, n in enumerate(count):
            np.testing.assert_array_equal(dirty[row, :n], clean[row, :n])
            assert np.isfinite(dirty[row, :n]).all()


def records(cache: LayerCache, row: int, tokens: int) -> list[np.ndarray]:
    """Keys and values of a row's first tokens, as attention reads them."""
    found: dict[int, tuple] = {}
    for i in range(int(cache.blocks())):
        k, v, pos = map(np.asarray, read_block(cache, i))
        for slot in np.flatnonzero(pos[row, 0] >= 0):
            found[int(pos[row, 0, slot])] = (k[row, :, slot], v[row, :, slot])
    return [np.stack([found[p][part] for p in range(tokens)]) for part in (0, 1)]


def assert_overflow_is_not_silent(member, count) -> None:
    """Law 6. Row 0 has room for one token less than it is to take, row 1 for more than enough."""
    most = member.init().capacity
    start = (most + 1 - count[0], 2)
    before = member.fill(*start)
    with pytest.raises(CapacityError, match=rf"hold \[{start[0]}, 2\] .*{most}|{most}.*hold"):
        before.append(member.blank(max(count)), jnp.array(count))
    before.check()
    _, after = member.step(start, count, before)
    with pytest.raises(CapacityError, match=rf"rows \[0\] .*{most}"):
        after.check()
    assert after.n.tolist() == [start[0], 2 + count[1]]
    for row, n in enumerate(start):
        for old, new in zip(records(before, row, n), records(after, row, n), strict=True):
            np.testing.assert_array_equal(old, new)
    assert not any(np.isnan(x).any() for x in records(after, 1, 2 + count[1]))
