"""One shape of decode attention: its arithmetic, and arrays to run it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from kvjax import sizing
from kvjax.cache.codecs import DTYPES, plain_codec
from kvjax.sizing.checks import whole


@dataclass(frozen=True)
class Case:
    """B rows, each of whose newest token attends `length` cached tokens in `capacity` slots.

    Attributes:
      batch: B.
      query_heads, kv_heads, head_dim: N, K and H.
      length, capacity: live tokens and slots (S) a row.
      codec: of K, V and the queries; f32, bf16 or f16.
    """

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    length: int
    capacity: int
    codec: str

    def __post_init__(self) -> None:
        check_sizes(self.batch, self.length, self.capacity)
        object.__setattr__(self, "codec", plain_codec(self.codec))
        _ = self.layer  # which checks the heads

    @property
    def layer(self) -> sizing.LayerSpec:
        return sizing.LayerSpec(self.query_heads, self.kv_heads, self.head_dim, self.head_dim)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of the live K and V: what a step has to read."""
        return self.batch * self.layer.record_bytes(self.length, sizing.codec(self.codec))

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots."""
        return self.batch * self.layer.record_bytes(self.capacity, sizing.codec(self.codec))

    @property
    def flop_per_step(self) -> int:
        """FLOP of the products of the queries with K, and of the weights with V."""
        return self.batch * self.layer.decode_flop(self.length)

    @property
    def dtype(self) -> DTypeLike:
        return DTYPES[self.codec]


def check_sizes(batch: int, length: int, capacity: int) -> None:
    """Whole numbers of at least 1, and the live tokens no more than the slots."""
    for name, value in (("batch", batch), ("length", length), ("capacity", capacity)):
        whole(name, value)
    if length > capacity:
        raise ValueError(f"length={length}: at most the capacity, {capacity}, is accepted")


def grid(
    *,
    batch: Sequence[int],
    query_heads: int,
    kv_heads: Sequence[int],
    head_dim: Sequence[int],
    length: Sequence[int],
    capacity: int | None,
    codec: Sequence[str],
) -> list[Case]:
    """All combinations; capacity None gives each case as many slots as it has live tokens."""
    return [
        Case(b, query_heads, k, h, live, live if capacity is None else capacity, name)
        for name, b, h, live, k in product(codec, batch, head_dim, length, kv_heads)
    ]


class Inputs:
    """Random arrays of a case, all rows of the same length; slots past it are 0.

    Attributes:
      q: (B, N, H).
      k, v: (B, K, S, H), as this library and torch keep them.
      lengths: (B,) int32.
    """

    def __init__(self, case: Case, seed: int = 0):
        draw = np.random.default_rng(seed)

        def normal(heads: int, *tokens: int) -> np.ndarray:
            shape = (case.batch, heads, *tokens, case.head_dim)
            return draw.standard_normal(shape, np.float32)

        def fill() -> Array:
            slots = np.zeros((case.batch, case.kv_heads, case.capacity, case.head_dim), np.float32)
            slots[:, :, : case.length] = normal(case.kv_heads, case.length)
            return jnp.asarray(slots, case.dtype)

        self.q = jnp.asarray(normal(case.query_heads), case.dtype)
        self.k, self.v = fill(), fill()
        self.lengths = jnp.full((case.batch,), case.length, jnp.int32)

    @cached_property
    def token_major(self) -> tuple[Array, Array]:
        """k and v (B, S, K, H), as jax.nn and flax keep them."""
        return jnp.swapaxes(self.k, 1, 2), jnp.swapaxes(self.v, 1, 2)
