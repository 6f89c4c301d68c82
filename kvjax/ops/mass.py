"""How much attention each slot of a cache gets: what heavy-hitter eviction goes by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block, LayerCache
from kvjax.ops import xla
from kvjax.ops.blockwise import over_slots
from kvjax.ops.checks import check_heads, describe, score_rule
from kvjax.ops.online import ScoreRule, group_queries


def attention_mass(
    q: Array,
    cache: LayerCache,
    lse: Array,
    q_positions: Array | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Array:
    """Attention probabilities of each slot, summed over queries: a second pass after `attend`.

    A query at position p gives a slot the probability exp(score - lse) that it had in `attend`, and
    0 where it does not see it. Of the G query heads that read one KV head the mean is taken (H2O,
    arXiv:2306.14048, and SnapKV, arXiv:2404.14469, carried over to groups). What learned sinks or
    records outside the cache got is missing. Neither all scores nor decoded keys are ever held: a
    tile of queries meets a block of slots. To be called inside jit.

    Args:
      q: (B, T, N, H); query head n reads KV head n // (N // K).
      cache: one layer's cache, which holds what the queries attended to.
      lse: (B, T, N), the log-sum-exp that `attend` returned for them.
      q_positions: (B, T) integers, -1 for padding, which counts nothing; None where the queries are
        those of each row's newest T tokens.
      window, chunk, soft_cap, scale: as `attend` had them.

    Returns:
      (B, K, S) float32 (float64 for float64 inputs), 0 at dead slots. All slots of a row and head
      add up to the number of its queries, if those see nothing elsewhere.

    Raises:
      ValueError: for arguments that do not fit; it says what was given and what is accepted.
    """
    if q_positions is None:
        q_positions = cache.n[:, None] - q.shape[1] + jnp.arange(q.shape[1], dtype=jnp.int32)
    if q.ndim != 4 or lse.shape != q.shape[:3] or q_positions.shape != q.shape[:2]:
        raise ValueError(
            f"q is {describe(q)}, lse {describe(lse)} and q_positions {describe(q_positions)}; "
            f"accepted are q (B, T, N, H), lse (B, T, N) and q_positions (B, T)"
        )
    first = jax.eval_shape(cache.block, 0)
    check_heads(q, first.k, first.v, axes=4)
    rule = score_rule(
        q.shape[-1],
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        chunk=chunk,
        sight=cache.sight,
    )
    kv_heads = first.k.shape[1]
    tiles = _tiles(q, lse, q_positions)

    def of_block(block: Block) -> Array:
        def tile(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
            return total + _mass(*part, block, rule, kv_heads), None

        shape = (q.shape[0], kv_heads, block.k.shape[2])
        empty = jnp.zeros(shape, jnp.promote_types(q.dtype, jnp.float32))
        return jax.lax.scan(tile, empty, tiles)[0]

    return over_slots(cache, of_block)


def _mass(
    q: Array, lse: Array, positions: Array, block: Block, rule: ScoreRule, kv_heads: int
) -> Array:
    """(B, K, C): probabilities of one block, summed over a tile of queries."""
    visible = rule.visible(positions, block.pos)
    scores = rule.scores(group_queries(q, kv_heads), block.k)  # (B, K, G, T, C)
    shift = group_queries(lse[..., None], kv_heads)
    weights = jnp.where(visible, jnp.exp(scores - shift), 0)
    return weights.mean(2).sum(2)


def _tiles(q: Array, lse: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Queries in tiles of at most `xla.QUERY_TILE`, on a new leading axis; padding is at -1."""
    width = min(q.shape[1], xla.QUERY_TILE)
    return (
        xla.split(q, 1, width, 0),
        xla.split(lse, 1, width, 0),
        xla.split(positions, 1, width, -1),
    )
