"""What holds of every layout with every codec: what a text leaves behind, whatever its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import Kivi, Paged, Record, SinkRing, init_layer_cache
from kvjax.cache.codecs import build_codec
from laws.checks import held

BATCH, HEADS, DIM, TOKENS, STEP = 2, 2, 8, 24, 8
SMALL = Kivi(2, group=4, residual=8)
CODECS = (
    *("f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2"),
    *("fp8_e4m3_head", "fp8_e4m3_token", "int8", "int4", "fp8_ds_mla"),
)
LAYOUTS = {
    "dense": {},
    "pages": {"layout": Paged(4)},
    "ring": {"window": 7},
    "sinks": {"layout": SinkRing(2, 5)},
    "reindexed sinks": {"layout": SinkRing(2, 5, reindexed=True)},
}
QUICK = {
    *(("dense", "fp8_e5m2"), ("pages", "int8"), ("ring", "fp8_ds_mla"), ("sinks", "int4")),
    *(("reindexed sinks", "fp8_e4m3_head"), ("pages", "kivi2")),
}
EVERY = [
    *((layout, codec) for layout in LAYOUTS for codec in CODECS),
    *((layout, SMALL) for layout in ("dense", "pages")),
]
caches = pytest.mark.parametrize(
    ("layout", "codec"),
    [
        pytest.param(
            layout,
            codec,
            id=f"{layout}, {name}",
            marks=() if (layout, name) in QUICK else pytest.mark.slow,
        )
        for layout, codec in EVERY
        for name in [codec if isinstance(codec, str) else codec.name]
    ],
)


def empty(layout: str, codec):
    return init_layer_cache(
        BATCH, TOKENS, kv_heads=HEADS, key_dim=DIM, value_dim=DIM, codec=codec, **LAYOUTS[layout]
    )


def text(seed: int = 0) -> Record:
    """TOKENS of each row, and padding that is read as part of the last step."""
    rng = np.random.default_rng(seed)
    return Record(*rng.normal(size=(2, BATCH, HEADS, TOKENS + STEP, DIM)).astype(np.float32))


def live(cache, row: int) -> dict[str, dict[int, bytes]]:
    """The bits that a row's tokens left in each leaf, by position."""
    found: dict[str, dict[int, bytes]] = {}
    table = getattr(cache, "page_table", None)
    for name, leaf in cache.leaves.items():
        paged = table is not None and not name.endswith("_exact")
        rows = np.asarray(table)[row] if paged else [row]
        at = held(cache, name)
        found[name] = {
            int(at[r, slot]): np.asarray(leaf)[r, :, slot].tobytes()
            for r in rows
            for slot in np.flatnonzero(at[r] >= 0)
        }
    return found


def streamed(cache, record: Record, lengths, splits):
    """In steps of at most STEP tokens, rows in turn as `splits` says, until both are done."""
    done, lengths, i = np.zeros(BATCH, int), np.array(lengths), 0
    while (done < lengths).any():
        pair = splits[i % len(splits)] if i < 4 * len(splits) else (STEP, STEP)
        count, i = np.minimum(pair, lengths - done), i + 1
        part = [
            np.stack([x[row, :, first : first + STEP] for row, first in enumerate(done)])
            for x in record
        ]
        cache = append(cache, Record(*part), jnp.asarray(count, jnp.int32))
        done = done + count
    cache.check()
    return cache


append = jax.jit(lambda cache, record, count: cache.append(record, count))
few = st.lists(st.tuples(st.integers(0, STEP), st.integers(0, STEP)), min_size=1, max_size=6)


@caches
def test_a_text_leaves_the_same_bits_whatever_its_steps(layout, codec):
    at_once = {}

    @settings(max_examples=6)
    @given(splits=few, lengths=st.tuples(st.sampled_from([5, 17, 24]), st.sampled_from([8, 23])))
    def holds(splits, lengths):
        record = text()
        if lengths not in at_once:
            whole = Record(*(x[:, :, :TOKENS] for x in record))
            at_once[lengths] = empty(layout, codec).append(whole, jnp.array(lengths))
        got = streamed(empty(layout, codec), record, lengths, splits)
        for row in range(BATCH):
            assert live(got, row) == live(at_once[lengths], row)

    holds()


@caches
def test_rows_are_independent(layout, codec):
    """Beside a row of other numbers, not finite ones among them, the bits are the same."""
    one, other = text(), text(seed=1)
    for x, y in zip(one, other, strict=True):
        y[1] = x[1]
        y[0, :, 3] = np.nan
        y[0, :, 4] = np.inf
    left, right = (
        streamed(empty(layout, codec), record, lengths, [(5, 3), (1, 8)])
        for record, lengths in ((one, (9, 20)), (other, (24, 20)))
    )
    assert live(left, 1) == live(right, 1)


@caches
def test_every_buffer_is_its_own(layout, codec):
    """Else a cache could not be donated."""
    leaves = [leaf for leaf in jax.tree.leaves(empty(layout, codec)) if leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("codec", [*CODECS[3:], "kivi2", "kivi4"])
def test_finite_numbers_stay_finite_and_zeros_stay_zero(codec):
    """Whatever else the token holds: one channel group, one head, is all zero."""
    dim = 64
    kivi = codec.startswith("kivi")

    def round_trip(k):
        if not kivi:
            encoding = build_codec(codec, dim, dim)
            scales = encoding.scales(1, 1)
            return encoding.decode(encoding.encode(Record(k, k), scales), scales)
        cache = init_layer_cache(
            1, 64, kv_heads=1, key_dim=dim, value_dim=dim, codec=Kivi(int(codec[-1]), 32, 32)
        ).append(Record(k, k), jnp.array([64]))
        return cache.block(jnp.int32(0))[:2]

    round_trip = jax.jit(round_trip)

    @settings(max_examples=25)
    @given(
        st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
            min_size=32,
            max_size=32,
        ),
        st.booleans(),
    )
    def holds(numbers, zero_first):
        x = np.zeros((1, 1, 64 if kivi else 1, dim), np.float32)
        zero, rest = (slice(32), slice(32, 64)) if zero_first else (slice(32, 64), slice(32))
        x[..., rest] = numbers
        for part in map(np.asarray, round_trip(jnp.asarray(x))):
            assert np.isfinite(part).all()
            # Groups are of 32 channels, or of tokens of one channel: half of them are zero.
            assert not part[..., zero].any()
        for part in round_trip(jnp.zeros(x.shape)):
            assert not np.asarray(part, np.float32).any()

    holds()
