"""Evicting from one full cache by many policies and budgets, of which queries are observed once.

`kvjax.engine.compress` makes the same caches, one policy and budget a call: each call runs the
observed tokens through the model again, and is compiled anew for each budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache import Cache, LayerCache
from kvjax.engine.compress import RAGGED_MULTIPLE
from kvjax.engine.generate import CHUNK
from kvjax.engine.steps import prefill
from kvjax.evict import POLICIES, Adaptive, Policy, Protected, Queries, Seen, choose, observe
from kvjax.nn import Attention, Decoder
from kvjax.ops import slot_positions

STEP = 8  # in which budgets are tried where heads keep different numbers of tokens


class Evictor:
    """A cache of rows of one length, in layers that keep all tokens.

    Args:
      model: the decoder that filled the cache.
      cache: what to evict from; it is left as it is.
      queries: of each layer, from `observed`; of all tokens, for policies such as H2O.
    """

    def __init__(self, model: Decoder, cache: Cache, queries: Sequence[Queries]):
        self.model, self.cache, self._queries = model, cache, queries
        self.tokens = int(cache.n.max())
        self._scores: dict[tuple[Callable, int | None], list[Array]] = {}

    def indices(self, policy: Policy, budget: int) -> list[Array]:
        """Slots that each layer keeps, (B, K or 1, m).

        Raises:
          ValueError: a budget that the policy does not take.
        """
        least = policy.protected.least(budget)
        if budget < least:
            raise ValueError(f"budget: got {budget}; accepted: at least the {least} protected")
        layers = self.cache.layers
        shares = policy.budgets(len(layers), self.tokens, budget, least)
        # Not jitted: there are more budgets than it takes to compile for.
        chosen = (
            choose(Seen(layer, pos, None, None, {}), scores, share, policy.protected, policy.heads)
            for layer, pos, scores, share in zip(
                layers, self._positions, self._scored(policy), shares, strict=True
            )
        )
        return [_trimmed(slots, share) for slots, share in zip(chosen, shares, strict=True)]

    @cached_property
    def _positions(self) -> list[Array]:
        return [_positions(layer) for layer in self.cache.layers]

    def _scored(self, policy: Policy) -> list[Array]:
        rule = policy.score, policy.observe
        if rule not in self._scores:
            self._scores[rule] = [
                _score(layer.attention, cache, queries, *rule)
                for layer, cache, queries in zip(
                    self.model.layers, self.cache.layers, self._queries, strict=True
                )
            ]
        return self._scores[rule]

    def kept(self, indices: Sequence[Array], slots: int) -> Cache:
        """The cache of what is named, with so many slots in all, of which new tokens take the rest.

        One step is compiled for caches of all budgets, if they are made with as many slots.
        """
        wide = (
            jnp.pad(part, ((0, 0), (0, 0), (0, slots - part.shape[2])), constant_values=-1)
            for part in indices
        )
        return Cache(tuple(map(_keep, self.cache.layers, wide)))

    def nbytes(self, indices: Sequence[Array]) -> int:
        """Bytes of a cache of what is named alone, tables included."""
        made = jax.eval_shape(lambda parts: list(map(_keep, self.cache.layers, parts)), indices)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))

    def even_bytes(self, slots: int) -> int:
        """Bytes of a cache in which each head has so many slots and positions of its own."""
        heads = jax.eval_shape(self.cache.layers[0].block, 0).k.shape[1]
        even = jax.ShapeDtypeStruct((len(self.cache.n), heads, slots), jnp.int32)
        return self.nbytes([even] * len(self.cache.layers))


def filled(model: Decoder, tokens: np.ndarray, room: int, codec: str) -> Cache:
    """A dense cache of tokens (B, T), with room for more."""
    cache = model.init_cache(len(tokens), tokens.shape[1] + room, "dense", codec)
    return extended(model, cache, tokens)


def extended(model: Decoder, cache: Cache, tokens: np.ndarray) -> Cache:
    """The cache, which is taken over, with tokens (B, T) added."""
    for start in range(0, tokens.shape[1], CHUNK):
        part = tokens[:, start : start + CHUNK]
        count = np.full(len(part), part.shape[1], np.int32)
        _, cache = prefill(model, part, cache, count)
    cache.check()
    return cache


def copied(cache: Cache) -> Cache:
    """A cache of its own, for steps that take theirs over."""
    return jax.tree.map(jnp.copy, cache)


def observed(model: Decoder, cache: Cache, tokens: np.ndarray) -> list[Queries]:
    """Queries of each layer, of tokens (B, T) that are each row's newest in the cache."""
    return _observed(model, cache, tokens, np.full(len(tokens), tokens.shape[1], np.int32))


@jax.jit
def _observed(model: Decoder, cache: Cache, tokens: Array, count: Array) -> list[Queries]:
    return [seen.observed for seen in observe(model, cache, tokens, count)]


@partial(jax.jit, static_argnames=("score", "many"))
def _score(
    attention: Attention,
    cache: LayerCache,
    queries: Queries,
    score: Callable[[Seen], Array],
    many: int | None,
) -> Array:
    """Of one layer; `many` as in `Policy.observe`. Policies that need no queries ignore them."""
    newest = Queries(*(x[:, -(many or 0) :] for x in queries))
    seen = Seen(cache, slot_positions(cache), newest, attention.config.rope, attention.settings)
    return score(seen)


def _trimmed(slots: Array, share: int) -> Array:
    """Without the columns that no head needs, where heads differ."""
    if slots.shape[2] <= share:
        return slots
    most = int((slots >= 0).sum(2).max())
    return slots[:, :, : -(-most // RAGGED_MULTIPLE) * RAGGED_MULTIPLE]


@jax.jit
def _keep(layer: LayerCache, slots: Array) -> LayerCache:
    return layer.keep(slots)


@jax.jit
def _positions(layer: LayerCache) -> Array:
    return slot_positions(layer)


def random(seen: Seen) -> Array:
    """Numbers that say nothing, drawn anew for every layer."""
    first = seen.cache.block(jnp.int32(0)).k.astype(jnp.float32)
    seed = jax.lax.bitcast_convert_type(first.sum(), jnp.int32)
    shape = (*first.shape[:2], seen.pos.shape[2])
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0), seed), shape)


NARROW = {"observe": 8, "protected": Protected(recent=8)}
CONTROLS = {
    "random": Policy(random),
    "random, 4 first and 64 newest": Policy(random, protected=Protected(sinks=4, recent=64)),
}
CONTENDERS = {
    **POLICIES,
    "snapkv, window 8": replace(POLICIES["snapkv"], **NARROW),
    "pyramidkv, window 8": replace(POLICIES["pyramidkv"], **NARROW),
    **CONTROLS,
}


def fitting(evictor: Evictor, policy: Policy, budget: int, target: int) -> tuple[int, list[Array]]:
    """The slots to give a policy for about `target` bytes, and what it then keeps.

    The target is `even_bytes(budget)` of a cache in bf16. Policies with one set of positions for
    all heads take up to 1 % less. Where heads keep different numbers only trying tells: the most
    slots, in steps, that take at most 2 % more.

    Raises:
      ValueError: a budget that the policy does not take.
    """
    if not isinstance(policy.heads, Adaptive):
        first, second = evictor.even_bytes(1), evictor.even_bytes(2)
        slots = 1 + (target - first) // (second - first)
        return slots, evictor.indices(policy, slots)
    low, high = max(-(-policy.protected.least(budget) // STEP), 1), budget // STEP
    fits = low * STEP, evictor.indices(policy, low * STEP)
    if evictor.nbytes(fits[1]) > target * 1.02:
        raise ValueError(f"budget: {fits[0]} slots take more bytes than {budget} do evenly")
    while low < high:
        middle = (low + high + 1) // 2
        indices = evictor.indices(policy, middle * STEP)
        if evictor.nbytes(indices) <= target * 1.02:
            low, fits = middle, (middle * STEP, indices)
        else:
            high = middle - 1
    return fits
