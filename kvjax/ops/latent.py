"""Decode attention over latents, with the up-projections absorbed into queries and outputs."""

from __future__ import annotations

from typing import Literal, overload

import jax.numpy as jnp
from jax import Array

from kvjax.ops.checks import check_sinks, check_slots, describe, score_rule
from kvjax.ops.decode import decode_stored
from kvjax.ops.stored import Stored


@overload
def latent_decode_attention(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    lengths: Array,
    *,
    scale: float,
    page_table: Array | None = ...,
    window: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
    interpret: bool = ...,
) -> Array: ...


@overload
def latent_decode_attention(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    lengths: Array,
    *,
    scale: float,
    page_table: Array | None = ...,
    window: int | None = ...,
    sink_logits: Array | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
    interpret: bool = ...,
) -> tuple[Array, Array]: ...


def latent_decode_attention(
    q_latent: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    lengths: Array,
    *,
    scale: float,
    page_table: Array | None = None,
    window: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention of each row's newest token over latents (MLA, arXiv:2405.04434, section 2.1.2).

    All heads read the same record of a token: a latent, which is both key and value, and a rope
    key. out = softmax(scale * (q_latent . latent + q_rope . k_rope)) . latent; neither keys nor
    values of single heads are made.

    Args:
      q_latent: (B, N, L), queries with the keys' up-projection absorbed.
      q_rope: (B, N, R), rotated.
      latent, k_rope: (B, S, L) and (B, S, R), the cache as it lies; or pages (num_pages, P, L) and
        (num_pages, P, R).
      lengths: (B,) integers, live slots of each row, the newest token included; 0 to S.
      scale: factor of the scores: of the heads before absorption, (H + R) ** -0.5 or what a model
        makes of it. It cannot be told from the shapes here.
      page_table, window, sink_logits, soft_cap, return_lse, implementation, interpret: as in
        `decode_attention`.

    Returns:
      out (B, N, L) in q_latent's dtype, to be multiplied with the values' up-projection; with
      return_lse also lse (B, N) float32, natural log.

    Raises:
      ValueError: for arguments that do not fit; it says what was given and what is accepted.
    """
    _check(q_latent, q_rope, latent, k_rope, paged=page_table is not None)
    stored = Stored((latent[:, None], k_rope[:, None]), None, page_table)
    check_slots(stored, lengths, batch=len(q_latent))
    check_sinks(sink_logits, q_latent.shape[1])
    rule = score_rule(stored.key_dim, scale=scale, soft_cap=soft_cap, window=window)
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    out, lse = decode_stored(q, stored, lengths, sink_logits, rule, implementation, interpret)
    return (out, lse) if return_lse else out


def _check(q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, *, paged: bool) -> None:
    named = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "k_rope": k_rope}
    for name, array in named.items():
        if array.ndim != 3 or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} is {describe(array)}; accepted are floats of 3 axes")
    if q_rope.shape[:2] != q_latent.shape[:2] or q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"q_rope is {describe(q_rope)}; accepted beside q_latent {describe(q_latent)} is the "
            f"same in all but the last axis"
        )
    if k_rope.shape[:2] != latent.shape[:2] or k_rope.dtype != latent.dtype:
        raise ValueError(
            f"k_rope is {describe(k_rope)}; accepted beside latent {describe(latent)} is the same "
            f"in all but the last axis"
        )
    for query, key in (("q_latent", "latent"), ("q_rope", "k_rope")):
        if named[query].shape[-1] != named[key].shape[-1]:
            raise ValueError(
                f"{query} is {describe(named[query])}; accepted beside {key} "
                f"{describe(named[key])} are {named[key].shape[-1]} columns"
            )
    if not paged and len(latent) != len(q_latent):
        raise ValueError(
            f"latent is {describe(latent)}; accepted beside q_latent {describe(q_latent)} are "
            f"{len(q_latent)} rows"
        )
