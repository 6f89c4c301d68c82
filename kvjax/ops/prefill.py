"""Causal self-attention within one chunk, for training and for the first tokens of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import jax.numpy as jnp
from jax import Array

from kvjax.ops import cudnn, reference, xla
from kvjax.ops.checks import check_heads, check_lengths, check_sinks, describe, score_rule
from kvjax.ops.devices import current_gpu
from kvjax.ops.implementations import choose

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "cudnn": cudnn.prefill,
    "xla": xla.prefill,
    "reference": reference.prefill,
}


@overload
def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: Array | None = ...,
    window: int | None = ...,
    chunk: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
) -> Array: ...


@overload
def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: Array | None = ...,
    window: int | None = ...,
    chunk: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
) -> tuple[Array, Array]: ...


def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: Array | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """Causal attention of a chunk's T tokens over the chunk itself; reverse-differentiable.

    Query i sees the keys j with j <= i, j < lengths[b] and, in a window, j > i - window, or, in
    chunks, j // chunk == i // chunk. Tiles in which no query sees a key are skipped, and the
    backward pass computes the scores again, tile by tile (arXiv:2205.14135).

    Args:
      q: (B, T, N, H); query head n reads KV head n // (N // K).
      k, v: (B, K, T, H) and (B, K, T, HV).
      lengths: (B,) integers, real tokens of each right-padded row, 0 to T; None for T.
      window: keys each query sees, its own included; None for all.
      chunk: tokens of a chunk beyond which nothing is seen (Llama 4); None for none.
      sink_logits, soft_cap, scale, return_lse: as in `decode_attention`.
      implementation: None for the best here, "cudnn" (a CUDA GPU; bf16 or f16; no chunks, sinks,
        soft cap or LSE), "xla" (blockwise), or "reference".

    Returns:
      out (B, T, N, HV) in q's dtype; with return_lse also lse (B, T, N) float32, natural log. A
      query that sees no key has out 0 and lse -inf (or its sinks); padding gives something finite.

    Raises:
      ValueError: for arguments that do not fit; it says what was given and what is accepted.
    """
    check_heads(q, k, v, axes=4)
    batch, tokens, heads, dim = q.shape
    if k.shape[2] != tokens:
        raise ValueError(f"k is {describe(k)}; accepted beside q {describe(q)} are {tokens} tokens")
    lengths = jnp.full((batch,), tokens, jnp.int32) if lengths is None else jnp.asarray(lengths)
    check_lengths(lengths, batch, most=tokens)
    check_sinks(sink_logits, heads)
    rule = score_rule(dim, scale=scale, soft_cap=soft_cap, window=window, chunk=chunk)
    gpu = current_gpu()
    obstacle = cudnn.obstacle(
        gpu,
        q,
        k,
        v,
        chunk=chunk,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
        return_lse=return_lse,
    )
    run = choose(implementation, IMPLEMENTATIONS, {"cudnn": obstacle}, gpu is not None)
    out, lse = run(q, k, v, lengths, sink_logits, rule)
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out
