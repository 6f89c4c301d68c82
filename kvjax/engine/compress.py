"""Evicting from a model's cache: once after a prompt, or every so many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache import Cache, LayerCache
from kvjax.evict import Policy
from kvjax.nn import Decoder

# Where heads keep different numbers of tokens the greediest one decides on the slots. Rounded up,
# they differ less from one call to the next, and fewer steps are compiled.
RAGGED_MULTIPLE = 32


def compress(
    model: Decoder,
    cache: Cache,
    tokens: Array | np.ndarray | None,
    policy: Policy,
    budget: int,
    *,
    count: Array | np.ndarray | None = None,
    room: int = 0,
) -> Cache:
    """Evict all but the best of each layer's tokens; memory is smaller once `cache` is dropped.

    Layers that keep a window alone stay as they are. Of layers that share keys and values, the
    queries of the one that makes them decide for all. A row with no more than `budget` tokens loses
    none, so that a large budget changes nothing but the arrays' shapes.

    Args:
      model: the decoder that filled the cache.
      cache: what to evict from; it is left as it is.
      tokens: (B, T) ids, right-padded, of the newest tokens that each row holds: the prompt, or
        what came since the last eviction. They are run again over the cache for their queries, of
        which a policy may need only the last. None for policies that need none.
      policy: which tokens are the best.
      budget: slots to keep, of each row and head, in a layer; in the mean, where the policy spreads
        them.
      count: (B,) int32, the real tokens of each row; None means all T.
      room: further slots of each layer, for tokens to come.

    Returns:
      A cache of budget + room slots a layer, or of fewer, where it had fewer to keep.

    Raises:
      ValueError: for a budget that does not hold what the policy protects, no tokens where it needs
        some, or more of them than the cache has seen.
    """
    observed, many = _newest(cache, tokens, count, policy.observe)
    budgets = _budgets(cache, policy, budget)
    slots = _indices(model, cache, observed, many, policy, budgets)
    return Cache(
        tuple(
            layer if kept is None else _keep(layer, _trimmed(kept, limit), room)
            for layer, kept, limit in zip(cache.layers, slots, budgets, strict=True)
        )
    )


@dataclass(frozen=True)
class Eviction:
    """Evict to `budget` slots a layer after the prompt, and whenever `every` tokens have come.

    Attributes:
      policy: which tokens stay.
      budget: slots kept of each row and head, in the mean of the layers.
      every: tokens between two evictions; a layer has room for so many beside its budget.
    """

    policy: Policy
    budget: int = 2048
    every: int = 512

    def __post_init__(self) -> None:
        for name in ("budget", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; accepted: 1 and more")

    def check(self, cache: Cache, tokens: int) -> None:
        """Refuse, before anything is computed, what could not be done to a cache later.

        Args:
          cache: the cache, or its shapes alone.
          tokens: that the longest row will hold at most.

        Raises:
          ValueError: every layer keeps a window alone, the codec cannot drop single tokens, or the
            budget does not hold what the policy protects.
        """
        growing = _growing(cache)
        if not growing:
            raise ValueError(
                "eviction: got a cache whose layers keep a window alone, which has nothing to "
                "evict; accepted: layouts in which a layer holds all of its tokens"
            )
        for layer in growing:
            one = jax.ShapeDtypeStruct((len(layer.n), 1, 1), jnp.int32)
            jax.eval_shape(lambda layer, indices: layer.keep(indices), layer, one)
        if self.budget < tokens:
            _spread(len(growing), self.policy, tokens, self.budget)

    def __call__(
        self,
        model: Decoder,
        cache: Cache,
        tokens: Array | np.ndarray | None,
        count: Array | np.ndarray | None = None,
    ) -> Cache:
        """The cache after an eviction; tokens and count as in `compress`."""
        return compress(
            model, cache, tokens, self.policy, self.budget, count=count, room=self.every
        )


@partial(jax.jit, static_argnames=("policy", "budgets"))
def _indices(
    model: Decoder,
    cache: Cache,
    tokens: Array | None,
    count: Array | None,
    policy: Policy,
    budgets: tuple[int | None, ...],
) -> tuple[Array | None, ...]:
    return policy.indices(model, cache, tokens, count, budgets)


@partial(jax.jit, static_argnames="room")
def _keep(layer: LayerCache, indices: Array, room: int) -> LayerCache:
    return layer.keep(indices, room)


def _trimmed(indices: Array, budget: int | None) -> Array:
    """Without the columns past the budget that no head needs."""
    slots = indices.shape[2]
    if budget is None or slots <= budget:
        return indices
    most = max(int((indices >= 0).sum(2).max()), 1)
    return indices[:, :, : min(-(-most // RAGGED_MULTIPLE) * RAGGED_MULTIPLE, slots)]


def _budgets(cache: Cache, policy: Policy, budget: int) -> tuple[int | None, ...]:
    """Slots of each layer; None for one that keeps a window alone."""
    growing = _growing(cache)
    seen = int(cache.n.max())
    held = min(seen, max((layer.capacity for layer in growing), default=0))
    # Spread by the tokens seen, so that a second eviction gives the layers what the first gave.
    shares = _spread(len(growing), policy, seen if budget < held else 0, budget)
    share = iter(shares)
    return tuple(
        None if layer.sight.window is not None else min(next(share), layer.capacity)
        for layer in cache.layers
    )


def _growing(cache: Cache) -> list[LayerCache]:
    """The layers that hold more than a window."""
    return [layer for layer in cache.layers if layer.sight.window is None]


def _spread(layers: int, policy: Policy, tokens: int, budget: int) -> tuple[int, ...]:
    """Slots of each layer, of rows of so many tokens; ValueError for a budget too small."""
    least = policy.protected.least(budget)
    if budget < max(least, 1):
        raise ValueError(
            f"budget: got {budget}; accepted: at least 1, and the {least} tokens that the policy "
            f"protects"
        )
    if budget >= tokens:
        return (budget,) * layers
    return policy.budgets(layers, tokens, budget, least)


def _newest(
    cache: Cache,
    tokens: Array | np.ndarray | None,
    count: Array | np.ndarray | None,
    observe: int | None,
) -> tuple[Array | None, Array | None]:
    """The last `observe` of each row's tokens, right-padded, and how many there are."""
    if observe == 0:
        return None, None
    if tokens is None or np.ndim(tokens) != 2 or len(tokens) != len(cache.n) or not tokens.size:
        given = "None" if tokens is None else f"shape {list(np.shape(tokens))}"
        raise ValueError(
            f"tokens: got {given}; accepted: ({len(cache.n)}, T), as the policy observes queries"
        )
    held = np.asarray(cache.n)
    real = np.full(len(held), tokens.shape[1]) if count is None else np.asarray(count)
    if (real > np.minimum(held, tokens.shape[1])).any() or (real < 0).any():
        raise ValueError(
            f"count: got {real.tolist()}; accepted: 0 to {tokens.shape[1]}, and to the "
            f"{held.tolist()} tokens that the cache holds"
        )
    width = tokens.shape[1] if observe is None else min(observe, tokens.shape[1])
    start = np.maximum(real - width, 0)
    columns = np.minimum(start[:, None] + np.arange(width), tokens.shape[1] - 1)
    newest = np.take_along_axis(np.asarray(tokens), columns, axis=1)
    return jnp.asarray(newest, jnp.int32), jnp.asarray(real - start, jnp.int32)
