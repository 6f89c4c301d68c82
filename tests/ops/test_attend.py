"""Attention over a cache known by its blocks alone."""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax.cache import Block, Paged, Record, Sight, SinkRing, SlotCache, init_layer_cache
from kvjax.cache import slots as slots_module
from kvjax.cache.codecs import build_codec
from kvjax.ops import attend, reference
from kvjax.ops.online import ScoreRule

WIDTH = 8
SETTINGS = {
    "plain": {},
    "window": {"window": 5},
    "all": {"window": 9, "soft_cap": 2.0, "scale": 0.8, "sink_logits": jnp.linspace(-2, 2, 6)},
}


class Scattered(NamedTuple):
    """Blocks in any order, of any positions: k, v (blocks, B, K, C, ...), pos alike."""

    k: jax.Array
    v: jax.Array
    pos: jax.Array
    live: jax.Array

    def first_block(self, oldest):
        return 0

    def blocks(self):
        return self.live

    def block(self, i):
        return Block(self.k[i], self.v[i], self.pos[i])

    def operands(self):
        return None

    @property
    def sight(self):
        return Sight()


def cut(x):
    """(B, K, S, ...) -> (blocks, B, K, WIDTH, ...)."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, WIDTH, *x.shape[3:]), 2, 0)


def over_all(q, k, v, pos, q_positions, **settings):
    """The reference, with visibility told pair by pair."""
    seen = (pos[:, None, :] >= 0) & (pos[:, None, :] <= q_positions[:, :, None])
    if "window" in settings:
        seen &= pos[:, None, :] > q_positions[:, :, None] - settings["window"]
    rule = ScoreRule(settings.get("scale", q.shape[-1] ** -0.5), settings.get("soft_cap"))
    return reference.attention(q, k, v, seen[:, :, None], settings.get("sink_logits"), rule)


run = jax.jit(attend, static_argnames=("window", "soft_cap", "scale"))


@pytest.mark.parametrize(("tokens", "name"), [(1, "window"), (3, "plain"), (11, "all")])
@pytest.mark.usefixtures("small_blocks")
def test_blocks_are_masked_by_position_alone(tokens, name, draw, assert_same):
    q, k, v = draw(2, (6, 2), 24, (16, 8), tokens=tokens)
    rng = np.random.default_rng(1)
    # Positions in no order, and one slot in four dead.
    pos = jnp.array([rng.permutation(24) for _ in range(2)])
    pos = jnp.where(pos % 4 == 3, -1, pos)
    cache = Scattered(cut(k), cut(v), cut(pos[:, None]), jnp.array(3))
    positions = jnp.array([np.arange(tokens) + 12, np.arange(tokens)])
    got = run(q, cache, positions, **SETTINGS[name])
    assert_same(got, over_all(q, k, v, pos, positions, **SETTINGS[name]))


def test_positions_may_differ_between_heads(draw, assert_same):
    q, k, v = draw(2, (6, 2), 24, (16, 8), tokens=3)
    rng = np.random.default_rng(2)
    pos = jnp.array(rng.integers(-1, 24, (2, 2, 24)))
    positions = jnp.array([[10, 11, 12], [3, 4, 5]])
    got = run(q, Scattered(cut(k), cut(v), cut(pos), jnp.array(3)), positions)
    for head in range(2):
        own = slice(3 * head, 3 * head + 3)
        one = [x[:, head : head + 1] for x in (k, v)]
        want = over_all(q[:, :, own], *one, pos[:, head], positions)
        assert_same([x[:, :, own] for x in got], want)


@pytest.mark.parametrize(("tokens", "name"), [(2, "all"), (20, "plain"), (20, "window")])
@pytest.mark.usefixtures("small_blocks")
def test_new_records_join_the_cache(tokens, name, draw, assert_same):
    """A chunk of ragged rows beside a cache, in one tile or in many: equal to all keys at once."""
    q, k, v = draw(2, (6, 2), 16 + tokens, (16, 8), tokens=tokens)
    held, count = jnp.array([[13], [0]]), jnp.array([[tokens], [1]])
    slots, steps = jnp.arange(16), jnp.arange(tokens)
    old = jnp.where(slots < held, slots, -1)
    positions = jnp.where(steps < count, held + steps, -1)
    cache = Scattered(cut(k[:, :, :16]), cut(v[:, :, :16]), cut(old[:, None]), jnp.array(2))
    chunk = Block(k[:, :, 16:], v[:, :, 16:], positions[:, None])
    got = run(q, cache, positions, new=(chunk,), **SETTINGS[name])
    pos = jnp.concatenate([old, positions], 1)
    want = over_all(q, k, v, pos, positions, **SETTINGS[name])
    assert_same(got, want)
    poisoned = Block(*(jnp.where((positions < 0)[:, None, :, None], jnp.nan, x) for x in chunk[:2]),
                     chunk.pos)  # fmt: skip
    again = run(q, cache, positions, new=(poisoned,), **SETTINGS[name])
    np.testing.assert_array_equal(again[0], got[0])
    assert np.isfinite(again[0]).all()


@pytest.mark.parametrize("window", [None, 4])
def test_one_query_reads_a_dense_cache_in_place(window, draw, assert_same):
    """The way through decode_attention and the way through blocks agree; padding gives 0."""
    q, k, v = draw(3, (6, 2), 20, (16, 8), tokens=1)
    cache = init_layer_cache(3, 20, kv_heads=2, key_dim=16, value_dim=8, codec="f32")
    lengths = jnp.array([20, 7, 5])
    cache = cache.append(Record(k, v), lengths)
    positions = jnp.array([[19], [6], [-1]])
    got = run(q, cache, positions, window=window)
    live = jnp.where(jnp.arange(20) < lengths[:, None], jnp.arange(20), -1)
    settings = {} if window is None else {"window": window}
    want = over_all(q, k, v, live, positions, **settings)
    assert_same(got, want)
    assert not got[0][2].any()

    class ByBlocks(NamedTuple):
        inner: object

        @property
        def sight(self):
            return Sight()

        def first_block(self, oldest):
            return 0

        def blocks(self):
            return self.inner.blocks()

        def block(self, i):
            return self.inner.block(i)

        def operands(self):
            return None

    assert_same(run(q, ByBlocks(cache), positions, window=window), want)


def sinks_apart(q, q_sinks, k, v, positions, layout):
    """The reference: queries twice as wide, whose halves meet the window and the first tokens."""
    pos = jnp.arange(k.shape[2])
    query, first = positions[:, :, None], pos < layout.sink_tokens
    seen = (pos <= query) & (first | (pos > query - layout.window))
    beside = jnp.where(first[:, None], jnp.zeros_like(k), k), jnp.where(first[:, None], k, 0)
    rule = ScoreRule(q.shape[-1] ** -0.5, 3.0)
    return reference.attention(
        *(jnp.concatenate(halves, -1) for halves in ((q, q_sinks), beside)),
        v,
        seen[:, :, None],
        jnp.linspace(-2, 2, q.shape[2]),
        rule,
    )


@pytest.mark.parametrize(
    ("sinks", "held", "tokens"),
    rest_slow(
        product([2, 6, 0], [(0, 12), (12, 1)], [1, 12]),
        [(2, (0, 12), 1), (2, (12, 1), 12), (6, (0, 12), 12), (0, (12, 1), 1)],
    ),
    ids=str,
)
@pytest.mark.usefixtures("small_blocks")
def test_first_tokens_have_queries_of_their_own(
    sinks, held, tokens, draw, assert_same, monkeypatch
):
    """In the cache or among the new, in one block or in two, and for one query or two tiles."""
    monkeypatch.setattr(slots_module, "BLOCK", 4)
    layout = SinkRing(sinks, 5)
    q, k, v = draw(2, (6, 2), 24, (16, 8), tokens=tokens)
    q_sinks = draw(2, (6, 2), 1, (16, 8), tokens=tokens, seed=1).q
    cache = SlotCache.init(2, layout, 2, 16, 8, build_codec("f32"))
    start = jnp.asarray(held)
    cache = cache.append(Record(k, v), start)
    positions = start[:, None] + jnp.arange(tokens)
    steps = positions[:, None, :, None]
    record = Record(*(jnp.take_along_axis(x, steps, axis=2) for x in (k, v)))
    if tokens == 1:
        cache, new = cache.append(record, jnp.array([1, 1])), ()
    else:
        new = (Block(*record, positions[:, None]),)
    settings = {"soft_cap": 3.0, "sink_logits": jnp.linspace(-2, 2, 6)}
    got = run(q, cache, positions, q_sinks=q_sinks, new=new, **settings)
    assert_same(got, sinks_apart(q, q_sinks, k, v, positions, layout))
    same = run(q, cache, positions, q_sinks=q, new=new, **settings)
    assert_same(same, run(q, cache, positions, new=new, **settings))


def test_queries_of_first_tokens_cost_little():
    """Of 4 first tokens beside 252: far from a second pass over all."""
    cache = jax.eval_shape(
        lambda: SlotCache.init(1, SinkRing(4, 252), 2, 64, 64, build_codec("f32"))
    )
    q, positions = jax.ShapeDtypeStruct((1, 8, 8, 64), jnp.float32), jnp.zeros((1, 8), jnp.int32)
    flops = [
        run.lower(q, cache, positions, q_sinks=q_sinks).compile().cost_analysis()["flops"]
        for q_sinks in (None, q)
    ]
    assert flops[0] < flops[1] < 1.1 * flops[0]


def test_cost_follows_the_live_blocks(draw, updates):
    q, k, v = draw(1, (2, 1), 80, (4, 4), tokens=3)
    pos = jnp.arange(80)[None, None]
    positions = jnp.array([[30, 31, 32]])
    jax.jit(lambda *args: attend(*args))(
        q, Scattered(cut(k), cut(v), cut(pos), jnp.array(4)), positions
    )
    jax.effects_barrier()
    assert len(updates) == 4


def test_scores_of_a_long_chunk_are_never_all_there():
    """T = 2048 over itself: far less than its 2048 x 2048 float32 scores for each of 8 heads."""
    q, kv = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 2048, 8, 64), (1, 2, 2048, 64))
    )
    positions = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    cache = jax.eval_shape(
        lambda: init_layer_cache(1, 4096, kv_heads=2, key_dim=64, value_dim=64, codec="f32")
    )

    def step(q, k, v, cache, positions):
        return attend(q, cache, positions, new=(Block(k, v, positions[:, None]),))

    found = jax.jit(step).lower(q, kv, kv, cache, positions).compile().memory_analysis()
    assert found.temp_size_in_bytes < 2048 * 2048 * 8 * 4 / 4


@pytest.mark.parametrize(
    ("q", "positions", "message"),
    [
        ((2, 4, 16), (2, 4), "accepted are q .B, T, N, H. and q_positions .B, T."),
        ((2, 3, 6, 16), (2, 4), r"q_positions int32\[2, 4\]"),
        ((2, 3, 6, 8), (2, 3), "head dim 16"),
        ((2, 3, 5, 16), (2, 3), "multiple of 2 heads"),
    ],
)
def test_what_does_not_fit_is_refused(q, positions, message):
    cache = init_layer_cache(2, 20, kv_heads=2, key_dim=16, value_dim=8, codec="f32")
    with pytest.raises(ValueError, match=message):
        attend(jnp.zeros(q), cache, jnp.zeros(positions, jnp.int32))


def test_queries_of_first_tokens_are_as_the_others():
    cache = init_layer_cache(1, 20, kv_heads=2, key_dim=16, value_dim=8, codec="f32")
    q, q_sinks = jnp.zeros((1, 3, 2, 16)), jnp.zeros((1, 3, 2, 8))
    with pytest.raises(ValueError, match=r"q_sinks is float32\[1, 3, 2, 8\]; accepted beside q is"):
        attend(q, cache, jnp.zeros((1, 3), jnp.int32), q_sinks=q_sinks)


@pytest.mark.parametrize(
    ("settings", "choices", "first"),
    [
        ({"window": 1024}, {}, 29),
        ({"window": 1024}, {"codec": "int8"}, 29),
        ({"window": 1024}, {"layout": Paged(64)}, 29),
        ({"window": 1024}, {"codec": "kivi4"}, 117),
        ({"chunk": 4096}, {}, 24),
        ({"chunk": 4096, "window": 1024}, {}, 29),
        ({}, {}, 0),
        ({"window": 1024}, {"layout": SinkRing(4, 2044)}, 0),
    ],
    ids=str,
)
def test_blocks_before_the_window_are_not_read(settings, choices, first):
    """Queries at 16000 to 16002, of 16000 tokens: what is before 14977, or 12288, is not seen."""
    choices = {"layout": "dense", "codec": "f32"} | choices
    inner = init_layer_cache(2, 2**14, kv_heads=1, key_dim=32, value_dim=32, **choices)
    inner = replace(inner, n=jnp.array([16000, 16000]))
    read = []

    class Counted(NamedTuple):
        n: jax.Array = inner.n
        sight: Sight = inner.sight

        def blocks(self):
            return inner.blocks()

        def first_block(self, oldest):
            return inner.first_block(oldest)

        def block(self, i):
            jax.debug.callback(lambda i: read.append(int(i)), i)
            return inner.block(i)

        def operands(self):
            return None

    positions = jnp.array([[16000, 16001, 16002], [16000, -1, -1]])
    q = jnp.ones((2, 3, 2, 32))
    jax.block_until_ready(jax.jit(lambda q: attend(q, Counted(), positions, **settings))(q))
    jax.effects_barrier()
    assert sorted(read) == list(range(first, int(inner.blocks())))
