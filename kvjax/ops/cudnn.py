"""Prefill by cuDNN's flash attention, as `jax.nn.dot_product_attention` offers it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.ops.devices import Gpu
from kvjax.ops.online import ScoreRule


def obstacle(
    gpu: Gpu | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    chunk: int | None,
    soft_cap: float | None,
    sink_logits: Array | None,
    return_lse: bool,
) -> str | None:
    """Why it cannot serve such a call on that GPU; None if it can."""
    if gpu is None or gpu.capability < (8, 0):
        return "it needs a CUDA GPU of compute capability 8.0 or later"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"it needs q, k and v all in bf16 or all in f16, not {q.dtype}, {k.dtype}, {v.dtype}"
    widest = 256 if gpu.capability >= (9, 0) else 128
    dim = q.shape[-1]
    if dim % 8 or dim > widest or v.shape[-1] != dim:
        return (
            f"it needs one head dim for k and v, a multiple of 8 up to {widest}, not {dim} and "
            f"{v.shape[-1]}"
        )
    if chunk is not None:
        return "it has windows but no chunks"
    if soft_cap is not None or sink_logits is not None:
        return "it has neither a soft cap nor learned sinks"
    if return_lse:
        return f"it rounds the LSE to {q.dtype}"
    return None


def prefill(
    q: Array, k: Array, v: Array, lengths: Array, sink_logits: Array | None, rule: ScoreRule
) -> tuple[Array, None]:
    """As `reference.prefill`, without its LSE and with out in q's dtype."""
    out = jax.nn.dot_product_attention(
        q,
        jnp.swapaxes(k, 1, 2),
        jnp.swapaxes(v, 1, 2),
        scale=rule.scale,
        is_causal=True,
        key_value_seq_lengths=lengths.astype(jnp.int32),
        # jax counts the keys before the query's own.
        local_window_size=None if rule.window is None else (rule.window - 1, 0),
        implementation="cudnn",
    )
    # What it leaves where a query sees no key is not defined. The newest key query i may see is
    # that of token min(i, length - 1).
    i = jnp.arange(q.shape[1])
    newest = jnp.minimum(i, lengths[:, None] - 1)
    oldest = 0 if rule.window is None else jnp.maximum(i - rule.window + 1, 0)
    return jnp.where((newest >= oldest)[:, :, None, None], out, 0), None
