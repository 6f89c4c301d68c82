"""The cache of a whole model: one layer cache per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.codecs import build_codec
from kvjax.cache.kivi import KiviCache
from kvjax.cache.kivi_codec import KIVI, Kivi
from kvjax.cache.layouts import Dense, Layout, Ring, SinkRing
from kvjax.cache.paged import Paged, PagedCache
from kvjax.cache.protocol import LayerCache
from kvjax.cache.slots import SlotCache

# What a layer's cache may be asked to be; "auto" is a ring where the layer has a window.
type LayoutChoice = Literal["auto", "dense", "ring"] | Paged | SinkRing

LAYOUTS: tuple[Literal["auto", "dense", "ring"], ...] = ("auto", "dense", "ring")

# A name of `kvjax.sizing.CODECS`, or a codec with settings of its own.
type CodecChoice = str | Kivi

# One choice for all layers of a model, or one for each.
type PerLayer[Choice] = Choice | Sequence[Choice]


@partial(jax.tree_util.register_dataclass, data_fields=("layers",), meta_fields=())
@dataclass(frozen=True)
class Cache:
    """What a model's layers remember of a batch of rows. Donate it to every step.

    Attributes:
      layers: in the model's order, one for each layer that makes keys and values; layers that share
        those of another have none, and are read and evicted with it.
    """

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
        """Forget the newest tokens of each row, a number or (B,).

        Inside jit, a row that one layer cannot give back stays as it is in all, and is flagged.

        Raises:
          ValueError: outside jit, for such a row.
        """
        many = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), self.n.shape)
        tried = [layer.rollback(many) for layer in self.layers]
        able = jnp.stack([layer.n == self.n - many for layer in tried]).all(0)
        return Cache(
            tuple(
                replace(layer.rollback(jnp.where(able, many, 0)), overflow=flagged.overflow)  # type: ignore[type-var]
                for layer, flagged in zip(self.layers, tried, strict=True)
            )
        )

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
    layout: LayoutChoice = "auto",
    codec: CodecChoice = "bf16",
    scales: Mapping[str, Array] | None = None,
    value_heads: int | None = None,
    rope_key: bool = False,
) -> LayerCache:
    """An empty cache of one layer.

    Args:
      batch, capacity: rows, and tokens that each is to hold.
      kv_heads, key_dim, value_dim: K, H and HV.
      window: keys that a query of the layer sees at most, or of any that shares the cache: its
        window, or its chunk; None for all.
      layout: "auto" (a ring of the window where that is shorter than the capacity, else dense),
        "dense", "ring" (refused without a window), `Paged`, or `SinkRing`, which is as short as the
        layer's own window where it has one, and dense where it would never turn.
      codec: a name of `kvjax.sizing.CODECS` that caches can hold, or `Kivi`, which rounds the
        capacity up to whole groups and is refused by layouts that drop single tokens.
      scales: in place of the constants of a codec that has such, by their names; the cache takes
        them over.
      value_heads: heads of the values, where those of the keys are `kv_heads` alone; None for
        equally many.
      rope_key: whether keys are rope keys beside latents or tied values, which tiled codecs keep
        wider.

    Raises:
      ValueError: for what cannot be held, and why.
    """
    for name, value in (("batch", batch), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1 is needed")
    if isinstance(codec, str):
        codec = KIVI.get(codec, codec)
    if isinstance(codec, Kivi):
        _check_groups_stay(codec, layout, capacity, window)
        pages = layout if isinstance(layout, Paged) else None
        return KiviCache.init(
            batch, capacity, kv_heads, key_dim, value_dim, codec, pages, value_heads
        )
    encoding = build_codec(codec, key_dim, value_dim, rope_key=rope_key)
    if isinstance(layout, Paged):
        return PagedCache.init(
            batch, capacity, layout, kv_heads, key_dim, value_dim, encoding, scales, value_heads
        )
    slots = _slots(layout, capacity, window)
    return SlotCache.init(batch, slots, kv_heads, key_dim, value_dim, encoding, scales, value_heads)


def _check_groups_stay(kivi: Kivi, layout: LayoutChoice, capacity: int, window: int | None) -> None:
    """Raise ValueError for a layout in which tokens of a group may be dropped one by one."""
    asked = f"layout: got {layout!r} with codec {kivi.name}"
    if isinstance(layout, Paged):
        together = layout.page_size
        if together % kivi.group == 0:
            return
    elif isinstance(_slots(layout, capacity, window), Dense):
        return
    else:
        together = 1
        asked += f" and a window of {window}" if window else ""
    raise ValueError(
        f"{asked}, whose keys share a scale over {kivi.group} tokens: these must be dropped "
        f"together, and the layout drops {together} at a time; accepted: 'dense', Paged of a "
        f"multiple of {kivi.group}"
    )


def _slots(layout: LayoutChoice, capacity: int, window: int | None) -> Layout:
    match layout:
        case SinkRing():
            # A layer's own window hides what lies before it, but not the first tokens.
            span = capacity if window is None else window
            ring = replace(layout, window=min(layout.window, span))
            return Dense(capacity) if capacity <= min(ring.slots, span) else ring
        case "dense":
            return Dense(capacity)
        case "ring" if window is None:
            raise ValueError(
                f"layout={layout!r}: the layer has no window, or one that shares its cache has "
                f"none; accepted: auto, dense"
            )
        case "auto" | "ring":
            # A ring that never turns is dense, and says when it is full.
            return Dense(capacity) if window is None or capacity <= window else Ring(window)
    raise ValueError(
        f"layout={layout!r}: accepted are {', '.join(LAYOUTS)}, Paged(...) and SinkRing(...)"
    )
