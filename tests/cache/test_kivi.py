"""KIVI: golden bytes, what becomes codes and when, and what the arrays take."""

from functools import cache as remember

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache.kivi_rows import SMALL, append, assert_same, draw, empty, fill, live, tokens_of
from quick import rest_slow

from kvjax import sizing
from kvjax.cache import (
    CapacityError,
    Kivi,
    KiviCache,
    Paged,
    Record,
    SinkRing,
    SlotCache,
    init_layer_cache,
)
from kvjax.cache.bits import pack, unpack
from kvjax.ops import attend


def test_golden_bytes_of_packing():
    """The first code is in the lowest bits."""
    two = jnp.array([[0, 1, 2, 3], [3, 0, 0, 1]], jnp.uint8)
    assert pack(two, 2).tolist() == [[0b11100100], [0b01000011]]
    assert pack(jnp.array([1, 2, 15, 8], jnp.uint8), 4).tolist() == [0x21, 0x8F]
    assert unpack(pack(two, 2), 2).tolist() == two.tolist()
    assert unpack(jnp.array([0x21, 0x8F], jnp.uint8), 4).tolist() == [1, 2, 15, 8]


def test_golden_bytes_of_a_group():
    """Keys share along tokens, values along channels; counted by hand."""
    codec = Kivi(bits=2, group=4, residual=4)
    x = np.array([[0, 10, 5, -1], [1, 16, 5, -1], [2, 13, 5, 0], [3, 19, 5, 2]], np.float32)
    record = Record(*np.concatenate([x, x * 0 + 9])[None, None, None].repeat(2, 0))
    leaves = fill(empty(codec, 1, 8, 1, 4), record, [8], [8]).leaves
    assert leaves["k_zero"].tolist() == [[[[0, 10, 5, -1]]]]
    assert leaves["k_scale"].tolist() == [[[[1, 3, 0, 1]]]]
    # Token by token the codes are 0 0 0 0, 1 2 0 0, 2 1 0 1, 3 3 0 3.
    assert leaves["k"].tolist() == [[[[[0x00], [0x09], [0x46], [0xCF]]]]]
    assert leaves["v_zero"].tolist() == [[[[[-1], [-1], [0], [2]]]]]
    scales = np.array([11, 17, 13, 17], np.float32) * np.float32(1 / 3)
    np.testing.assert_array_equal(leaves["v_scale"].ravel(), scales.astype(np.float16))
    # -1 is 0 and 10 is 3; 0, 0.27 steps up, is 0, and 5, 1.6 steps up, is 2. And so on.
    assert leaves["v"].tolist() == [[[[[0x2C], [0x1C], [0x1C], [0x1C]]]]]


def quantised(x, bits, axis):
    """The definition, in numpy: codes times scale plus zero."""
    x = x.astype(np.float16).astype(np.float32)
    zero = x.min(axis, keepdims=True)
    scale = ((x.max(axis, keepdims=True) - zero) / (2**bits - 1)).astype(np.float16)
    scale = scale.astype(np.float32)
    return (
        np.clip(np.round((x - zero) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1) * scale + zero
    )


@pytest.mark.parametrize("codec", [SMALL, Kivi(4, 4, 8), Kivi(2, 8, 8)], ids=str)
def test_what_is_read_is_the_definition(codec):
    """Codes of keys per channel and of values per token; the rest in fp16."""
    record, group = draw(2, 2, 40, 16), codec.group
    cache = fill(empty(codec, dim=16), record, (40, 21), [40])
    for row, n in enumerate((40, 21)):
        coded = -(-(n - 8) // group) * group
        k, v = (x[row].astype(np.float16).astype(np.float32) for x in record)
        in_groups = k[:, :coded].reshape(2, -1, group, 16)
        k[:, :coded] = quantised(in_groups, codec.bits, -2).reshape(2, coded, 16)
        in_groups = v[:, :coded].reshape(2, coded, -1, group)
        v[:, :coded] = quantised(in_groups, codec.bits, -1).reshape(2, coded, 16)
        for position, (_, key, value) in tokens_of(cache, row).items():
            np.testing.assert_allclose(key, k[:, position], atol=1e-5)
            np.testing.assert_allclose(value, v[:, position], atol=1e-5)


LONG = (513, 499)


@remember
def long_at_once() -> tuple[Record, KiviCache]:
    record = draw(2, 1, 513, 32)
    return record, fill(empty("kivi2", 2, 513, 1, 32), record, LONG, [513])


@pytest.mark.parametrize(
    "splits",
    [
        [129, 1, 1, 33],
        *(pytest.param(splits, marks=pytest.mark.slow) for splits in ([1], [64], [7, 200])),
    ],
    ids=str,
)
def test_a_text_leaves_the_same_codes_whatever_its_steps(splits):
    record, at_once = long_at_once()
    streamed = fill(empty("kivi2", 2, 513, 1, 32), record, LONG, splits)
    for row in (0, 1):
        assert_same(live(streamed, row), live(at_once, row))
        assert len(tokens_of(streamed, row)) == LONG[row]


def test_rows_that_start_ragged():
    """13 tokens more fill four groups of the first row, 2 more none of the second."""
    record = draw(2, 2, 21, 8)
    first = fill(empty(), record, (8, 17), [17])
    rest = Record(*(np.zeros((2, 2, 13, 8), np.float32) for _ in "kv"))
    for new, x in zip(rest, record, strict=True):
        new[0], new[1, :, :2] = x[0, :, 8:21], x[1, :, 17:19]
    both = append(first, rest, np.array([13, 2]))
    for row, n in enumerate((21, 19)):
        found = live(both, row)
        assert_same(found, live(fill(empty(), record, (n, n), [21]), row))
        for name in ("k", "k_scale", "v", "v_zero"):  # what is no code yet was never written
            assert not both.leaves[name][row, :, found[name].shape[1] :].any()


@pytest.mark.parametrize("codec", rest_slow([SMALL, Kivi(2, 8, 8)], [SMALL]), ids=str)
def test_the_residual_never_holds_more_than_its_slots(codec):
    """Between R - G + 1 and R exact tokens from R on; and codes stay what they were."""
    record, cache, before = draw(1, 1, 40, 8), empty(codec, 1, 40, 1), None
    for n in range(1, 41):
        new = Record(*(x[:, :, n - 1 : n] for x in record))
        cache = append(cache, new, np.ones(1, np.int32))
        found = tokens_of(cache, 0)
        exact = sorted(p for p, (slot, *_) in found.items() if slot >= 32)
        assert exact == list(range(n - len(exact), n))
        assert min(n, 8 - codec.group + 1) <= len(exact) <= 8
        for position in exact:
            np.testing.assert_array_equal(
                found[position][1], record.k[0, :, position].astype(np.float16)
            )
        after = {name: x for name, x in live(cache, 0).items() if not name.endswith("_exact")}
        for name, old in (before or {}).items():
            np.testing.assert_array_equal(after[name][:, : old.shape[1]], old)
        before = after


def test_one_group_as_residual():
    """32 tokens, then 40 one by one, against 72 at once, all of them in one group's residual."""
    settings, record = (Kivi(2, group=32, residual=32), 2, 72, 2, 32), draw(2, 2, 72, 32)
    streamed = fill(empty(*settings), Record(*(x[:, :, :32] for x in record)), [32, 0], [32])
    spec = sizing.ModelSpec("test", 64, (sizing.LayerSpec(4, 2, 32, 32),))
    said = spec.cache_bytes(96, 2, streamed.codec.spec)
    for i in range(32, 72):
        # Row 1 stays empty beside row 0.
        new = Record(*(x[:, :, i : i + 1] for x in record))
        streamed = append(streamed, new, np.array([1, 0]))
        held = live(streamed, 0)
        assert held["k_exact"].shape[1] + 32 * held["k"].shape[1] == i + 1
        assert held["k_exact"].shape[1] <= 32
        assert streamed.nbytes == said.allocated + said.tables
    at_once = fill(empty(*settings), record, [72, 72], [72])
    assert_same(live(streamed, 0), live(at_once, 0))
    assert held["k"].dtype == np.uint8
    assert tokens_of(streamed, 1) == {}


def test_rows_are_independent():
    record = draw(2, 2, 30, 8)
    alone = fill(empty(batch=1), Record(*(x[1:] for x in record)), [30], [30])
    record.k[0, 0], record.v[0] = np.nan, np.inf
    beside = fill(empty(), record, (11, 30), [30])
    assert_same(live(beside, 1), live(alone, 0))


def test_an_outlier_channel_spoils_tokens_but_not_channels():
    """One channel of keys is ten times the others: the reason for the two kinds of groups."""
    x = draw(1, 1, 256, 64).k
    x[..., 7] *= 10
    found = tokens_of(fill(empty("kivi2", 1, 256, 1, 64), Record(x, x), [256], [256]), 0)
    k, v = (
        np.stack([found[position][part][0] for position in range(128)]) - x[0, 0, :128]
        for part in (1, 2)
    )
    size = np.linalg.norm(x[0, 0, :128])
    assert np.linalg.norm(k) / size < 0.4
    assert np.linalg.norm(v) / size > 0.5


@pytest.mark.parametrize("codec", [Kivi(2, 4, 8), Kivi(4, 4, 8)], ids=str)
def test_equal_numbers_decode_to_themselves(codec):
    flat = np.array([0, 3.7, -65504, 6e-8], np.float16).reshape(2, 2, 1, 1)
    record = Record(*(np.broadcast_to(flat, (2, 2, 20, 8)).astype(np.float32) for _ in "kv"))
    cache = fill(empty(codec), record, (20, 20), [20])
    for row in (0, 1):
        for _, *parts in tokens_of(cache, row).values():
            for part in parts:
                np.testing.assert_array_equal(part, record.k[row, :, 0])


def test_what_no_half_can_hold_becomes_the_largest():
    record = draw(1, 1, 20, 8)
    record.k[..., 0], record.v[..., 1] = 1e9, -np.inf
    found = tokens_of(fill(empty(batch=1, heads=1), record, [20], [20]), 0)
    for position in (0, 19):
        assert found[position][1][0, 0] == 65504
        assert found[position][2][0, 1] == -65504
        assert np.isfinite(found[position][1:]).all()


@pytest.mark.parametrize("capacity", [1, 8, 9, 12, 13, 40])
@pytest.mark.parametrize(
    ("codec", "key_dim", "value_dim"),
    [(SMALL, 8, 8), (Kivi(4, 4, 8), 6, 12), (Kivi(2, 8, 8), 4, 16)],
    ids=str,
)
def test_bytes_are_those_of_sizing(capacity, codec, key_dim, value_dim):
    cache = init_layer_cache(
        3, capacity, kv_heads=2, key_dim=key_dim, value_dim=value_dim, codec=codec
    )
    layer = sizing.LayerSpec(2, 2, key_dim, value_dim)
    spec = sizing.ModelSpec("test", 64, (layer,))
    said = spec.cache_bytes(cache.capacity, 3, codec.spec)
    assert capacity <= cache.capacity < max(capacity, 8) + codec.group
    assert cache.capacity % codec.group == 0
    assert cache.nbytes == said.allocated + said.tables
    assert cache.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    if capacity <= 8:
        assert cache.nbytes == spec.cache_bytes(capacity, 3, codec.spec).total
    assert len({id(leaf) for leaf in jax.tree.leaves(cache)}) == len(cache.leaves) + 2


def test_names_are_those_of_sizing():
    for name in ("kivi2", "kivi4"):
        assert empty(name, dim=32).codec.spec == sizing.CODECS[name]


REFUSED = {
    "pages of half a group": (
        {"layout": Paged(16)},
        "codec kivi2.* share a scale over 32 tokens.*drops 16 at a time.*Paged of a multiple of 32",
    ),
    "sinks": ({"layout": SinkRing(2, 5)}, "SinkRing.*share a scale.*drops 1 at a time"),
    "ring": ({"layout": "ring", "window": 8}, "'ring'.*share a scale.*drops 1 at a time"),
    "a ring of its own accord": ({"window": 8}, "'auto'.*a window of 8.*accepted: 'dense'"),
    "groups over the end": (
        {"value_dim": 48},
        "value_dim: got 48; accepted: multiples of group=32",
    ),
    "half bytes": ({"key_dim": 33}, "key_dim: got 33; accepted: multiples of 4"),
    "no layout": ({"layout": "dance"}, "layout='dance': accepted are auto, dense"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes, message):
    settings = {"kv_heads": 2, "key_dim": 32, "value_dim": 32, "codec": "kivi2"}
    with pytest.raises(ValueError, match=message):
        init_layer_cache(2, 64, **(settings | changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "bits: got 3; accepted: 2, 4"),
        ({"group": 0}, "group: got 0; accepted: at least 1"),
        ({"residual": 100}, "residual: got 100; accepted: multiples of group=32"),
        ({"residual": 0}, "residual: got 0"),
    ],
    ids=str,
)
def test_settings_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Kivi(**settings)


def test_a_window_is_masked_in_a_dense_cache():
    cache = empty(capacity=40, batch=1)
    assert (
        init_layer_cache(
            1, 40, kv_heads=2, key_dim=8, value_dim=8, window=4, layout="dense", codec=SMALL
        )
        .leaves["k"]
        .shape
        == cache.leaves["k"].shape
    )


def test_eviction_is_refused():
    with pytest.raises(ValueError, match="keep: keys of codec kivi2 share a scale over 4 tokens"):
        empty().keep(jnp.zeros((2, 1, 3), jnp.int32))


def test_attention_is_that_over_what_is_read():
    """Ragged rows, against a plain cache of the decoded records; dead slots hold NaN."""
    record, lengths = draw(2, 2, 40, 8), (37, 5)
    cache = fill(empty(), record, lengths, [40])
    plain = [np.zeros((2, 2, 40, 8), np.float32) for _ in "kv"]
    for row in (0, 1):
        for position, (_, *parts) in tokens_of(cache, row).items():
            for x, part in zip(plain, parts, strict=True):
                x[row, :, position] = part
    dense = init_layer_cache(2, 40, kv_heads=2, key_dim=8, value_dim=8, codec="f32")
    dense = append(dense, Record(*plain), np.array(lengths))
    q = np.random.default_rng(5).normal(size=(2, 1, 4, 8)).astype(np.float32)
    positions = np.array(lengths)[:, None] - 1
    expected = jax.jit(attend)(q, dense, positions)
    for found in (cache, poisoned(cache)):
        for x, y in zip(jax.jit(attend)(q, found, positions), expected, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def poisoned(cache) -> KiviCache:
    """NaN in all that is dead."""
    held = {row: live(cache, row) for row in (0, 1)}
    leaves = {}
    for name, leaf in cache.leaves.items():
        new = np.array(leaf)
        if new.dtype == np.float16:
            new[:] = np.nan
            for row, parts in held.items():
                n = int(cache.n[row])
                first = n - parts["k_exact"].shape[1]
                exact = np.arange(first, n) % cache.codec.residual
                groups = slice(parts["k"].shape[1])
                new[row][:, exact if name.endswith("_exact") else groups] = parts[name]
        leaves[name] = jnp.asarray(new)
    assert any(np.isnan(leaf).any() for leaf in leaves.values())
    return KiviCache(leaves, cache.n, cache.overflow, cache.codec)


def test_select():
    cache = fill(empty(), draw(2, 2, 30, 8), (30, 13), [30])
    chosen = cache.select(jnp.array([1, 0, 1]))
    assert chosen.n.tolist() == [13, 30, 13]
    for new, old in enumerate((1, 0, 1)):
        assert_same(live(chosen, new), live(cache, old))


def test_rollback_to_where_tokens_became_codes():
    """At 29 tokens 24 are codes, and so they were from 29 on; at 32 three can be forgotten."""
    record = draw(2, 2, 40, 8)
    cache = fill(empty(), record, (32, 6), [40])
    back = cache.rollback(jnp.array([3, 6]))
    assert back.n.tolist() == [29, 0]
    assert_same(live(back, 0), live(fill(empty(), record, (29, 0), [40]), 0))
    with pytest.raises(ValueError, match=r"rollback of .* \[32, 6\], of which \[24, 0\] are codes"):
        cache.rollback(jnp.array([4, 0]))
    with pytest.raises(ValueError, match=r"rollback of 7 tokens; rows hold \[32, 6\]"):
        cache.rollback(7)
    flagged = jax.jit(lambda cache: cache.rollback(jnp.array([4, 1])))(cache)
    assert flagged.n.tolist() == [32, 5]
    assert flagged.overflow.tolist() == [True, False]


def test_what_is_appended_after_a_rollback_is_what_counts():
    record, other = draw(1, 2, 40, 8), draw(1, 2, 40, 8, seed=1)
    for x, y in zip(other, record, strict=True):
        x[:, :, :29] = y[:, :, :29]
    cache = fill(empty(batch=1), other, [32], [40]).rollback(3)
    rest = Record(*(x[:, :, 29:] for x in record))
    cache = append(cache, rest, np.array([11]))
    assert_same(live(cache, 0), live(fill(empty(batch=1), record, [40], [40]), 0))


def test_overflow():
    record = draw(2, 2, 40, 8)
    cache = fill(empty(capacity=17), record, (19, 2), [40])
    assert cache.capacity == 20
    new = draw(2, 2, 2, 8, seed=3)
    with pytest.raises(CapacityError, match=r"capacity is 20 .*hold \[19, 2\].*take \[2, 2\]"):
        cache.append(new, jnp.array([2, 2]))
    cache.check()
    after = append(cache, new, np.array([2, 2]))
    assert_same(live(after, 0), live(cache, 0))
    assert after.n.tolist() == [19, 4]
    with pytest.raises(CapacityError, match=r"rows \[0\] dropped .* capacity is 20 tokens"):
        after.check()


@pytest.mark.parametrize("tokens", rest_slow([1, 8], [1]))
def test_a_step_writes_in_place_whatever_the_capacity(tokens):
    """The donated cache is handed through, and temporaries do not grow with it."""

    def step(cache, record, q, count):
        attended, _ = attend(q, cache, cache.n[:, None] + jnp.arange(tokens))
        attended, cache = jax.lax.optimization_barrier((attended, cache))
        return attended, cache.append(record, count)

    def memory(capacity):
        cache = jax.eval_shape(lambda: empty("kivi2", 2, capacity, 2, 32))
        k = jax.ShapeDtypeStruct((2, 2, tokens, 32), jnp.float32)
        q = jax.ShapeDtypeStruct((2, tokens, 8, 32), jnp.float32)
        count = jax.ShapeDtypeStruct((2,), jnp.int32)
        compiled = jax.jit(step, donate_argnums=0).lower(cache, Record(k, k), q, count).compile()
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        return nbytes, compiled.memory_analysis()

    nbytes, short = memory(8192)
    assert short.alias_size_in_bytes == nbytes
    assert abs(memory(65536)[1].temp_size_in_bytes - short.temp_size_in_bytes) <= 64 * 1024


def test_it_is_no_layout_of_slots():
    assert not isinstance(empty(), SlotCache)
    assert empty().operands() is None
