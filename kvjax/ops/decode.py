"""Decode attention: the newest token of each row against the row's cached slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax import Array

from kvjax.ops import reference, xla
from kvjax.ops.checks import check_heads, check_lengths, check_sinks, score_rule
from kvjax.ops.implementations import choose

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"xla": xla.decode, "reference": reference.decode}


@overload
def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    window: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
) -> Array: ...


@overload
def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    window: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
) -> tuple[Array, Array]: ...


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
    """Attention of each row's newest token over the row's live slots.

    The query is the token in slot lengths - 1. Reads as many blocks as the longest row has (in a
    window: as the window has), whatever the capacity S; slots past a row's length may hold
    anything. Where KV heads hold different numbers of tokens, as after an eviction head by head,
    each is as long as `lengths` says, and the longest decides on the blocks.

    Args:
      q: (B, N, H); query head n reads KV head n // (N // K).
      k, v: (B, K, S, H) and (B, K, S, HV), the cache as it lies; any float dtypes.
      lengths: (B,) integers, live slots of each row, the newest token included; 0 to S. Or (B, K),
        of each of its KV heads.
      window: slots the query sees, its own included; None for all. Refused beside lengths (B, K),
        since slots then count no positions.
      sink_logits: (N,) learned scores that enter the softmax with value 0, and the LSE (gpt-oss,
        arXiv:2508.10925); None for none.
      soft_cap: a score s becomes soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv:2408.00118).
      scale: factor of q.k, before the soft cap; None for H ** -0.5.
      return_lse: whether to return the LSE, too.
      implementation: None for the best here, "xla" (blockwise), or "reference".

    Returns:
      out (B, N, HV) in q's dtype; with return_lse also lse (B, N) float32, the natural log of the
      sum of exponentials. A row or head of length 0 has out 0 and lse -inf (or its sinks).

    Raises:
      ValueError: for arguments that do not fit; it says what was given and what is accepted.
    """
    check_heads(q, k, v, axes=3)
    check_lengths(lengths, batch=q.shape[0], most=k.shape[2], heads=k.shape[1])
    if lengths.ndim > 1 and window is not None:
        raise ValueError(
            f"window={window}; accepted beside lengths (B, K) is None: heads that hold tokens of "
            f"their own have them in slots that count no positions"
        )
    check_sinks(sink_logits, q.shape[1])
    rule = score_rule(q.shape[-1], scale=scale, soft_cap=soft_cap, window=window)
    run = choose(implementation, IMPLEMENTATIONS)
    # (B, 1) or (B, K), as the implementations take them.
    heads = jnp.asarray(lengths).reshape(q.shape[0], -1)
    out, lse = run(q, k, v, heads, sink_logits, rule)
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out
