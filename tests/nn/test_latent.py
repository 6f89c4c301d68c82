"""Latent attention against its equations, written out over the module's own matrices in float64."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from nn.small import BATCH, D_MODEL, POSITIONS, TOKENS, X, alone, build, in_steps
from quick import rest_slow

from kvjax.cache import Latents, Paged, SinkRing, init_layer_cache
from kvjax.nn import LatentAttentionConfig, NormConfig, Rope

BASE = LatentAttentionConfig(
    d_model=D_MODEL,
    query_heads=4,
    latent_rank=12,
    rope_dim=4,
    head_dim=8,
    head_value_dim=6,
    rope=Rope(4, theta=50.0),
)
CONFIGS = {
    "plain": BASE,
    "query by way of a rank": replace(BASE, query_rank=10),
    "biases": replace(BASE, query_rank=10, query_bias=True, latent_bias=True, out_bias=True),
    "latents as they are": replace(BASE, latent_norm=False, query_bias=True),
    "a rope key for two heads": replace(
        BASE, rope_heads=2, rope=Rope(8, theta=50.0, pairs=(3, 1, 0, 3)), latent_norm=False
    ),
    "a latent for two heads": replace(BASE, latents=2, latent_rank=6, latent_bias=True),
    "a latent for each head": replace(BASE, latents=4, latent_norm=False),
    "latents and rope keys of groups": replace(
        BASE, latents=2, rope_heads=4, rope=Rope(16, theta=50.0), window=4
    ),
    "window and scale": replace(BASE, window=3, scale=0.9, norm=NormConfig(eps=0.1)),
}


def by_the_equations(module, x):
    """arXiv:2405.04434, equations 9 to 13 and 37 to 47: every head with its keys and values.

    With several latents (arXiv:2505.21487) those of the latent that is its group's.
    """
    c = module.config

    def linear(layer, y):
        bias = 0 if layer.bias is None else np.asarray(layer.bias[...], np.float64)
        return y @ np.asarray(layer.kernel[...], np.float64) + bias

    def normed(layer, y):
        mean = (y**2).mean(-1, keepdims=True)
        return y / np.sqrt(mean + c.norm.eps) * np.asarray(layer.scale[...], np.float64)

    def rotated(y):
        angles = POSITIONS[0][:, None] * c.rope.frequencies().astype(np.float64)
        turn = np.exp(1j * angles).reshape(TOKENS, *(1,) * (y.ndim - 3), -1)
        turned = (y[..., : c.rope.width // 2] + 1j * y[..., c.rope.width // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = x.astype(np.float64)
    if c.query_rank is None:
        q = linear(module.q, x)
    else:
        q = linear(module.q_up, normed(module.q_norm, linear(module.q_down, x)))
    q = q.reshape(BATCH, TOKENS, c.query_heads, -1)
    both = linear(module.kv_down, x)
    *latents, k_rope = np.split(both, c.latent_rank * np.arange(1, c.latents + 1), axis=-1)
    k_rope = rotated(k_rope)
    if c.latent_norm:
        norms = module.kv_norm if c.latents > 1 else [module.kv_norm]
        latents = [normed(norm, latent) for norm, latent in zip(norms, latents, strict=True)]
    latent = np.stack([latents[n * c.latents // c.query_heads] for n in range(c.query_heads)], 2)
    k = np.einsum("btnl,nhl->btnh", latent, np.asarray(module.k_up[...], np.float64))
    v = np.einsum("btnl,nlv->btnv", latent, np.asarray(module.v_up[...], np.float64))
    scores = np.einsum("bqnh,bknh->bnqk", q[..., : c.head_dim], k)
    rope_keys = c.rope_dim // 2 * np.arange(c.rope_heads)[:, None] + np.arange(c.rope_dim // 2)
    for n in range(c.query_heads):
        # The channels of its key: a half among all keys' first halves, and one among the second.
        mine = rope_keys[n * c.rope_heads // c.query_heads]
        mine = np.concatenate([mine, mine + c.key_dim // 2])
        placed = np.zeros((BATCH, TOKENS, c.key_dim))
        placed[..., mine] = q[:, :, n, c.head_dim :]
        scores[:, n] += np.einsum("bqr,bkr->bqk", rotated(placed), k_rope)
    scores *= (c.head_dim + c.rope_dim) ** -0.5 if c.scale is None else c.scale
    query, key = np.mgrid[:TOKENS, :TOKENS]
    seen = (key <= query) & (query - key < (c.window or TOKENS))
    weights = np.where(seen, np.exp(scores), 0)
    out = np.einsum("bnqk,bknv->bqnv", weights / weights.sum(-1, keepdims=True), v)
    return linear(module.o, out.reshape(BATCH, TOKENS, -1))


UNEVEN = (4, 1, 4)


@pytest.mark.parametrize(
    ("name", "sizes"),
    rest_slow(
        product(CONFIGS, ((TOKENS,), (1,) * TOKENS, UNEVEN)), [(name, UNEVEN) for name in CONFIGS]
    ),
    ids=str,
)
def test_it_is_what_the_equations_say(name, sizes):
    """Over a cache, absorbed; and alone, as heads."""
    module = build(CONFIGS[name])
    want = by_the_equations(module, X)
    np.testing.assert_allclose(alone(module), want, rtol=1e-5, atol=1e-5)
    cached = in_steps(module, sizes)
    np.testing.assert_allclose(cached, want, rtol=1e-5, atol=1e-5)


def test_a_cache_holds_latents_and_rope_keys_alone():
    """L + R numbers a token: what MLA is for."""
    cache = init_layer_cache(3, 64, kv_heads=1, key_dim=64, value_dim=512, codec="bf16")
    assert sum(leaf.nbytes for leaf in cache.leaves.values()) == 3 * 64 * (512 + 64) * 2


def test_a_cache_holds_several_latents_and_one_rope_key():
    """h_c L + R numbers a token: of two latents of 2 d each what MLA of 4 d leaves."""
    c = replace(BASE, latents=2, latent_rank=256, rope_dim=64, rope=Rope(64))
    heads = {"kv_heads": c.kv_heads, "value_heads": c.value_heads}
    cache = init_layer_cache(3, 64, **heads, key_dim=c.key_dim, value_dim=c.value_dim, codec="bf16")
    assert sum(leaf.nbytes for leaf in cache.leaves.values()) == 3 * 64 * (512 + 64) * 2


def test_several_latents_that_are_the_same_are_one():
    """GLA is MLA where what makes its latents is the same."""
    one = build(BASE)
    several = build(replace(BASE, latents=2))
    down = np.asarray(one.kv_down.kernel[...])
    several.kv_down.kernel[...] = np.concatenate([down[:, : BASE.latent_rank], down], axis=1)
    for norm in several.kv_norm:
        norm.scale[...] = one.kv_norm.scale[...]
    for name in ("k_up", "v_up"):
        getattr(several, name)[...] = getattr(one, name)[...]
    several.q.kernel[...], several.o.kernel[...] = one.q.kernel[...], one.o.kernel[...]
    want, _ = one(X, POSITIONS)
    np.testing.assert_allclose(several(X, POSITIONS)[0], want, rtol=1e-5, atol=1e-5)
    cached = in_steps(several, (4, 1, 4))
    np.testing.assert_allclose(cached, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["dense", Paged(4)], ids=str)
def test_one_token_reads_the_cache_in_place(layout):
    cache = init_layer_cache(2, 16, kv_heads=1, key_dim=4, value_dim=12, layout=layout)
    operands = Latents(cache).operands()
    assert operands["latent"].shape[-1] == 12
    assert operands["k_rope"].shape[-1] == 4
    assert ("page_table" in operands) == isinstance(layout, Paged)
    several = init_layer_cache(
        2, 16, kv_heads=1, value_heads=2, key_dim=4, value_dim=12, layout=layout
    )
    assert Latents(several).operands() is None
    for codec in ("int8", "fp8_ds_mla"):
        coded = init_layer_cache(
            2, 16, kv_heads=1, key_dim=4, value_dim=12, layout=layout, codec=codec, rope_key=True
        )
        assert Latents(coded).operands() is None


def test_a_ring_hides_among_new_tokens_what_it_drops():
    """Many tokens at once see no more of each other than one at a time would."""
    module, layout = build(BASE), SinkRing(1, 3)
    at_once = in_steps(module, (TOKENS,), layout)
    one_by_one = in_steps(module, (1,) * TOKENS, layout)
    np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": 3}, "latents: got 3; accepted: a divisor of 4 query heads"),
        ({"rope_heads": 3}, "rope_heads: got 3; accepted: a divisor of 4 query heads"),
        ({"rope_heads": 2}, "rope: got one of 4 channels; accepted: 8, those of all rotated keys"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)
