"""Which slot holds which token: rings and sinks against a list that forgets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax.cache import Dense, Record, Ring, SinkRing, SlotCache, init_layer_cache
from kvjax.cache.codecs import build_codec

HEADS, DIM = 2, 4


def record(start: int, tokens: int) -> Record:
    """Keys that say their position, and values that say it twice."""
    positions = jnp.arange(start, start + tokens, dtype=jnp.float32)
    k = jnp.broadcast_to(positions[:, None], (2, HEADS, tokens, DIM))
    return Record(k, 2 * k)


append = jax.jit(SlotCache.append)


def stored(cache, row: int) -> dict[int, set[float]]:
    """Position -> the keys found there."""
    found: dict[int, set[float]] = {}
    for i in range(int(cache.blocks())):
        block = cache.block(jnp.int32(i))
        for slot, position in enumerate(np.asarray(block.pos[row, 0])):
            if position >= 0:
                found.setdefault(int(position), set()).update(np.ravel(block.k[row, :, slot]))
                np.testing.assert_array_equal(block.v[row, :, slot], 2 * block.k[row, :, slot])
    return found


def expected(layout, n: int) -> dict[int, set[float]]:
    """What a list that forgets all but the layout's tokens holds after n."""
    match layout:
        case Dense():
            kept = range(n)
        case Ring():
            kept = range(max(0, n - layout.window), n)
        case SinkRing():
            sinks = layout.sink_tokens
            kept = {*range(min(sinks, n)), *range(max(sinks, n - layout.window), n)}
    return {position: {float(position)} for position in kept}


@pytest.mark.parametrize(
    "layout",
    rest_slow(
        [Dense(40), Ring(1), Ring(4), Ring(7), SinkRing(1, 1), SinkRing(2, 5), SinkRing(4, 4)],
        [Dense(40), Ring(1), Ring(7), SinkRing(2, 5)],
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "split",
    [
        [3, 1, 2, 5, 9],
        [6, 0, 1, 13],
        *(pytest.param(x, marks=pytest.mark.slow) for x in ([1] * 20, [20])),
    ],
    ids=str,
)
def test_a_layout_keeps_its_tokens_whatever_the_chunks(layout, split):
    cache = SlotCache.init(2, layout, HEADS, DIM, DIM, build_codec("f32"))
    done = np.zeros(2, int)
    for tokens in split:
        # Row 1 takes one token less of each chunk.
        counts = np.array([tokens, max(tokens - 1, 0)])
        chunk = [record(int(start), max(tokens, 1)) for start in done]
        rows = Record(*(jnp.stack([chunk[0][i][0], chunk[1][i][1]]) for i in (0, 1)))
        cache = append(cache, rows, jnp.asarray(counts, jnp.int32))
        done += counts
        for row, n in enumerate(done):
            assert stored(cache, row) == expected(layout, n)
    assert cache.n.tolist() == done.tolist()
    cache.check()


@pytest.mark.parametrize("layout", [Ring(4), SinkRing(2, 2)])
def test_what_was_replaced_cannot_be_had_back(layout):
    cache = SlotCache.init(2, layout, HEADS, DIM, DIM, build_codec("f32"))
    cache = cache.append(record(0, 4), jnp.array([4, 3]))
    assert cache.rollback(2).n.tolist() == [2, 1]
    full = cache.append(record(4, 1), jnp.array([1, 0]))
    with pytest.raises(ValueError, match=r"rollback of 1 tokens; rows hold \[5, 3\] and have rep"):
        full.rollback(1)
    flagged = jax.jit(SlotCache.rollback)(full, jnp.array([1, 1]))
    assert flagged.n.tolist() == [5, 2]
    assert flagged.overflow.tolist() == [True, False]
    assert full.rollback(jnp.array([0, 1])).n.tolist() == [5, 2]


def make(**settings):
    return init_layer_cache(2, 16, kv_heads=HEADS, key_dim=DIM, value_dim=DIM, **settings)


def test_auto_is_a_ring_only_where_it_would_turn():
    assert make().layout == Dense(16)
    assert make(window=5).layout == Ring(5)
    assert make(window=16).layout == make(window=99).layout == Dense(16)
    assert make(window=5, layout="dense").layout == Dense(16)
    assert make(window=5, layout="ring").layout == Ring(5)
    assert make(layout=SinkRing(1, 4)).layout == SinkRing(1, 4)


@pytest.mark.parametrize("reindexed", [False, True])
@pytest.mark.parametrize(
    ("sinks", "window", "of_layer", "expected"),
    [
        (4, 11, None, (4, 11)),
        (4, 12, None, None),
        (4, 99, None, None),
        (4, 12, 16, None),
        # The layer's window would hide the first tokens, were it dense.
        (4, 12, 15, (4, 12)),
        (4, 99, 5, (4, 5)),
    ],
)
def test_sinks_beside_a_ring_that_never_turns_are_dense(
    sinks, window, of_layer, expected, reindexed
):
    layout = make(layout=SinkRing(sinks, window, reindexed), window=of_layer).layout
    assert layout == (SinkRing(*expected, reindexed) if expected else Dense(16))


def test_places_of_queries():
    """Of positions -1 (padding) to 8, beside 2 first tokens and a window of 4."""
    positions = jnp.arange(-1, 9)
    sight = SinkRing(2, 4, reindexed=True).sight
    assert sight.place(positions).tolist() == [-1, 0, 1, 2, 3, 4, 5, 5, 5, 5]
    for other in (SinkRing(2, 4), Ring(4), Dense(9)):
        assert other.sight.place(positions).tolist() == positions.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "ring"}, "layout='ring': the layer has no window, .*; accepted: auto, dense"),
        ({"layout": "tree"}, r"layout='tree': accepted are auto, dense, ring, Paged\(...\)"),
    ],
)
def test_layouts_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
