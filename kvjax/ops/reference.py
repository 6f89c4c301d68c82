"""Attention written out plainly, as the oracle of every other implementation.

The whole score matrix at once, one softmax, nothing clever; float32, or float64 for float64 input.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.ops.blockwise import accumulation_dtype


def attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: Array | None = None,
) -> tuple[Array, Array]:
    """Attention of q (B, T, N, H) over k (B, K, S, H) and v (B, K, S, HV).

    visible is bool (B, T, S). Returns out (B, T, N, HV) and LSE (B, T, N), not rounded; a query
    that sees nothing gives 0 and -inf.
    """
    dtype = accumulation_dtype(q)
    group = q.shape[2] // k.shape[1]
    keys = jnp.repeat(k.astype(dtype), group, axis=1)
    values = jnp.repeat(v.astype(dtype), group, axis=1)
    scores = jnp.einsum("btnh,bnsh->bnts", q.astype(dtype), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    if sink_logits is not None:
        # A sink is one more key, whose value is 0.
        sinks = jnp.broadcast_to(sink_logits.astype(dtype)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    seen = visible.any(axis=1)[:, None, :, None]
    out = jnp.einsum("bnts,bnsh->btnh", weights[..., : k.shape[2]], jnp.where(seen, values, 0))
    return out, jnp.swapaxes(lse, 1, 2)
