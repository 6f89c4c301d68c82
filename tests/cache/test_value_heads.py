"""Caches whose values have another number of heads than their keys.

Each is compared with two caches that have as many of both: one keeps the same keys, the other the
same values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax import sizing
from kvjax.cache import Kivi, Paged, Record, SinkRing, init_layer_cache
from kvjax.sizing.codecs import Part

BATCH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CAPACITY = 2, 1, 3, 4, 8, 16
LENGTHS = np.array([13, 7])
SMALL = Kivi(4, group=4, residual=8)
LAYOUTS = {
    "dense": {},
    "pages": {"layout": Paged(4)},
    "ring": {"window": 7},
    "sinks": {"layout": SinkRing(2, 5)},
}
CASES = [
    ("dense", "f32"),
    ("dense", "int4"),
    ("dense", "fp8_e4m3_head"),
    ("pages", "int8"),
    ("pages", "fp8_e4m3"),
    ("ring", "bf16"),
    ("sinks", "fp8_e4m3_token"),
    ("dense", SMALL),
    ("pages", SMALL),
]
# Scales of heads, of tokens and none, in three layouts.
QUICK = [("dense", "fp8_e4m3_head"), ("pages", "int8"), ("ring", "bf16")]
every_cache = pytest.mark.parametrize(
    ("layout", "codec"), rest_slow(CASES, [*QUICK, ("dense", SMALL)]), ids=str
)
append = jax.jit(lambda cache, record, count: cache.append(record, count))


def drawn(heads: int, dim: int) -> jax.Array:
    rng = np.random.default_rng(heads)
    return jnp.asarray(rng.normal(size=(BATCH, heads, CAPACITY, dim)), jnp.float32)


KEYS, VALUES = drawn(KEY_HEADS, KEY_DIM), drawn(VALUE_HEADS, VALUE_DIM)


def filled(layout, codec, k=KEYS, v=VALUES, scales=None):
    """A cache of LENGTHS tokens of k and v, which came in steps of six and of one."""
    cache = init_layer_cache(
        BATCH,
        CAPACITY,
        kv_heads=k.shape[1],
        value_heads=None if k.shape[1] == v.shape[1] else v.shape[1],
        key_dim=k.shape[-1],
        value_dim=v.shape[-1],
        codec=codec,
        scales=scales,
        **LAYOUTS[layout],
    )
    done = LENGTHS * 0
    while (done < LENGTHS).any():
        most = 6 if (done < 6).all() else 1
        count = np.minimum(most, LENGTHS - done)
        new = Record(
            *(jnp.stack([x[b, :, n : n + most] for b, n in enumerate(done)]) for x in (k, v))
        )
        cache, done = append(cache, new, jnp.asarray(count, jnp.int32)), done + count
    cache.check()
    return cache


def blocks(cache):
    return [jax.jit(lambda c, i: c.block(i))(cache, i) for i in range(int(cache.blocks()))]


def assert_the_same(cache, of_keys, of_values):
    """What is read back is what two caches of one number of heads hold."""
    for got, keys, values in zip(*map(blocks, (cache, of_keys, of_values)), strict=True):
        assert (got.k.shape[1], got.v.shape[1]) == (KEY_HEADS, VALUE_HEADS)
        np.testing.assert_array_equal(got.pos, keys.pos)
        live = np.broadcast_to(np.asarray(got.pos)[:, 0] >= 0, (BATCH, got.k.shape[2]))
        for part, whole in ((got.k, keys.k), (got.v, values.v)):
            part, whole = (np.moveaxis(np.asarray(x, np.float32), 2, 1) for x in (part, whole))
            np.testing.assert_array_equal(part[live], whole[live])


def pair(layout, codec):
    """A cache with the same keys, and one with the same values, each with one number of heads."""
    of_keys = filled(layout, codec, KEYS, drawn(KEY_HEADS, VALUE_DIM))
    return of_keys, filled(layout, codec, drawn(VALUE_HEADS, KEY_DIM), VALUES)


@every_cache
def test_it_holds_what_two_caches_do(layout, codec):
    cache = filled(layout, codec)
    assert_the_same(cache, *pair(layout, codec))
    assert_the_same(
        cache.select(jnp.array([1, 0])), *(c.select(jnp.array([1, 0])) for c in pair(layout, codec))
    )
    leaves = {name: leaf.shape[1] for name, leaf in cache.leaves.items()}
    assert leaves == {name: KEY_HEADS if name[0] == "k" else VALUE_HEADS for name in leaves}


@every_cache
def test_its_bytes_are_those_of_its_parts(layout, codec):
    cache = filled(layout, codec)
    spec = codec.spec if isinstance(codec, Kivi) else sizing.codec(codec)
    slots = cache.capacity
    parts = Part(KEY_HEADS, KEY_DIM, key=True), Part(VALUE_HEADS, VALUE_DIM, key=False)
    records = BATCH * sum(spec.allocated(slots, part) for part in parts)
    constants = sum(spec.constants(part) for part in parts)
    table = BATCH * 4 * cache.page_table.shape[1] if "pages" in layout else 0
    assert cache.nbytes == records + constants + table + BATCH * 5


@pytest.mark.parametrize(("layout", "codec"), rest_slow(CASES[:-2], QUICK), ids=str)
def test_an_eviction_is_of_all_heads_at_once(layout, codec):
    """And what comes after it goes behind what is left, of keys and of values."""
    indices = jnp.array([[[0, 6, 2]], [[3, 1, -1]]])
    more, one = Record(KEYS[:, :, 13:14], VALUES[:, :, 13:14]), jnp.ones(BATCH, jnp.int32)

    def after(cache, record):
        return append(cache.keep(indices, room=1), record, one)

    of_keys, of_values = pair(layout, codec)
    assert_the_same(
        after(filled(layout, codec), more),
        after(of_keys, Record(more.k, drawn(KEY_HEADS, VALUE_DIM)[:, :, 13:14])),
        after(of_values, Record(drawn(VALUE_HEADS, KEY_DIM)[:, :, 13:14], more.v)),
    )
    for heads in (KEY_HEADS + 1, VALUE_HEADS):
        with pytest.raises(
            ValueError,
            match=rf"^indices: got shape \[2, {heads}, 3\]; accepted: \(2, 1, n\), n at least 1, "
            r"as keys and values have 1 and 3 heads",
        ):
            filled(layout, codec).keep(jnp.zeros((BATCH, heads, 3), jnp.int32))


def test_scales_of_heads_are_of_keys_or_of_values():
    given = {"k_scale": jnp.float32([0.5]), "v_scale": jnp.float32([0.25, 2.0, 16.0])}
    cache = filled("dense", "fp8_e4m3_head", scales={**given})
    ends = {name: 448 * scale[:, None, None] for name, scale in given.items()}
    edge = Record(
        jnp.broadcast_to(ends["k_scale"], KEYS[:, :, :1].shape),
        jnp.broadcast_to(ends["v_scale"], VALUES[:, :, :1].shape),
    )
    cache = cache.append(edge, jnp.ones(BATCH, jnp.int32))
    block = cache.block(jnp.int32(0))
    np.testing.assert_array_equal(block.k[0, :, 13], edge.k[0, :, 0])
    np.testing.assert_array_equal(block.v[0, :, 13], edge.v[0, :, 0])
    with pytest.raises(ValueError, match=r"v_scale of shape \[1\]; accepted: \[3\]"):
        filled("dense", "fp8_e4m3_head", scales={**given, "v_scale": given["k_scale"]})
