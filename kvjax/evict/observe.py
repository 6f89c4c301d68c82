"""What scorers go by: a layer's cache, and the queries of its newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache, LayerCache
from kvjax.nn import Attention, Decoder, Rope, Shared
from kvjax.nn.watch import attention_modules, with_attention
from kvjax.ops import attend, attention_mass, slot_positions


class Queries(NamedTuple):
    """Queries of T tokens a row that the cache holds already.

    Attributes:
      q: (B, T, N, H), as they attend: normed and rotated.
      unrotated: (B, T, N, H), as at position 0.
      positions: (B, T) int32; -1 for padding.
      lse: (B, T, N), of their attention.
    """

    q: Array
    unrotated: Array
    positions: Array
    lse: Array


@dataclass(frozen=True)
class Seen:
    """What a scorer may know of one layer; made and used inside one jitted function.

    Attributes:
      cache: the layer's cache.
      pos: (B, K or 1, S) int32, the position of each slot's token; -1 in a dead slot.
      queries: of the newest tokens; None where the policy observes none.
      rope: the layer's rotary embedding, or None.
      settings: what the layer tells `attend`.
    """

    cache: LayerCache
    pos: Array
    queries: Queries | None
    rope: Rope | None
    settings: dict[str, Any]

    @property
    def observed(self) -> Queries:
        """The queries; ValueError where there are none."""
        if self.queries is None:
            raise ValueError("observe: got 0; accepted: at least 1, as the scores need queries")
        return self.queries

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        given = self.settings["scale"]
        return float(self.observed.q.shape[-1] ** -0.5 if given is None else given)

    def mass(self) -> Array:
        """(B, K, S) float32, attention that each slot got from all observed queries."""
        seen = self.observed
        # The LSE has the learned sinks in it.
        rule = {name: value for name, value in self.settings.items() if name != "sink_logits"}
        return attention_mass(seen.q, self.cache, seen.lse, seen.positions, **rule)


class _Held(NamedTuple):
    """A layer's cache, the position that observation starts at, and what was observed."""

    cache: LayerCache
    n: Array
    queries: Queries | None = None


@dataclass(frozen=True)
class _Watched:
    """An attention module that attends to what is cached alone, and leaves its queries beside it.

    Of layers that share keys and values all attend, and the one that makes them leaves its queries.
    """

    attention: Attention

    def __call__(
        self, x: Array, positions: Array, held: _Held | Shared
    ) -> tuple[Array, _Held | Shared]:
        module = self.attention
        own: _Held = cast(Any, held.cache) if isinstance(held, Shared) else held
        queries = module.queries(x)
        q = module.rotate(queries, positions)
        q_sinks = module.sink_queries(queries, positions, own.cache.sight)
        out, lse = attend(q, own.cache, positions, q_sinks=q_sinks, **module.settings)
        if module.config.shares_with is None:
            unrotated = module.rotate(queries, jnp.where(positions >= 0, 0, -1))
            own = own._replace(queries=Queries(q, unrotated, positions, lse))
        y = module.o(out.reshape(*out.shape[:2], -1))
        return y, Shared(cast(Any, own)) if isinstance(held, Shared) else own


def observe(
    model: Decoder, cache: Cache, tokens: Array | None, count: Array | None
) -> tuple[Seen, ...]:
    """Run the newest tokens again over a cache that holds them, and see each layer's queries.

    Each attends to what the cache holds up to its own position; nothing is written. Where layers
    share keys and values, those of the layer that makes them are seen: what its queries attend to
    is kept for all. To be called inside jit.

    Args:
      model, cache: a decoder whose layers are `nn.Attention`, and its cache.
      tokens: (B, T) int32, right-padded, each row's newest; None to observe none.
      count: (B,) int32, the real tokens of each row.

    Returns:
      One entry for each entry of the cache.

    Raises:
      ValueError: for a layer of another kind.
    """
    every = attention_modules(model)
    modules = [every[i] for i in model.config.cached]
    queries: tuple[Queries | None, ...] = (None,) * len(modules)
    if tokens is not None and count is not None:
        queries = _run(model, cache, tokens, count)
    return tuple(
        Seen(layer_cache, slot_positions(layer_cache), seen, module.config.rope, module.settings)
        for layer_cache, seen, module in zip(cache.layers, queries, modules, strict=True)
    )


def _run(model: Decoder, cache: Cache, tokens: Array, count: Array) -> tuple[Queries | None, ...]:
    watched = with_attention(model, _Watched)
    held = tuple(_Held(layer, cache.n - count) for layer in cache.layers)
    _, seen = watched.hidden(tokens, Cache(cast(Any, held)), count=count)
    return tuple(held.queries for held in cast(Any, seen).layers)
