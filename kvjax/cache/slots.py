"""A cache of slots: rows of one length, a layout that says what lies where, and a codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.codecs import Codec, Leaves, constants, empty_leaves
from kvjax.cache.common import block_start, check_overflow, cut, roll_back
from kvjax.cache.kept import KeptCache, gather_slots, kept
from kvjax.cache.layouts import Layout, Sight
from kvjax.cache.protocol import BLOCK, Block, CapacityError, Record


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves", "scales", "n", "overflow"),
    meta_fields=("layout", "codec"),
)
@dataclass(frozen=True)
class SlotCache:
    """One layer's cache with the same number of slots for every row.

    Attributes:
      leaves: the codec's arrays, (B, K, S, ...).
      scales: the codec's constants, shared by all rows and tokens.
      n: (B,) int32, tokens seen, which is also the next position.
      overflow: (B,) bool, set where a write did not fit, or a rollback was impossible; either was
        dropped.
      layout: in which slot a token lives; static.
      codec: how records are encoded; static.
    """

    leaves: dict[str, Array]
    scales: dict[str, Array]
    n: Array
    overflow: Array
    layout: Layout
    codec: Codec

    @classmethod
    def init(
        cls,
        batch: int,
        layout: Layout,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        codec: Codec,
        scales: Mapping[str, Array] | None = None,
        value_heads: int | None = None,
    ) -> SlotCache:
        """An empty cache; `scales` replace the codec's own constants.

        `value_heads`: None where values have as many heads as keys.
        """
        heads = kv_heads, kv_heads if value_heads is None else value_heads
        leaves = empty_leaves(codec, batch, layout.slots, *heads, key_dim, value_dim)
        n, overflow = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
        return cls(leaves, constants(codec, *heads, scales), n, overflow, layout, codec)

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.layout.slots

    @property
    def sight(self) -> Sight:
        """What the layout lets queries see."""
        return self.layout.sight

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, bookkeeping included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def append(self, record: Record, count: Array) -> SlotCache:
        """Write the first count (B,) tokens of a right-padded record (B, K, T, ...).

        A row whose tokens do not all fit keeps what it had: outside jit that raises
        CapacityError; inside jit the row's write is dropped and its overflow flag set.
        """
        fits = self.layout.fits(self.n, count)
        if not isinstance(fits, jax.core.Tracer) and not bool(fits.all()):
            raise CapacityError(
                f"capacity is {self.capacity} tokens a row; rows hold {self.n.tolist()} and "
                f"were to take {jnp.asarray(count).tolist()} more"
            )
        steps = jnp.arange(record.k.shape[2], dtype=jnp.int32)
        written = (steps < count[:, None]) & fits[:, None]
        # The slot past the end stands for "nowhere": mode="drop" skips it.
        end = (self.n + count)[:, None]
        slots = self.layout.slot(self.n[:, None] + steps, end)
        slots = jnp.where(written, slots, self.capacity)
        rows, slots = jnp.arange(len(slots))[:, None, None], slots[:, None, :]
        # Indices over batch, head and slot: a window over the heads would make XLA copy the cache.
        leaves = {
            name: self.leaves[name]
            .at[rows, jnp.arange(new.shape[1])[:, None], slots]
            .set(new, mode="drop")
            for name, new in self.codec.encode(record, self.scales).items()
        }
        n = self.n + jnp.where(fits, count, 0).astype(jnp.int32)
        return replace(self, leaves=leaves, n=n, overflow=self.overflow | ~fits)

    @property
    def _width(self) -> int:
        return min(BLOCK, self.capacity)

    def blocks(self) -> Array:
        """Blocks that hold a live token of any row, traced."""
        return (jnp.max(self.layout.used(self.n)) + self._width - 1) // self._width

    def first_block(self, oldest: Array) -> Array:
        """The first block that may hold a token at position `oldest`, (), or a later one."""
        return self.layout.since(oldest) // self._width

    def first_slot(self, i: Array) -> Array:
        """The slot that block i begins with."""
        return block_start(i, self._width, self.capacity)

    def block(self, i: Array) -> Block:
        """Block i: records of `BLOCK` slots, and their positions (B, 1, C), -1 where dead."""
        start, width = self.first_slot(i), self._width
        leaves = cut(self.leaves, start, width)
        slots = start + jnp.arange(width, dtype=jnp.int32)
        held = jnp.where(slots >= i * width, self.layout.held(slots, self.n[:, None]), -1)
        return Block(*self.codec.decode(leaves, self.scales), held[:, None, :])

    def operands(self) -> dict[str, Array] | None:
        """Arguments of `ops.decode_attention` that read this cache in place, if it can.

        Of a row's newest token alone: it sees all that a layout keeps, in whatever order.
        """
        arrays = self.codec.operands(self.leaves, self.scales)
        return None if arrays is None else {**arrays, "lengths": self.layout.used(self.n)}

    def keep(self, indices: Array, room: int = 0) -> KeptCache:
        """Evict all but the slots named, as in `LayerCache.keep`."""

        def gather(slots: Array) -> Leaves:
            return gather_slots(self.leaves, slots)

        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        held = self.layout.held(slots, self.n[:, None])
        return kept(self, gather, held[:, None], indices, room)

    def select(self, rows: Array) -> SlotCache:
        """The cache of the given rows (any number of them), all arrays together."""
        leaves = {name: leaf[rows] for name, leaf in self.leaves.items()}
        return replace(self, leaves=leaves, n=self.n[rows], overflow=self.overflow[rows])

    def rollback(self, tokens: Array | int) -> SlotCache:
        """Forget the newest tokens, a number or (B,); at most as many as a row holds.

        Raises:
          ValueError: outside jit, where a row holds fewer, or has replaced what they replaced.
            Inside jit such a row stays as it is and is flagged.
        """
        n, stuck = roll_back(
            self.n,
            tokens,
            lambda many: self.layout.recalls(self.n, many),
            lambda: f" and have replaced older ones in {self.capacity} slots",
        )
        return replace(self, n=n, overflow=self.overflow | stuck)

    def check(self) -> None:
        """Raise CapacityError if a write or a rollback inside jit was dropped."""
        check_overflow(self.overflow, self.capacity, self.n)
