"""The dense layout: token p of a row lives in slot p."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.codecs import Cast
from kvjax.cache.protocol import Block, CapacityError, Record

# Slots that attention reads at a time. On CPUs 512 and fewer keep their speed, more lose it.
BLOCK = 512


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves", "n", "overflow"),
    meta_fields=("codec",),
)
@dataclass(frozen=True)
class DenseCache:
    """One layer's cache with `capacity` slots a row.

    Attributes:
      leaves: the codec's arrays, (B, K, S, ...).
      n: (B,) int32, tokens held, which is also the next position.
      overflow: (B,) bool, set where a write did not fit and was dropped.
      codec: how records are encoded; static.
    """

    leaves: dict[str, Array]
    n: Array
    overflow: Array
    codec: Cast

    @classmethod
    def init(
        cls, batch: int, capacity: int, kv_heads: int, key_dim: int, value_dim: int, codec: Cast
    ) -> DenseCache:
        """An empty cache."""
        k, v = (jnp.zeros((batch, kv_heads, 1, dim)) for dim in (key_dim, value_dim))
        shapes = jax.eval_shape(codec.encode, Record(k, v))
        # One buffer a leaf: a buffer shared by two leaves could not be donated.
        leaves = {
            name: jnp.zeros((*leaf.shape[:2], capacity, *leaf.shape[3:]), leaf.dtype)
            for name, leaf in shapes.items()
        }
        return cls(leaves, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool), codec)

    @property
    def capacity(self) -> int:
        return next(iter(self.leaves.values())).shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, bookkeeping included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def append(self, record: Record, count: Array) -> DenseCache:
        """Write the first count (B,) tokens of a right-padded record (B, K, T, ...).

        A row whose tokens do not all fit keeps what it had: outside jit that raises
        CapacityError; inside jit the row's write is dropped and its overflow flag set.
        """
        fits = self.n + count <= self.capacity
        if not isinstance(fits, jax.core.Tracer) and not bool(fits.all()):
            raise CapacityError(
                f"capacity is {self.capacity} tokens a row; rows hold {self.n.tolist()} and "
                f"were to take {jnp.asarray(count).tolist()} more"
            )
        steps = jnp.arange(record.k.shape[2], dtype=jnp.int32)
        written = (steps < count[:, None]) & fits[:, None]
        # The slot past the end stands for "nowhere": mode="drop" skips it.
        slots = jnp.where(written, self.n[:, None] + steps, self.capacity)
        batch, heads = record.k.shape[:2]
        # Indices over batch, head and slot: a window over the heads would make XLA copy the cache.
        where = (jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None], slots[:, None, :])
        leaves = {
            name: self.leaves[name].at[where].set(new, mode="drop")
            for name, new in self.codec.encode(record).items()
        }
        n = self.n + jnp.where(fits, count, 0).astype(jnp.int32)
        return replace(self, leaves=leaves, n=n, overflow=self.overflow | ~fits)

    def blocks(self) -> Array:
        """Blocks that hold a live token of any row, traced."""
        width = min(BLOCK, self.capacity)
        return (jnp.max(self.n) + width - 1) // width

    def block(self, i: Array) -> Block:
        """Block i: records of `BLOCK` slots, and their positions (B, 1, C), -1 where dead."""
        width = min(BLOCK, self.capacity)
        # The last block starts early enough to be whole; the slots seen before are dead in it.
        start = jnp.minimum(i * width, self.capacity - width)
        leaves = {
            name: jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=2)
            for name, leaf in self.leaves.items()
        }
        positions = start + jnp.arange(width, dtype=jnp.int32)
        live = (positions >= i * width) & (positions < self.n[:, None])
        return Block(*self.codec.decode(leaves), jnp.where(live, positions, -1)[:, None, :])

    def operands(self) -> dict[str, Array] | None:
        """Arguments of `ops.decode_attention` that read this cache in place."""
        return {"k": self.leaves["k"], "v": self.leaves["v"], "lengths": self.n}

    def select(self, rows: Array) -> DenseCache:
        """The cache of the given rows (any number of them), all arrays together."""
        return jax.tree.map(lambda leaf: leaf[rows], self)

    def rollback(self, tokens: Array | int) -> DenseCache:
        """Forget the newest tokens, a number or (B,); at most as many as a row holds."""
        n = self.n - jnp.asarray(tokens, jnp.int32)
        if not isinstance(n, jax.core.Tracer) and bool(((n < 0) | (n > self.n)).any()):
            raise ValueError(f"rollback of {tokens} tokens; rows hold {self.n.tolist()}")
        return replace(self, n=jnp.maximum(n, 0))

    def check(self) -> None:
        """Raise CapacityError if a write inside jit was dropped."""
        if bool(self.overflow.any()):
            rows = jnp.flatnonzero(self.overflow).tolist()
            raise CapacityError(
                f"rows {rows} ran over the capacity of {self.capacity} tokens; "
                f"they hold {self.n.tolist()} and dropped what did not fit"
            )
