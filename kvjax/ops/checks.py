"""What the public functions ask of their arguments. Below them nothing is checked again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from kvjax.cache import Sight
from kvjax.ops.online import ScoreRule


def check_heads(q: Array, k: Array, v: Array, axes: int) -> None:
    """q with that many axes, (B, ..., N, H), against k (B, K, S, H) and v (B, K, S, HV)."""
    for name, array, wanted in (("q", q, axes), ("k", k, 4), ("v", v, 4)):
        if array.ndim != wanted or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {describe(array)}; accepted are floats of {wanted} axes")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v is {describe(v)}; accepted beside k {describe(k)} is the same in all but the last "
            f"axis"
        )
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[1]:
        raise ValueError(
            f"q is {describe(q)}; accepted beside k {describe(k)} are {k.shape[0]} rows, a "
            f"multiple of {k.shape[1]} heads, and head dim {k.shape[-1]}"
        )


def check_lengths(lengths: Array, batch: int, most: int, heads: int | None = None) -> None:
    """(B,) integers from 0 to `most`, or (B, heads); inside jit their values cannot be seen."""
    shapes = [(batch,)] if heads is None else [(batch,), (batch, heads)]
    if lengths.shape not in shapes or not jnp.issubdtype(lengths.dtype, jnp.integer):
        accepted = " or ".join(map(str, shapes))
        raise ValueError(f"lengths is {describe(lengths)}; accepted are integers {accepted}")
    if isinstance(lengths, Tracer):
        return
    # numpy, for inside jit even the operations of jnp on known values are traced.
    known = np.asarray(lengths)
    if ((known < 0) | (known > most)).any():
        raise ValueError(f"lengths={known.tolist()}; accepted are 0 to {most}")


def check_sinks(sink_logits: Array | None, query_heads: int) -> None:
    if sink_logits is not None and sink_logits.shape != (query_heads,):
        raise ValueError(
            f"sink_logits is {describe(sink_logits)}; accepted are ({query_heads},), one for each "
            f"query head, or None"
        )


def check_q_sinks(q_sinks: Array | None, q: Array) -> None:
    if q_sinks is not None and (q_sinks.shape, q_sinks.dtype) != (q.shape, q.dtype):
        raise ValueError(
            f"q_sinks is {describe(q_sinks)}; accepted beside q is the same, {describe(q)}, or None"
        )


def score_rule(
    head_dim: int,
    *,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    chunk: int | None = None,
    sight: Sight = Sight(),
) -> ScoreRule:
    """The rule of these settings; scale None is head_dim ** -0.5.

    `sight`, of a cache that keeps less, narrows the window and lets first tokens be seen beside it.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}; accepted are 1 and more tokens, or None for no chunks")
    if window is not None and window < 1:
        raise ValueError(f"window={window}; accepted are 1 and more keys, or None for all")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap}; accepted are positive numbers, or None")
    factor = head_dim**-0.5 if scale is None else float(scale)
    if sight.window is not None:
        window = sight.window if window is None else min(window, sight.window)
    return ScoreRule(factor, soft_cap, window, sight.sink_tokens, chunk)


def describe(array: Array | jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}{list(array.shape)}"
