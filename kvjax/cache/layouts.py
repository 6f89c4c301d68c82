"""Layouts: in which slot of its row a token's record lives, and which token a slot holds.

Only arithmetic on positions; what a slot holds is the codec's business. A layout is static, and
its byte counts are those of `kvjax.sizing.layouts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array


class Sight(NamedTuple):
    """What a layout lets a query see at most, whatever its module's own window.

    Attributes:
      window: keys, the query's own included; None for all.
      sink_tokens: first tokens of a row that every query sees besides. They lie among as many
        first slots.
      gaps: whether tokens between others may be missing, so that slots do not count positions.
      reindexed: whether those first tokens are as far from a query as if nothing between them and
        its window had ever been (`place`), and not as far as in the text.
    """

    window: int | None = None
    sink_tokens: int = 0
    gaps: bool = False
    reindexed: bool = False

    def place(self, positions: Array) -> Array:
        """Places of queries among what they see; -1 for padding, as in positions (B, T) int32."""
        if not self.reindexed or self.window is None:
            return positions
        return jnp.minimum(positions, self.sink_tokens + self.window - 1)


class Layout(Protocol):
    """Slot arithmetic of one row; positions and slots are int32 arrays."""

    @property
    def slots(self) -> int:
        """S, slots a row."""
        ...

    @property
    def sight(self) -> Sight: ...

    def fits(self, n: Array, count: Array) -> Array:
        """(B,) bool, whether rows of n (B,) tokens have room for count (B,) more."""
        ...

    def slot(self, positions: Array, end: Array) -> Array:
        """Slots of positions (B, T) in rows that will hold end (B, 1); S for one that is dropped.

        No two of a row's positions may have one slot.
        """
        ...

    def held(self, slots: Array, n: Array) -> Array:
        """(B, C), positions that slots (C,) hold in rows of n (B, 1) tokens; -1 for none."""
        ...

    def used(self, n: Array) -> Array:
        """(B,), the slots from 0 on among which all of a row's records lie."""
        ...

    def since(self, oldest: Array) -> Array:
        """A slot, (), before which none holds position `oldest`, (), or a later one."""
        ...

    def recalls(self, n: Array, tokens: Array) -> Array:
        """(B,) bool, whether rows of n tokens can forget their newest and be as before them."""
        ...


@dataclass(frozen=True)
class Dense:
    """Token p in slot p."""

    slots: int

    @property
    def sight(self) -> Sight:
        return Sight()

    def fits(self, n: Array, count: Array) -> Array:
        return n + count <= self.slots

    def slot(self, positions: Array, end: Array) -> Array:
        return positions

    def held(self, slots: Array, n: Array) -> Array:
        return jnp.where(slots < n, slots, -1)

    def used(self, n: Array) -> Array:
        return n

    def since(self, oldest: Array) -> Array:
        return oldest

    def recalls(self, n: Array, tokens: Array) -> Array:
        return jnp.ones_like(n, bool)


@dataclass(frozen=True)
class Ring:
    """The last `window` tokens, token p in slot p % window; serves chunked attention, too.

    Never full: a new token takes the slot of the oldest, after the chunk that it came with has
    seen what it replaces.
    """

    window: int

    @property
    def slots(self) -> int:
        return self.window

    @property
    def sight(self) -> Sight:
        return Sight(self.window)

    def fits(self, n: Array, count: Array) -> Array:
        return jnp.ones_like(n, bool)

    def slot(self, positions: Array, end: Array) -> Array:
        return jnp.where(positions >= end - self.window, positions % self.window, self.slots)

    def held(self, slots: Array, n: Array) -> Array:
        newest = n - 1
        position = newest - (newest - slots) % self.window
        return jnp.where(position >= 0, position, -1)

    def used(self, n: Array) -> Array:
        return jnp.minimum(n, self.window)

    def since(self, oldest: Array) -> Array:
        return jnp.zeros_like(oldest)

    def recalls(self, n: Array, tokens: Array) -> Array:
        """Only while nothing was replaced."""
        return (n <= self.window) | (tokens == 0)


@dataclass(frozen=True)
class SinkRing:
    """The first `sink_tokens` and the last `window` tokens (StreamingLLM, arXiv:2309.17453).

    Keys keep the rotation of their place in the text. With `reindexed`, distances are those within
    the cache all the same (section 3.2 of the paper): those to the window are equal in both, and
    for the first tokens the query is rotated again, to its place in the cache.
    """

    sink_tokens: int
    window: int
    reindexed: bool = False

    @property
    def slots(self) -> int:
        return self.sink_tokens + self.window

    @property
    def sight(self) -> Sight:
        return Sight(self.window, self.sink_tokens, reindexed=self.reindexed)

    @property
    def _ring(self) -> Ring:
        return Ring(self.window)

    def fits(self, n: Array, count: Array) -> Array:
        return jnp.ones_like(n, bool)

    def slot(self, positions: Array, end: Array) -> Array:
        sinks = self.sink_tokens
        turning = sinks + self._ring.slot(positions - sinks, end - sinks)
        return jnp.where(positions < sinks, positions, turning)

    def held(self, slots: Array, n: Array) -> Array:
        sinks = self.sink_tokens
        turning = self._ring.held(slots - sinks, n - sinks)
        fixed = jnp.where(slots < n, slots, -1)
        return jnp.where(slots < sinks, fixed, jnp.where(turning >= 0, turning + sinks, -1))

    def used(self, n: Array) -> Array:
        return jnp.minimum(n, self.slots)

    def since(self, oldest: Array) -> Array:
        return jnp.zeros_like(oldest)

    def recalls(self, n: Array, tokens: Array) -> Array:
        return (n <= self.slots) | (tokens == 0)
