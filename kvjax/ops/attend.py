"""Attention of new tokens over a cache, whatever its layout and codec."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array

from kvjax.cache.protocol import Block, LayerCache
from kvjax.ops import blockwise
from kvjax.ops.blockwise import Scoring
from kvjax.ops.checks import check_settings
from kvjax.ops.decode import decode_attention


def attend(
    q: Array,
    cache: LayerCache,
    q_positions: Array,
    *,
    window: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    new: Sequence[Block] = (),
) -> tuple[Array, Array]:
    """Attend the records of a cache and, after them, blocks that are not in it yet.

    Knows nothing of layouts: it takes the cache's blocks one by one and masks by position alone.
    Costs one pass over the cache's live blocks for every 256 queries.

    Args:
      q: (B, T, N, H), a float type.
      cache: one layer's cache. With T = 1 and nothing new, one whose operands `decode_attention`
        can read in place goes there.
      q_positions: (B, T) int32, absolute; -1 at padding, where the output means nothing.
      window, sink_logits, soft_cap, scale: as in `decode_attention`.
      new: blocks of the chunk's own records, exact, before any codec.

    Returns:
      out (B, T, N, HV) in q's dtype, and the LSE (B, T, N) in float32.

    Raises:
      ValueError: for shapes or settings outside the above.
    """
    if q.ndim != 4 or q_positions.shape != q.shape[:2]:
        raise ValueError(
            f"q {q.shape} and q_positions {q_positions.shape}: "
            "(B, T, N, H) and (B, T) are needed"
        )
    check_settings(q.shape[2], window, sink_logits, soft_cap)
    if q.shape[1] == 1 and not new and (operands := cache.operands()) is not None:
        out, lse = decode_attention(
            q[:, 0],
            **operands,
            window=window,
            sink_logits=sink_logits,
            soft_cap=soft_cap,
            scale=scale,
            return_lse=True,
        )
        return out[:, None], lse[:, None]
    scoring = Scoring(q.shape[-1] ** -0.5 if scale is None else scale, soft_cap, window)
    first = jax.eval_shape(cache.block, 0)

    def over_cache_and_new(q: Array, q_pos: Array) -> tuple[Array, Array]:
        def add(i: Array, seen: blockwise.Partial) -> blockwise.Partial:
            block = cache.block(i)
            visible = scoring.visible(q_pos[:, None], block.pos)
            return blockwise.update(seen, q, block.k, block.v, visible, scoring)

        seen = blockwise.empty(q, first.v.shape[-1])
        seen = jax.lax.fori_loop(0, cache.blocks(), add, seen)
        for block in new:
            seen = blockwise.attend_positions(seen, q, q_pos, block, scoring)
        return blockwise.finish(seen, sink_logits)

    grouped = blockwise.group_queries(q, first.k.shape[1])
    out, lse = blockwise.over_query_blocks(over_cache_and_new, grouped, q_positions)
    return blockwise.ungroup(out).astype(q.dtype), blockwise.ungroup(lse)
