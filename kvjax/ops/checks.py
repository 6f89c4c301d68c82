"""The rules of the attention ops, checked once at the public functions."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

AXES = {"q": "(B, ..., N, H)", "k": "(B, K, S, H)", "v": "(B, K, S, HV)"}


def check_heads(q: Array, k: Array, v: Array, axes: int) -> None:
    """Shapes and dtypes of q (`axes` axes, N and H last) against k and v."""
    for name, array, wanted in (("q", q, axes), ("k", k, 4), ("v", v, 4)):
        if array.ndim != wanted:
            raise ValueError(f"{name} has shape {array.shape}; {AXES[name]} is needed")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; a float type is needed")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k {k.shape} and v {v.shape} must agree in (B, K, S)")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in B")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in H")
    if q.shape[-2] % k.shape[1]:
        raise ValueError(f"q has {q.shape[-2]} heads; a multiple of k's {k.shape[1]} is needed")


def check_settings(
    heads: int, window: int | None, sink_logits: Array | None, soft_cap: float | None
) -> None:
    """Window, learned sinks and soft cap for N = `heads` query heads."""
    if window is not None and window < 1:
        raise ValueError(f"window={window}: at least 1 key (the query's own), or None for all")
    if sink_logits is not None and sink_logits.shape != (heads,):
        raise ValueError(f"sink_logits has shape {sink_logits.shape}; ({heads},) is needed")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap}: more than 0, or None for no cap")


def check_lengths(lengths: Array, batch: int, capacity: int) -> None:
    """lengths (B,) of whole numbers, 0 to the capacity where their values are known."""
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths is {lengths.dtype}{list(lengths.shape)}; int32[{batch}] is needed"
        )
    if isinstance(lengths, jax.core.Tracer):
        return
    if bool(((lengths < 0) | (lengths > capacity)).any()):
        raise ValueError(f"lengths={lengths.tolist()}: 0 to {capacity} is accepted")


def choose(implementation: str | None, best: str, refusals: Mapping[str, str | None]) -> str:
    """The implementation to run.

    Args:
      implementation: what the caller asked for; None for `best`.
      best: the choice where the caller has none.
      refusals: per implementation, why it cannot serve this call, or None if it can.
    """
    if implementation is None:
        return best
    if implementation not in refusals:
        raise ValueError(
            f"implementation={implementation!r}: accepted are None, {', '.join(map(repr, refusals))}"
        )
    if refusals[implementation] is not None:
        raise ValueError(f"implementation={implementation!r}: {refusals[implementation]}")
    return implementation
