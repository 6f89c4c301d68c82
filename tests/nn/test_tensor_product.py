"""Tensor product attention against its equations in float64, and against what it is a case of.

The equations are written out over the module's own matrices.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.small import BATCH, D_MODEL, POSITIONS, TOKENS, X, alone, build, empty, in_steps

from kvjax.cache import Factors, Paged, SinkRing
from kvjax.nn import AttentionConfig, Rope, TensorProductAttentionConfig, fixed_heads
from kvjax.nn.tensor_product import side_by_side
from kvjax.ops import attend

HEADS, DIM = 4, 8
BASE = TensorProductAttentionConfig(
    d_model=D_MODEL,
    query_heads=HEADS,
    head_dim=DIM,
    key_rank=2,
    value_rank=3,
    query_rank=5,
    rope=Rope(DIM, theta=50.0),
)
CONFIGS = {
    "plain": BASE,
    "queries without factors": replace(BASE, query_rank=None, key_rank=1),
    "factors over heads that are parameters": replace(BASE, contextual=False),
    "window, scale and no rope": replace(BASE, window=3, scale=0.9, rope=None),
}


def by_the_equations(module, x):
    """arXiv:2501.06425: Q, K and V are means over ranks of a (x) b, with RoPE on b of Q and K."""
    c = module.config

    def matrix(parameter):
        return np.asarray(parameter[...], np.float64)

    def rotated(y):
        if c.rope is None:
            return y
        angles = POSITIONS[0][:, None] * c.rope.frequencies().astype(np.float64)
        turned = (y[..., : DIM // 2] + 1j * y[..., DIM // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    def heads(pairs, rank, turn):
        """(B, T, N, H), rank by rank."""
        total = np.zeros((BATCH, TOKENS, HEADS, DIM))
        for r in range(rank):
            if c.contextual:
                a = x @ matrix(pairs.a.kernel).reshape(D_MODEL, rank, HEADS)[:, r]
            else:
                a = np.broadcast_to(matrix(pairs.heads)[r], (BATCH, TOKENS, HEADS))
            b = x @ matrix(pairs.b.kernel).reshape(D_MODEL, rank, DIM)[:, r]
            b = turn(b[:, :, None])[:, :, 0]
            total += a[..., :, None] * b[..., None, :]
        return total / rank

    x = x.astype(np.float64)
    if c.query_rank is None:
        q = rotated((x @ matrix(module.q.kernel)).reshape(BATCH, TOKENS, HEADS, DIM))
    else:
        q = heads(module.q, c.query_rank, rotated)
    k, v = heads(module.k, c.key_rank, rotated), heads(module.v, c.value_rank, lambda b: b)
    scores = np.einsum("bqnh,bknh->bnqk", q, k) * (DIM**-0.5 if c.scale is None else c.scale)
    query, key = np.mgrid[:TOKENS, :TOKENS]
    seen = (key <= query) & (query - key < (c.window or TOKENS))
    weights = np.where(seen, np.exp(scores), 0)
    out = np.einsum("bnqk,bknh->bqnh", weights / weights.sum(-1, keepdims=True), v)
    return out.reshape(BATCH, TOKENS, -1) @ matrix(module.o.kernel)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "steps",
    [[(1,) * TOKENS, (4, 1, 4)], pytest.param([(TOKENS,)], marks=pytest.mark.slow)],
    ids=["few at a time", "at once"],
)
def test_it_is_what_the_equations_say(name, steps):
    """Alone, as heads; and over a cache, as factors, in steps."""
    module = build(CONFIGS[name])
    want = by_the_equations(module, X)
    np.testing.assert_allclose(alone(module), want, rtol=1e-5, atol=1e-5)
    for sizes in steps:
        np.testing.assert_allclose(in_steps(module, sizes), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kv_heads", "query_rank"),
    [
        pytest.param(kv_heads, rank, marks=pytest.mark.slow if rank and kv_heads != 2 else ())
        for kv_heads in (1, 2, 4)
        for rank in (None, HEADS)
    ],
)
def test_with_fixed_heads_it_is_mqa_gqa_or_mha(kv_heads, query_rank):
    """Factors over heads that are constants make `Attention` of it, with the same matrices."""
    twin = build(AttentionConfig(D_MODEL, HEADS, kv_heads, DIM, DIM, rope=BASE.rope))
    ranks = {"key_rank": kv_heads, "value_rank": kv_heads, "query_rank": query_rank}
    module = build(replace(BASE, contextual=False, **ranks))
    for mine, its in ((module.k, twin.k), (module.v, twin.v)):
        mine.heads[...] = fixed_heads(HEADS, kv_heads)
        mine.b.kernel[...] = its.kernel[...]
    if query_rank is None:
        module.q.kernel[...] = twin.q.kernel[...]
    else:
        module.q.heads[...] = fixed_heads(HEADS, HEADS)
        module.q.b.kernel[...] = twin.q.kernel[...]
    module.o.kernel[...] = twin.o.kernel[...]
    want = alone(twin)
    np.testing.assert_allclose(alone(module), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(in_steps(module, (4, 1, 4)), want, rtol=1e-5, atol=1e-5)


def test_fixed_heads_are_the_papers():
    """As many ranks as they are averaged over: R e_r for MHA, ones for MQA."""
    np.testing.assert_array_equal(fixed_heads(3, 3), 3 * np.eye(3))
    np.testing.assert_array_equal(fixed_heads(3, 1), np.ones((1, 3)))
    np.testing.assert_array_equal(fixed_heads(4, 2), [[2, 2, 0, 0], [0, 0, 2, 2]])
    with pytest.raises(ValueError, match=r"^kv_heads: got 3; accepted: a divisor of 4"):
        fixed_heads(4, 3)


@pytest.mark.parametrize("layout", ["dense", Paged(4)], ids=str)
def test_a_cache_holds_factors_alone(layout):
    """(R_K + R_V) (N + H) numbers a token."""
    leaves = empty(BASE, layout, "bf16").leaves.values()
    slots = BATCH * TOKENS if layout == "dense" else BATCH * 12
    assert sum(leaf.nbytes for leaf in leaves) == slots * (2 + 3) * (HEADS + DIM) * 2


def test_both_factors_are_as_large_and_their_product_is_the_same():
    """However unlike they were; of zeros nothing is made."""
    rng = np.random.default_rng(2)
    a, b = (jnp.float32(rng.normal(size=(50, width))) for width in (HEADS, DIM))
    a, b = a * 2.0 ** rng.integers(-20, 20, (50, 1)), b.at[7].set(0)
    both = np.asarray(jax.jit(side_by_side)(a, b))
    product = both[:, :HEADS, None] * both[:, None, HEADS:]
    np.testing.assert_array_equal(product, np.asarray(a)[:, :, None] * np.asarray(b)[:, None])
    of_a, of_b = (np.abs(part).max(-1) for part in np.split(both, [HEADS], axis=-1))
    np.testing.assert_array_less(np.abs(np.log2(np.delete(of_a, 7) / np.delete(of_b, 7))), 2)


def test_a_codec_loses_little_of_factors_that_differ_much():
    """Of int8: as if both were alike; with one scale for them as they are, all would be lost."""
    module, small = build(BASE), build(BASE)
    for pairs in (small.k, small.v):
        pairs.a.kernel[...] = pairs.a.kernel[...] * 2.0**-8
        pairs.b.kernel[...] = pairs.b.kernel[...] * 2.0**8
    sizes = (4, 1, 4)
    np.testing.assert_allclose(
        in_steps(small, sizes, codec="int8"), in_steps(module, sizes, codec="int8"), atol=1e-5
    )


def test_a_ring_hides_among_new_tokens_what_it_drops():
    """Many tokens at once see no more of each other than one at a time would."""
    module = build(BASE)
    for layout in (SinkRing(1, 3), SinkRing(1, 3, reindexed=True)):
        at_once = in_steps(module, (TOKENS,), layout)
        one_by_one = in_steps(module, (1,) * TOKENS, layout)
        np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5, atol=1e-5)


def test_ranks_that_keep_tokens_of_their_own_are_refused():
    """Of as many ranks of keys as of values, a cache would let each keep its own."""
    cache = empty(replace(BASE, value_rank=2)).keep(jnp.zeros((BATCH, 2, 1), jnp.int32))
    q = jnp.zeros((BATCH, 1, HEADS, DIM))
    with pytest.raises(ValueError, match=r"^cache: got one in which each of 2 ranks keeps tokens"):
        attend(q, Factors(cache), jnp.zeros((BATCH, 1), jnp.int32))


@pytest.mark.parametrize("heads", [HEADS - 1, HEADS + 1])
def test_queries_of_other_heads_are_refused(heads):
    q = jnp.zeros((BATCH, 1, heads, DIM))
    with pytest.raises(ValueError, match=rf"accepted beside q .* keys {heads} \+ 8 columns"):
        attend(q, Factors(empty(BASE)), jnp.zeros((BATCH, 1), jnp.int32))


@pytest.mark.parametrize("name", ["key_rank", "value_rank", "query_rank"])
def test_ranks_below_1_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}: got 0; accepted: 1 and more"):
        replace(BASE, **{name: 0})
