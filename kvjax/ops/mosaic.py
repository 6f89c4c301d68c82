"""Decode attention by the kernels for GPUs: what they serve, and what surrounds them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.ops.devices import Gpu
from kvjax.ops.merge import merge_splits
from kvjax.ops.online import ScoreRule
from kvjax.ops.stored import Stored

# What is interpreted is planned for a GPU so small that few blocks do.
INTERPRETED = Gpu((9, 0), 4)


def obstacle(gpu: Gpu | None, q: Array, stored: Stored) -> str | None:
    """Why no kernel serves such a call on that GPU; None if one does."""
    if gpu is None:
        return "it needs an NVIDIA GPU, or interpret=True"
    from kvjax.kernels.mosaic_gpu import support

    return support.obstacle(
        gpu.capability,
        q.dtype,
        stored.keys[0].dtype,
        [part.shape[-1] for part in stored.keys],
        None if stored.values is None else stored.value_dim,
        stored.capacity,
        stored.page_size,
        stored.token_scales,
    )


def decode(
    q: Array,
    stored: Stored,
    lengths: Array,
    sink_logits: Array | None,
    rule: ScoreRule,
    *,
    gpu: Gpu,
    interpret: bool,
) -> tuple[Array, Array]:
    """As `reference.decode`, in float32. Splits of rows are merged here, and sinks added."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from kvjax.kernels.mosaic_gpu.choice import choose
    from kvjax.kernels.mosaic_gpu.plan import Shape
    from kvjax.kernels.mosaic_gpu.settings import Inputs
    from kvjax.kernels.mosaic_gpu.support import operand_type

    batch, heads, _ = q.shape
    kv_heads, capacity = stored.kv_heads, stored.capacity
    operand = operand_type(gpu.capability, q.dtype, stored.keys[0].dtype)
    assert operand is not None
    shape = Shape(
        batch=batch,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        key_dims=tuple(part.shape[-1] for part in stored.keys),
        value_dim=0 if stored.values is None else stored.value_dim,
        slots=capacity if rule.window is None else min(rule.window, capacity),
        operand=operand,
        stored=stored.keys[0].dtype,
        token_scales=stored.token_scales,
    )
    kernel, plan = choose(shape, *gpu)
    # A KV head's queries side by side, filled up to whole blocks.
    grouped = q.astype(operand).reshape(batch, kv_heads, shape.group, -1)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, -shape.group % plan.heads), (0, 0)))
    per_head = None if stored.token_scales else stored.k_scale
    parts = kernel(
        Inputs(
            q=tuple(jnp.split(grouped, np.cumsum(shape.key_dims)[:-1], axis=-1)),
            k=stored.keys,
            v=stored.values,
            lengths=lengths.astype(jnp.int32),
            page_table=stored.page_table,
            key_factor=None if per_head is None else jnp.broadcast_to(per_head, (kv_heads,)),
            k_scale=stored.k_scale if stored.token_scales else None,
            v_scale=stored.v_scale if stored.token_scales else None,
        ),
        plan,
        scale=rule.scale,
        soft_cap=rule.soft_cap,
        window=rule.window,
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )
    out, lse = (x[:, :, : shape.group] for x in merge_splits(parts.out, parts.lse))
    if stored.v_scale is not None and not stored.token_scales:
        out *= jnp.broadcast_to(stored.v_scale, (kv_heads,))[:, None, None]
    out, lse = out.reshape(batch, heads, -1), lse.reshape(batch, heads)
    return (out, lse) if sink_logits is None else _with_sinks(out, lse, sink_logits)


def _with_sinks(out: Array, lse: Array, sink_logits: Array) -> tuple[Array, Array]:
    """As if each head had seen one more key, of that score and value 0."""
    both = jnp.logaddexp(lse, sink_logits.astype(lse.dtype))
    share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - both))
    return out * share[..., None], both
