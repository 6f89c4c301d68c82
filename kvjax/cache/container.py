"""The cache of a whole model: one layer cache per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax import Array

from kvjax.cache.codecs import build_codec
from kvjax.cache.dense import DenseCache
from kvjax.cache.protocol import LayerCache

LAYOUTS = ("auto", "dense")


@partial(jax.tree_util.register_dataclass, data_fields=("layers",), meta_fields=())
@dataclass(frozen=True)
class Cache:
    """What a model's layers remember of a batch of rows. Donate it to every step."""

    layers: tuple[LayerCache, ...]

    @property
    def n(self) -> Array:
        """(B,) int32, tokens each row holds: its next position."""
        return self.layers[0].n

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, bookkeeping included."""
        return sum(layer.nbytes for layer in self.layers)

    def check(self) -> None:
        """Raise CapacityError if a write inside jit was dropped."""
        for layer in self.layers:
            layer.check()

    def select(self, rows: Array) -> Cache:
        """The cache of the given rows, for beams."""
        return self._map(lambda layer: layer.select(rows))

    def rollback(self, tokens: Array | int) -> Cache:
        """Forget the newest tokens of each row, a number or (B,)."""
        return self._map(lambda layer: layer.rollback(tokens))

    def _map(self, change: Callable[[LayerCache], LayerCache]) -> Cache:
        return Cache(tuple(change(layer) for layer in self.layers))


def init_layer_cache(
    batch: int,
    capacity: int,
    *,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    window: int | None = None,
    layout: str = "auto",
    codec: str = "bf16",
) -> LayerCache:
    """An empty cache of one layer; ValueError for what cannot be held, and why."""
    for name, value in (("batch", batch), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1 is needed")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: accepted are {', '.join(LAYOUTS)}")
    if window is not None and window < capacity:
        raise ValueError(
            f"capacity={capacity} exceeds the layer's sliding window of {window}: "
            f"a dense cache serves capacities up to the window"
        )
    return DenseCache.init(batch, capacity, kv_heads, key_dim, value_dim, build_codec(codec))
