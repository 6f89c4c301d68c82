"""A cache seen otherwise: what a module makes of its records before attention reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.cache.layouts import Sight
from kvjax.cache.protocol import Block, LayerCache


@dataclass(frozen=True)
class View(ABC):
    """A cache whose blocks attention gets by way of `read`; of any layout and codec."""

    cache: LayerCache

    @property
    def sight(self) -> Sight:
        """Of the cache."""
        return self.cache.sight

    def blocks(self) -> Array:
        """Of the cache."""
        return self.cache.blocks()

    def first_block(self, oldest: Array) -> Array:
        """Of the cache."""
        return self.cache.first_block(oldest)

    def block(self, i: Array) -> Block:
        """Block i as queries see it."""
        return self.read(self.cache.block(i))

    def operands(self) -> dict[str, Array] | None:
        """None: records are read block by block."""
        return None

    @abstractmethod
    def read(self, block: Block) -> Block:
        """A block of records as queries see it."""


def with_rope_keys(block: Block, width: int) -> Block:
    """A block of rope keys (B, 1, C, R) and values (B, K, C, HV), the first of which are keys, too.

    Returns:
      The block with keys (B, K, C, width + R): the first `width` channels of each head's value, and
      behind them the rope key, which all heads share.
    """
    dtype = jnp.promote_types(block.k.dtype, block.v.dtype)
    values = block.v[..., :width].astype(dtype)
    rope = jnp.broadcast_to(block.k.astype(dtype), (*values.shape[:3], block.k.shape[-1]))
    return block._replace(k=jnp.concatenate([values, rope], axis=-1))
