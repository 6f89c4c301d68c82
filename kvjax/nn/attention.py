"""One attention module; MHA, GQA and MQA are settings of it.

MHA is kv_heads == query_heads (arXiv:1706.03762), MQA is kv_heads == 1 (arXiv:1911.02150), and GQA
all between (arXiv:2305.13245). Query head n reads KV head n // (query_heads // kv_heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache import Block, LayerCache, Record
from kvjax.nn.norm import NormConfig
from kvjax.nn.rope import Rope
from kvjax.ops import attend, prefill_attention


@dataclass(frozen=True)
class AttentionConfig:
    """Settings of one attention layer.

    Attributes:
      d_model: D, width of the residual stream.
      query_heads, kv_heads: N and K; K divides N.
      key_dim, value_dim: H and HV, channels per head of keys (and queries) and of values.
      qkv_bias, out_bias: whether the projections carry biases.
      fused: one kernel for q, k and v, its output axis being [N*H | K*H | K*HV].
      qk_norm: RMSNorm of q and k before RoPE: "head" over each head's H channels with one shared
        scale (Qwen3), "full" over all heads' channels at once (OLMo-2), None for none.
      norm: the kind and epsilon of that norm.
      rope: rotary embedding, or None.
      window: keys each query sees, its own included; None for all.
      sinks: each head has a learned logit that takes part in its softmax and has no value
        (gpt-oss; a softmax that may attend to nothing).
      soft_cap: scores become soft_cap * tanh(score / soft_cap).
      scale: factor of the scores; None for H ** -0.5.
    """

    d_model: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False
    qk_norm: Literal["head", "full"] | None = None
    norm: NormConfig = NormConfig()
    rope: Rope | None = None
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide query_heads={self.query_heads}")

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v in the projections: (N*H, K*H, K*HV)."""
        return (
            self.query_heads * self.key_dim,
            self.kv_heads * self.key_dim,
            self.kv_heads * self.value_dim,
        )


class Attention(nnx.Module):
    """Causal self-attention: `y, cache = module(x, positions, cache)`."""

    def __init__(self, config: AttentionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(
            nnx.Linear, param_dtype=dtype, kernel_init=nnx.initializers.normal(0.02), rngs=rngs
        )
        self.config = config
        widths = config.qkv_widths
        if config.fused:
            self.qkv = linear(config.d_model, sum(widths), use_bias=config.qkv_bias)
        else:
            self.q, self.k, self.v = (
                linear(config.d_model, width, use_bias=config.qkv_bias) for width in widths
            )
        self.o = linear(
            config.query_heads * config.value_dim, config.d_model, use_bias=config.out_bias
        )
        if config.qk_norm:
            q_width, k_width = widths[:2] if config.qk_norm == "full" else (config.key_dim,) * 2
            self.q_norm = config.norm.build(q_width, dtype, rngs)
            self.k_norm = config.norm.build(k_width, dtype, rngs)
        if config.sinks:
            self.sink_logits = nnx.Param(jnp.zeros((config.query_heads,), dtype))

    def __call__(
        self, x: Array, positions: Array, cache: LayerCache | None = None
    ) -> tuple[Array, LayerCache | None]:
        """Attend the cached tokens and the T new ones, and append the new ones to the cache.

        Args:
          x: (B, T, D).
          positions: (B, T) int32, absolute; a row's new tokens are consecutive, and -1 marks its
            padding on the right.
          cache: the layer's cache, holding each row's tokens before `positions`; None attends x
            alone (training, or scoring a whole text).

        Returns:
          y (B, T, D), and the cache with the new tokens (None if none was given).
        """
        settings = self.settings
        q, k, v = self.project(x, positions)
        count = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
        record = Record(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        if cache is None:
            out = prefill_attention(q, *record, lengths=count, **settings)
        elif x.shape[1] == 1:
            cache = cache.append(record, count)
            out, _ = attend(q, cache, positions, **settings)
        else:
            chunk = Block(*record, positions[:, None, :])
            out, _ = attend(q, cache, positions, new=(chunk,), **settings)
            # Without the barrier XLA may write before it has read, and then copies the cache.
            out, cache = jax.lax.optimization_barrier((out, cache))
            cache = cache.append(record, count)
        return self.o(out.reshape(*out.shape[:2], -1)), cache

    @property
    def settings(self) -> dict[str, Any]:
        """What `attend` is to be told beside queries and cache."""
        c = self.config
        return {
            "window": c.window,
            "sink_logits": self.sink_logits[...] if c.sinks else None,
            "soft_cap": c.soft_cap,
            "scale": c.scale,
        }

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """x (B, T, D) -> normed and rotated q (B, T, N, H), k (B, T, K, H), and v (B, T, K, HV)."""
        c = self.config
        if c.fused:
            q_width, k_width, _ = c.qkv_widths
            q, k, v = jnp.split(self.qkv(x), [q_width, q_width + k_width], axis=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        if c.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (
            part.reshape(*x.shape[:2], heads, dim)
            for part, heads, dim in (
                (q, c.query_heads, c.key_dim),
                (k, c.kv_heads, c.key_dim),
                (v, c.kv_heads, c.value_dim),
            )
        )
        if c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if c.rope is not None:
            q, k = c.rope(q, positions), c.rope(k, positions)
        return q, k, v
