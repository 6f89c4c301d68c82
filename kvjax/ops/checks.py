"""What the public functions ask of their arguments. Below them nothing is checked again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from kvjax.cache import Sight
from kvjax.ops.online import ScoreRule
from kvjax.ops.stored import Stored


def check_heads(
    q: Array, k: Array, v: Array, axes: int, *, codes: bool = False, pages: bool = False
) -> None:
    """q with that many axes, (B, ..., N, H), against k (B, K, S, H) and v (B, K, S, HV).

    `codes`: k and v may be 8-bit integers. `pages`: they are pages, not rows.
    """
    for name, array, wanted in (("q", q, axes), ("k", k, 4), ("v", v, 4)):
        kinds = jnp.issubdtype(array.dtype, jnp.floating) or (
            codes and name != "q" and array.dtype == jnp.int8
        )
        if array.ndim != wanted or not kinds:
            raise ValueError(f"{name} is {describe(array)}; accepted are floats of {wanted} axes")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v is {describe(v)}; accepted beside k {describe(k)} is the same in all but the last "
            f"axis"
        )
    rows = pages or q.shape[0] == k.shape[0]
    if not rows or q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[1]:
        raise ValueError(
            f"q is {describe(q)}; accepted beside k {describe(k)} are "
            f"{'' if pages else f'{k.shape[0]} rows, '}a multiple of {k.shape[1]} heads, and head "
            f"dim {k.shape[-1]}"
        )


def check_scales(k: Array, v: Array, k_scale: Array | None, v_scale: Array | None) -> None:
    """Scales of one shape beside 8-bit k and v: (), (K,), or the first axes of k. Else none."""
    coded = k.dtype.itemsize == 1
    if (v.dtype.itemsize == 1) != coded:
        raise ValueError(f"v is {describe(v)}; accepted beside k {describe(k)} is the same dtype")
    shapes = [(), k.shape[1:2], k.shape[:3]]
    if k_scale is not None:
        shapes = [shape for shape in shapes if shape == k_scale.shape] or shapes
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        given = "None" if scale is None else describe(scale)
        if coded and (scale is None or scale.shape not in shapes):
            accepted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{name} is {given}; accepted beside k {describe(k)} is float32 {accepted}"
            )
        if not coded and scale is not None:
            raise ValueError(f"{name} is {given}; accepted beside k {describe(k)} is None")


def check_slots(stored: Stored, lengths: Array, batch: int, heads: int | None = None) -> None:
    """Lengths, as in `check_lengths`, and a page_table that has a page for each live slot."""
    table = stored.page_table
    if table is not None and (table.ndim != 2 or len(table) != batch or table.dtype != jnp.int32):
        raise ValueError(
            f"page_table is {describe(table)}; accepted are int32 ({batch}, max_pages)"
        )
    check_lengths(lengths, batch, stored.capacity, heads)
    # Inside jit values cannot be seen.
    if table is None or isinstance(table, Tracer) or isinstance(lengths, Tracer):
        return
    pages, longest = np.asarray(table), np.asarray(lengths).reshape(batch, -1).max(1)
    num_pages, _, size, _ = stored.keys[0].shape
    needed = np.arange(pages.shape[1]) < -(-longest // size)[:, None]
    if (needed & ((pages < 0) | (pages >= num_pages))).any():
        raise ValueError(
            f"page_table={pages.tolist()}; accepted are 0 to {num_pages - 1} for the pages that "
            f"lengths={longest.tolist()} take"
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
