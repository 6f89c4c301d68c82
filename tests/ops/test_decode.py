"""Decode attention against its reference, against jax.nn, and against closed forms."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax.cache.common import block_width
from kvjax.ops import decode_attention, reference, xla
from kvjax.ops.online import ScoreRule
from kvjax.ops.stored import Stored

LENGTHS = jnp.array([0, 1, 7, 8, 9, 20])
ROWS = LENGTHS[:, None]  # as implementations take them
# (N, K), (H, HV): every kind of group and width, one of each kind of checkpoint.
SHAPES = {
    "mha": ((4, 4), (16, 16)),
    "group 3, dim 80": ((6, 2), (80, 80)),
    "group 7, dim 96": ((7, 1), (96, 96)),
    "group 9, narrow values": ((18, 2), (192, 128)),
    "group 24, latent": ((24, 1), (576, 512)),
    "group 71, wide values": ((71, 1), (8, 24)),
}
SETTINGS = {
    "plain": {},
    "window 1": {"window": 1},
    "window 4": {"window": 4},
    "window of all": {"window": 20},
    "cap": {"soft_cap": 1.5},
    "scale": {"scale": 0.5},
    "sinks": {"sink_logits": True},
    "all": {"window": 11, "soft_cap": 3.0, "scale": 0.7, "sink_logits": True},
}


def settings_for(name: str, heads: int) -> dict:
    """Those settings, with a learned sink for each head where they have sinks."""
    settings = dict(SETTINGS[name])
    if settings.get("sink_logits"):
        settings["sink_logits"] = jnp.linspace(-2, 2, heads)
    return settings


def both(inputs, lengths, **settings):
    """(out, lse) of the blockwise implementation and of the reference."""
    return (
        decode_attention(
            *inputs, lengths, return_lse=True, implementation=implementation, **settings
        )
        for implementation in ("xla", "reference")
    )


def jax_nn(q, k, v, lengths, window=None):
    """The same by jax.nn; rows of length 0 set to 0, where it gives the mean of all values."""
    out = jax.nn.dot_product_attention(
        q[:, None],
        jnp.swapaxes(k, 1, 2),
        jnp.swapaxes(v, 1, 2),
        mask=visible(lengths, k.shape[2], window)[:, None, None, :],
    )[:, 0]
    return jnp.where((lengths > 0)[:, None, None], out, 0), None


def visible(lengths, slots, window):
    """(B, S), told slot by slot."""
    return jnp.array(
        [
            [n - (window or slots) <= slot < n for slot in range(slots)]
            for n in np.asarray(lengths).tolist()
        ]
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_group_and_width(shape, draw, assert_same):
    inputs = draw(len(LENGTHS), SHAPES[shape][0], 20, SHAPES[shape][1])
    got, want = both(inputs, LENGTHS)
    assert_same(got, want)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", rest_slow(SETTINGS, ["window 1", "window of all", "all"]))
def test_every_setting(name, draw, assert_same):
    got, want = both(draw(6, (6, 2), 20, (16, 8)), LENGTHS, **settings_for(name, 6))
    assert_same(got, want)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("window", "dtype"),
    rest_slow(
        product([None, 1, 4, 20], ["float32", "bfloat16"]), [(None, "bfloat16"), (4, "float32")]
    ),
)
def test_jax_nn_agrees(window, dtype, draw, assert_same):
    inputs = draw(6, (6, 2), 20, (16, 16), dtype=dtype)
    got = decode_attention(*inputs, LENGTHS, window=window, return_lse=True)
    assert_same(got, jax_nn(*inputs, LENGTHS, window))


@pytest.mark.parametrize(
    ("slots", "dtype"),
    rest_slow(
        product([1, 511, 512, 1200], ["float32", "bfloat16", "float16"]),
        [(1, "float32"), (511, "bfloat16"), (512, "float16"), (1200, "float32")],
    ),
)
def test_blocks_as_they_are(slots, dtype, draw, assert_same):
    """Capacities below, at and above the width of a block, in every dtype."""
    lengths = jnp.array([slots, slots // 2])
    got, want = both(draw(2, (4, 2), slots, (16, 16), dtype=dtype), lengths)
    assert got[0].dtype == dtype
    assert got[1].dtype == jnp.float32
    assert_same(got, want)


def test_a_cache_of_another_dtype_is_not_rounded(draw, assert_same):
    """float32 queries over a bf16 cache: accurate as float32."""
    q, k, v = draw(2, (4, 2), 20, (16, 16))
    got, want = both((q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)), jnp.array([20, 9]))
    assert got[0].dtype == jnp.float32
    assert_same(got, want)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_an_empty_row_gives_0_and_minus_infinity(implementation):
    q, kv = jnp.ones((2, 2, 4)), jnp.ones((2, 1, 5, 4))
    out, lse = decode_attention(
        q, kv, kv, jnp.array([0, 3]), return_lse=True, implementation=implementation
    )
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()
    np.testing.assert_allclose(out[1], 1, rtol=1e-6)
    np.testing.assert_allclose(lse[1], np.log(3) + 2, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("window", [None, 4])
def test_dead_slots_take_no_part(implementation, window, draw):
    q, k, v = draw(6, (4, 2), 20, (8, 8))
    clean = decode_attention(q, k, v, LENGTHS, window=window, implementation=implementation)
    dead = ~visible(LENGTHS, 20, window)[:, None, :, None]
    for poison in (jnp.nan, jnp.inf):
        k_dirty, v_dirty = (jnp.where(dead, poison, x) for x in (k, v))
        dirty = decode_attention(
            q, k_dirty, v_dirty, LENGTHS, window=window, implementation=implementation
        )
        np.testing.assert_array_equal(dirty, clean)


# Of each KV head, (B, K): none, one, some of a block, whole blocks, and all slots.
OF_HEADS = np.array([[0, 20], [1, 0], [7, 8], [20, 20], [9, 1], [16, 3]])


def head_by_head(q, k, v, lengths, sinks):
    """(out, lse) in float64, one head of one row after the other."""
    q, k, v, sinks = (np.asarray(x, np.float64) for x in (q, k, v, sinks))
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.zeros(q.shape[:2])
    for row, head in np.ndindex(q.shape[:2]):
        kv_head = head // (q.shape[1] // k.shape[1])
        live = lengths[row, kv_head]
        scores = k[row, kv_head, :live] @ q[row, head] * q.shape[-1] ** -0.5
        with np.errstate(divide="ignore"):
            lse[row, head] = np.log(np.exp(scores).sum() + np.exp(sinks[head]))
        if live:
            out[row, head] = np.exp(scores - lse[row, head]) @ v[row, kv_head, :live]
    return out, lse


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("sink", [-np.inf, 0.5])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_heads_of_different_lengths(implementation, sink, draw, assert_same):
    """NaN in dead slots; a head of length 0 gives 0, and LSE -inf or its sink."""
    inputs, sinks = draw(6, (6, 2), 20, (16, 8)), jnp.full(6, sink)
    dead = np.arange(20) >= OF_HEADS[..., None]
    k, v = (jnp.where(dead[..., None], jnp.nan, x) for x in inputs[1:])
    got = decode_attention(
        inputs.q,
        k,
        v,
        jnp.asarray(OF_HEADS),
        sink_logits=None if np.isinf(sink) else sinks,
        return_lse=True,
        implementation=implementation,
    )
    assert_same(got, head_by_head(*inputs, OF_HEADS, sinks))
    assert (got[1][0, :3] == sink).all()


@pytest.mark.usefixtures("small_blocks")
def test_heads_of_one_length_are_a_row(draw, assert_same):
    inputs = draw(6, (6, 2), 20, (16, 16))
    apart = jnp.repeat(LENGTHS[:, None], 2, axis=1)
    assert_same(*(decode_attention(*inputs, n, return_lse=True) for n in (apart, LENGTHS)))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_sinks_and_cap_by_hand(implementation):
    """Equal scores of 0 over n keys of value 1, and a sink: n / (n + exp(sink))."""
    sinks = jnp.array([0.0, 2.0])
    n = np.array([[0], [3]])
    ones = jnp.ones((2, 1, 4, 1))
    out, lse = decode_attention(
        jnp.zeros((2, 2, 1)),
        ones,
        ones,
        jnp.array([0, 3]),
        sink_logits=sinks,
        return_lse=True,
        implementation=implementation,
    )
    np.testing.assert_allclose(out[..., 0], n / (n + np.exp(sinks)), rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(n + np.exp(sinks)), rtol=1e-6, atol=1e-6)
    # Scores 1000 and 0, capped at 2: 2 and 0.
    q, k, v = jnp.ones((1, 1, 1)), jnp.array([1000.0, 0.0]), jnp.array([1.0, 0.0])
    out, lse = decode_attention(
        q,
        k.reshape(1, 1, 2, 1),
        v.reshape(1, 1, 2, 1),
        jnp.array([2]),
        soft_cap=2.0,
        scale=1.0,
        return_lse=True,
        implementation=implementation,
    )
    np.testing.assert_allclose(out.item(), np.exp(2) / (np.exp(2) + 1), rtol=1e-6)
    np.testing.assert_allclose(lse.item(), np.log(np.exp(2) + 1), rtol=1e-6)


def decode(q, k, v, lengths, sinks, rule):
    return reference.decode(q, Stored((k,), v), lengths, sinks, rule)


FAULTY = {
    "all zero": lambda q, k, v, lengths, sinks, rule: tuple(
        jnp.zeros_like(x) for x in decode(q, k, v, lengths, sinks, rule)
    ),
    "values built from keys": lambda q, k, v, lengths, sinks, rule: decode(
        q, k, k, lengths, sinks, rule
    ),
    "window shifted by one": lambda q, k, v, lengths, sinks, rule: decode(
        q, k, v, lengths, sinks, ScoreRule(rule.scale, rule.soft_cap, rule.window + 1)
    ),
    "length short by one": lambda q, k, v, lengths, sinks, rule: decode(
        q, k, v, jnp.maximum(lengths - 1, 0), sinks, rule
    ),
    "query heads dealt out in turn": lambda q, k, v, lengths, sinks, rule: decode(
        q.reshape(len(q), 3, 2, -1).swapaxes(1, 2).reshape(q.shape), k, v, lengths, sinks, rule
    ),
    "sinks forgotten": lambda q, k, v, lengths, sinks, rule: decode(q, k, v, lengths, None, rule),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTY)
def test_the_comparison_rejects(fault, dtype, draw, assert_same):
    """Each fault alone in out, and in LSE where it shows there, fails the tests above."""
    inputs = draw(6, (6, 2), 20, (16, 16), dtype=dtype)
    rule, sinks = ScoreRule(0.25, None, 4), jnp.linspace(-2, 2, 6)
    want = decode(*inputs, ROWS, sinks, rule)
    bad_out, bad_lse = FAULTY[fault](*inputs, ROWS, sinks, rule)
    with pytest.raises(AssertionError):
        assert_same((bad_out.astype(dtype), want[1]), want)
    if fault != "values built from keys":
        with pytest.raises(AssertionError):
            assert_same((want[0].astype(dtype), bad_lse), want)
    assert_same((want[0].astype(dtype), want[1]), want)


@pytest.mark.parametrize(
    ("lengths", "window", "blocks"),
    [
        ([0, 0], None, 0),
        ([1, 512], None, 1),
        ([3, 513], None, 2),
        ([900, 1500], None, 3),
        ([1500, 1500], 512, 1),
        ([600, 1500], 513, 2),
        ([[1, 1500], [0, 0]], None, 3),
    ],
    ids=str,
)
def test_cost_follows_the_length_or_the_window(lengths, window, blocks, draw, updates):
    inputs = draw(2, (4, 2), 2000, (4, 4))
    decode_attention(*inputs, jnp.array(lengths), window=window, implementation="xla")
    jax.effects_barrier()
    assert len(updates) == blocks


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ((4, 8, 2048, 128), 512),
        ((1, 2, 8192, 32), 512),
        ((16, 8, 2048, 128), 128),
        ((4, 32, 2048, 128), 128),
        ((6, 8, 2048, 128), 320),
        ((64, 32, 2048, 128), 64),
        ((64, 32, 40, 128), 40),
    ],
    ids=str,
)
def test_blocks_stay_in_fast_memory(keys, width):
    """Multiples of 64 slots that make up to 2**21 numbers, from 64 to 512 and to the capacity."""
    assert block_width(xla.DECODE_BLOCK, keys) == width


SLACK = 64 * 1024


def temporaries(function, *, slots, heads, dtype="float32") -> int:
    """Bytes that XLA sets aside when it decodes one row of K = 2 heads of 128."""
    arguments = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((1, heads, 128), dtype),
            ((1, 2, slots, 128), dtype),
            ((1, 2, slots, 128), dtype),
            ((1,), jnp.int32),
        )
    ]
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def with_capacity(function, dtype="float32") -> int:
    shorter, longer = (
        temporaries(function, slots=slots, heads=4, dtype=dtype) for slots in (8192, 65536)
    )
    return longer - shorter


def with_group(function) -> int:
    """Growth from 2 to 16 queries a KV head, beside four copies of their scores and sums."""
    few, many = 4, 32
    own = 4 * 4 * (many - few) * (xla.DECODE_BLOCK + 128)
    return (
        temporaries(function, slots=8192, heads=many)
        - temporaries(function, slots=8192, heads=few)
        - own
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1024])
def test_temporaries_do_not_grow_with_the_capacity(window, dtype):
    def decode(*args):
        return decode_attention(*args, window=window)

    assert abs(with_capacity(decode, dtype)) <= SLACK


def test_temporaries_do_not_grow_with_the_group():
    assert with_group(decode_attention) <= SLACK


def test_a_transposed_or_repeated_cache_shows():
    def transposed(q, k, v, lengths):
        return jax.nn.dot_product_attention(q[:, None], k.swapaxes(1, 2), v.swapaxes(1, 2))

    def repeated(q, k, v, lengths):
        k, v = (jnp.repeat(x, q.shape[1] // 2, axis=1) for x in (k, v))
        return decode_attention(q, k, v, lengths)

    assert with_capacity(transposed) > SLACK
    assert with_group(repeated) > SLACK


BAD = {
    "q of 4 axes": ({"q": (2, 1, 4, 8)}, {}, "q is float32[2, 1, 4, 8]"),
    "head dims differ": ({"q": (2, 4, 6)}, {}, "head dim 8"),
    "rows differ": ({"q": (3, 4, 8)}, {}, "2 rows"),
    "heads do not divide": ({"q": (2, 5, 8)}, {}, "multiple of 2 heads"),
    "v is shorter": ({"v": (2, 2, 4, 8)}, {}, "v is float32[2, 2, 4, 8]"),
    "lengths of one row": ({"lengths": jnp.array([1])}, {}, "lengths is int32[1]"),
    "lengths of 3 heads": (
        {"lengths": jnp.zeros((2, 3), int)},
        {},
        "lengths is int32[2, 3]; accepted are integers (2,) or (2, 2)",
    ),
    "a window over slots that count no positions": (
        {"lengths": jnp.ones((2, 2), int)},
        {"window": 3},
        "window=3; accepted beside lengths (B, K) is None",
    ),
    "lengths not whole": ({"lengths": jnp.array([1.0, 2.0])}, {}, "accepted are integers (2,)"),
    "length beyond": ({"lengths": jnp.array([1, 6])}, {}, "lengths=[1, 6]; accepted are 0 to 5"),
    "length below": ({"lengths": jnp.array([-1, 5])}, {}, "lengths=[-1, 5]"),
    "window 0": ({}, {"window": 0}, "window=0; accepted are 1 and more keys, or None"),
    "cap 0": ({}, {"soft_cap": 0.0}, "soft_cap=0.0"),
    "sinks of K heads": ({}, {"sink_logits": jnp.zeros(2)}, "sink_logits is float32[2]"),
    "no such implementation": (
        {},
        {"implementation": "triton"},
        "implementation='triton': there is none of that name for this op; accepted here are "
        "None, 'xla', 'reference'",
    ),
    "no GPU": (
        {},
        {"implementation": "mosaic_gpu"},
        "implementation='mosaic_gpu': it needs an NVIDIA GPU, or interpret=True; accepted here",
    ),
    "interpreted XLA": (
        {},
        {"implementation": "xla", "interpret": True},
        "interpret=True: accepted beside implementation='xla' is False",
    ),
    "codes without scales": (
        {"k": jnp.zeros((2, 2, 5, 8), jnp.int8), "v": jnp.zeros((2, 2, 5, 8), jnp.int8)},
        {},
        "k_scale is None; accepted beside k int8[2, 2, 5, 8] is float32 [] or [2] or [2, 2, 5]",
    ),
    "scales of two shapes": (
        {"k": jnp.zeros((2, 2, 5, 8), jnp.int8), "v": jnp.zeros((2, 2, 5, 8), jnp.int8)},
        {"k_scale": jnp.ones(2), "v_scale": jnp.ones(())},
        "v_scale is float32[]; accepted beside k int8[2, 2, 5, 8] is float32 [2]",
    ),
    "codes beside numbers": (
        {"k": jnp.zeros((2, 2, 5, 8), jnp.int8)},
        {"k_scale": jnp.ones(())},
        "v is float32[2, 2, 5, 8]; accepted beside k int8[2, 2, 5, 8] is the same dtype",
    ),
    "scales of numbers": ({}, {"v_scale": jnp.ones(())}, "v_scale is float32[]; accepted"),
    "a table of one axis": (
        {},
        {"page_table": jnp.zeros(2, jnp.int32)},
        "page_table is int32[2]; accepted are int32 (2, max_pages)",
    ),
    "a live slot without a page": (
        {},
        {"page_table": jnp.array([[0, -1], [-1, 0]])},
        "page_table=[[0, -1], [-1, 0]]; accepted are 0 to 1 for the pages that lengths=[5, 2] take",
    ),
    "more than the table has": (
        {"lengths": jnp.array([5, 11])},
        {"page_table": jnp.array([[0, 1], [1, 0]])},
        "lengths=[5, 11]; accepted are 0 to 10",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    changed, settings, message = BAD[case]
    arguments = {"q": (2, 4, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8), "lengths": jnp.array([5, 2])}
    arguments = {
        name: jnp.zeros(value) if isinstance(value, tuple) else value
        for name, value in (arguments | changed).items()
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared whole
        decode_attention(**arguments, **settings)
    assert message in str(caught.value)


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"k is int32.*floats of 4 axes"):
        decode_attention(
            jnp.zeros((1, 1, 4)),
            jnp.zeros((1, 1, 2, 4), jnp.int32),
            jnp.zeros((1, 1, 2, 4)),
            jnp.array([1]),
        )
