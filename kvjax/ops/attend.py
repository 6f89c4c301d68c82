"""Attention over any cache, of which it knows the blocks alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block, LayerCache
from kvjax.ops.checks import check_heads, check_sinks, describe, score_rule
from kvjax.ops.decode import decode_attention
from kvjax.ops.online import Partial, start, update
from kvjax.ops.xla import over_tiles, see


def attend(
    q: Array,
    cache: LayerCache,
    q_positions: Array,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    new: Sequence[Block] = (),
) -> tuple[Array, Array]:
    """Attention of T tokens a row over a cache, and over records beside it.

    A query at position p sees a slot at position s if 0 <= s <= p and, in a window, s > p - window,
    or, in chunks, s // chunk == p // chunk; nothing else decides. A layout that keeps less narrows
    the window, and may let first tokens be seen beside it (`cache.sight`). Cost follows the cache's
    live blocks. To be called inside jit: outside, its loops are compiled anew at each call.

    Args:
      q: (B, T, N, H); query head n reads KV head n // (N // K).
      cache: one layer's cache. One query a row with nothing in `new` goes to `decode_attention` if
        the cache has operands for it; it must then be its row's newest token, or padding.
      q_positions: (B, T) integers, absolute; -1 for padding, whose output is finite.
      window, sink_logits, soft_cap, scale: as in `decode_attention`.
      chunk: tokens of a chunk beyond which nothing is seen (Llama 4); None for none.
      new: blocks that are not in the cache, such as the chunk's own exact records; of any width.

    Returns:
      out (B, T, N, HV) in q's dtype and lse (B, T, N) float32, natural log; a query that sees
      nothing has out 0 and lse -inf (or its sinks).

    Raises:
      ValueError: for arguments that do not fit; it says what was given and what is accepted.
    """
    if q.ndim != 4 or q_positions.shape != q.shape[:2]:
        raise ValueError(
            f"q is {describe(q)} and q_positions {describe(q_positions)}; accepted are "
            f"q (B, T, N, H) and q_positions (B, T)"
        )
    sight = cache.sight
    # What the layout keeps is all that the window lets be seen.
    kept = sight.window is not None and (window is None or sight.window <= window)
    alone = q.shape[1] == 1 and not new and chunk is None and (kept or sight.window is None)
    operands: dict[str, Any] | None = cache.operands() if alone else None
    # `decode_attention` counts a window in slots, which must then be positions.
    if operands is not None and (kept or window is None or not sight.gaps):
        # Padding, at position -1, sees nothing.
        operands["lengths"] = jnp.minimum(operands["lengths"], q_positions[:, 0] + 1)
        out, lse = decode_attention(
            q[:, 0],
            **operands,
            window=None if kept else window,
            sink_logits=sink_logits,
            soft_cap=soft_cap,
            scale=scale,
            return_lse=True,
        )
        return out[:, None], lse[:, None]
    first = jax.eval_shape(cache.block, 0)
    for block in (first, *new):
        check_heads(q, block.k, block.v, axes=4)
    check_sinks(sink_logits, q.shape[2])
    rule = score_rule(
        q.shape[-1],
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        chunk=chunk,
        sight=sight,
    )

    def tile(q: Array, positions: Array) -> Partial:
        def body(i: Array, seen: Partial) -> Partial:
            return update(seen, q, positions, cache.block(i), rule)

        seen = start(q, first.v.shape[-1], sink_logits)
        seen = jax.lax.fori_loop(0, cache.blocks(), body, seen)
        for block in new:
            seen = see(seen, q, positions, block, rule)
        return seen

    return over_tiles(tile, q, q_positions, first.k.shape[1])
