"""Where the slots of rows lie: in rows of arrays of their own, or in pages of one pool.

Slots of what, tokens or groups of them, is for the cache to say: both answer alike for either.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.cache.codecs import Leaves
from kvjax.cache.common import cut

# Indices of slots (B, M) in arrays of K heads, for reads and writes (B, K, M, ...). Over heads as
# well: a window over the heads would make XLA copy what is written to. "Nowhere" is past the end,
# which writes with mode="drop" skip.
type Index = tuple[Array, Array, Array]


@dataclass(frozen=True)
class Rows:
    """Arrays (B, K, S, ...) that have a row for each row of the batch.

    Attributes:
      batch, slots: B and S.
    """

    batch: int
    slots: int

    def has(self, slots: Array) -> Array:
        """Bool (B, M), whether there are such slots (B, M), of 0 and more."""
        return slots < self.slots

    def room(self) -> Array:
        """(B,) int32, slots from 0 on that a row has."""
        return jnp.full((self.batch,), self.slots, jnp.int32)

    def index(self, slots: Array, heads: int, wanted: Array | bool = True) -> Index:
        """Of slots (B, M); nowhere where there is none, or it is not wanted (B, M)."""
        slots = jnp.where(wanted & self.has(slots), slots, self.slots)
        return jnp.arange(self.batch)[:, None, None], jnp.arange(heads)[:, None], slots[:, None, :]

    def read(self, leaves: Leaves, start: Array, many: int) -> tuple[Leaves, Array]:
        """What lies in `many` slots of each row, (B, K, many, ...), and whether (B, many) it is."""
        return cut(leaves, start, many), jnp.ones((self.batch, many), bool)


@dataclass(frozen=True)
class Pages:
    """Arrays (num_pages, K, P, ...) that all rows share, and the table of who has which page.

    Attributes:
      table: (B, max_pages) int32; slot s of a row lies in page table[s // P], at s % P. -1, or a
        number that is no page's, where there is none.
      num_pages: of the arrays.
      size: P.
    """

    table: Array
    num_pages: int
    size: int

    @property
    def slots(self) -> int:
        """Slots that a row's table can address."""
        return self.table.shape[1] * self.size

    def page(self, entries: Array) -> Array:
        """(B, M) pages behind table entries (B, M) of 0 and more; -1 where there is none."""
        width = self.table.shape[1]
        if not width:
            return jnp.full_like(entries, -1)
        # Clipped first, since an index of -1 would be the last one.
        page = jnp.take_along_axis(self.table, jnp.clip(entries, 0, width - 1), axis=1)
        return jnp.where((entries < width) & self._valid(page), page, -1)

    def has(self, slots: Array) -> Array:
        """Bool (B, M), whether slots (B, M) have a page."""
        return self.page(slots // self.size) >= 0

    def room(self) -> Array:
        """(B,), slots before the first entry without a page."""
        return jnp.cumprod(self._valid(self.table), axis=1).sum(1) * self.size

    def index(self, slots: Array, heads: int, wanted: Array | bool = True) -> Index:
        """Of slots (B, M); nowhere where one has no page, or is not wanted (B, M)."""
        page = self.page(slots // self.size)
        page = jnp.where(wanted & (page >= 0), page, self.num_pages)
        return page[:, None, :], jnp.arange(heads)[:, None], (slots % self.size)[:, None, :]

    def read(self, leaves: Leaves, start: Array, many: int) -> tuple[Leaves, Array]:
        """What lies in `many` slots of each row, (B, K, many, ...), and whether (B, many) it is.

        Where a slot has no page, another's stands in.
        """
        slots = start + jnp.arange(many, dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, (len(self.table), many))

        def at(leaf: Array) -> Array:
            page, *rest = self.index(slots, leaf.shape[1])
            return leaf[(jnp.minimum(page, self.num_pages - 1), *rest)]

        return {name: at(leaf) for name, leaf in leaves.items()}, self.has(slots)

    def _valid(self, page: Array) -> Array:
        return (page >= 0) & (page < self.num_pages)


def in_line(leaf: Array, page: Array) -> Array:
    """Pages (B, M) of a leaf (num_pages, K, P, ...), side by side: (B, K, M * P, ...).

    Where there is none, -1, another stands in.
    """
    pages = jnp.moveaxis(leaf[jnp.maximum(page, 0)], 2, 1)
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])


def own_pages(
    batch: int, tokens: int, page_size: int, num_pages: int | None, what: str = "tokens"
) -> tuple[Array, int]:
    """A table in which each row has, in order, the pages that `tokens` tokens take; and num_pages.

    Args:
      batch, tokens: B, and tokens that each row is to hold in pages.
      page_size: P, in tokens.
      num_pages: of the pool; None for what the rows take.
      what: the tokens' name in the message.

    Returns:
      (B, max_pages) int32, and the pages of the pool.

    Raises:
      ValueError: the rows take more than num_pages.
    """
    a_row = -(-tokens // page_size)
    needed = batch * a_row
    if num_pages is not None and num_pages < needed:
        raise ValueError(
            f"num_pages={num_pages}: {batch} rows of {tokens} {what} take {needed} pages of "
            f"{page_size}"
        )
    table = jnp.arange(needed, dtype=jnp.int32).reshape(batch, a_row)
    return table, needed if num_pages is None else num_pages
