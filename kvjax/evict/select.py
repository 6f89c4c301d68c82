"""From scores to slots: what is protected, how many each head keeps, and which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.evict.observe import Seen


@dataclass(frozen=True)
class Protected:
    """Tokens that are kept whatever they score.

    Attributes:
      sinks: the first of a row.
      recent: its newest.
      recent_share: part of the budget that goes to the newest, beside `recent`; rounded down.
    """

    sinks: int = 0
    recent: int = 0
    recent_share: float = 0.0

    def newest(self, budget: int) -> int:
        """Newest tokens protected of a budget."""
        return self.recent + int(self.recent_share * budget)

    def least(self, budget: int) -> int:
        """Slots that what is protected takes."""
        return self.sinks + self.newest(budget)

    def mask(self, pos: Array, n: Array, budget: int) -> Array:
        """bool like pos (B, K or 1, S), of rows of n (B,) tokens."""
        newest = pos >= n[:, None, None] - self.newest(budget)
        return (pos >= 0) & ((pos < self.sinks) | newest)


class Heads(Protocol):
    """How the heads of a layer share its budget; hashable, hence static under jit."""

    def __call__(self, order: Array, budget: int) -> Array:
        """Slots to keep, (B, K, m) int32, -1 where a head keeps fewer than others.

        `order` (B, K, S) ranks them: -inf where dead, inf where protected.
        """
        ...


@dataclass(frozen=True)
class Evenly:
    """Each head its `budget` best."""

    def __call__(self, order: Array, budget: int) -> Array:
        best, slots = jax.lax.top_k(order, min(budget, order.shape[2]))
        return jnp.where(best > -jnp.inf, slots, -1)


@dataclass(frozen=True)
class Adaptive:
    """Heads compete for K * budget slots (Ada-KV, arXiv:2407.11550).

    Each keeps the best `floor` of its even share; the rest goes to the best of all heads together.
    As many slots are allocated for every head as the greediest one keeps.

    Attributes:
      floor: alpha, 0 to 1; 1 is even.
    """

    floor: float = 0.2

    def __call__(self, order: Array, budget: int) -> Array:
        batch, heads, slots = order.shape
        sure = min(int(self.floor * budget), slots)
        if sure:
            best, index = jax.lax.top_k(order, sure)
            rows, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None]
            # A dead slot stays dead even where the head has fewer live ones.
            best = jnp.where(best > -jnp.inf, jnp.inf, best)
            order = order.at[rows, head, index].set(best)
        flat = order.reshape(batch, -1)
        best, index = jax.lax.top_k(flat, min(heads * budget, flat.shape[1]))
        kept = jnp.zeros_like(flat, bool).at[jnp.arange(batch)[:, None], index].set(best > -jnp.inf)
        kept = kept.reshape(order.shape)
        # Kept ones first, in the order of the slots.
        first = jnp.argsort(~kept, axis=2, stable=True)
        return jnp.where(jnp.take_along_axis(kept, first, axis=2), first, -1)


def choose(seen: Seen, scores: Array, budget: int, protected: Protected, heads: Heads) -> Array:
    """Slots (B, K or 1, m) to keep of a layer by scores (B, K or 1, S); see `Heads`."""
    pos = jnp.broadcast_to(seen.pos, jnp.broadcast_shapes(seen.pos.shape, scores.shape))
    limit = jnp.finfo(scores.dtype).max
    # Scores of their own may be infinite, or NaN, and must not look dead or protected.
    order = jnp.clip(jnp.nan_to_num(scores, nan=-limit), -limit, limit)
    order = jnp.where(protected.mask(pos, seen.cache.n, budget), jnp.inf, order)
    return heads(jnp.where(pos >= 0, order, -jnp.inf), budget)
