"""Softmax attention accumulated over blocks of keys, in plain JAX.

The online softmax of FlashAttention (arXiv:2205.14135): each block of C keys updates a running
maximum, the sum of exponentials and the weighted sum of values, all in float32 (float64 for float64
queries). Nothing here knows layouts: a mask says what each query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.protocol import Block

# Keys and queries taken at a time. On CPUs 512 keys of 128 channels and fewer keep their speed.
KEY_BLOCK = 512
QUERY_BLOCK = 256


class Scoring(NamedTuple):
    """From products to scores: scale, then soft_cap * tanh(score / soft_cap) if there is one."""

    scale: float
    soft_cap: float | None
    window: int | None

    def __call__(self, products: Array) -> Array:
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def visible(self, q_pos: Array, k_pos: Array) -> Array:
        """Causal, within the window and not dead: (..., T) and (..., C) -> (..., T, C)."""
        q_pos, k_pos = q_pos[..., :, None], k_pos[..., None, :]
        seen = (k_pos >= 0) & (k_pos <= q_pos)
        return seen if self.window is None else seen & (k_pos > q_pos - self.window)


class Partial(NamedTuple):
    """Attention over the keys seen so far, in the accumulation dtype."""

    peak: Array  # (B, K, G, T) largest score, -inf if none was seen
    total: Array  # (B, K, G, T) sum of exp(score - peak)
    weighted: Array  # (B, K, G, T, HV) sum of exp(score - peak) * value


def empty(q: Array, value_dim: int) -> Partial:
    """Nothing seen yet, for q (B, K, G, T, H)."""
    rows, dtype = q.shape[:-1], accumulation_dtype(q)
    return Partial(
        jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, value_dim), dtype)
    )


def accumulation_dtype(q: Array) -> jnp.dtype:
    """float32, or float64 for float64 queries."""
    return jnp.promote_types(q.dtype, jnp.float32)


def update(
    seen: Partial, q: Array, k: Array, v: Array, visible: Array, scoring: Scoring
) -> Partial:
    """Add the keys of a block.

    Args:
      seen: the keys before.
      q: (B, K, G, T, H).
      k, v: (B, K, C, H) and (B, K, C, HV); may hold anything where nothing sees them.
      visible: bool, broadcastable to (B, K, T, C).
      scoring: scale and cap.
    """
    # In the dtype of the operands, accumulated in float32: widening a block of the cache first
    # would write it out once more.
    dtype = jnp.promote_types(q.dtype, k.dtype)
    contract = partial(jnp.einsum, preferred_element_type=accumulation_dtype(q))
    scores = scoring(contract("bkgth,bkch->bkgtc", q.astype(dtype), k.astype(dtype)))
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
    peak = jnp.maximum(seen.peak, scores.max(-1))
    base = jnp.where(peak == -jnp.inf, 0.0, peak)  # -inf - -inf is NaN
    weights = jnp.exp(scores - base[..., None])
    shrink = jnp.exp(seen.peak - base)
    # 0 * NaN is NaN, so that values nobody sees must go, too.
    v = jnp.where(visible.any(axis=2)[..., None], v, 0)
    added = contract("bkgtc,bkch->bkgth", weights.astype(dtype), v.astype(dtype))
    return Partial(
        peak,
        seen.total * shrink + weights.sum(-1),
        seen.weighted * shrink[..., None] + added,
    )


def finish(seen: Partial, sink_logits: Array | None = None) -> tuple[Array, Array]:
    """out (B, K, G, T, HV) and LSE (B, K, G, T); a row that saw nothing gives 0, -inf.

    sink_logits (N,) are scores without a value: they take weight, and count in the LSE.
    """
    peak, total, weighted = seen
    if sink_logits is not None:
        sink = sink_logits.astype(peak.dtype).reshape(1, *peak.shape[1:3], 1)
        top = jnp.maximum(peak, sink)
        shrink = jnp.exp(peak - top)
        peak, weighted = top, weighted * shrink[..., None]
        total = total * shrink + jnp.exp(sink - top)
    out = weighted / jnp.where(total == 0, 1.0, total)[..., None]
    return out, jnp.log(total) + jnp.where(total == 0, 0.0, peak)


def attend_positions(
    seen: Partial, q: Array, q_pos: Array, block: Block, scoring: Scoring
) -> Partial:
    """Add keys of any number S, a block at a time; blocks that no query sees cost nothing.

    Reverse-differentiable, with scores computed again in the backward pass.

    Args:
      seen: the keys before.
      q: (B, K, G, T, H).
      q_pos: (B, T).
      block: k (B, K, S, H), v (B, K, S, HV), pos broadcastable to (B, K, S).
      scoring: scale, cap and window.
    """
    pos = jnp.broadcast_to(block.pos, (q.shape[0], block.pos.shape[1], block.k.shape[2]))
    width = KEY_BLOCK
    if block.k.shape[2] <= width:
        return update(
            seen, q, block.k, block.v, scoring.visible(q_pos[:, None], pos), scoring
        )
    k, v = (_stack_blocks(x, width, 0) for x in (block.k, block.v))
    pos = _stack_blocks(pos, width, -1)

    @jax.checkpoint
    def add(seen: Partial, keys: tuple[Array, Array, Array]) -> tuple[Partial, None]:
        k, v, pos = keys
        visible = scoring.visible(q_pos[:, None], pos)
        return jax.lax.cond(
            visible.any(),
            lambda seen: update(seen, q, k, v, visible, scoring),
            lambda seen: seen,
            seen,
        ), None

    return jax.lax.scan(add, seen, (k, v, pos))[0]


def _stack_blocks(x: Array, width: int, fill: int) -> Array:
    """Cut axis 2 into blocks: (B, K, S, ...) -> (S / width rounded up, B, K, width, ...)."""
    short = -x.shape[2] % width
    x = jnp.pad(x, [(0, short) if axis == 2 else (0, 0) for axis in range(x.ndim)],
                constant_values=fill)
    x = x.reshape(*x.shape[:2], -1, width, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)


def group_queries(q: Array, kv_heads: int) -> Array:
    """q (B, T, N, H) -> (B, K, G, T, H)."""
    batch, tokens, heads, dim = q.shape
    return q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def ungroup(x: Array) -> Array:
    """(B, K, G, T, ...) -> (B, T, N, ...)."""
    batch, kv_heads, group, tokens, *rest = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(batch, tokens, kv_heads * group, *rest)


def over_query_blocks(
    attend: Callable[[Array, Array], tuple[Array, Array]], q: Array, q_pos: Array
) -> tuple[Array, Array]:
    """attend(q, q_pos) -> out, lse for q (B, K, G, T, H) and q_pos (B, T), QUERY_BLOCK at a time."""
    batch, kv_heads, group, tokens, dim = q.shape
    if tokens <= QUERY_BLOCK:
        return attend(q, q_pos)
    short = -tokens % QUERY_BLOCK
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, short), (0, 0)))
    q_pos = jnp.pad(q_pos, ((0, 0), (0, short)), constant_values=-1)
    q = jnp.moveaxis(q.reshape(batch, kv_heads, group, -1, QUERY_BLOCK, dim), 3, 0)
    q_pos = jnp.moveaxis(q_pos.reshape(batch, -1, QUERY_BLOCK), 1, 0)
    out, lse = jax.lax.map(lambda block: attend(*block), (q, q_pos))
    out = jnp.moveaxis(out, 0, 3).reshape(batch, kv_heads, group, -1, out.shape[-1])
    lse = jnp.moveaxis(lse, 0, 3).reshape(batch, kv_heads, group, -1)
    return out[..., :tokens, :], lse[..., :tokens]
