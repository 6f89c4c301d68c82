"""Attention over any cache, of which it knows the blocks alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block, Factors, LayerCache, View
from kvjax.ops.checks import check_heads, check_q_sinks, check_sinks, describe, score_rule
from kvjax.ops.decode import decode_attention
from kvjax.ops.devices import current_gpu
from kvjax.ops.factors import FactorRule, check_factors
from kvjax.ops.implementations import warn_once
from kvjax.ops.latent import latent_decode_attention
from kvjax.ops.online import Partial, start, update
from kvjax.ops.xla import over_tiles, see


def attend(
    q: Array,
    cache: LayerCache | View,
    q_positions: Array,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    q_sinks: Array | None = None,
    new: Sequence[Block] = (),
) -> tuple[Array, Array]:
    """Attention of T tokens a row over a cache, and over records beside it.

    A query at position p sees a slot at position s if 0 <= s <= p and, in a window, s > p - window,
    or, in chunks, s // chunk == p // chunk; nothing else decides. A layout that keeps less narrows
    the window, and may let first tokens be seen beside it (`cache.sight`). Cost follows the live
    blocks of the cache; in a window or chunk, those that the oldest query may see. To be called
    inside jit: outside, its loops are compiled anew at each call.

    Args:
      q: (B, T, N, H); query head n reads KV head n // (N // K), or its share of `Factors`.
      cache: one layer's cache, or a view of one, such as `Latents`, to be read by absorbed
        queries. One query a row with nothing in `new` goes to `decode_attention`, or
        `latent_decode_attention`, if the cache has operands for it; it must then be its row's
        newest token, or padding.
      q_positions: (B, T) integers, absolute; -1 for padding, whose output is finite.
      window, sink_logits, soft_cap, scale: as in `decode_attention`.
      chunk: tokens of a chunk beyond which nothing is seen (Llama 4); None for none.
      q_sinks: (B, T, N, H), the queries as the layout's first tokens (`cache.sight.sink_tokens`)
        are to be seen from, where positions within the cache count: rotated to `sight.place`. None
        for q itself.
      new: blocks that are not in the cache, such as the chunk's own exact records; of any width.
        With `q_sinks`, a first token lies among as many first slots of its block.

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
    sinks = 0 if q_sinks is None else sight.sink_tokens
    operands: dict[str, Any] | None = cache.operands() if alone and not sinks else None
    # `decode_attention` counts a window in slots, which must then be positions.
    if operands is not None and (kept or window is None or not sight.gaps):
        # Padding, at position -1, sees nothing.
        lengths = operands["lengths"]
        seen = (q_positions + 1).reshape(-1, *(1,) * (lengths.ndim - 1))
        operands["lengths"] = jnp.minimum(lengths, seen)
        out, lse = _decode(
            q[:, 0],
            operands,
            window=None if kept else window,
            sink_logits=sink_logits,
            soft_cap=soft_cap,
            scale=scale,
        )
        return out[:, None], lse[:, None]
    if q.shape[1] == 1 and current_gpu() is not None:
        warn_once(
            f"decoding on this GPU in plain JAX: no kernel reads a {type(cache).__name__} of this "
            f"codec, or one with chunks, re-indexed sinks, or a window over evicted tokens"
        )
    first = jax.eval_shape(cache.block, 0)
    factored = isinstance(cache, Factors)
    for block in (first, *new):
        if factored:
            check_factors(q, block.k, block.v)
        else:
            check_heads(q, block.k, block.v, axes=4)
    check_sinks(sink_logits, q.shape[2])
    check_q_sinks(q_sinks, q)
    rule = score_rule(
        q.shape[-1],
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        chunk=chunk,
        sight=sight,
    )
    kv_heads, value_dim = first.k.shape[1], first.v.shape[-1]
    if factored:
        # All heads read the same factors, of which the first N channels are over heads.
        rule, kv_heads, value_dim = FactorRule(**vars(rule)), 1, value_dim - q.shape[2]

    def tile(q: Array, positions: Array) -> Partial:
        def body(i: Array, seen: Partial) -> Partial:
            return update(seen, q, positions, _without(cache.block(i), sinks), rule)

        seen = start(q, value_dim, sink_logits)
        begin = cache.first_block(rule.oldest(positions))
        seen = jax.lax.fori_loop(begin, cache.blocks(), body, seen)
        for block in new:
            seen = see(seen, q, positions, _without(block, sinks), rule)
        return seen

    def tile_of_both(both: Array, positions: Array) -> Partial:
        q, q_sinks = jnp.split(both, 2, axis=-1)
        seen = tile(q, positions)
        for i in range(-(-sinks // first.k.shape[2])):
            seen = update(seen, q_sinks, positions, _first(cache.block(jnp.int32(i)), sinks), rule)
        for block in new:
            seen = see(seen, q_sinks, positions, _first(block, sinks), rule)
        return seen

    if q_sinks is None or not sinks:
        return over_tiles(tile, q, q_positions, kv_heads)
    both = jnp.concatenate([q, q_sinks], axis=-1)
    return over_tiles(tile_of_both, both, q_positions, kv_heads)


def _decode(q: Array, operands: dict[str, Any], **settings: Any) -> tuple[Array, Array]:
    """Queries (B, N, H) over a cache's arrays; latents have queries for them and for rope keys."""
    if "latent" not in operands:
        return decode_attention(q, **operands, **settings, return_lse=True)
    absorbed, rope = jnp.split(q, [operands["latent"].shape[-1]], axis=-1)
    return latent_decode_attention(absorbed, rope, **operands, **settings, return_lse=True)


def _without(block: Block, sinks: int) -> Block:
    """A block of which a row's first `sinks` tokens are dead."""
    return block._replace(pos=jnp.where(block.pos >= sinks, block.pos, -1)) if sinks else block


def _first(block: Block, sinks: int) -> Block:
    """A row's first `sinks` tokens, of a block that has them in as many first slots."""
    k, v, pos = (x[:, :, :sinks] for x in block)
    return Block(k, v, jnp.where(pos < sinks, pos, -1))
