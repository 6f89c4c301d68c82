"""KIVI's cache: codes of a few bits for old tokens, 16 bits for the newest (Liu et al. 2024).

The paper empties its key residual of R tokens all at once and moves values one by one. Here the
oldest G tokens of both become codes as soon as a token finds the residual full. The residual is
then never more than full and a row of S tokens has S - R of them as codes, so that the arrays take
what `kvjax.sizing.Kivi.allocated` says; between R - G + 1 and R keys stay exact, where the paper's
rule leaves from 0 to R - 1. How many are codes follows from a row's length alone: it needs no
bookkeeping, and a text leaves the same codes behind whatever the steps it came in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.common import check_overflow, roll_back
from kvjax.cache.kivi_codec import Kivi
from kvjax.cache.layouts import Sight
from kvjax.cache.protocol import BLOCK, Block, CapacityError, Record

_HALF_MAX = float(jnp.finfo(jnp.float16).max)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves", "n", "overflow"),
    meta_fields=("codec",),
)
@dataclass(frozen=True)
class KiviCache:
    """One layer's cache of M groups of codes, and R exact tokens, a row.

    Attributes:
      leaves: of codes, k and v (B, K, M, G, bytes), k_scale and k_zero (B, K, M, H), v_scale and
        v_zero (B, K, M, G, HV / G); k_exact (B, K, R, H) and v_exact (B, K, R, HV) in fp16, where
        token p is in slot p % R. What no fp16 can hold becomes the largest that one can.
      n: (B,) int32, tokens held; the first `codec.encoded(n)` are codes.
      overflow: (B,) bool, set where a write did not fit and was dropped.
      codec: static.
    """

    leaves: dict[str, Array]
    n: Array
    overflow: Array
    codec: Kivi

    @classmethod
    def init(
        cls, batch: int, capacity: int, kv_heads: int, key_dim: int, value_dim: int, codec: Kivi
    ) -> KiviCache:
        """An empty cache of at least `capacity` tokens a row: R, and as many groups as it takes.

        Rounded up, as a part of a group has no codes; `capacity` says to what.

        Raises:
          ValueError: for head widths that the codec cannot hold.
        """
        codec.check_widths(key_dim, value_dim)
        groups = (codec.slots(capacity) - codec.residual) // codec.group
        exact = {
            f"{name}_exact": jnp.zeros((batch, kv_heads, codec.residual, dim), jnp.float16)
            for name, dim in (("k", key_dim), ("v", value_dim))
        }
        shapes = jax.eval_shape(
            codec.encode,
            Record(
                *(jnp.zeros((batch, kv_heads, 1, codec.group, dim)) for dim in (key_dim, value_dim))
            ),
        )
        # One buffer a leaf: a buffer shared by two leaves could not be donated.
        encoded = {
            name: jnp.zeros((*leaf.shape[:2], groups, *leaf.shape[3:]), leaf.dtype)
            for name, leaf in shapes.items()
        }
        n, overflow = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
        return cls(encoded | exact, n, overflow, codec)

    @property
    def groups(self) -> int:
        """M, groups of codes a row."""
        return self.leaves["k"].shape[2]

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

        Tokens that leave the residual become codes, from their 16 bits and never again. A row whose
        tokens do not all fit keeps what it had: outside jit that raises CapacityError; inside jit
        the row's write is dropped and its overflow flag set.
        """
        fits = self.n + count <= self.capacity
        if not isinstance(fits, jax.core.Tracer) and not bool(fits.all()):
            raise CapacityError(
                f"capacity is {self.capacity} tokens a row; rows hold {self.n.tolist()} and "
                f"were to take {jnp.asarray(count).tolist()} more"
            )
        n = self.n + jnp.where(fits, count, 0).astype(jnp.int32)
        new = Record(*(_half(x) for x in record))
        leaves = self.leaves | self._encode_until(n, new) | self._keep_until(n, new)
        return replace(self, leaves=leaves, n=n, overflow=self.overflow | ~fits)

    def _encode_until(self, n: Array, new: Record) -> dict[str, Array]:
        """The codes, with those of groups that leave the residual as rows grow to n tokens."""
        size, tokens = self.codec.group, new.k.shape[2]
        # So many groups at most leave a residual that takes T tokens.
        most = min(-(-tokens // size), self.groups)
        if not most:
            return {}
        first, end = self.codec.encoded(self.n), self.codec.encoded(n)
        positions = first[:, None] + jnp.arange(most * size, dtype=jnp.int32)
        groups = positions[:, ::size] // size
        # The group past the end stands for "nowhere": mode="drop" skips it.
        groups = jnp.where(groups < end[:, None] // size, groups, self.groups)

        def encode() -> dict[str, Array]:
            exact = (self._tokens(name, getattr(new, name), positions) for name in "kv")
            groups = (x.reshape(*x.shape[:2], most, size, x.shape[-1]) for x in exact)
            return self.codec.encode(Record(*groups))

        def blank() -> dict[str, Array]:
            shapes = jax.eval_shape(encode)
            return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}

        # Most steps of a decode fill no group: only those that do pay for one.
        codes = jax.lax.cond((end > first).any(), encode, blank)
        where = _where(groups, new.k.shape[1])
        return {name: self.leaves[name].at[where].set(x, mode="drop") for name, x in codes.items()}

    def _tokens(self, name: str, new: Array, positions: Array) -> Array:
        """Exact tokens at `positions` (B, P), of the residual or of the new ones (B, K, T, H)."""
        heads, held = new.shape[1], self.n[:, None]
        old = self.leaves[f"{name}_exact"][_where(positions % self.codec.residual, heads)]
        steps = jnp.clip(positions - held, 0, new.shape[2] - 1)
        return jnp.where((positions < held)[:, None, :, None], old, new[_where(steps, heads)])

    def _keep_until(self, n: Array, new: Record) -> dict[str, Array]:
        """The residual as rows grow to n tokens."""
        size = self.codec.residual
        positions = self.n[:, None] + jnp.arange(new.k.shape[2], dtype=jnp.int32)
        # What became codes at once has no slot; the rest are at most R tokens, each with its own.
        stays = (positions >= self.codec.encoded(n)[:, None]) & (positions < n[:, None])
        where = _where(jnp.where(stays, positions % size, size), new.k.shape[1])
        return {
            f"{name}_exact": self.leaves[f"{name}_exact"].at[where].set(x, mode="drop")
            for name, x in new._asdict().items()
        }

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

    def first_slot(self, i: Array) -> Array:
        """The slot that block i begins with; slots of codes come first, one for each token."""
        codes, of_codes = self.groups * self.codec.group, self._of_codes()
        exact = codes + self._start(i - of_codes, self.codec.residual)
        return jnp.where(i < of_codes, self._start(i, codes), exact)

    def _start(self, i: Array, slots: int) -> Array:
        # The last block starts early enough to be whole; the slots seen before are dead in it.
        return jnp.minimum(i * self._width, slots - self._width)

    def block(self, i: Array) -> Block:
        """Block i in f32, of codes or after them of exact tokens; positions (B, 1, C)."""
        if not self.groups:
            return self._exact_block(i)
        of_codes = self._of_codes()
        # A branch, not a choice between both, so that only one kind is read and decoded.
        return jax.lax.cond(
            i < of_codes,
            lambda: self._coded_block(i),
            lambda: self._exact_block(i - of_codes),
        )

    def _coded_block(self, i: Array) -> Block:
        size, width = self.codec.group, self._width
        start = self._start(i, self.groups * size)
        parts = {
            name: jax.lax.dynamic_slice_in_dim(leaf, start // size, width // size, axis=2)
            for name, leaf in self.leaves.items()
            if not name.endswith("_exact")
        }
        k, v = (x.reshape(*x.shape[:2], width, x.shape[-1]) for x in self.codec.decode(parts))
        positions = start + jnp.arange(width, dtype=jnp.int32)
        live = (positions >= i * width) & (positions < self.codec.encoded(self.n)[:, None])
        return Block(k, v, jnp.where(live, positions, -1)[:, None, :])

    def _exact_block(self, i: Array) -> Block:
        size, width = self.codec.residual, self._width
        start = self._start(i, size)
        k, v = (
            jax.lax.dynamic_slice_in_dim(leaf, start, width, axis=2).astype(jnp.float32)
            for leaf in (self.leaves["k_exact"], self.leaves["v_exact"])
        )
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
        """The cache of the given rows (any number of them), all arrays together."""
        leaves = {name: leaf[rows] for name, leaf in self.leaves.items()}
        return replace(self, leaves=leaves, n=self.n[rows], overflow=self.overflow[rows])

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
        check_overflow(self.overflow, self.capacity, self.n)


def _half(x: Array) -> Array:
    return jnp.clip(x.astype(jnp.float32), -_HALF_MAX, _HALF_MAX).astype(jnp.float16)


def _where(slots: Array, heads: int) -> tuple[Array, Array, Array]:
    """Indices of `slots` (B, P) in arrays (B, K, S, ...), for reads and writes (B, K, P, ...).

    Over batch and heads as well: a window over the heads would make XLA copy what is written to.
    """
    return jnp.arange(len(slots))[:, None, None], jnp.arange(heads)[:, None], slots[:, None, :]
