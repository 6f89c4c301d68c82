"""Products of queries and weights with factors of keys and values (TPA, arXiv:2501.06425).

A key of head n is the mean over ranks r of a[r, n] * b[r], where a is N and b is H wide, and so is
a value. Neither is ever made: a score is the mean of a[r, n] * (q . b[r]).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.ops.checks import describe
from kvjax.ops.online import ScoreRule, product


@dataclass(frozen=True)
class FactorRule(ScoreRule):
    """How a query scores the factors of a key, and weighs those of a value."""

    def products(self, q: Array, k: Array) -> Array:
        """q (B, 1, N, T, H), k (B, R, C, N + H) -> (B, 1, N, T, C)."""
        a, b = _split(k, q.shape[2])
        return (_of_heads(a) * product("bkgth,brch->bkgtrc", q, b)).mean(-2)

    def mix(self, weights: Array, v: Array) -> Array:
        """weights (B, 1, N, T, C), v (B, R, C, N + HV) -> (B, 1, N, T, HV)."""
        a, b = _split(v, weights.shape[2])
        shares = _of_heads(a).astype(weights.dtype) * weights[..., None, :]
        return product("bkgtrc,brch->bkgth", shares, b) / v.shape[1]


def check_factors(q: Array, k: Array, v: Array) -> None:
    """q (B, T, N, H) against factors k (B, R_K, C, N + H) and v (B, R_V, C, N + HV)."""
    batch, _, heads, dim = q.shape
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4 or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {describe(array)}; accepted are floats of 4 axes")
    rows = {len(q), len(k), len(v)}
    if len(rows) > 1 or k.shape[-1] != heads + dim or v.shape[-1] <= heads:
        raise ValueError(
            f"k is {describe(k)} and v {describe(v)}; accepted beside q {describe(q)} are {batch} "
            f"rows, of keys {heads} + {dim} columns, and of values more than {heads}"
        )


def _split(factors: Array, heads: int) -> tuple[Array, Array]:
    """(B, R, C, N + H) -> over heads (B, R, C, N), and over channels (B, R, C, H)."""
    return factors[..., :heads], factors[..., heads:]


def _of_heads(a: Array) -> Array:
    """(B, R, C, N) -> (B, 1, N, 1, R, C)."""
    return jnp.moveaxis(a, 3, 1)[:, None, :, None]
