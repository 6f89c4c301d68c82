"""Each score against its definition, written out in float64 for one row and head at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import rest_slow

from kvjax.cache import Record, init_layer_cache
from kvjax.evict import Queries, Seen, scorers
from kvjax.nn import Rope, YarnScaling
from kvjax.ops import attend, slot_positions

HEADS, KV_HEADS, DIM, VALUE_DIM, SLOTS, TOKENS = 6, 2, 8, 4, 24, 7
GROUP = HEADS // KV_HEADS
LENGTHS = np.array([22, 13])
ROPES = {
    "rope": Rope(DIM, theta=50.0),
    "partial rope": Rope(4, theta=50.0),
    "yarn": Rope(DIM, theta=50.0, scaling=YarnScaling(4.0, 16, magnitude=1.2)),
    "no rope": None,
}
KEYS = np.random.default_rng(0).normal(0.3, 1, (2, KV_HEADS, SLOTS, DIM))
VALUES = np.random.default_rng(1).normal(0.3, 1, (2, KV_HEADS, SLOTS, VALUE_DIM))
UNROTATED = np.random.default_rng(2).normal(0.3, 1, (2, TOKENS, HEADS, DIM)).astype(np.float32)
POSITIONS = (LENGTHS[:, None] - TOKENS + np.arange(TOKENS)).astype(np.int32)


class Case(NamedTuple):
    """A scorer's input as arrays: keys and values by slot, of which pos says which live."""

    pos: np.ndarray  # (B, K, S)
    k: np.ndarray
    v: np.ndarray
    seen: Seen


def case(*, evicted=False, codec="f32", rope=None, soft_cap=None, scale=None) -> Case:
    """The newest TOKENS of each row look back, over all of the row or over what was kept of it."""
    cache = init_layer_cache(
        2, SLOTS, kv_heads=KV_HEADS, key_dim=DIM, value_dim=VALUE_DIM, codec=codec
    )
    record = Record(jnp.asarray(KEYS, jnp.float32), jnp.asarray(VALUES, jnp.float32))
    cache = cache.append(record, jnp.asarray(LENGTHS))
    if evicted:
        rng = np.random.default_rng(3)
        wanted = [[rng.permutation(n)[:10] for _ in range(KV_HEADS)] for n in LENGTHS]
        cache = cache.keep(np.array(wanted), room=3)
    q = jnp.asarray(UNROTATED)
    unrotated = q
    if rope is not None:
        q, unrotated = rope(q, jnp.asarray(POSITIONS)), rope(q, jnp.zeros_like(POSITIONS))
    settings = {"window": None, "sink_logits": None, "soft_cap": soft_cap, "scale": scale}
    _, lse = jax.jit(lambda cache: attend(q, cache, jnp.asarray(POSITIONS), **settings))(cache)
    pos = jax.jit(slot_positions)(cache)
    queries = Queries(q, unrotated, jnp.asarray(POSITIONS), lse)
    held = cache.codec.decode(cache.leaves, cache.scales)
    shape = (2, KV_HEADS, cache.capacity)
    return Case(
        np.broadcast_to(pos, shape),
        np.asarray(held.k, np.float64),
        np.asarray(held.v, np.float64),
        Seen(cache, pos, queries, rope, settings),
    )


def scored(scorer, given: Case) -> np.ndarray:
    """Scores (B, K or 1, S), with NaN in dead slots."""
    seen = given.seen

    @jax.jit
    def run(cache, pos, queries):
        return scorer(Seen(cache, pos, queries, seen.rope, seen.settings))

    scores = np.asarray(run(seen.cache, seen.pos, seen.queries), np.float64)
    assert scores.shape in {given.pos.shape, (2, 1, given.pos.shape[2])}
    return np.where(given.pos[:, : scores.shape[1]] >= 0, scores, np.nan)


def probabilities(given: Case) -> np.ndarray:
    """(B, N, T, S), by the softmax's definition."""
    settings = given.seen.settings
    scale = DIM**-0.5 if settings["scale"] is None else settings["scale"]
    q = np.asarray(given.seen.queries.q, np.float64)
    k, pos = (np.repeat(x, GROUP, axis=1) for x in (given.k, given.pos))
    scores = np.einsum("btnh,bnsh->bnts", q, k) * scale
    if settings["soft_cap"] is not None:
        scores = settings["soft_cap"] * np.tanh(scores / settings["soft_cap"])
    visible = (pos[:, :, None] >= 0) & (pos[:, :, None] <= POSITIONS[:, None, :, None])
    weights = np.where(visible, np.exp(scores), 0)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def by_kv_head(x: np.ndarray) -> np.ndarray:
    """The mean over each KV head's query heads: (B, N, ...) -> (B, K, ...)."""
    return x.reshape(2, KV_HEADS, GROUP, *x.shape[2:]).mean(2)


def same(got, want, given: Case, atol=2e-5) -> None:
    live = given.pos[:, : got.shape[1]] >= 0
    assert live.any()
    np.testing.assert_allclose(got[live], want[live], rtol=2e-4, atol=atol)


CASES = {
    "dense": {},
    "capped": {"soft_cap": 0.7, "scale": 0.5},
    "evicted": {"evicted": True},
    "int8, evicted": {"evicted": True, "codec": "int8"},
}


@pytest.fixture(params=CASES)
def given(request) -> Case:
    return case(**CASES[request.param], rope=ROPES["rope"])


def test_recency(given):
    got = scored(scorers.recency, given)
    same(np.broadcast_to(got, given.pos.shape), given.pos, given)


def test_total_mass(given):
    """H2O: column sums, the mean over the group."""
    same(scored(scorers.total_mass, given), by_kv_head(probabilities(given).sum(2)), given)


def test_mean_mass(given):
    """Column sums over the number of queries that could see the slot."""
    mass = by_kv_head(probabilities(given).sum(2))
    could = (POSITIONS[:, None, :, None] >= given.pos[:, :, None]).sum(2)
    same(scored(scorers.mean_mass, given), mass / np.maximum(could, 1), given)


def test_shared_mass(given):
    """TOVA where one query is observed: the mean over all heads, one score for all of them."""
    want = probabilities(given).sum(2).mean(1, keepdims=True)
    got = scored(scorers.shared_mass, given)
    assert got.shape[1] == 1
    live = (given.pos >= 0).all(1, keepdims=True)
    np.testing.assert_allclose(got[live], want[live], atol=2e-5)


def test_pooled_mass(given):
    """SnapKV: means over the window of queries, and over 5 neighbours of the tokens before it."""
    before = given.pos < POSITIONS[:, None, :1]
    mean = np.where(before, by_kv_head(probabilities(given).mean(2)), 0)
    padded = np.pad(mean, ((0, 0), (0, 0), (2, 2)))
    want = sum(padded[:, :, i : i + mean.shape[2]] for i in range(5)) / 5
    same(scored(scorers.pooled_mass, given), want, given)


def test_key_norm(given):
    same(scored(scorers.key_norm, given), -np.linalg.norm(given.k, axis=-1), given)


def test_key_difference(given):
    want = np.zeros(given.pos.shape)
    for at in np.ndindex(given.pos.shape[:2]):
        live = given.pos[at] >= 0
        unit = given.k[at] / np.maximum(np.linalg.norm(given.k[at], axis=-1, keepdims=True), 1e-12)
        mean = unit[live].mean(0)
        want[at] = -unit @ mean / np.linalg.norm(mean)
    same(scored(scorers.key_difference, given), want, given)


def rotation(rope, position) -> np.ndarray:
    """(H, H), by which a column vector is rotated to a position; lengths are kept."""
    matrix = np.eye(DIM)
    if rope is None:
        return matrix
    for i, frequency in enumerate(rope.frequencies()):
        a, b = i, i + rope.dim // 2
        cos, sin = np.cos(position * frequency), np.sin(position * frequency)
        matrix[[a, a, b, b], [a, b, a, b]] = [cos, -sin, sin, cos]
    return matrix


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("evicted", rest_slow([False, True], [True]))
def test_expected_attention(name, evicted):
    """mean and covariance of queries from position 10 on, rotated over 20 positions to come.

    Tokens before position 10 have no part in the softmax.
    """
    rope, skip, future, epsilon = ROPES[name], 10, 20, 0.02
    given = case(evicted=evicted, rope=rope, scale=0.4)
    magnitude = 1.0 if rope is None or rope.scaling is None else rope.scaling.magnitude
    want = np.zeros(given.pos.shape)
    for row in (0, 1):
        turn = np.mean([rotation(rope, LENGTHS[row] + i) for i in range(future)], axis=0)
        q = UNROTATED[row].astype(np.float64)
        q[..., : DIM if rope is None else rope.dim] *= magnitude
        q = q[POSITIONS[row] >= skip]
        others = given.pos[row] >= skip
        weights = np.zeros((HEADS, given.pos.shape[2]))
        for n in range(HEADS):
            k = given.k[row, n // GROUP]
            mean, covariance = q[:, n].mean(0), np.cov(q[:, n].T, bias=True)
            spread = np.einsum("si,ij,sj->s", k, turn @ covariance @ turn.T, k)
            z = 0.4 * k @ (turn @ mean) + 0.4**2 / 2 * spread
            e = np.where(others[n // GROUP], np.exp(z - z.max()), 0)
            weights[n] = e / e.sum()
        mean_weights = weights.reshape(KV_HEADS, GROUP, -1).mean(1)
        want[row] = (mean_weights + epsilon) * np.linalg.norm(given.v[row], axis=-1)
    got = scored(lambda seen: scorers.expected_attention(seen, future, skip, epsilon), given)
    same(got, want, given)


def test_the_identity_behind_expected_attention():
    """The mean of exp(k.q) over normal queries is exp(k.mean + k covariance k / 2)."""
    rng = np.random.default_rng(0)
    k, mean, root = rng.normal(size=4) * 0.5, rng.normal(size=4), rng.normal(size=(4, 4)) * 0.5
    q = mean + rng.normal(size=(400_000, 4)) @ root.T
    expected = np.exp(k @ mean + k @ root @ root.T @ k / 2)
    assert abs(np.exp(q @ k).mean() / expected - 1) < 0.02


def test_a_policy_that_observes_nothing_is_told():
    seen = case().seen
    blind = Seen(seen.cache, seen.pos, None, None, seen.settings)
    with pytest.raises(ValueError, match="observe: got 0"):
        scorers.total_mass(blind)
