"""Passes over the live blocks of a cache, whatever its layout and codec."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block, LayerCache


def over_slots(cache: LayerCache, of_block: Callable[[Block], Array]) -> Array:
    """What `of_block` makes of each slot, all together: (B, K or 1, C, ...) -> (B, K or 1, S, ...).

    Dead slots get 0. To be called inside jit.
    """
    made = jax.eval_shape(lambda: of_block(cache.block(jnp.int32(0))))
    slots = jnp.arange(made.shape[2], dtype=jnp.int32)

    def body(i: Array, out: Array) -> Array:
        block = cache.block(i)
        live = (block.pos >= 0).reshape(*block.pos.shape, *(1,) * (len(made.shape) - 3))
        part = jnp.where(live, of_block(block), 0)
        # Blocks may overlap, or end past the last slot; each slot is live in one of them at most.
        return out.at[:, :, cache.first_slot(i) + slots].add(part, mode="drop")

    empty = jnp.zeros((*made.shape[:2], cache.capacity, *made.shape[3:]), made.dtype)
    return jax.lax.fori_loop(0, cache.blocks(), body, empty)


def sum_over_blocks(cache: LayerCache, of_block: Callable[[Block], Array]) -> Array:
    """The sum of what `of_block` makes of each block. To be called inside jit."""
    made = jax.eval_shape(lambda: of_block(cache.block(jnp.int32(0))))

    def body(i: Array, total: Array) -> Array:
        return total + of_block(cache.block(i))

    return jax.lax.fori_loop(0, cache.blocks(), body, jnp.zeros(made.shape, made.dtype))


def slot_positions(cache: LayerCache) -> Array:
    """(B, K or 1, S) int32, the position of each slot's token; -1 in a dead one."""
    return over_slots(cache, lambda block: block.pos + 1) - 1
