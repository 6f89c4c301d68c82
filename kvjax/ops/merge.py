"""Exact merge of attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from kvjax.ops.checks import describe


def merge(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> tuple[Array, Array]:
    """Attention over all keys, from attention over each of several parts of them.

    With m = max_i lse_i: out = sum_i exp(lse_i - m) out_i / sum_i exp(lse_i - m), and
    lse = m + log sum_i exp(lse_i - m). Serves split-K, cascades (arXiv:2501.01005) and rings.
    A learned sink belongs into one part only.

    Args:
      outs: the parts' outputs, each (..., HV).
      lses: their LSEs, each (...), natural log; -inf where a part has no keys and its out is moot.

    Returns:
      out (..., HV) in the dtype of `outs`, and lse (...) float32 (float64 for float64 LSEs); 0 and
      -inf where no part has keys.

    Raises:
      ValueError: if there is no part, or shapes differ between the parts or between out and lse.
    """
    fitting = len(outs) == len(lses) > 0 and all(
        out.shape == outs[0].shape and out.shape[:-1] == lse.shape
        for out, lse in zip(outs, lses, strict=True)
    )
    if not fitting:
        raise ValueError(
            f"outs are {', '.join(map(describe, outs)) or 'none'} and lses "
            f"{', '.join(map(describe, lses)) or 'none'}; accepted are one or more outs of one "
            f"shape (..., HV), each with an lse (...)"
        )
    parts, lse = jnp.stack(list(outs)), jnp.stack(list(lses))
    lse = lse.astype(jnp.promote_types(lse.dtype, jnp.float32))
    most = lse.max(0)
    shift = jnp.where(jnp.isneginf(most), 0, most)  # -inf - -inf is NaN
    weights = jnp.exp(lse - shift)
    total = weights.sum(0)
    # A part without keys may hold anything, and 0 * NaN is NaN.
    parts = jnp.where((weights > 0)[..., None], parts, 0).astype(lse.dtype)
    out = (weights[..., None] * parts).sum(0) / jnp.where(total > 0, total, 1)[..., None]
    return out.astype(outs[0].dtype), shift + jnp.log(total)


def merge_splits(outs: Array, lses: Array) -> tuple[Array, Array]:
    """As `merge`, of f32 parts (splits, ..., HV) and (splits, ...), in two reductions.

    For what a kernel leaves to be merged: each is a kernel of its own on a GPU, where `merge` takes
    three. It has no derivative.
    """

    def both(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        most = jnp.maximum(a[0], b[0])
        finite = jnp.where(most > -jnp.inf, most, 0.0)
        return most, a[1] * jnp.exp(a[0] - finite) + b[1] * jnp.exp(b[0] - finite)

    live = lses > -jnp.inf
    parts = lses, jnp.where(live, 1.0, 0.0)
    most, total = lax.reduce(parts, (jnp.float32(-jnp.inf), jnp.float32(0)), both, (0,))
    some = total > 0
    lse = jnp.where(some, most + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    weights = jnp.exp(lses - jnp.where(some, lse, 0.0))
    return (jnp.where(live[..., None], outs, 0.0) * weights[..., None]).sum(0), lse
