"""Online softmax: attention taken block by block (arXiv:1805.02867, arXiv:2205.14135).

Every op of this package except the references goes through `update`. Queries are grouped by the KV
head they read, `q (B, K, G, T, H)`, so that a block `k (B, K, C, H)` serves its G query heads as it
is. Sums and maxima are float32 (float64 for float64 inputs), and so are the results of products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Block


@dataclass(frozen=True)
class ScoreRule:
    """How a query scores a key, and which keys it sees; hashable, hence static under jit.

    Attributes:
      scale: factor of the dot product.
      soft_cap: a score s becomes soft_cap * tanh(s / soft_cap); None for no cap.
      window: keys each query sees, its own included; None for all before it.
      sink_tokens: first keys of a row that every query sees, beside those of its window.
      chunk: a query sees only keys of its own chunk of so many positions; None for no chunks.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    sink_tokens: int = 0
    chunk: int | None = None

    def scores(self, q: Array, k: Array) -> Array:
        """Of q (B, K, G, T, H) and k (B, K, C, H), (B, K, G, T, C)."""
        scores = self.products(q, k) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return scores

    def products(self, q: Array, k: Array) -> Array:
        """q (B, K, G, T, H), k (B, K, C, H) -> (B, K, G, T, C)."""
        return product("bkgth,bkch->bkgtc", q, k)

    def mix(self, weights: Array, v: Array) -> Array:
        """weights (B, K, G, T, C), v (B, K, C, HV) -> (B, K, G, T, HV)."""
        return product("bkgtc,bkch->bkgth", weights, v)

    def visible(self, q_positions: Array, k_positions: Array) -> Array:
        """q_positions (B, T), k_positions broadcastable to (B, K, C) -> bool (B, K or 1, 1, T, C).

        A position of -1 is dead: as a key it is not seen, as a query it sees nothing.
        """
        query = q_positions[:, None, None, :, None]
        key = k_positions[:, :, None, None, :]
        seen = (key >= 0) & (key <= query)
        if self.window is not None:
            seen &= (key > query - self.window) | (key < self.sink_tokens)
        if self.chunk is not None:
            seen &= key // self.chunk == query // self.chunk
        return seen

    def oldest(self, q_positions: Array) -> Array:
        """The position, (), before which none of the queries at positions (B, T) sees a key."""
        oldest = jnp.zeros_like(q_positions)
        if self.sink_tokens:
            return oldest.min()
        if self.window is not None:
            oldest = jnp.maximum(q_positions - self.window + 1, 0)
        if self.chunk is not None:
            oldest = jnp.maximum(oldest, q_positions // self.chunk * self.chunk)
        # Padding sees none at all.
        return jnp.where(q_positions >= 0, oldest, jnp.iinfo(oldest.dtype).max).min()


class Partial(NamedTuple):
    """Attention over the keys seen so far, not yet divided by the sum of weights.

    shift (B, K, G, T): largest score, -inf where no key was seen. total (B, K, G, T): sum of
    exp(score - shift). weighted (B, K, G, T, HV): sum of exp(score - shift) * v.
    """

    shift: Array
    total: Array
    weighted: Array


def product(subscripts: str, a: Array, b: Array) -> Array:
    """einsum in the wider type of the two, with a result of float32 or wider.

    Neither operand is rounded, and float32 stays float32 on devices with faster, coarser products.
    """
    operand = jnp.promote_types(a.dtype, b.dtype)
    return jnp.einsum(
        subscripts,
        a.astype(operand),
        b.astype(operand),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(operand, jnp.float32),
    )


def group_queries(q: Array, kv_heads: int) -> Array:
    """q (B, T, N, H) -> (B, K, G, T, H); query head n reads KV head n // G."""
    batch, tokens, heads, dim = q.shape
    return jnp.moveaxis(q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim), 1, 3)


def ungroup(x: Array) -> Array:
    """(B, K, G, T, ...) -> (B, T, N, ...)."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def start(q: Array, value_dim: int, sink_logits: Array | None) -> Partial:
    """The partial of no keys, or of the learned sinks (N,): keys with these scores and value 0."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    rows = q.shape[:4]
    weighted = jnp.zeros((*rows, value_dim), dtype)
    if sink_logits is None:
        return Partial(jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), weighted)
    sinks = sink_logits.astype(dtype).reshape(1, *rows[1:3], 1)
    shift = jax.lax.stop_gradient(sinks)
    total = jnp.exp(sinks - _or_zero(shift))
    return Partial(jnp.broadcast_to(shift, rows), jnp.broadcast_to(total, rows), weighted)


def update(seen: Partial, q: Array, q_positions: Array, block: Block, rule: ScoreRule) -> Partial:
    """Take one block of keys into account; only the pairs that `rule` lets see each other."""
    visible = rule.visible(q_positions, block.pos)
    scores = jnp.where(visible, rule.scores(q, block.k), -jnp.inf)
    # The shift cancels in every result, so no gradient needs to pass through it.
    shift = jax.lax.stop_gradient(jnp.maximum(seen.shift, scores.max(-1)))
    weights = jnp.exp(scores - _or_zero(shift)[..., None])
    decay = jnp.exp(seen.shift - _or_zero(shift))
    # A weight of 0 does not silence a dead slot that holds NaN or inf.
    values = jnp.where(visible.any((2, 3))[..., None], block.v, 0)
    # Products of bf16 operands are several times faster: the weights follow q and v.
    factors = weights.astype(jnp.promote_types(q.dtype, values.dtype))
    return Partial(
        shift,
        seen.total * decay + weights.sum(-1),
        seen.weighted * decay[..., None] + rule.mix(factors, values),
    )


def finish(seen: Partial) -> tuple[Array, Array]:
    """Output (B, K, G, T, HV) and LSE (B, K, G, T); 0 and -inf where no key was seen."""
    some = seen.total > 0
    total = jnp.where(some, seen.total, 1)
    lse = jnp.where(some, _or_zero(seen.shift) + jnp.log(total), -jnp.inf)
    return seen.weighted / total[..., None], lse


def _or_zero(shift: Array) -> Array:
    """-inf - -inf is NaN: where nothing was seen, 0 serves."""
    return jnp.where(jnp.isneginf(shift), 0, shift)
