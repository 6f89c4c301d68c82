"""A cache's arrays as attention finds them: in rows or pages, as numbers or 8-bit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache.places import Pages, in_line


class Stored(NamedTuple):
    """What decode attention reads, never copied as a whole.

    Attributes:
      keys: parts of K that stand side by side, each (B, K, S, H); or pages (num_pages, K, P, H).
        One part, but for latents, whose rope keys are the second.
      values: (B, K, S, HV) or pages; None where the first part of the keys is the values, too.
      page_table: (B, max_pages) int32, the page of each P slots of a row; None for rows of slots.
      k_scale, v_scale: float32 factors of codes, () or (K,), or of each token (B, K, S), or in
        pages (num_pages, K, P); None for numbers.
    """

    keys: tuple[Array, ...]
    values: Array | None
    page_table: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.keys[0].shape[1]

    @property
    def key_dim(self) -> int:
        """H, of all parts together."""
        return sum(part.shape[-1] for part in self.keys)

    @property
    def value_dim(self) -> int:
        """HV."""
        return (self.keys[0] if self.values is None else self.values).shape[-1]

    @property
    def page_size(self) -> int | None:
        """P, or None for rows of slots."""
        return None if self.page_table is None else self.keys[0].shape[2]

    @property
    def capacity(self) -> int:
        """S, slots of a row."""
        slots = self.keys[0].shape[2]
        return slots if self.page_table is None else slots * self.page_table.shape[1]

    @property
    def token_scales(self) -> bool:
        """Whether each token has scales of its own."""
        return self.k_scale is not None and self.k_scale.ndim == 3

    def reader(self) -> Callable[[Array, int], tuple[Array, Array]]:
        """A function that reads some slots of every row; to be made outside the loop that calls it.

        Its arguments are `first`, the slot to begin with, () or (B,) for each row, and `width`, how
        many; of pages, both multiples of P. It gives keys (B, K, width, H) and values
        (B, K, width, HV); what has no slot or no page is any other's.
        """
        keys = [_Numbers.of(part, self.k_scale, self.page_table) for part in self.keys]
        values = None
        if self.values is not None:
            values = _Numbers.of(self.values, self.v_scale, self.page_table)

        def read(first: Array, width: int) -> tuple[Array, Array]:
            parts = [part.read(first, width) for part in keys]
            k = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
            return k, parts[0] if values is None else values.read(first, width)

        return read


class _Numbers(NamedTuple):
    """One array of a cache, and what makes numbers of it."""

    array: Array
    dtype: DTypeLike
    scale: Array | None
    page_table: Array | None

    @classmethod
    def of(cls, array: Array, scale: Array | None, page_table: Array | None) -> _Numbers:
        dtype = array.dtype
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
            # Bytes, which caches hold: XLA on CPU would widen a whole array of 8-bit floats.
            array = jax.lax.bitcast_convert_type(array, jnp.uint8)
        return cls(array, dtype, scale, page_table)

    def read(self, first: Array, width: int) -> Array:
        """(B, K, width, ...), `first` and `width` as in `Stored.reader`."""
        part = self._slots(self.array, first, width)
        if part.dtype != self.dtype:
            part = jax.lax.bitcast_convert_type(part, self.dtype)
        if self.scale is None:
            return part
        scale = self.scale
        if scale.ndim == 3:
            scale = self._slots(scale, first, width)[..., None]
        elif scale.ndim == 1:
            scale = scale[:, None, None]
        return part.astype(jnp.float32) * scale

    def _slots(self, array: Array, first: Array, width: int) -> Array:
        if self.page_table is not None:
            pages = Pages(self.page_table, len(array), array.shape[2])
            entries = first[..., None] // pages.size + jnp.arange(width // pages.size)
            shape = len(self.page_table), width // pages.size
            return in_line(array, pages.page(jnp.broadcast_to(entries, shape)))
        cut = jax.lax.dynamic_slice_in_dim
        if first.ndim == 0:
            return cut(array, first, width, axis=2)
        return jax.vmap(lambda row, i: cut(row, i, width, axis=1))(array, first)
