"""What caches with slots of their own do alike: blocks, rollback, and saying what was dropped."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.protocol import CapacityError

# A block of this many numbers of keys, 8 MiB in f32, was fastest on CPUs, in caches of 134 MB and
# more: wider ones leave the cores' caches, narrower ones pay more for starting each operation.
_BLOCK_NUMBERS = 2**21
# Widths are multiples of it, and at least it.
_BLOCK_MULTIPLE = 64


def block_width(most: int, keys: tuple[int, ...]) -> int:
    """Slots to read at a time of keys of the shape (B, K, S, H): `most` or fewer.

    Fewer the more rows, heads and dimensions a slot has, so that a block stays in fast memory; and
    never more than S.
    """
    batch, heads, slots, dim = keys
    fit = _BLOCK_NUMBERS // (batch * heads * dim) // _BLOCK_MULTIPLE * _BLOCK_MULTIPLE
    return min(most, slots, max(fit, _BLOCK_MULTIPLE))


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
    n: Array,
    tokens: Array | int,
    recalls: Callable[[Array], Array] = lambda many: jnp.ones_like(many, bool),
    lost: Callable[[], str] = lambda: "",
) -> tuple[Array, Array]:
    """Rows of n (B,) tokens without their newest, and which could not forget them.

    Args:
      n: tokens held.
      tokens: how many to forget, a number or (B,).
      recalls: (B,) bool, whether rows can be as before so many (B,) tokens; by default all can.
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
    """Raise CapacityError if a write or a rollback inside jit was dropped."""
    if bool(overflow.any()):
        raise CapacityError(
            f"rows {jnp.flatnonzero(overflow).tolist()} ran over the capacity of {capacity} {unit},"
            f" or were to forget what they could not; they hold {held.tolist()} and did neither"
        )
