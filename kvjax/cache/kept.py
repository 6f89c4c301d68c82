"""What is left of a cache after eviction: fewer slots, each with its position beside it.

The records are those that the evicted cache held, bit for bit: codes are gathered, never decoded
and encoded again, and keys keep the rotation of their place in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.codecs import Codec, Leaves
from kvjax.cache.common import block_start, check_overflow, cut
from kvjax.cache.layouts import Sight
from kvjax.cache.protocol import BLOCK, Block, CapacityError, Record

_NOWHERE = jnp.iinfo(jnp.int32).max


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves", "scales", "pos", "live", "n", "evicted_at", "overflow"),
    meta_fields=("sight", "codec"),
)
@dataclass(frozen=True)
class KeptCache:
    """One layer's cache of kept tokens, with room behind them for new ones.

    Live slots come first, in the order of their positions. Heads either all keep the same tokens
    (pos has one head), or each its own, of which there may be more or fewer (live is per head).

    Attributes:
      leaves: the codec's arrays, (B, K, S, ...).
      scales: the codec's constants.
      pos: (B, K or 1, S) int32, the position of each slot's token; -1 in a dead one.
      live: (B,) int32, live slots of a row; or (B, K), where heads keep their own.
      n: (B,) int32, tokens seen, which is also the next position.
      evicted_at: (B,) int32, what n was at the last eviction.
      overflow: (B,) bool, set where a write did not fit, or a rollback was impossible; either was
        dropped.
      sight: what queries see at most; static.
      codec: how records are encoded; static.
    """

    leaves: dict[str, Array]
    scales: dict[str, Array]
    pos: Array
    live: Array
    n: Array
    evicted_at: Array
    overflow: Array
    sight: Sight
    codec: Codec

    @property
    def capacity(self) -> int:
        """Slots a row and head."""
        return self.pos.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, bookkeeping included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def append(self, record: Record, count: Array) -> KeptCache:
        """Write the first count (B,) tokens of a right-padded record (B, K, T, ...).

        They go behind the live slots of each head. A row whose tokens do not all fit keeps what it
        had: outside jit that raises CapacityError; inside jit the row's write is dropped and its
        overflow flag set.
        """
        live = self._live_of_heads
        fits = live.max(1) + count <= self.capacity
        if not isinstance(fits, jax.core.Tracer) and not bool(fits.all()):
            raise CapacityError(
                f"capacity is {self.capacity} slots a row; rows hold {live.max(1).tolist()} and "
                f"were to take {jnp.asarray(count).tolist()} more"
            )
        steps = jnp.arange(record.k.shape[2], dtype=jnp.int32)
        written = ((steps < count[:, None]) & fits[:, None])[:, None]
        # The slot past the end stands for "nowhere": mode="drop" skips it.
        slots = jnp.where(written, live[..., None] + steps, self.capacity)
        rows = jnp.arange(len(live))[:, None, None]
        leaves = {
            name: self.leaves[name]
            .at[rows, jnp.arange(new.shape[1])[:, None], slots]
            .set(new, mode="drop")
            for name, new in self.codec.encode(record, self.scales).items()
        }
        new_pos = (self.n[:, None] + steps)[:, None]
        heads = jnp.arange(self.pos.shape[1])[:, None]
        pos = self.pos.at[rows, heads, slots].set(new_pos, mode="drop")
        added = jnp.where(fits, count, 0).astype(jnp.int32)
        return replace(
            self,
            leaves=leaves,
            pos=pos,
            live=self.live + added.reshape(-1, *(1,) * (self.live.ndim - 1)),
            n=self.n + added,
            overflow=self.overflow | ~fits,
        )

    @property
    def _live_of_heads(self) -> Array:
        """(B, K or 1)."""
        return self.live.reshape(len(self.n), -1)

    @property
    def _width(self) -> int:
        return min(BLOCK, self.capacity)

    def blocks(self) -> Array:
        """Blocks that hold a live token of any row and head, traced."""
        return (jnp.max(self.live) + self._width - 1) // self._width

    def first_block(self, oldest: Array) -> Array:
        """0: how many older tokens were kept is not known."""
        return jnp.zeros_like(oldest)

    def first_slot(self, i: Array) -> Array:
        """The slot that block i begins with."""
        return block_start(i, self._width, self.capacity)

    def block(self, i: Array) -> Block:
        """Block i: records of `BLOCK` slots, and their positions (B, K or 1, C), -1 where dead."""
        start, width = self.first_slot(i), self._width
        leaves = cut(self.leaves, start, width)
        pos = jax.lax.dynamic_slice_in_dim(self.pos, start, width, axis=2)
        fresh = start + jnp.arange(width, dtype=jnp.int32) >= i * width
        return Block(*self.codec.decode(leaves, self.scales), jnp.where(fresh, pos, -1))

    def operands(self) -> dict[str, Array] | None:
        """Arguments of `ops.decode_attention`, where queries see all that is live."""
        arrays = self.codec.operands(self.leaves, self.scales)
        if arrays is None or self.sight.window is not None:
            return None
        return {**arrays, "lengths": self.live}

    def keep(self, indices: Array, room: int = 0) -> KeptCache:
        """Evict all but the slots named, as in `LayerCache.keep`."""

        def gather(slots: Array) -> Leaves:
            return gather_slots(self.leaves, slots)

        return kept(self, gather, self.pos, indices, room)

    def select(self, rows: Array) -> KeptCache:
        """The cache of the given rows (any number of them), all arrays together."""
        return replace(
            self,
            leaves={name: leaf[rows] for name, leaf in self.leaves.items()},
            pos=self.pos[rows],
            live=self.live[rows],
            n=self.n[rows],
            evicted_at=self.evicted_at[rows],
            overflow=self.overflow[rows],
        )

    def rollback(self, tokens: Array | int) -> KeptCache:
        """Forget the newest tokens, a number or (B,); only such as came after the last eviction.

        What was evicted does not come back, so that going further back would not be exact.

        Raises:
          ValueError: outside jit, where that is too many. Inside jit such a row stays as it is and
            is flagged.
        """
        many = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), self.n.shape)
        exact = (many >= 0) & (many <= self.n - self.evicted_at)
        if not isinstance(exact, jax.core.Tracer) and not bool(exact.all()):
            raise ValueError(
                f"rollback of {tokens} tokens; rows took {(self.n - self.evicted_at).tolist()} "
                f"since the last eviction"
            )
        many = jnp.where(exact, many, 0)
        n = self.n - many
        return replace(
            self,
            pos=jnp.where(self.pos < n[:, None, None], self.pos, -1),
            live=self.live - many.reshape(-1, *(1,) * (self.live.ndim - 1)),
            n=n,
            overflow=self.overflow | ~exact,
        )

    def check(self) -> None:
        """Raise CapacityError if a write or a rollback inside jit was dropped."""
        check_overflow(self.overflow, self.capacity, self._live_of_heads.max(1), "slots")


def gather_slots(leaves: Leaves, slots: Array) -> Leaves:
    """Leaves (B, K, S, ...) at slots (B, K or 1, m) -> (B, K, m, ...)."""

    def gather(leaf: Array) -> Array:
        batch, heads = leaf.shape[:2]
        return leaf[jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None], slots]

    return {name: gather(leaf) for name, leaf in leaves.items()}


class _Encoded(Protocol):
    """What `kept` takes over."""

    @property
    def leaves(self) -> dict[str, Array]: ...

    @property
    def scales(self) -> dict[str, Array]: ...

    @property
    def n(self) -> Array: ...

    @property
    def overflow(self) -> Array: ...

    @property
    def sight(self) -> Sight: ...

    @property
    def codec(self) -> Codec: ...


def kept(
    cache: _Encoded, gather: Callable[[Array], Leaves], pos: Array, indices: Array, room: int
) -> KeptCache:
    """A `KeptCache` of what another cache holds in the slots named.

    Args:
      cache: the cache to evict from; its scales, n, overflow, sight and codec go over.
      gather: gives the leaves (B, K, m, ...) at slots (B, K or 1, m), all of them in the cache.
      pos: (B, K or 1, S), positions of all slots, -1 where dead.
      indices, room: as in `LayerCache.keep`.
    """
    indices = jnp.asarray(indices)
    _check(indices, room, pos.shape, {leaf.shape[1] for leaf in cache.leaves.values()})
    if indices.shape[1] < pos.shape[1]:
        indices = jnp.broadcast_to(indices, (*pos.shape[:2], indices.shape[2]))
    pos = jnp.broadcast_to(pos, (*indices.shape[:2], pos.shape[2]))
    named = (indices >= 0) & (indices < pos.shape[2])
    indices = jnp.where(named, indices, 0).astype(jnp.int32)
    pos = jnp.where(named, jnp.take_along_axis(pos, indices, axis=2), -1)
    pos, indices = _in_order(pos, indices)
    # A slot that was named twice is its own neighbour now.
    again = jnp.concatenate([jnp.zeros_like(pos[..., :1], bool), pos[..., 1:] == pos[..., :-1]], -1)
    pos, indices = _in_order(jnp.where(again, -1, pos), indices)
    padding = ((0, 0), (0, 0), (0, room))
    live = jnp.sum(pos >= 0, axis=2, dtype=jnp.int32)
    return KeptCache(
        leaves={
            name: jnp.pad(leaf, (*padding, *((0, 0),) * (leaf.ndim - 3)))
            for name, leaf in gather(indices).items()
        },
        scales=cache.scales,
        pos=jnp.pad(pos, padding, constant_values=-1),
        live=live[:, 0] if indices.shape[1] == 1 else live,
        n=cache.n,
        # A buffer of its own: one that two leaves share could not be donated.
        evicted_at=jnp.copy(cache.n),
        overflow=cache.overflow,
        sight=cache.sight._replace(gaps=True),
        codec=cache.codec,
    )


def _in_order(pos: Array, indices: Array) -> tuple[Array, Array]:
    """Both sorted by position, dead ones last."""
    key = jnp.where(pos >= 0, pos, _NOWHERE)
    key, indices = jax.lax.sort((key, indices), dimension=2, num_keys=1)
    return jnp.where(key < _NOWHERE, key, -1), indices


def _check(indices: Array, room: int, slots: tuple[int, ...], heads: set[int]) -> None:
    """`heads`: how many each of the cache's arrays has."""
    batch, most = slots[0], slots[2]
    # Of keys and values with different numbers of heads, no head has its own of both.
    accepted = [(batch, many) for many in sorted({1, *heads} if len(heads) == 1 else {1})]
    if indices.ndim != 3 or indices.shape[:2] not in accepted or 0 in indices.shape:
        shapes = " or ".join(f"({batch}, {many}, n)" for _, many in reversed(accepted))
        of = " and ".join(map(str, sorted(heads)))
        why = f", as keys and values have {of} heads" if len(heads) > 1 else ""
        raise ValueError(
            f"indices: got shape {list(indices.shape)}; accepted: {shapes}, n at least 1{why}"
        )
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"indices: got {indices.dtype}; accepted: integers")
    if room < 0:
        raise ValueError(f"room: got {room}; accepted: 0 and more slots")
    if isinstance(indices, jax.core.Tracer):
        return
    if bool(((indices < -1) | (indices >= most)).any()):
        raise ValueError(
            f"indices: got {int(indices.min())} to {int(indices.max())}; accepted: slots from 0 to "
            f"{most - 1}, or -1 for none"
        )
