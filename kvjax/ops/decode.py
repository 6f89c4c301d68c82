"""Decode attention: the newest token of each row against the row's cached slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax import Array

from kvjax.ops import mosaic, reference, xla
from kvjax.ops.checks import check_heads, check_scales, check_sinks, check_slots, score_rule
from kvjax.ops.devices import current_gpu
from kvjax.ops.implementations import choose
from kvjax.ops.online import ScoreRule
from kvjax.ops.stored import Stored

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "mosaic_gpu": mosaic.decode,
    "xla": xla.decode,
    "reference": reference.decode,
}


@overload
def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    page_table: Array | None = ...,
    window: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    scale: float | None = ...,
    k_scale: Array | None = ...,
    v_scale: Array | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
    interpret: bool = ...,
) -> Array: ...


@overload
def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    page_table: Array | None = ...,
    window: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    scale: float | None = ...,
    k_scale: Array | None = ...,
    v_scale: Array | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
    interpret: bool = ...,
) -> tuple[Array, Array]: ...


def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    page_table: Array | None = None,
    window: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention of each row's newest token over the row's live slots.

    The query is the token in slot lengths - 1. Reads as many blocks as the longest row has (in a
    window: as the window has), whatever the capacity S; slots past a row's length may hold
    anything. Where KV heads hold different numbers of tokens, as after an eviction head by head,
    each is as long as `lengths` says, and the longest decides on the blocks.

    Args:
      q: (B, N, H); query head n reads KV head n // (N // K).
      k, v: (B, K, S, H) and (B, K, S, HV), the cache as it lies; any float dtypes, or int8. Beside
        a page_table, pages (num_pages, K, P, H) and (num_pages, K, P, HV).
      lengths: (B,) integers, live slots of each row, the newest token included; 0 to S. Or (B, K),
        of each of its KV heads.
      page_table: (B, max_pages) int32, the pages of each row in order, S = max_pages * P; behind
        the live ones, anything. None for rows of slots.
      window: slots the query sees, its own included; None for all. Refused beside lengths (B, K),
        since slots then count no positions.
      sink_logits: (N,) learned scores that enter the softmax with value 0, and the LSE (gpt-oss,
        arXiv:2508.10925); None for none.
      soft_cap: a score s becomes soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv:2408.00118).
      scale: factor of q.k, before the soft cap; None for H ** -0.5.
      k_scale, v_scale: float32 factors of 8-bit k and v: () for all, (K,) for each head, (B, K, S)
        for each token, or in pages (num_pages, K, P). None for k and v that are numbers.
      return_lse: whether to return the LSE, too.
      implementation: None for the best here, "mosaic_gpu" (a Pallas kernel; NVIDIA GPUs),
        "xla" (blockwise), or "reference". The kernel has no derivative.
      interpret: run the kernel as a simulation, on any device.

    Returns:
      out (B, N, HV) in q's dtype; with return_lse also lse (B, N) float32, the natural log of the
      sum of exponentials. A row or head of length 0 has out 0 and lse -inf (or its sinks).

    Raises:
      ValueError: for arguments that do not fit, or an implementation that cannot serve them; it
        says what was given and what is accepted.
    """
    check_heads(q, k, v, axes=3, codes=True, pages=page_table is not None)
    check_scales(k, v, k_scale, v_scale)
    stored = Stored((k,), v, page_table, k_scale, v_scale)
    check_slots(stored, lengths, batch=q.shape[0], heads=k.shape[1])
    if lengths.ndim > 1 and window is not None:
        raise ValueError(
            f"window={window}; accepted beside lengths (B, K) is None: heads that hold tokens of "
            f"their own have them in slots that count no positions"
        )
    check_sinks(sink_logits, q.shape[1])
    rule = score_rule(q.shape[-1], scale=scale, soft_cap=soft_cap, window=window)
    out, lse = decode_stored(q, stored, lengths, sink_logits, rule, implementation, interpret)
    return (out, lse) if return_lse else out


def decode_stored(
    q: Array,
    stored: Stored,
    lengths: Array,
    sink_logits: Array | None,
    rule: ScoreRule,
    implementation: str | None,
    interpret: bool,
) -> tuple[Array, Array]:
    """Out in q's dtype and LSE of checked arguments, by the implementation that is to serve."""
    if interpret and implementation not in (None, "mosaic_gpu"):
        raise ValueError(
            f"interpret=True: accepted beside implementation={implementation!r} is False"
        )
    gpu = mosaic.INTERPRETED if interpret else current_gpu()
    obstacles = {"mosaic_gpu": mosaic.obstacle(gpu, q, stored)}
    if interpret:
        implementation = "mosaic_gpu"
    run = choose(implementation, IMPLEMENTATIONS, obstacles, gpu is not None)
    if run is mosaic.decode:
        run = partial(run, gpu=gpu, interpret=interpret)
    # (B, 1) or (B, K), as the implementations take them.
    heads = jnp.asarray(lengths).reshape(q.shape[0], -1)
    out, lse = run(q, stored, heads, sink_logits, rule)
    return out.astype(q.dtype), lse
