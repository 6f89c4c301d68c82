"""Keys and values on their way through the layers that read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block, LayerCache, Record


@partial(jax.tree_util.register_dataclass, data_fields=("cache", "new"), meta_fields=())
@dataclass(frozen=True)
class Shared:
    """What the queries of a step attend to, in the layer that makes it and in those that share it.

    One new token a row is appended before it is attended. Of more, every reader attends to the
    cache as it was and to the new tokens' own exact records, and the append waits for the last.

    Attributes:
      cache: of the layer that makes keys and values; None for a forward pass without one.
      new: keys and values of the T new tokens, pos (B, 1, T); None before they are made.
    """

    cache: LayerCache | None
    new: Block | None = None

    @property
    def record(self) -> Record:
        """Of the new tokens, in the order of their positions."""
        assert self.new is not None
        return Record(self.new.k, self.new.v)

    @property
    def count(self) -> Array:
        """(B,) int32, the new tokens of each row."""
        assert self.new is not None
        return jnp.sum(self.new.pos[:, 0] >= 0, axis=1, dtype=jnp.int32)

    @property
    def uncached(self) -> tuple[Block, ...]:
        """The new tokens, if they are not in the cache yet."""
        return () if self.new is None or self.new.k.shape[2] == 1 else (self.new,)

    def take(self, new: Block) -> Shared:
        """With the new tokens, before anything attends to them."""
        taken = replace(self, new=new)
        if taken.cache is None or taken.uncached:
            return taken
        return replace(taken, cache=taken.cache.append(taken.record, taken.count))

    def close(self, y: Array) -> tuple[Array, LayerCache | None]:
        """The cache with the new tokens, and y (...), which is made of all that was read."""
        if self.cache is None or not self.uncached:
            return y, self.cache
        # Without the barrier XLA may write before it has read, and then copies the cache.
        y, cache = jax.lax.optimization_barrier((y, self.cache))
        return y, cache.append(self.record, self.count)
