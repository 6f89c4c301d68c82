"""The paged layout: slots in pages of one pool, found through a table (Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.codecs import Codec, Leaves, constants, empty_leaves
from kvjax.cache.common import roll_back
from kvjax.cache.kept import KeptCache, kept
from kvjax.cache.layouts import Sight
from kvjax.cache.places import Pages, in_line, own_pages
from kvjax.cache.protocol import Block, CapacityError, Record
from kvjax.cache.slots import BLOCK


@dataclass(frozen=True)
class Paged:
    """Asks for pages of `page_size` slots.

    Attributes:
      page_size: P.
      num_pages: pages of the pool; None for as many as the rows' capacities take.
    """

    page_size: int = 16
    num_pages: int | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves", "scales", "page_table", "n", "overflow"),
    meta_fields=("codec",),
)
@dataclass(frozen=True)
class PagedCache:
    """One layer's cache of pages, in any order, shared by all rows.

    Attributes:
      leaves: the codec's arrays, (num_pages, K, P, ...).
      scales: the codec's constants.
      page_table: (B, max_pages) int32; token p of a row lies in page page_table[p // P], slot
        p % P. -1, or a number that is no page's, where there is none: such a page is never read,
        and what would be written to it is dropped and flagged.
      n: (B,) int32, tokens held.
      overflow: (B,) bool, set where a write found no slot, or a row held fewer tokens than it was
        to forget; either was dropped.
      codec: how records are encoded; static.
    """

    leaves: dict[str, Array]
    scales: dict[str, Array]
    page_table: Array
    n: Array
    overflow: Array
    codec: Codec

    @classmethod
    def init(
        cls,
        batch: int,
        capacity: int,
        pages: Paged,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        codec: Codec,
        scales: Mapping[str, Array] | None = None,
        value_heads: int | None = None,
    ) -> PagedCache:
        """An empty cache whose rows have pages of their own for `capacity` tokens each.

        `scales` replace the codec's own constants. `value_heads`: None where values have as many
        heads as keys.
        """
        heads = kv_heads, kv_heads if value_heads is None else value_heads
        table, num_pages = own_pages(batch, capacity, pages.page_size, pages.num_pages)
        leaves = empty_leaves(codec, num_pages, pages.page_size, *heads, key_dim, value_dim)
        n, overflow = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
        return cls(leaves, constants(codec, *heads, scales), table, n, overflow, codec)

    @property
    def page_size(self) -> int:
        """P."""
        return next(iter(self.leaves.values())).shape[2]

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(next(iter(self.leaves.values())))

    @property
    def _pages(self) -> Pages:
        return Pages(self.page_table, self.num_pages, self.page_size)

    @property
    def capacity(self) -> int:
        """Tokens that a row's table can address."""
        return self._pages.slots

    @property
    def sight(self) -> Sight:
        """All that is held."""
        return Sight()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, bookkeeping included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def append(self, record: Record, count: Array) -> PagedCache:
        """Write the first count (B,) tokens of a right-padded record (B, K, T, ...).

        A row of which a token has no page keeps what it had: outside jit that raises
        CapacityError, inside it the row's write is dropped and its overflow flag set.
        """
        steps = jnp.arange(record.k.shape[2], dtype=jnp.int32)
        positions = self.n[:, None] + steps
        wanted = steps < count[:, None]
        fits = (self._pages.has(positions) | ~wanted).all(1)
        if not isinstance(fits, jax.core.Tracer) and not bool(fits.all()):
            raise CapacityError(
                f"rows hold {self.n.tolist()} tokens and were to take "
                f"{jnp.asarray(count).tolist()} more; their pages have room for "
                f"{self._pages.room().tolist()} in all"
            )
        written = wanted & fits[:, None]
        leaves = {
            name: self.leaves[name]
            .at[self._pages.index(positions, new.shape[1], written)]
            .set(new, mode="drop")
            for name, new in self.codec.encode(record, self.scales).items()
        }
        n = self.n + jnp.where(fits, count, 0).astype(jnp.int32)
        return replace(self, leaves=leaves, n=n, overflow=self.overflow | ~fits)

    @property
    def _pages_a_block(self) -> int:
        return max(1, min(BLOCK // self.page_size, self.page_table.shape[1]))

    def blocks(self) -> Array:
        """Blocks that hold a live token of any row, traced."""
        width = self._pages_a_block * self.page_size
        return (jnp.max(self.n) + width - 1) // width

    def first_block(self, oldest: Array) -> Array:
        """The first block that may hold a token at position `oldest`, (), or a later one."""
        return oldest // (self._pages_a_block * self.page_size)

    def first_slot(self, i: Array) -> Array:
        """The slot of a row, counted over its pages, that block i begins with."""
        return i * self._pages_a_block * self.page_size

    def block(self, i: Array) -> Block:
        """Block i: records of a few pages of each row, and positions (B, 1, C), -1 where dead."""
        many, size = self._pages_a_block, self.page_size
        entries = i * many + jnp.arange(many, dtype=jnp.int32)
        page = self._pages.page(jnp.broadcast_to(entries, (len(self.n), many)))
        leaves = {name: in_line(leaf, page) for name, leaf in self.leaves.items()}
        positions = (entries[:, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
        live = (positions < self.n[:, None]) & (jnp.repeat(page, size, axis=1) >= 0)
        held = jnp.where(live, positions, -1)
        return Block(*self.codec.decode(leaves, self.scales), held[:, None, :])

    def operands(self) -> dict[str, Array] | None:
        """Arguments of `ops.decode_attention` that read the pages in place, if it can."""
        arrays = self.codec.operands(self.leaves, self.scales)
        if arrays is None:
            return None
        return {**arrays, "page_table": self.page_table, "lengths": self.n}

    def keep(self, indices: Array, room: int = 0) -> KeptCache:
        """Evict all but the slots named, as in `LayerCache.keep`; slot p is that of token p.

        The new cache has slots of its own: the rows' pages may be freed.
        """

        def gather(slots: Array) -> Leaves:
            batch, heads, many = slots.shape
            page = self._pages.page(slots.reshape(batch, -1) // self.page_size)
            page = jnp.maximum(page.reshape(batch, heads, many), 0)
            return {
                name: leaf[page, jnp.arange(leaf.shape[1])[:, None], slots % self.page_size]
                for name, leaf in self.leaves.items()
            }

        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        there = self._pages.has(jnp.broadcast_to(slots, (len(self.n), len(slots))))
        held = jnp.where((slots < self.n[:, None]) & there, slots, -1)
        return kept(self, gather, held[:, None], indices, room)

    def select(self, rows: Array) -> PagedCache:
        """The given rows, which share pages with those that they are copies of.

        Two copies of a row must not both be written to: give each pages of its own first.
        """
        return replace(
            self, page_table=self.page_table[rows], n=self.n[rows], overflow=self.overflow[rows]
        )

    def rollback(self, tokens: Array | int) -> PagedCache:
        """Forget the newest tokens, a number or (B,); at most as many as a row holds.

        Raises:
          ValueError: outside jit, where a row holds fewer. Inside jit such a row stays as it is and
            is flagged.
        """
        n, stuck = roll_back(self.n, tokens)
        return replace(self, n=n, overflow=self.overflow | stuck)

    def check(self) -> None:
        """Raise CapacityError if a write or a rollback inside jit was dropped."""
        if bool(self.overflow.any()):
            raise CapacityError(
                f"rows {jnp.flatnonzero(self.overflow).tolist()} had no page for all of their "
                f"tokens, or fewer than they were to forget; rows hold {self.n.tolist()}, their "
                f"pages have room for {self._pages.room().tolist()}"
            )
