"""Prefill attention: causal self-attention of one chunk of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.protocol import Block
from kvjax.ops import blockwise, reference
from kvjax.ops.blockwise import Scoring
from kvjax.ops.checks import check_heads, check_lengths, check_settings, choose


def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: Array | None = None,
    window: int | None = None,
    sink_logits: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """Causal attention of T tokens among themselves; reverse-differentiable.

    Args:
      q: (B, T, N, H), a float type. Query head n reads KV head n // (N // K).
      k, v: (B, K, T, H) and (B, K, T, HV), of the same tokens.
      lengths: (B,) int32, real tokens of each row, the rest being padding; None for T. What comes
        out at padding is 0.
      window, sink_logits, soft_cap, scale, return_lse: as in `decode_attention`.
      implementation: None for the best one here; "cudnn" (on a GPU, through
        `jax.nn.dot_product_attention`, for f16 and bf16 without sinks or cap); "xla" (plain JAX,
        blockwise: never T * T scores at once); or "reference".

    Returns:
      out (B, T, N, HV) in q's dtype, and with return_lse the LSE (B, T, N) in float32, -inf
      where a query saw nothing.

    Raises:
      ValueError: for shapes or settings outside the above, or an implementation that cannot
        serve them, with the reason.
    """
    check_heads(q, k, v, axes=4)
    batch, tokens, heads, dim = q.shape
    if k.shape[2] != tokens:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in T")
    check_settings(heads, window, sink_logits, soft_cap)
    if lengths is not None:
        check_lengths(jnp.asarray(lengths), batch, tokens)
    lengths = jnp.asarray(tokens if lengths is None else lengths, jnp.int32)
    lengths = jnp.broadcast_to(lengths, (batch,))
    scoring = Scoring(dim**-0.5 if scale is None else scale, soft_cap, window)
    refusal = cudnn_refusal(jax.default_backend(), q, v, soft_cap, sink_logits)
    chosen = choose(
        implementation,
        best="xla" if refusal else "cudnn",
        refusals={"reference": None, "xla": None, "cudnn": refusal},
    )
    out, lse = IMPLEMENTATIONS[chosen](q, k, v, lengths, scoring, sink_logits)
    out = out.astype(q.dtype)
    return (out, lse) if return_lse else out


def cudnn_refusal(
    platform: str, q: Array, v: Array, soft_cap: float | None, sink_logits: Array | None
) -> str | None:
    """Why cuDNN's fused attention cannot serve a call, or None if it can."""
    if platform != "gpu":
        return f"cuDNN needs a GPU; the default back end is {platform}"
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN takes float16 and bfloat16, not {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > 128 or v.shape[-1] != q.shape[-1]:
        return (
            "cuDNN takes equal head dims of K and V, multiples of 8 up to 128; "
            f"not {q.shape[-1]} and {v.shape[-1]}"
        )
    if soft_cap is not None or sink_logits is not None:
        return "cuDNN's attention here has neither soft_cap nor sink_logits"
    return None


def _positions(tokens: int, lengths: Array) -> Array:
    """(B, T) int32, -1 at padding."""
    steps = jnp.arange(tokens, dtype=jnp.int32)
    return jnp.where(steps < lengths[:, None], steps, -1)


def _reference(
    q: Array, k: Array, v: Array, lengths: Array, scoring: Scoring, sink_logits: Array | None
) -> tuple[Array, Array]:
    positions = _positions(q.shape[1], lengths)
    return reference.attention(
        q,
        k,
        v,
        scoring.visible(positions, positions),
        scale=scoring.scale,
        soft_cap=scoring.soft_cap,
        sink_logits=sink_logits,
    )


def _xla(
    q: Array, k: Array, v: Array, lengths: Array, scoring: Scoring, sink_logits: Array | None
) -> tuple[Array, Array]:
    positions = _positions(q.shape[1], lengths)
    block = Block(k, v, positions[:, None])

    def attend(q: Array, q_pos: Array) -> tuple[Array, Array]:
        seen = blockwise.empty(q, v.shape[-1])
        seen = blockwise.attend_positions(seen, q, q_pos, block, scoring)
        return blockwise.finish(seen, sink_logits)

    grouped = blockwise.group_queries(q, k.shape[1])
    out, lse = blockwise.over_query_blocks(attend, grouped, positions)
    return blockwise.ungroup(out), blockwise.ungroup(lse)


def _cudnn(
    q: Array, k: Array, v: Array, lengths: Array, scoring: Scoring, sink_logits: Array | None
) -> tuple[Array, Array]:
    del sink_logits  # refused above
    out, lse = jax.nn.dot_product_attention(
        q,
        jnp.swapaxes(k, 1, 2),
        jnp.swapaxes(v, 1, 2),
        scale=scoring.scale,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        # jax counts the keys before the query's own.
        local_window_size=None if scoring.window is None else (scoring.window - 1, 0),
        implementation="cudnn",
        return_residual=True,
    )
    # What cuDNN leaves at padding is not promised.
    real = _positions(q.shape[1], lengths)[..., None] >= 0
    return jnp.where(real[..., None], out, 0), jnp.where(real, lse, -jnp.inf)


IMPLEMENTATIONS = {"reference": _reference, "xla": _xla, "cudnn": _cudnn}
