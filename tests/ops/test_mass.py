"""Attention mass: column sums of the softmax that `attend` took, found again from its LSE."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax.cache import Paged, Record, SinkRing, init_layer_cache
from kvjax.cache import kept as kept_module
from kvjax.cache import paged as paged_module
from kvjax.cache import slots as slots_module
from kvjax.ops import attend, attention_mass, over_slots, slot_positions, sum_over_blocks

HEADS, KV_HEADS, DIM, VALUE_DIM, SLOTS = 6, 2, 16, 8, 24
LENGTHS = np.array([21, 13])
SETTINGS = {"plain": {}, "all": {"window": 7, "soft_cap": 2.0, "scale": 0.8}}
LAYOUTS = {"dense": "dense", "pages": Paged(5), "sinks": SinkRing(2, 12)}


@pytest.fixture(autouse=True)
def narrow_blocks(small_blocks, monkeypatch):
    """Blocks of 10 slots, which divide no capacity here."""
    for module in (slots_module, kept_module, paged_module):
        monkeypatch.setattr(module, "BLOCK", 10)


def filled(draw, layout, codec="f32", lengths=LENGTHS):
    _, k, v = draw(2, (HEADS, KV_HEADS), SLOTS, (DIM, VALUE_DIM))
    cache = init_layer_cache(
        2,
        SLOTS,
        kv_heads=KV_HEADS,
        key_dim=DIM,
        value_dim=VALUE_DIM,
        layout=layout,
        codec=codec,
    )
    return cache.append(Record(k, v), jnp.asarray(lengths))


def queries(draw, tokens, seed=3):
    return draw(2, (HEADS, KV_HEADS), 1, (DIM, VALUE_DIM), tokens=tokens, seed=seed).q


def newest(tokens, lengths=LENGTHS):
    return jnp.asarray(lengths[:, None] - tokens + np.arange(tokens), jnp.int32)


def by_definition(q, k, pos, q_positions, *, window=None, soft_cap=None, scale=None, sinks=0):
    """Softmax in float64, summed over the queries and averaged over each KV head's query heads."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    pos = np.broadcast_to(pos, k.shape[:3])
    mass = np.zeros(k.shape[:3])
    group = HEADS // KV_HEADS
    for b, t, n in np.ndindex(q.shape[:3]):
        head, at = n // group, int(q_positions[b, t])
        seen = (pos[b, head] >= 0) & (pos[b, head] <= at)
        if window is not None:
            seen &= (pos[b, head] > at - window) | (pos[b, head] < sinks)
        scores = k[b, head] @ q[b, t, n] * (DIM**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.where(seen, np.exp(scores - scores.max()), 0)
        if seen.any():
            mass[b, head] += weights / weights.sum() / group
    return mass


def both(q, cache, positions, **settings):
    @jax.jit
    def run(q, cache):
        _, lse = attend(q, cache, positions, **settings)
        return attention_mass(q, cache, lse, positions, **settings), slot_positions(cache)

    return run(q, cache)


def decoded(cache):
    """Keys of all slots, as attention reads them."""
    if hasattr(cache, "page_table"):
        pages = cache.leaves["k"][cache.page_table]
        return jnp.moveaxis(pages, 2, 1).reshape(2, KV_HEADS, -1, DIM)
    return cache.codec.decode(cache.leaves, cache.scales).k


@pytest.mark.parametrize(
    ("layout", "tokens", "settings"),
    rest_slow(
        product(LAYOUTS, [1, 3, 11], SETTINGS),
        [
            *(("dense", 1, "plain"), ("dense", 11, "all"), ("pages", 3, "all")),
            *(("pages", 11, "plain"), ("sinks", 1, "all"), ("sinks", 3, "plain")),
        ],
    ),
)
def test_the_mass_of_each_slot(layout, tokens, settings, draw):
    settings = SETTINGS[settings]
    cache, q, positions = filled(draw, LAYOUTS[layout]), queries(draw, tokens), newest(tokens)
    mass, pos = both(q, cache, positions, **settings)
    assert mass.shape == (2, KV_HEADS, cache.capacity)
    assert mass.dtype == jnp.float32
    if layout == "sinks":
        settings = {"window": 12, **settings, "sinks": 2}
    want = by_definition(q, decoded(cache), pos, positions, **settings)
    np.testing.assert_allclose(mass, want, atol=2e-5)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_lossy_codecs_give_the_mass_of_what_they_hold(codec, draw):
    cache, q, positions = filled(draw, "dense", codec), queries(draw, 4), newest(4)
    mass, pos = both(q, cache, positions)
    np.testing.assert_allclose(mass, by_definition(q, decoded(cache), pos, positions), atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_slot_is_counted_once(layout, draw):
    """Though blocks overlap, or end past the last slot; dead slots get 0."""
    cache = filled(draw, LAYOUTS[layout])
    norms, pos = jax.jit(
        lambda cache: (
            over_slots(cache, lambda block: jnp.linalg.norm(block.k, axis=-1)),
            slot_positions(cache),
        )
    )(cache)
    want = np.where(pos >= 0, np.linalg.norm(decoded(cache), axis=-1), 0)
    np.testing.assert_allclose(norms, want, rtol=1e-5)
    total = jax.jit(lambda cache: sum_over_blocks(cache, lambda block: (block.pos >= 0).sum(2)))
    assert total(cache)[:, 0].tolist() == (pos >= 0).sum(2)[:, 0].tolist()


def test_all_slots_together_have_the_queries(draw):
    """A query pads the row where its position is -1, and then counts nothing."""
    positions = newest(11).at[1, 9:].set(-1)
    mass, _ = both(queries(draw, 11), filled(draw, "dense"), positions)
    np.testing.assert_allclose(mass.sum(2), [[11, 11], [9, 9]], rtol=1e-5)


def test_the_newest_queries_need_no_positions(draw):
    cache, q = filled(draw, "dense"), queries(draw, 3)
    _, lse = jax.jit(attend)(q, cache, newest(3))
    implied = jax.jit(attention_mass)(q, cache, lse)
    np.testing.assert_array_equal(implied, jax.jit(attention_mass)(q, cache, lse, newest(3)))


def test_later_tokens_change_nothing(draw):
    """Causal: queries of earlier positions give the same mass, whatever came after them."""
    short = LENGTHS - 4
    q, positions = queries(draw, 5), newest(5, short)
    early, _ = both(q, filled(draw, "dense", lengths=short), positions)
    late, _ = both(q, filled(draw, "dense"), positions)
    np.testing.assert_array_equal(early, late)


def test_rows_are_independent(draw):
    q, cache = queries(draw, 5), filled(draw, "dense")
    mass, _ = both(q, cache, newest(5))
    other, _ = both(q.at[1].multiply(3), cache, newest(5))
    np.testing.assert_array_equal(mass[0], other[0])
    assert np.abs(mass[1] - other[1]).max() > 1e-3


def test_dead_slots_get_none(draw):
    cache = filled(draw, "dense")
    cache = cache.rollback(jnp.asarray([4, 2]))
    mass, pos = both(queries(draw, 3), cache, newest(3, LENGTHS - [4, 2]))
    assert not np.asarray(mass)[np.broadcast_to(pos < 0, mass.shape)].any()
    np.testing.assert_allclose(mass.sum(2), 3, rtol=1e-5)


def test_what_does_not_fit_is_refused(draw):
    cache, q = filled(draw, "dense"), queries(draw, 3)
    for lse in (jnp.zeros((2, 3)), jnp.zeros((2, 4, HEADS))):
        with pytest.raises(ValueError, match=r"lse float32.*accepted are q \(B, T, N, H\), lse"):
            attention_mass(q, cache, lse)
    with pytest.raises(ValueError, match="multiple of 2 heads"):
        partial(attention_mass, cache=cache)(q[:, :, :5], lse=jnp.zeros((2, 3, 5)))
