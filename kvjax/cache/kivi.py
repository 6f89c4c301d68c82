"""KIVI's cache: codes of a few bits for old tokens, 16 bits for the newest (Liu et al. 2024).

Codes lie in groups of G tokens, in arrays of the rows' own or in pages of one pool; the newest
tokens, at most R, in a ring of each row beside them.

When tokens become codes is not as in the paper (arXiv:2402.02750, algorithm 1), whose keys grow a
residual to R tokens and then become codes all at once, so that from 0 to R - 1 stay exact, while
each value becomes codes alone, once R newer ones follow it. Here the oldest G tokens, keys and
values, become codes as soon as a token finds R in the residual, so that from R - G + 1 to R of both
stay exact. That has three reasons: keys and values of a token then always lie in one place; the
arrays take the published R slots and codes of the other S - R, which is what
`kvjax.sizing.Kivi.allocated` says; and how many are codes follows from a row's length alone, so
that a text leaves the same codes behind whatever the steps it came in. What a group of codes holds
is the same in both, and no code is ever made of codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.common import block_start, cut, roll_back
from kvjax.cache.kivi_codec import Kivi, to_half
from kvjax.cache.layouts import Sight
from kvjax.cache.paged import Paged
from kvjax.cache.places import Pages, Rows, own_pages
from kvjax.cache.protocol import BLOCK, Block, CapacityError, Record


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves", "n", "overflow", "page_table"),
    meta_fields=("codec",),
)
@dataclass(frozen=True)
class KiviCache:
    """One layer's cache of M groups of codes, and R exact tokens, a row.

    Attributes:
      leaves: of codes, k and v (B, K, M, G, bytes), k_scale and k_zero (B, K, M, H), v_scale and
        v_zero (B, K, M, G, HV / G), or of a pool of pages, (num_pages, K, P / G, ...) each;
        k_exact (B, K, R, H) and v_exact (B, K, R, HV) in fp16, where token p is in slot p % R. What
        no fp16 can hold becomes the largest that one can.
      n: (B,) int32, tokens held; the first `codec.encoded(n)` are codes.
      overflow: (B,) bool, set where a write found no room and was dropped.
      codec: static.
      page_table: (B, max_pages) int32, or None where rows have codes of their own; the codes of
        token p lie in page page_table[p // P]. -1, or a number that is no page's, where there is
        none, as in `PagedCache`.
    """

    leaves: dict[str, Array]
    n: Array
    overflow: Array
    codec: Kivi
    page_table: Array | None = None

    @classmethod
    def init(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        codec: Kivi,
        pages: Paged | None = None,
        value_heads: int | None = None,
    ) -> KiviCache:
        """An empty cache of at least `capacity` tokens a row: R, and as many groups as it takes.

        Rounded up, as a part of a group has no codes; `capacity` says to what. With `pages`, of a
        multiple of G slots, rows have as many of their own as those groups take. `value_heads`:
        None where values have as many heads as keys.

        Raises:
          ValueError: for head widths that the codec cannot hold, or fewer pages than that.
        """
        codec.check_widths(key_dim, value_dim)
        heads = kv_heads, kv_heads if value_heads is None else value_heads
        coded = codec.slots(capacity) - codec.residual
        rows, slots, table = batch, coded, None
        if pages is not None:
            slots, what = pages.page_size, "tokens of codes"
            table, rows = own_pages(batch, coded, slots, pages.num_pages, what)
        leaves = codec.empty(batch, rows, slots // codec.group, *heads, key_dim, value_dim)
        n, overflow = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
        return cls(leaves, n, overflow, codec, table)

    @property
    def _places(self) -> Rows | Pages:
        """Where groups lie."""
        first, _, many = self.leaves["k"].shape[:3]
        table = self.page_table
        return Rows(first, many) if table is None else Pages(table, first, many)

    @property
    def groups(self) -> int:
        """M, groups of codes a row."""
        return self._places.slots

    @property
    def capacity(self) -> int:
        """Tokens a row."""
        return self.groups * self.codec.group + self.codec.residual

    @property
    def sight(self) -> Sight:
        """All that is held."""
        return Sight()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, bookkeeping included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def append(self, record: Record, count: Array) -> KiviCache:
        """Write the first count (B,) tokens of a right-padded record (B, K, T, ...).

        Tokens that leave the residual become codes, from their 16 bits and never again. A row that
        has no room for all of them keeps what it had: outside jit that raises CapacityError; inside
        jit the row's write is dropped and its overflow flag set.
        """
        size, tokens = self.codec.group, record.k.shape[2]
        first, end = (self.codec.encoded(n) // size for n in (self.n, self.n + count))
        # So many groups at most leave a residual that takes T tokens.
        groups = first[:, None] + jnp.arange(-(-tokens // size), dtype=jnp.int32)
        leave = groups < end[:, None]
        fits = (self._places.has(groups) | ~leave).all(1)
        if not isinstance(fits, jax.core.Tracer) and not bool(fits.all()):
            more = jnp.asarray(count).tolist()
            raise CapacityError(f"{self._limits()} and were to take {more} more")
        n = self.n + jnp.where(fits, count, 0).astype(jnp.int32)
        new = Record(*map(to_half, record))
        codes = self._encode(groups, leave & fits[:, None], new)
        leaves = self.leaves | codes | self._keep_until(n, new)
        return replace(self, leaves=leaves, n=n, overflow=self.overflow | ~fits)

    def _limits(self) -> str:
        room = self._places.room() * self.codec.group + self.codec.residual
        return (
            f"capacity is {self.capacity} tokens a row, with room for {room.tolist()}; rows hold "
            f"{self.n.tolist()}"
        )

    def _encode(self, groups: Array, leave: Array, new: Record) -> dict[str, Array]:
        """The codes, with those of groups (B, M) that leave (B, M) the residual."""
        # No row has more groups, and so none leaves beyond.
        groups, leave = groups[:, : self.groups], leave[:, : self.groups]
        size, most = self.codec.group, groups.shape[1]
        if most == 0:
            return {}
        positions = groups[:, :1] * size + jnp.arange(most * size, dtype=jnp.int32)

        def encode() -> dict[str, Array]:
            exact = (self._tokens(name, getattr(new, name), positions) for name in "kv")
            groups = (x.reshape(*x.shape[:2], most, size, x.shape[-1]) for x in exact)
            return self.codec.encode(Record(*groups))

        def blank() -> dict[str, Array]:
            shapes = jax.eval_shape(encode)
            return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}

        # Most steps of a decode fill no group: only those that do pay for one.
        codes = jax.lax.cond(leave.any(), encode, blank)
        return {
            name: self.leaves[name]
            .at[self._places.index(groups, x.shape[1], leave)]
            .set(x, mode="drop")
            for name, x in codes.items()
        }

    def _tokens(self, name: str, new: Array, positions: Array) -> Array:
        """Exact tokens at `positions` (B, P), of the residual or of the new ones (B, K, T, H)."""
        heads, held = new.shape[1], self.n[:, None]
        old = self.leaves[f"{name}_exact"][self._ring.index(positions % self._ring.slots, heads)]
        steps = jnp.clip(positions - held, 0, new.shape[2] - 1)
        fresh = new[Rows(len(new), new.shape[2]).index(steps, heads)]
        return jnp.where((positions < held)[:, None, :, None], old, fresh)

    def _keep_until(self, n: Array, new: Record) -> dict[str, Array]:
        """The residual as rows grow to n tokens."""
        positions = self.n[:, None] + jnp.arange(new.k.shape[2], dtype=jnp.int32)
        # What became codes at once has no slot; the rest are at most R tokens, each with its own.
        stays = (positions >= self.codec.encoded(n)[:, None]) & (positions < n[:, None])
        return {
            f"{name}_exact": self.leaves[f"{name}_exact"]
            .at[self._ring.index(positions % self._ring.slots, x.shape[1], stays)]
            .set(x, mode="drop")
            for name, x in new._asdict().items()
        }

    @property
    def _ring(self) -> Rows:
        """Where exact tokens lie."""
        return Rows(len(self.n), self.codec.residual)

    @property
    def _width(self) -> int:
        """C: whole groups, and no more slots than there are of either kind."""
        size = self.codec.group
        kinds = (self.groups * size, self.codec.residual) if self.groups else (self.codec.residual,)
        return min(max(BLOCK // size, 1) * size, *kinds)

    def _of_codes(self) -> Array:
        """Blocks of live codes, traced."""
        return -(-jnp.max(self.codec.encoded(self.n)) // self._width)

    def blocks(self) -> Array:
        """Blocks that hold a live token of any row, traced."""
        exact = jnp.minimum(jnp.max(self.n), self.codec.residual)
        return self._of_codes() + -(-exact // self._width)

    def first_block(self, oldest: Array) -> Array:
        """The first block that may hold a token at position `oldest`, (), or a later one."""
        return jnp.minimum(oldest // self._width, self._of_codes())

    def first_slot(self, i: Array) -> Array:
        """The slot that block i begins with; slots of codes come first, one for each token."""
        codes, of_codes = self.groups * self.codec.group, self._of_codes()
        exact = codes + block_start(i - of_codes, self._width, self.codec.residual)
        return jnp.where(i < of_codes, block_start(i, self._width, codes), exact)

    def block(self, i: Array) -> Block:
        """Block i in f32, of codes or after them of exact tokens; positions (B, 1, C)."""
        if not self.groups:
            return self._exact_block(i)
        end = self._of_codes()
        # A branch, not a choice between both, so that only one kind is read and decoded.
        return jax.lax.cond(
            i < end, lambda: self._coded_block(i), lambda: self._exact_block(i - end)
        )

    def _coded_block(self, i: Array) -> Block:
        size, width = self.codec.group, self._width
        start = block_start(i, width, self.groups * size)
        codes = {name: leaf for name, leaf in self.leaves.items() if not name.endswith("_exact")}
        parts, there = self._places.read(codes, start // size, width // size)
        k, v = (x.reshape(*x.shape[:2], width, x.shape[-1]) for x in self.codec.decode(parts))
        positions = start + jnp.arange(width, dtype=jnp.int32)
        live = (positions >= i * width) & (positions < self.codec.encoded(self.n)[:, None])
        live &= jnp.repeat(there, size, axis=1)
        return Block(k, v, jnp.where(live, positions, -1)[:, None, :])

    def _exact_block(self, i: Array) -> Block:
        size, width = self.codec.residual, self._width
        start = block_start(i, width, size)
        exact = cut({name: self.leaves[f"{name}_exact"] for name in "kv"}, start, width)
        k, v = (exact[name].astype(jnp.float32) for name in "kv")
        slots = start + jnp.arange(width, dtype=jnp.int32)
        newest = self.n[:, None] - 1
        positions = newest - (newest - slots) % size
        live = (slots >= i * width) & (positions >= self.codec.encoded(self.n)[:, None])
        return Block(k, v, jnp.where(live, positions, -1)[:, None, :])

    def operands(self) -> dict[str, Array] | None:
        """None: codes are read block by block."""
        return None

    def keep(self, indices: Array, room: int = 0) -> KiviCache:
        """Refused: tokens that share a scale can only be dropped together."""
        raise ValueError(
            f"keep: keys of codec {self.codec.name} share a scale over {self.codec.group} tokens, "
            f"of which none can be dropped alone; accepted: caches of codecs with a scale a token"
        )

    def select(self, rows: Array) -> KiviCache:
        """The cache of the given rows (any number of them), all arrays together.

        But for pages: these are shared with the rows that the given ones are copies of. Two copies
        of a row must not both be written to: give each pages of its own first.
        """
        table = self.page_table
        leaves = {
            name: leaf[rows] if table is None or name.endswith("_exact") else leaf
            for name, leaf in self.leaves.items()
        }
        return replace(
            self,
            leaves=leaves,
            n=self.n[rows],
            overflow=self.overflow[rows],
            page_table=None if table is None else table[rows],
        )

    def rollback(self, tokens: Array | int) -> KiviCache:
        """Forget the newest tokens, a number or (B,), back to where tokens last became codes.

        Before that a row held exactly what it now holds as codes.

        Raises:
          ValueError: outside jit, where a row holds fewer, or tokens have become codes since.
            Inside jit such a row stays as it is and is flagged.
        """
        encoded = self.codec.encoded
        n, stuck = roll_back(
            self.n,
            tokens,
            lambda many: encoded(self.n - many) == encoded(self.n),
            lambda: f", of which {encoded(self.n).tolist()} are codes, and fewer were before those",
        )
        return replace(self, n=n, overflow=self.overflow | stuck)

    def check(self) -> None:
        """Raise CapacityError if a write inside jit was dropped."""
        if bool(self.overflow.any()):
            rows = jnp.flatnonzero(self.overflow).tolist()
            raise CapacityError(f"rows {rows} dropped what did not fit: {self._limits()}")
