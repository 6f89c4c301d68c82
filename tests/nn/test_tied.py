"""Tied attention against its equations in float64, and against the attention that it is a case of.

The equations are written out over the module's own matrices.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn.small import BATCH, D_MODEL, POSITIONS, TOKENS, X, alone, build, in_steps
from quick import rest_slow

from kvjax.cache import Paged, SinkRing, init_layer_cache
from kvjax.nn import AttentionConfig, Rope, TiedAttentionConfig

BASE = TiedAttentionConfig(
    d_model=D_MODEL, query_heads=4, tied_heads=2, head_dim=8, rope=Rope(4, theta=50.0)
)
CONFIGS = {
    "grouped": BASE,
    "one head": replace(BASE, tied_heads=1, qkv_bias=True, out_bias=True),
    "as many heads as queries": replace(BASE, tied_heads=4),
    "narrow rope": replace(BASE, rope=Rope(2, theta=50.0)),
    "window and scale": replace(BASE, window=3, scale=0.9),
}
# Which `Attention` is compared with, too.
TWINNED = ("as many heads as queries",)


def by_the_equations(module, x):
    """arXiv:2505.21487: V is the tied state, K its first half and RoPE of a half that all share."""
    c = module.config
    rope_dim = c.rope.width

    def linear(layer, y):
        bias = 0 if layer.bias is None else np.asarray(layer.bias[...], np.float64)
        return y @ np.asarray(layer.kernel[...], np.float64) + bias

    def rotated(y):
        angles = POSITIONS[0][:, None] * c.rope.frequencies().astype(np.float64)
        turn = np.exp(1j * angles).reshape(TOKENS, *(1,) * (y.ndim - 3), -1)
        turned = (y[..., : rope_dim // 2] + 1j * y[..., rope_dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = x.astype(np.float64)
    q = linear(module.q, x).reshape(BATCH, TOKENS, c.query_heads, c.head_dim)
    tied = linear(module.kv, x).reshape(BATCH, TOKENS, c.tied_heads, c.head_dim)
    k_rope = rotated(linear(module.k_rope, x))
    out = np.zeros_like(q)
    for head in range(c.query_heads):
        state = tied[:, :, head // (c.query_heads // c.tied_heads)]
        keys = np.concatenate([state[..., : c.head_dim - rope_dim], k_rope], -1)
        plain, rope = np.split(q[:, :, head], [c.head_dim - rope_dim], axis=-1)
        queries = np.concatenate([plain, rotated(rope)], -1)
        scores = np.einsum("bqh,bkh->bqk", queries, keys)
        scores *= c.head_dim**-0.5 if c.scale is None else c.scale
        query, key = np.mgrid[:TOKENS, :TOKENS]
        seen = (key <= query) & (query - key < (c.window or TOKENS))
        weights = np.where(seen, np.exp(scores), 0)
        out[:, :, head] = weights / weights.sum(-1, keepdims=True) @ state
    return linear(module.o, out.reshape(BATCH, TOKENS, -1))


@pytest.mark.parametrize(
    "name",
    rest_slow(CONFIGS, [name for name in CONFIGS if name not in TWINNED]),
)
@pytest.mark.parametrize(
    "steps",
    [[(1,) * TOKENS, (4, 1, 4)], pytest.param([(TOKENS,)], marks=pytest.mark.slow)],
    ids=["few at a time", "at once"],
)
def test_it_is_what_the_equations_say(name, steps):
    """Alone, and over a cache in steps."""
    module = build(CONFIGS[name])
    want = by_the_equations(module, X)
    np.testing.assert_allclose(alone(module), want, rtol=1e-5, atol=1e-5)
    for sizes in steps:
        np.testing.assert_allclose(in_steps(module, sizes), want, rtol=1e-5, atol=1e-5)


def turned_around(heads, rope_dim):
    """Heads (..., H) with the last channels first: `Rope` rotates the first ones of a head."""
    return np.roll(heads, rope_dim, axis=-1)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_it_is_mqa_gqa_or_mha_whose_projections_are_tied(heads):
    """Of one head, of groups, and of each query head its own: the same as `Attention`."""
    tied = build(replace(BASE, tied_heads=heads))
    twin = AttentionConfig(
        d_model=D_MODEL, query_heads=4, kv_heads=heads, key_dim=8, value_dim=8, rope=BASE.rope
    ).build(jnp.float32, nnx.Rngs(0))
    q, v, rope = (np.asarray(part.kernel[...]) for part in (tied.q, tied.kv, tied.k_rope))
    states = v.reshape(D_MODEL, heads, 8)
    shared = np.broadcast_to(rope[:, None], (D_MODEL, heads, 4))
    k = np.concatenate([states[..., :4], shared], axis=-1)
    twin.q.kernel[...] = turned_around(q.reshape(D_MODEL, 4, 8), 4).reshape(D_MODEL, -1)
    twin.k.kernel[...] = turned_around(k, 4).reshape(D_MODEL, -1)
    twin.v.kernel[...] = v
    twin.o.kernel[...] = tied.o.kernel[...]
    want = alone(twin)
    np.testing.assert_allclose(alone(tied), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(in_steps(tied, (4, 1, 4)), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["dense", Paged(4)], ids=str)
def test_a_cache_holds_tied_states_and_one_rope_key(layout):
    """K H + R numbers a token: of 8 heads of 128 about half of what GQA leaves."""
    c = TiedAttentionConfig(64, 16, 8, 128, Rope(64))
    cache = init_layer_cache(
        3,
        64,
        kv_heads=c.kv_heads,
        value_heads=c.value_heads,
        key_dim=c.key_dim,
        value_dim=c.value_dim,
        layout=layout,
        codec="bf16",
    )
    assert sum(leaf.nbytes for leaf in cache.leaves.values()) == 3 * 64 * (8 * 128 + 64) * 2


def test_a_ring_hides_among_new_tokens_what_it_drops():
    """Many tokens at once see no more of each other than one at a time would."""
    module = build(BASE)
    for layout in (SinkRing(1, 3), SinkRing(1, 3, reindexed=True)):
        at_once = in_steps(module, (TOKENS,), layout)
        one_by_one = in_steps(module, (1,) * TOKENS, layout)
        np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tied_heads": 3}, "tied_heads: got 3; accepted: a divisor of 4 query heads"),
        ({"rope": Rope(8)}, "rope: got one of 8 channels; accepted: fewer than the 8 of a head"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(BASE, **changes)
