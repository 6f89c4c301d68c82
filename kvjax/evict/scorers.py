"""Scores of cached tokens: what to keep (higher) and what to evict (lower).

Each is a function of what `observe` saw of one layer, and gives (B, K, S) float32, one score for
each slot and KV head, or (B, 1, S) where all heads are to keep the same tokens. Scores of dead
slots mean nothing. First and newest tokens are protected by the policy, whatever they score.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block
from kvjax.evict.observe import Seen
from kvjax.nn import Rope
from kvjax.ops import over_slots, sum_over_blocks
from kvjax.ops.online import group_queries, product


def recency(seen: Seen) -> Array:
    """The newest (StreamingLLM, arXiv:2309.17453; its sinks are protected ones)."""
    return seen.pos.astype(jnp.float32)


def total_mass(seen: Seen) -> Array:
    """All attention that the observed queries gave a slot (H2O, arXiv:2306.14048)."""
    return seen.mass()


def mean_mass(seen: Seen) -> Array:
    """The mean attention of the queries that could see a slot: early tokens have no advantage."""
    at = seen.observed.positions[:, None, None, :]
    could = jnp.sum(at >= jnp.maximum(seen.pos, 0)[..., None], axis=-1)
    return seen.mass() / jnp.maximum(could, 1)


def shared_mass(seen: Seen) -> Array:
    """The attention of all heads together; with one observed query TOVA (arXiv:2401.06104)."""
    return seen.mass().mean(1, keepdims=True)


def pooled_mass(seen: Seen, kernel: int = 5) -> Array:
    """The mean over the observed queries, averaged over `kernel` neighbours (arXiv:2404.14469).

    SnapKV: with a token its context stays. Neighbours are those next to it in the cache. The
    observed tokens themselves, which the policy protects, count as zeros, like what lies outside.
    """
    earlier = seen.pos < seen.observed.positions[:, None, :1]
    mean = jnp.where(earlier, seen.mass(), 0) / seen.observed.q.shape[1]
    window = (1, 1, kernel)
    sums = jax.lax.reduce_window(mean, 0.0, jax.lax.add, window, (1, 1, 1), "SAME")
    return sums / kernel


def key_norm(seen: Seen) -> Array:
    """Minus the norm of the key: small keys draw attention (arXiv:2406.11430)."""
    return over_slots(seen.cache, lambda block: -jnp.linalg.norm(_keys(block), axis=-1))


def key_difference(seen: Seen) -> Array:
    """Minus the cosine of the key and the mean direction of all keys (KeyDiff, arXiv:2504.15364).

    That mean is over the live slots of the row and head; its length does not change the cosine.
    """

    def directions(block: Block) -> Array:
        keys = jnp.where((block.pos >= 0)[..., None], _keys(block), 0)
        return keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)

    mean = sum_over_blocks(seen.cache, lambda block: directions(block).sum(2))
    mean /= jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)
    return over_slots(seen.cache, lambda block: -product("bkch,bkh->bkc", directions(block), mean))


def expected_attention(seen: Seen, future: int = 512, skip: int = 4, epsilon: float = 0.0) -> Array:
    """Attention that tokens to come are expected to give, times the value's norm.

    Queries are taken to be normal, with the mean and covariance of the observed ones before their
    rotation; they are rotated by the mean rotation of the next `future` positions, and the mean of
    exp(score) is then known in closed form (arXiv:2510.00636). The first `skip` tokens are unlike
    others: their queries are left out, and attention is shared among the rest, as in the authors'
    code. They have weight 0, and are for the policy to protect.
    """
    mean, covariance = _normal(seen, skip)
    if seen.rope is not None:
        turn = _mean_rotation(seen.rope, seen.cache.n, future, mean.shape[-1])
        mean = product("bkgi,bij->bkgj", mean, turn)
        covariance = product("bkgij,bjl->bkgil", covariance, turn)
        covariance = product("bkgil,bij->bkgjl", covariance, turn)
    scale = seen.scale

    def logits(block: Block) -> Array:
        keys = _keys(block)
        spread = product("bkgci,bkci->bkcg", product("bkci,bkgij->bkgcj", keys, covariance), keys)
        return product("bkci,bkgi->bkcg", keys, mean) * scale + spread * (scale**2 / 2)

    others = (seen.pos >= skip)[..., None]
    weights = jax.nn.softmax(over_slots(seen.cache, logits), axis=2, where=others).mean(3)
    values = over_slots(seen.cache, lambda b: jnp.linalg.norm(b.v.astype(jnp.float32), axis=-1))
    return (weights + epsilon) * values


def _keys(block: Block) -> Array:
    return block.k.astype(jnp.float32)


def _normal(seen: Seen, skip: int) -> tuple[Array, Array]:
    """Mean (B, K, G, H) and covariance (B, K, G, H, H) of the queries from position `skip` on."""
    q = group_queries(seen.observed.unrotated.astype(jnp.float32), _keys_shape(seen)[1])
    taken = (seen.observed.positions >= skip)[:, None, None, :, None]
    many = jnp.maximum(taken.sum(3), 1)
    mean = jnp.where(taken, q, 0).sum(3) / many
    apart = jnp.where(taken, q - mean[..., None, :], 0)
    return mean, product("bkgti,bkgtj->bkgij", apart, apart) / many[..., None]


def _keys_shape(seen: Seen) -> tuple[int, ...]:
    return jax.eval_shape(seen.cache.block, 0).k.shape


def _mean_rotation(rope: Rope, n: Array, future: int, dim: int) -> Array:
    """(B, H, H): a row vector as at position 0 times it is the mean over positions from n on."""
    unit = jnp.broadcast_to(jnp.eye(dim), (len(n), 1, dim, dim))

    def turned(positions: Array) -> Array:
        return rope(unit, positions[:, None])[:, 0]

    def body(i: Array, total: Array) -> Array:
        return total + turned(n + i)

    total = jax.lax.fori_loop(0, future, body, jnp.zeros((len(n), dim, dim)))
    # Some scalings lengthen what they rotate, at position 0 too.
    return total / future / jnp.diagonal(turned(jnp.zeros_like(n)), axis1=1, axis2=2)[..., None]
