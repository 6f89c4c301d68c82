"""Decode attention: one query a row against its cached keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.protocol import Block
from kvjax.ops import blockwise, reference
from kvjax.ops.blockwise import KEY_BLOCK, Scoring
from kvjax.ops.checks import check_heads, check_lengths, check_settings, choose


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    window: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of each row's newest token over its first `lengths` cached keys.

    Costs one pass over the live keys and values of the longest row (with a window, over the
    windows of all rows); the rest of the capacity is not read.

    Args:
      q: (B, N, H), a float type. Query head n reads KV head n // (N // K).
      k, v: (B, K, S, H) and (B, K, S, HV), the cache as it lies. Slots at or past a row's length
        may hold anything, NaN included.
      lengths: (B,) int32, 0 to S, counting the newest token. A row of length 0 gives 0.
      window: keys the query sees, its own included; None for all.
      sink_logits: (N,), learned scores that take weight and have no value (gpt-oss).
      soft_cap: scores become soft_cap * tanh(score / soft_cap).
      scale: of the scores; None for H ** -0.5.
      return_lse: also return the natural log of the sum of exponentials of the scores.
      implementation: None for the best one here, "xla" (plain JAX, blockwise), or "reference".

    Returns:
      out (B, N, HV) in q's dtype, and with return_lse the LSE (B, N) in float32, -inf where a row
      saw nothing.

    Raises:
      ValueError: for shapes, lengths or settings outside the above.
    """
    check_heads(q, k, v, axes=3)
    check_settings(q.shape[1], window, sink_logits, soft_cap)
    check_lengths(jnp.asarray(lengths), q.shape[0], k.shape[2])
    scoring = Scoring(q.shape[-1] ** -0.5 if scale is None else scale, soft_cap, window)
    run = IMPLEMENTATIONS[choose(implementation, "xla", dict.fromkeys(IMPLEMENTATIONS))]
    out, lse = run(q, k, v, jnp.asarray(lengths, jnp.int32), scoring, sink_logits)
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def _reference(
    q: Array, k: Array, v: Array, lengths: Array, scoring: Scoring, sink_logits: Array | None
) -> tuple[Array, Array]:
    slots = jnp.arange(k.shape[2])
    slots = jnp.where(slots < lengths[:, None], slots, -1)
    out, lse = reference.attention(
        q[:, None],
        k,
        v,
        scoring.visible(lengths[:, None] - 1, slots),
        scale=scoring.scale,
        soft_cap=scoring.soft_cap,
        sink_logits=sink_logits,
    )
    return out[:, 0], lse[:, 0]


def _xla(
    q: Array, k: Array, v: Array, lengths: Array, scoring: Scoring, sink_logits: Array | None
) -> tuple[Array, Array]:
    capacity = k.shape[2]
    width = min(KEY_BLOCK, capacity)
    q = blockwise.group_queries(q[:, None], k.shape[1])
    newest = (lengths - 1)[:, None]

    def add(i: Array, seen: blockwise.Partial) -> blockwise.Partial:
        block = slice_block(k, v, lengths, i, width)
        visible = scoring.visible(newest[:, None], block.pos)
        return blockwise.update(seen, q, block.k, block.v, visible, scoring)

    first = 0
    if scoring.window is not None:
        first = jnp.maximum(jnp.min(lengths) - scoring.window, 0) // width
    last = (jnp.max(lengths) + width - 1) // width
    seen = jax.lax.fori_loop(first, last, add, blockwise.empty(q, v.shape[-1]))
    out, lse = blockwise.finish(seen, sink_logits)
    return blockwise.ungroup(out)[:, 0], blockwise.ungroup(lse)[:, 0]


def slice_block(k: Array, v: Array, lengths: Array, i: Array, width: int) -> Block:
    """Slots i * width onwards of k and v (B, K, S, ...), pos (B, 1, width) being -1 where dead."""
    # The last block starts early enough to be whole; the slots seen before are dead in it.
    start = jnp.minimum(i * width, k.shape[2] - width)
    slots = start + jnp.arange(width, dtype=jnp.int32)
    live = (slots >= i * width) & (slots < lengths[:, None])
    return Block(
        jax.lax.dynamic_slice_in_dim(k, start, width, axis=2),
        jax.lax.dynamic_slice_in_dim(v, start, width, axis=2),
        jnp.where(live, slots, -1)[:, None, :],
    )


IMPLEMENTATIONS = {"reference": _reference, "xla": _xla}
