"""Merging attention over parts of the keys (split-K, cascades, sequence parallelism)."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def merge(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> tuple[Array, Array]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    Exact: o = sum_i exp(s_i - s) o_i with s = log sum_i exp(s_i).

    Args:
      outs: parts (..., HV) of one shape and dtype, normalised each by its own sum.
      lses: their natural-log sums of exponentials, (...); -inf for a part without keys.

    Returns:
      out (..., HV) in the parts' dtype, 0 where no part has keys, and its LSE (...), there -inf.
    """
    lses = jnp.stack(lses)
    outs = jnp.stack(outs)
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"outs {outs.shape} and lses {lses.shape} must agree in all but the last axis")
    peak = lses.max(axis=0)
    base = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(lses - base)
    total = weights.sum(axis=0)
    # A part without keys may hold anything.
    parts = jnp.where(lses[..., None] == -jnp.inf, 0, outs.astype(lses.dtype))
    mixed = (parts * weights[..., None]).sum(axis=0)
    out = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return out.astype(outs.dtype), jnp.log(total) + base
