"""Attention over a cache known by its blocks alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Block, Record, Sight, init_layer_cache
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
    return reference.attention(q, k, v, seen, settings.get("sink_logits"), rule)


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
        sight: Sight = Sight()

        def blocks(self):
            return self.inner.blocks()

        def block(self, i):
            return self.inner.block(i)

        def operands(self):
            return None

    assert_same(run(q, ByBlocks(cache), positions, window=window), want)


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
