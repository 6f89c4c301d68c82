"""The dense cache by itself: slots, blocks, overflow, beams, rollback."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import CapacityError, Dense, Record, SlotCache
from kvjax.cache import slots as slots_module
from kvjax.cache.codecs import build_codec
from kvjax.models.family import abstract_decoder
from kvjax.nn import AttentionConfig, DecoderConfig, MlpConfig

BATCH, HEADS, DIM, VALUE_DIM = 2, 3, 4, 2
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def empty(capacity: int, codec: str = "f32", batch: int = BATCH) -> SlotCache:
    return SlotCache.init(
        batch, Dense(capacity), HEADS, DIM, VALUE_DIM, build_codec(codec, DIM, VALUE_DIM)
    )


def record(tokens: int, seed: int = 0, batch: int = BATCH) -> Record:
    """Keys around 1 and values around 2, so that neither is taken for the other or for empty."""
    rng = np.random.default_rng(seed)
    k = rng.normal(1, 0.1, (batch, HEADS, tokens, DIM)).astype(np.float32)
    v = rng.normal(2, 0.1, (batch, HEADS, tokens, VALUE_DIM)).astype(np.float32)
    return Record(jnp.asarray(k), jnp.asarray(v))


def count(*tokens: int) -> jax.Array:
    return jnp.asarray(tokens, jnp.int32)


append = jax.jit(SlotCache.append)


@pytest.mark.parametrize("codec", DTYPES)
def test_token_p_of_a_row_lies_in_slot_p(codec):
    new = record(5)
    cache = empty(8, codec).append(new, count(5, 2)).append(record(3, seed=1), count(1, 3))
    assert cache.n.tolist() == [6, 5]
    for name in ("k", "v"):
        stored = cache.leaves[name]
        first, second = getattr(new, name), getattr(record(3, seed=1), name)
        assert stored.dtype == DTYPES[codec]
        first, second = first.astype(stored.dtype), second.astype(stored.dtype)
        np.testing.assert_array_equal(stored[0, :, :5], first[0])
        np.testing.assert_array_equal(stored[0, :, 5:6], second[0, :, :1])
        np.testing.assert_array_equal(stored[1, :, :2], first[1, :, :2])
        np.testing.assert_array_equal(stored[1, :, 2:5], second[1])
        assert not stored[0, :, 6:].any()
        assert not stored[1, :, 5:].any()


@pytest.mark.parametrize("codec", DTYPES)
@pytest.mark.parametrize("split", [(13,), (1,) * 13, (4, 0, 9), (6, 6, 1)], ids=str)
def test_streamed_and_at_once_hold_the_same_bits(codec, split):
    new, at_once = record(13), empty(16, codec)
    at_once = at_once.append(new, count(13, 13))
    streamed, start = empty(16, codec), 0
    for tokens in split:
        part = Record(*(x[:, :, start : start + max(tokens, 1)] for x in new))
        streamed = append(streamed, part, count(tokens, tokens))
        start += tokens
    for left, right in zip(jax.tree.leaves(at_once), jax.tree.leaves(streamed), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("capacity", [4, 8, 10, 13])
def test_blocks_give_every_live_slot_once(capacity, monkeypatch):
    """Capacities below, at, and beside a multiple of the block."""
    monkeypatch.setattr(slots_module, "BLOCK", 4)
    new = record(capacity)
    cache = empty(capacity).append(new, count(capacity, 3))
    assert cache.blocks() == -(-capacity // 4)
    seen = [[] for _ in range(BATCH)]
    for i in range(int(cache.blocks())):
        block = cache.block(jnp.int32(i))
        assert block.k.shape == (BATCH, HEADS, min(4, capacity), DIM)
        positions = np.broadcast_to(block.pos, block.k.shape[:3])
        for row in range(BATCH):
            for slot, position in enumerate(positions[row, 0]):
                if position >= 0:
                    seen[row].append(int(position))
                    np.testing.assert_array_equal(block.k[row, :, slot], new.k[row, :, position])
                    np.testing.assert_array_equal(block.v[row, :, slot], new.v[row, :, position])
    assert seen == [list(range(capacity)), [0, 1, 2]]


def test_blocks_count_live_tokens_and_not_capacity():
    cache = empty(4096)
    assert cache.blocks() == 0
    for tokens, blocks in ((1, 1), (511, 1), (1, 2)):
        cache = append(cache, record(tokens), count(tokens, 1))
        assert cache.blocks() == blocks


def test_init_makes_a_buffer_of_its_own_for_every_leaf():
    """One buffer for K and V could not be donated."""
    leaves = jax.tree.leaves(empty(8))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_nbytes_are_those_of_the_arrays():
    cache = empty(8, "bf16")
    assert cache.nbytes == BATCH * 8 * HEADS * (DIM + VALUE_DIM) * 2 + BATCH * (4 + 1)


def test_overflow_outside_jit_raises_and_names_capacity_and_length():
    cache = empty(8).append(record(8), count(8, 5))
    with pytest.raises(CapacityError, match=r"capacity is 8 tokens.*hold \[8, 5\].*\[1, 1\]"):
        cache.append(record(1, seed=1), count(1, 1))


@pytest.mark.parametrize(
    ("held", "more"), [((8, 5), (1, 1)), ((7, 5), (2, 2)), ((1, 0), (8, 8)), ((8, 8), (8, 0))]
)
def test_overflow_inside_jit_damages_no_slot(held, more):
    """The row that overflows keeps what it had, the other takes its tokens."""
    before = empty(8).append(record(8), count(*held))
    after = append(before, record(8, seed=1), count(*more))
    fits = [h + m <= 8 for h, m in zip(held, more, strict=True)]
    assert after.overflow.tolist() == [not fit for fit in fits]
    assert after.n.tolist() == [h + m * fit for h, m, fit in zip(held, more, fits, strict=True)]
    for name in ("k", "v"):
        new = getattr(record(8, seed=1), name)
        for row in range(BATCH):
            kept = getattr(record(8), name)[row, :, : held[row]]
            np.testing.assert_array_equal(after.leaves[name][row, :, : held[row]], kept)
            written = after.leaves[name][row, :, held[row] : int(after.n[row])]
            np.testing.assert_array_equal(written, new[row, :, : written.shape[1]])
            assert not after.leaves[name][row, :, int(after.n[row]) :].any()


def test_check_raises_after_an_overflow_and_later_too():
    cache = append(empty(8).append(record(8), count(8, 5)), record(1), count(1, 1))
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"rows \[0\] ran over the capacity of 8"):
            cache.check()
        cache = append(cache, record(1), count(0, 1))
    empty(8).check()


def test_select_takes_rows_of_all_arrays():
    cache = append(empty(8), record(8), count(9, 3))
    chosen = cache.select(jnp.array([1, 1, 0]))
    assert chosen.n.tolist() == [3, 3, 0]
    assert chosen.overflow.tolist() == [False, False, True]
    np.testing.assert_array_equal(chosen.leaves["k"][1], cache.leaves["k"][1])
    np.testing.assert_array_equal(chosen.leaves["v"][2], cache.leaves["v"][0])


@pytest.mark.parametrize("tokens", [2, count(2, 2), count(0, 3)], ids=["all", "rows", "ragged"])
def test_rollback_then_append_is_as_if_never_written(tokens):
    kept = (5 - np.broadcast_to(tokens, (BATCH,))).tolist()
    cache = empty(8).append(record(5), count(5, 5)).rollback(tokens)
    assert cache.n.tolist() == kept
    again = cache.append(record(3, seed=1), count(3, 3))
    direct = empty(8).append(record(5), count(*kept)).append(record(3, seed=1), count(3, 3))
    for name in ("k", "v"):
        for row, n in enumerate(again.n.tolist()):
            np.testing.assert_array_equal(
                again.leaves[name][row, :, :n], direct.leaves[name][row, :, :n]
            )


@pytest.mark.parametrize("tokens", [4, -1])
def test_rollback_of_more_than_is_held_or_of_less_than_none_is_refused(tokens):
    with pytest.raises(ValueError, match=rf"rollback of {tokens} tokens; rows hold \[5, 3\]"):
        empty(8).append(record(5), count(5, 3)).rollback(tokens)


def test_a_token_of_a_7b_mha_layer_is_16384_bytes():
    """Read off live arrays: K and V of 32 heads of 128 channels in bf16."""
    cache = SlotCache.init(1, Dense(1), 32, 128, 128, build_codec("bf16", 128, 128))
    assert sum(leaf.nbytes for leaf in cache.leaves.values()) == 16384


def test_the_cache_of_a_model_holds_its_kv_heads_alone():
    """32 query heads over 8 KV heads: the arrays have 8, never 32."""
    attention = AttentionConfig(d_model=64, query_heads=32, kv_heads=8, key_dim=4, value_dim=4)
    config = DecoderConfig(vocab_size=8, d_model=64, attention=(attention,), mlp=MlpConfig(8))
    (layer,) = abstract_decoder(config).init_cache(1, 16).layers
    assert {leaf.shape for leaf in layer.leaves.values()} == {(1, 8, 16, 4)}
