"""What caches with slots of their own do alike: blocks, rollback, and saying what was dropped."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.protocol import CapacityError


def block_start(i: Array, width: int, capacity: int) -> Array:
    """The slot that block i begins with.

    The last block starts early enough to be whole; the slots seen before are dead in it.
    """
    return jnp.minimum(i * width, capacity - width)


def cut(leaves: dict[str, Array], start: Array, width: int) -> dict[str, Array]:
    """`width` slots of each array (B, K, S, ...), from `start` on."""
    return {
        name: jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=2)
        for name, leaf in leaves.items()
    }


def roll_back(
    n: Array, tokens: Array | int, recalls: Callable[[Array], Array], lost: Callable[[], str]
) -> tuple[Array, Array]:
    """Rows of n (B,) tokens without their newest, and which could not forget them.

    Args:
      n: tokens held.
      tokens: how many to forget, a number or (B,).
      recalls: (B,) bool, whether rows can be as before so many (B,) tokens.
      lost: what to say, outside jit, of rows that cannot.

    Returns:
      The new n, and (B,) bool, set inside jit for rows that stay as they are.

    Raises:
      ValueError: outside jit, where a row holds fewer, or cannot be as before.
    """
    many = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), n.shape)
    possible = (many >= 0) & (many <= n)
    recalled = recalls(many)
    if not isinstance(recalled, jax.core.Tracer):
        asked = f"rollback of {tokens} tokens; rows hold {n.tolist()}"
        if not bool(possible.all()):
            raise ValueError(asked)
        if not bool(recalled.all()):
            raise ValueError(f"{asked}{lost()}")
    exact = possible & recalled
    return n - jnp.where(exact, many, 0), ~exact


def check_overflow(overflow: Array, capacity: int, held: Array, unit: str = "tokens") -> None:
    """Raise CapacityError if a write inside jit was dropped."""
    if bool(overflow.any()):
        raise CapacityError(
            f"rows {jnp.flatnonzero(overflow).tolist()} ran over the capacity of {capacity} {unit};"
            f" they hold {held.tolist()} and dropped what did not fit"
        )
