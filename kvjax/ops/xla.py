"""Blockwise attention compiled by XLA, for every device.

Cost follows what is visible: decode runs over the blocks of the longest row (or of the window),
and blocks that no query of a tile sees are skipped. Nothing as large as K, V or all scores is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block
from kvjax.cache.common import block_width
from kvjax.ops.online import (
    Partial,
    ScoreRule,
    finish,
    group_queries,
    start,
    ungroup,
    update,
)
from kvjax.ops.stored import Stored

# The most slots that decode reads at a time; see `block_width`.
DECODE_BLOCK = 512
# Tile of scores in prefill, queries x keys.
QUERY_TILE, KEY_TILE = 128, 256


@partial(jax.jit, static_argnames="rule")
def decode(
    q: Array, stored: Stored, lengths: Array, sink_logits: Array | None, rule: ScoreRule
) -> tuple[Array, Array]:
    """As `reference.decode`, lengths (B, K or 1), with out in q's dtype."""
    capacity, size = stored.capacity, stored.page_size
    shape = (len(q), stored.kv_heads, capacity, stored.key_dim)
    width = block_width(DECODE_BLOCK, shape)
    if size is not None:
        width = max(width // size, 1) * size
    read = stored.reader()
    q = group_queries(q[:, None], stored.kv_heads)
    longest = lengths.max(1)  # (B,), of each row's heads
    # Without a window all rows begin at slot 0, and one slice serves the batch. With one, each row
    # begins at its own, so that ragged rows cost no more than one.
    begin = jnp.int32(0) if rule.window is None else jnp.maximum(longest - rule.window, 0)
    if size is not None:
        begin = begin // size * size

    def body(i: Array, seen: Partial) -> Partial:
        first = begin + i * width
        # The last block of a row of slots starts early, to be whole.
        slot = first if size is not None else jnp.minimum(first, capacity - width)
        slots = slot[..., None, None] + jnp.arange(width, dtype=slot.dtype)
        fresh = (slots >= first[..., None, None]) & (slots < lengths[..., None])
        positions = jnp.where(fresh, slots, -1)  # (B, K or 1, C)
        block = Block(*read(slot, width), positions)
        return update(seen, q, longest[:, None] - 1, block, rule)

    trips = (jnp.max(longest - begin) + width - 1) // width
    seen = jax.lax.fori_loop(0, trips, body, start(q, stored.value_dim, sink_logits))
    out, lse = (ungroup(x)[:, 0] for x in finish(seen))
    return out.astype(q.dtype), lse


@partial(jax.jit, static_argnames="rule")
def prefill(
    q: Array, k: Array, v: Array, lengths: Array, sink_logits: Array | None, rule: ScoreRule
) -> tuple[Array, Array]:
    """As `reference.prefill`, with out in q's dtype."""
    steps = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
    live = jnp.where(steps < lengths[:, None], steps, -1)
    chunk = Block(k, v, live[:, None, :])

    def tile(q: Array, positions: Array) -> Partial:
        return see(start(q, v.shape[-1], sink_logits), q, positions, chunk, rule)

    return over_tiles(tile, q, steps, k.shape[1])


def over_tiles(
    tile: Callable[[Array, Array], Partial], q: Array, positions: Array, kv_heads: int
) -> tuple[Array, Array]:
    """Apply `tile` to q (B, T, N, H) and positions (B, T), QUERY_TILE tokens at a time.

    `tile` gets grouped queries and their positions. Returns out (B, T, N, HV) and lse (B, T, N).
    """

    def attended(tile_q: Array, tile_positions: Array) -> tuple[Array, Array]:
        out, lse = finish(tile(group_queries(tile_q, kv_heads), tile_positions))
        return ungroup(out).astype(q.dtype), ungroup(lse)

    tokens = q.shape[1]
    if tokens <= QUERY_TILE:
        return attended(q, positions)
    tiles = split(q, 1, QUERY_TILE, 0), split(positions, 1, QUERY_TILE, -1)
    # Recomputed in the backward pass, one tile at a time, rather than kept for all tiles.
    _, results = jax.lax.scan(jax.checkpoint(lambda carry, xs: (carry, attended(*xs))), None, tiles)
    out, lse = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in results)
    return out[:, :tokens], lse[:, :tokens]


def see(seen: Partial, q: Array, positions: Array, block: Block, rule: ScoreRule) -> Partial:
    """Take a block of any width into account, KEY_TILE keys at a time."""
    if block.k.shape[2] <= KEY_TILE:
        return update(seen, q, positions, block, rule)

    @jax.checkpoint
    def body(seen: Partial, part: Block) -> tuple[Partial, None]:
        needed = rule.visible(positions, part.pos).any()
        return jax.lax.cond(
            needed, lambda: update(seen, q, positions, part, rule), lambda: seen
        ), None

    pos = jnp.broadcast_to(block.pos, (*block.pos.shape[:2], block.k.shape[2]))
    parts = Block(
        *(split(x, 2, KEY_TILE, fill) for x, fill in ((block.k, 0), (block.v, 0), (pos, -1)))
    )
    return jax.lax.scan(body, seen, parts)[0]


def split(x: Array, axis: int, width: int, fill: int) -> Array:
    """Cut an axis into pieces of `width`, on a new leading axis; the last one is filled up."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % width)
    x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(*x.shape[:axis], -1, width, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
