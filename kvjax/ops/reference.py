"""Attention written as its definition: all scores at once, one softmax, one weighted sum.

The oracle of every other implementation, in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.ops.online import ScoreRule
from kvjax.ops.stored import Stored


def attention(
    q: Array, k: Array, v: Array, visible: Array, sink_logits: Array | None, rule: ScoreRule
) -> tuple[Array, Array]:
    """Softmax attention of every query over the keys visible to it.

    Args:
      q: (B, T, N, H).
      k, v: (B, K, S, H) and (B, K, S, HV); query head n reads KV head n // (N // K).
      visible: bool (B, T, K or 1, S).
      sink_logits: (N,) scores of one more key a head, with value 0, that every query sees; or None.
      rule: scale and soft cap; its window and chunk must be in `visible` already.

    Returns:
      out (B, T, N, HV) and lse (B, T, N), the natural log of the sum of exponentials; a query that
      sees nothing has out 0 and lse -inf.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    batch, tokens, heads, dim = q.shape
    grouped = (batch, tokens, k.shape[1], heads // k.shape[1])
    q, k, v = q.astype(dtype).reshape(*grouped, dim), k.astype(dtype), v.astype(dtype)
    scores = rule.scale * _contract("btkgh,bksh->btkgs", q, k)
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    scores = jnp.where(visible[:, :, :, None], scores, -jnp.inf)
    if sink_logits is not None:
        sinks = jnp.broadcast_to(sink_logits.astype(dtype).reshape(grouped[2:]), grouped)
        scores = jnp.concatenate([scores, sinks[..., None]], -1)
    # With `where`, a query that sees nothing gets weights 0 rather than NaN.
    weights = jax.nn.softmax(scores, axis=-1, where=scores > -jnp.inf)[..., : k.shape[2]]
    # A weight of 0 does not silence a slot that holds NaN.
    v = jnp.where(visible.any(1)[..., None], v, 0)
    out = _contract("btkgs,bksh->btkgh", weights, v)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return out.reshape(batch, tokens, heads, -1), lse.reshape(batch, tokens, heads)


@partial(jax.jit, static_argnames="rule")
def decode(
    q: Array, stored: Stored, lengths: Array, sink_logits: Array | None, rule: ScoreRule
) -> tuple[Array, Array]:
    """One query a row, q (B, N, H), the newest of the row's or head's `lengths` (B, K or 1)."""
    slots = jnp.arange(stored.capacity)
    visible = slots < lengths[..., None]
    if rule.window is not None:
        visible &= slots >= lengths[..., None] - rule.window
    k, v = stored.reader()(jnp.int32(0), stored.capacity)
    out, lse = attention(q[:, None], k, v, visible[:, None], sink_logits, rule)
    return out[:, 0], lse[:, 0]


@partial(jax.jit, static_argnames="rule")
def prefill(
    q: Array, k: Array, v: Array, lengths: Array, sink_logits: Array | None, rule: ScoreRule
) -> tuple[Array, Array]:
    """Query i sees the keys j <= i with j < lengths[b], within its window and its chunk."""
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[2])
    visible = (j <= i) & (j < lengths[:, None, None])
    if rule.window is not None:
        visible &= j > i - rule.window
    if rule.chunk is not None:
        visible &= j // rule.chunk == i // rule.chunk
    return attention(q, k, v, visible[:, :, None], sink_logits, rule)


def _contract(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)
