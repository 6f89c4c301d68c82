"""Inputs that attention elsewhere is known to fail on, each with its right answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Block, Record, init_layer_cache
from kvjax.ops import attend, decode_attention, reference
from kvjax.ops.online import ScoreRule


def test_an_empty_row_beside_one_of_three():
    """A softmax over nothing is NaN, or the mean of all values; here it is 0, and the LSE -inf."""
    q, k, v = jnp.zeros((2, 1, 4)), jnp.zeros((2, 1, 8, 4)), jnp.ones((2, 1, 8, 4))
    for implementation in ("xla", "reference"):
        out, lse = decode_attention(
            q, k, v, jnp.array([0, 3]), return_lse=True, implementation=implementation
        )
        assert out[:, 0].tolist() == [[0.0] * 4, [1.0] * 4]
        np.testing.assert_allclose(lse[:, 0], [-np.inf, np.log(3)], rtol=1e-6)


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 128), (576, 512)], ids=str)
def test_the_scale_is_that_of_the_width_itself(dims, draw):
    """Not of the next power of two, nor of the values' width."""
    q, k, v = draw(1, (3, 1), 9, dims)
    out = decode_attention(q, k, v, jnp.array([9]))
    scores = np.einsum("nh,sh->ns", q[0], k[0, 0]) / np.sqrt(dims[0])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ np.asarray(v[0, 0])
    np.testing.assert_allclose(out[0], want, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("slots", [1, 7, 8, 9, 20])
def test_the_last_block_is_as_short_as_it_may_be(slots, draw, assert_same):
    """Lengths beside the block of 8, with what no token was written to full of NaN."""
    q, k, v = draw(2, (4, 2), slots, (8, 8))
    lengths = jnp.array([slots, (slots + 1) // 2])
    dead = (jnp.arange(slots) >= lengths[:, None])[:, None, :, None]
    got, want = (
        decode_attention(q, *(jnp.where(dead, fill, x) for x in (k, v)), lengths,
                         return_lse=True, implementation=implementation)
        for implementation, fill in (("xla", jnp.nan), ("reference", 0.0))
    )  # fmt: skip
    assert_same(got, want)


@pytest.mark.parametrize("first", [3, 6])
def test_a_ring_of_4_sees_what_a_window_of_4_sees(first, draw, assert_same):
    """A prompt shorter and longer than the window, then chunks of 1, 2 and 5."""
    q, k, v = draw(1, (4, 2), 16, (8, 8), tokens=16)
    cache = init_layer_cache(
        1, 16, kv_heads=2, key_dim=8, value_dim=8, window=4, layout="ring", codec="f32"
    )
    assert cache.capacity == 4
    seen = jnp.tril(jnp.ones((16, 16), bool)) & ~jnp.tril(jnp.ones((16, 16), bool), -4)
    want = reference.attention(q, k, v, seen[None, :, None], None, ScoreRule(8**-0.5))
    run, start = jax.jit(attend, static_argnames="window"), 0
    for tokens in (first, 1, 2, 5):
        part = slice(start, start + tokens)
        positions = jnp.arange(start, start + tokens)[None]
        chunk = Record(k[:, :, part], v[:, :, part])
        if tokens == 1:
            cache = cache.append(chunk, jnp.array([1]))
            got = run(q[:, part], cache, positions, window=4)
        else:
            got = run(
                q[:, part], cache, positions, window=4, new=(Block(*chunk, positions[:, None]),)
            )
            cache = cache.append(chunk, jnp.array([tokens]))
        assert_same(got, [x[:, part] for x in want])
        start += tokens
    for slot in range(4):
        newest = max(p for p in range(start) if p % 4 == slot)
        np.testing.assert_array_equal(cache.leaves["k"][0, :, slot], k[0, :, newest])
