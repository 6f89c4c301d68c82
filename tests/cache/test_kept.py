"""The kept cache by itself: gathering, appending, blocks, rollback, beams, bytes."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax import sizing
from kvjax.cache import (
    CapacityError,
    KeptCache,
    Paged,
    Record,
    SinkRing,
    init_layer_cache,
)
from kvjax.cache import kept as kept_module
from kvjax.ops import attend

BATCH, HEADS, DIM, VALUE_DIM, SLOTS = 2, 3, 8, 4, 12
CODECS = ["f32", "bf16", "f16", "fp8_e4m3", "fp8_e4m3_head", "fp8_e4m3_token", "int8", "int4"]
LAYOUTS = {"dense": "dense", "pages": Paged(5), "sinks": SinkRing(2, 6), "ring": "ring"}
LENGTHS = np.array([11, 7])
# Row 1 keeps one token less, in no order, and the last head of row 0 two less.
INDICES = np.array(
    [[[0, 9, 5, 2], [1, 2, 3, 4], [10, 8, -1, -1]], [[6, 0, 3, -1], [1, -1, 0, 5], [2, 4, 6, -1]]]
)


def record(tokens: int, seed: int = 0) -> Record:
    rng = np.random.default_rng(seed)
    shapes = ((BATCH, HEADS, tokens, dim) for dim in (DIM, VALUE_DIM))
    return Record(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))


def filled(layout="dense", codec="f32", lengths=LENGTHS):
    cache = init_layer_cache(
        BATCH,
        SLOTS,
        kv_heads=HEADS,
        key_dim=DIM,
        value_dim=VALUE_DIM,
        window=8 if layout == "ring" else None,
        layout=layout,
        codec=codec,
    )
    return cache.append(record(SLOTS), jnp.asarray(lengths))


def contents(cache) -> dict:
    """{(row, head, position): (k, v)} of what is live, as attention reads it."""
    found: dict = {}
    for i in range(int(cache.blocks())):
        block = cache.block(jnp.int32(i))
        pos = np.broadcast_to(block.pos, block.k.shape[:3])
        for row, head, slot in np.argwhere(pos >= 0):
            at = (row, head, int(pos[row, head, slot]))
            assert at not in found, "no token is given twice"
            found[at] = (np.asarray(block.k[row, head, slot]), np.asarray(block.v[row, head, slot]))
    return found


def assert_holds(cache, wanted: dict) -> None:
    got = contents(cache)
    assert got.keys() == wanted.keys()
    for at, (k, v) in wanted.items():
        np.testing.assert_array_equal(got[at][0], k)
        np.testing.assert_array_equal(got[at][1], v)


def chosen(cache, indices) -> dict:
    """What of the cache's contents lies in the slots named; `slots` gives their positions."""
    held, wanted = contents(cache), {}
    pos = np.broadcast_to(positions_of(cache), (BATCH, HEADS, cache.capacity))
    indices = np.broadcast_to(indices, (BATCH, HEADS, indices.shape[2]))
    for row, head, i in np.argwhere(indices >= 0):
        at = (row, head, int(pos[row, head, indices[row, head, i]]))
        if at[2] >= 0:
            wanted[at] = held[at]
    return wanted


def assert_live_first(kept) -> None:
    """Live slots are the first ones of each head, in the order of their positions."""
    counts = (kept.pos >= 0).sum(2)
    assert kept.live.tolist() == (counts if kept.live.ndim > 1 else counts[:, 0]).tolist()
    for row in np.asarray(kept.pos).reshape(-1, kept.capacity):
        live = row[row >= 0]
        assert row[: len(live)].tolist() == sorted(live)


def positions_of(cache):
    """(B, K or 1, S), from the layout's own arithmetic."""
    if isinstance(cache, KeptCache):
        return cache.pos
    slots = np.arange(cache.capacity)
    if hasattr(cache, "page_table"):
        return np.where(slots < np.asarray(cache.n)[:, None], slots, -1)[:, None]
    return np.asarray(cache.layout.held(jnp.asarray(slots), cache.n[:, None]))[:, None]


@pytest.mark.parametrize(
    ("layout", "codec"),
    rest_slow(
        product(LAYOUTS, CODECS),
        [
            *(("dense", "f32"), ("dense", "fp8_e4m3_head"), ("dense", "int4")),
            *(("pages", "fp8_e4m3_token"), ("pages", "int4"), ("sinks", "int8"), ("ring", "bf16")),
        ],
    ),
)
def test_what_is_named_is_kept_bit_for_bit(layout, codec):
    cache = filled(LAYOUTS[layout], codec)
    indices = np.where(cache.capacity > INDICES, INDICES, -1)
    kept = cache.keep(indices, room=3)
    assert (kept.capacity, kept.n.tolist()) == (7, LENGTHS.tolist())
    assert_holds(kept, chosen(cache, indices))
    assert_live_first(kept)


def test_one_set_for_all_heads():
    cache = filled()
    kept = cache.keep(INDICES[:, :1])
    assert kept.pos.shape == (BATCH, 1, 4)
    assert kept.live.tolist() == [4, 3]
    assert_holds(kept, chosen(cache, INDICES[:, :1]))


def test_dead_and_repeated_slots_count_as_none():
    kept = filled().keep(np.array([[[11, 3, 3, 0]], [[7, 8, 6, 6]]]))
    assert kept.pos[:, 0].tolist() == [[0, 3, -1, -1], [6, -1, -1, -1]]
    assert kept.live.tolist() == [2, 1]


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("codec", ["f32", "int4"])
def test_new_tokens_go_behind(heads, codec):
    cache = filled(codec=codec)
    kept, new = cache.keep(INDICES[:, :heads], room=3), record(3, seed=1)
    after = jax.jit(KeptCache.append)(kept, new, jnp.array([2, 3]))
    assert after.n.tolist() == [13, 10]
    fresh = init_layer_cache(
        BATCH, 3, kv_heads=HEADS, key_dim=DIM, value_dim=VALUE_DIM, codec=codec
    ).append(new, jnp.array([2, 3]))
    wanted = chosen(cache, INDICES[:, :heads]) | {
        (row, head, int(position + LENGTHS[row])): pair
        for (row, head, position), pair in contents(fresh).items()
    }
    assert_holds(after, wanted)
    assert_live_first(after)


def test_kept_again():
    """A second eviction, once for each head and once for all heads of what heads keep apart."""
    kept = filled().keep(INDICES, room=2).append(record(2, seed=1), jnp.array([2, 1]))
    for indices in (np.array([[[0, 5], [1, 2], [0, 3]]] * 2), np.array([[[0, 2, 4]]] * 2)):
        again = kept.keep(indices, room=1)
        assert again.pos.shape == (BATCH, HEADS, indices.shape[2] + 1)
        assert_holds(again, chosen(kept, indices))
        assert again.evicted_at.tolist() == again.n.tolist() == [13, 8]


@pytest.mark.parametrize("indices", [INDICES, INDICES[:, :1]], ids=["each head", "all heads"])
def test_blocks(indices, monkeypatch):
    """Blocks that do not divide the capacity give each slot once, and only as many as are live."""
    monkeypatch.setattr(kept_module, "BLOCK", 3)
    cache = filled()
    kept = cache.keep(indices, room=7)
    assert kept.blocks() == 2
    assert_holds(kept, chosen(cache, indices))
    assert kept.append(record(7), jnp.array([7, 0])).blocks() == 4


def test_overflow_is_never_silent():
    kept = filled().keep(INDICES, room=1)
    with pytest.raises(CapacityError, match=r"capacity is 5 slots.*hold \[4, 3\].*\[2, 2\] more"):
        kept.append(record(2), jnp.array([2, 2]))
    after = jax.jit(KeptCache.append)(kept, record(2), jnp.array([2, 2]))
    assert after.n.tolist() == [11, 9]
    with pytest.raises(CapacityError, match=r"rows \[0\] ran over the capacity of 5"):
        after.check()
    held = {at: pair for at, pair in contents(after).items() if at[0] == 0}
    np.testing.assert_array_equal(sorted(held), sorted(at for at in contents(kept) if at[0] == 0))


def test_rollback_goes_back_to_the_last_eviction():
    kept = filled().keep(INDICES, room=3)
    after = kept.append(record(3), jnp.array([3, 1]))
    back = after.rollback(jnp.array([3, 1]))
    assert_holds(back, contents(kept))
    assert (back.n.tolist(), back.live.tolist()) == (kept.n.tolist(), kept.live.tolist())
    again = back.append(record(3), jnp.array([3, 1]))
    assert_holds(again, contents(after))
    with pytest.raises(ValueError, match=r"rollback of 2 tokens.*took \[3, 1\] since"):
        after.rollback(2)
    inside = jax.jit(KeptCache.rollback)(after, 2)
    assert inside.n.tolist() == [12, 8]
    assert inside.overflow.tolist() == [False, True]


def test_beams():
    kept = filled().keep(INDICES, room=1)
    beams = kept.select(jnp.array([1, 1, 0]))
    assert beams.n.tolist() == [7, 7, 11]
    got, held = contents(beams), contents(kept)
    for (row, head, position), (k, _) in got.items():
        np.testing.assert_array_equal(k, held[[1, 1, 0][row], head, position][0])
    assert len(got) == sum(2 if at[0] else 1 for at in held)


@pytest.mark.parametrize(
    "codec", rest_slow(CODECS, ["f32", "fp8_e4m3_head", "fp8_e4m3_token", "int4"])
)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_memory_is_that_of_the_kept_slots(codec, heads):
    """Records, positions, counts, lengths and constants as sizing says."""
    kept = filled(codec=codec).keep(INDICES[:, :heads], room=3)
    layer = sizing.LayerSpec(HEADS, HEADS, DIM, VALUE_DIM)
    said = sizing.ModelSpec("one layer", DIM, (layer,)).cache_bytes(
        SLOTS, BATCH, codec, kept=sizing.Kept(4, room=3, per_head=heads > 1)
    )
    assert sum(leaf.nbytes for leaf in kept.leaves.values()) == said.allocated
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) == kept.nbytes == said.total
    assert kept.nbytes < filled(codec=codec).nbytes


def queries(tokens):
    rng = np.random.default_rng(5)
    return jnp.asarray(rng.normal(size=(BATCH, tokens, 2 * HEADS, DIM)), jnp.float32)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("tokens", [1, 2])
def test_one_set_is_attended_as_each_heads_own(window, tokens):
    """Through decode_attention where that serves, and by blocks: the window counts positions."""
    cache = filled()
    shared = cache.keep(INDICES[:, :1], room=1)
    apart = cache.keep(np.repeat(INDICES[:, :1], HEADS, axis=1), room=1)
    assert shared.operands()["lengths"].shape == (BATCH,)
    assert apart.operands()["lengths"].shape == (BATCH, HEADS)
    q, positions = queries(tokens), jnp.asarray(LENGTHS[:, None] - tokens + np.arange(tokens))
    run = jax.jit(attend, static_argnames="window")
    gots, wants = (run(q, cache, positions, window=window) for cache in (shared, apart))
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_heads_of_different_lengths_in_place_and_by_blocks(monkeypatch):
    """One query a row: through decode_attention, and where that is not to be had."""
    kept = filled().keep(INDICES, room=3)
    assert len(set(np.ravel(kept.live).tolist())) > 1
    q, positions = queries(1), jnp.asarray(LENGTHS[:, None] - [[1], [8]])  # one row is padding
    in_place = jax.jit(attend)(q, kept, positions)
    monkeypatch.setattr(KeptCache, "operands", lambda cache: None)
    by_blocks = jax.jit(lambda *args: attend(*args))(q, kept, positions)
    for got, want in zip(in_place, by_blocks, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert np.isneginf(in_place[1][1]).all()


def test_what_is_dead_takes_no_part():
    kept = filled().keep(INDICES, room=3)
    dead = np.broadcast_to(kept.pos < 0, (BATCH, HEADS, 7))[..., None]
    poisoned = {name: jnp.where(dead, jnp.nan, leaf) for name, leaf in kept.leaves.items()}
    q, positions = queries(2), jnp.full((BATCH, 2), 20)
    run = jax.jit(attend)
    results = (run(q, cache, positions) for cache in (kept, replace(kept, leaves=poisoned)))
    for clean, dirty in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize(
    ("indices", "room", "message"),
    [
        (np.zeros((2, 2, 3), int), 0, r"indices: got shape \[2, 2, 3\]; accepted: \(2, 3, n\)"),
        (np.zeros((2, 3), int), 0, r"indices: got shape \[2, 3\]"),
        (np.zeros((2, 3, 0), int), 0, "n at least 1"),
        (np.zeros((2, 3, 1)), 0, "indices: got float"),
        (np.full((2, 3, 1), 12), 0, "indices: got 12 to 12; accepted: slots from 0 to 11"),
        (np.full((2, 3, 1), -2), 0, "indices: got -2"),
        (np.zeros((2, 3, 1), int), -1, "room: got -1"),
    ],
)
@pytest.mark.parametrize("layout", ["dense", Paged(4)], ids=str)
def test_what_cannot_be_kept_is_refused(layout, indices, room, message):
    with pytest.raises(ValueError, match=message):
        filled(layout).keep(indices, room)
