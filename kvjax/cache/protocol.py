"""What attention may ask of a layer's cache, whatever its layout and codec."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jax import Array

from kvjax.cache.layouts import Sight

# Slots that attention reads at a time. On CPUs 512 and fewer keep their speed, more lose it.
BLOCK = 512


class CapacityError(ValueError):
    """A row holds more tokens than its cache has slots for."""


class Record(NamedTuple):
    """What T new tokens leave behind: k (B, K, T, H) and v (B, K, T, HV).

    Keys and values may have different numbers of heads, as where one rope key serves several
    latents; then K is either's own.
    """

    k: Array
    v: Array


class Block(NamedTuple):
    """C slots as attention reads them: k (B, K, C, H), v (B, K, C, HV), and each slot's position.

    K is that of keys or of values, as in `Record`. pos is int32, broadcastable to (B, K, C); -1
    marks a dead slot. Attention masks by it alone.
    """

    k: Array
    v: Array
    pos: Array


class LayerCache(Protocol):
    """One layer's cache: a frozen dataclass pytree whose layout and codec are static."""

    @property
    def n(self) -> Array:
        """(B,) int32, the next position of each row."""
        ...

    @property
    def overflow(self) -> Array:
        """(B,) bool, set where a write or a rollback inside jit could not be done."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, bookkeeping included."""
        ...

    @property
    def sight(self) -> Sight:
        """What the layout lets queries see at most."""
        ...

    @property
    def capacity(self) -> int:
        """Slots a row."""
        ...

    def append(self, record: Record, count: Array) -> LayerCache:
        """Add the first count (B,) tokens of a record right-padded to T.

        What does not fit is never written: outside jit that raises CapacityError, inside it the
        row's write is dropped and flagged.
        """
        ...

    def blocks(self) -> Array:
        """Traced number of blocks that hold a live token of any row."""
        ...

    def first_block(self, oldest: Array) -> Array:
        """The first block that may hold a token at position `oldest`, (), or a later one."""
        ...

    def block(self, i: Array) -> Block:
        """Block i, decoded."""
        ...

    def first_slot(self, i: Array) -> Array:
        """The slot that block i begins with; its others follow."""
        ...

    def operands(self) -> dict[str, Array] | None:
        """Arguments of `ops.decode_attention`, or None where only `block` serves."""
        ...

    def keep(self, indices: Array, room: int = 0) -> LayerCache:
        """Evict: a cache of n + room slots, which holds what lies in the n slots named.

        Args:
          indices: (B, K, n) slots to keep of each row and head, or (B, 1, n) of all heads, which
            alone serves where keys and values have different numbers of heads; in any order. -1
            names none, so that rows and heads may keep fewer than others; a slot that is dead, or
            named before, counts as none.
          room: further slots, for new tokens.

        Raises:
          ValueError: for indices of another shape, or outside the slots.
        """
        ...

    def select(self, rows: Array) -> LayerCache:
        """The cache of the given rows, for beams."""
        ...

    def rollback(self, tokens: Array | int) -> LayerCache:
        """Forget the newest tokens of each row, a number or (B,).

        Only where that leaves what the row held before them: outside jit what cannot be raises
        ValueError, inside it the row stays as it is and is flagged.
        """
        ...

    def check(self) -> None:
        """Raise CapacityError if a write or a rollback inside jit was dropped."""
        ...
