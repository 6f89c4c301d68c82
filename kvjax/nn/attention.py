"""One attention module; MHA, GQA and MQA are settings of it.

MHA is kv_heads == query_heads (arXiv:1706.03762), MQA is kv_heads == 1 (arXiv:1911.02150), and GQA
all between (arXiv:2305.13245). Query head n reads KV head n // (query_heads // kv_heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache import Block, LayerCache, Sight
from kvjax.nn.norm import NormConfig
from kvjax.nn.rope import Rope
from kvjax.nn.shared import Shared
from kvjax.ops import attend, prefill_attention


@dataclass(frozen=True)
class AttentionConfig:
    """Settings of one attention layer.

    Attributes:
      d_model: D, width of the residual stream.
      query_heads, kv_heads: N and K; K divides N.
      key_dim, value_dim: H and HV, channels per head of keys (and queries) and of values.
      qkv_bias, out_bias: whether the projections carry biases.
      fused: one kernel for q, k and v, its output axis being [N*H | K*H | K*HV]. A layer that
        shares has q alone either way.
      qk_norm: RMSNorm of q and k before RoPE: "head" over each head's H channels with one shared
        scale (Qwen3), "full" over all heads' channels at once (OLMo-2), None for none.
      norm: the kind and epsilon of that norm.
      rope: rotary embedding, or None.
      window: keys each query sees, its own included; None for all.
      chunk: a query sees only keys of its own chunk of so many positions (Llama 4); None for no
        chunks. Not beside a window.
      shares_with: the layer before this one, by its index in the model, whose keys and values this
        one reads instead of making its own (arXiv:2405.12981); None for its own. See `nn.sharing`.
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
    chunk: int | None = None
    shares_with: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    scale: float | None = None

    # What a cache keeps are keys and values, and none of them a rope key beside a latent.
    rope_key = False

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide query_heads={self.query_heads}")
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"chunk: got {self.chunk} beside a window of {self.window}; accepted: one of them"
            )

    @property
    def value_heads(self) -> int:
        """Heads of values that a cache keeps: as many as of keys."""
        return self.kv_heads

    @property
    def span(self) -> int | None:
        """The most keys a query sees: the window, or the chunk; None for all."""
        return self.chunk if self.window is None else self.window

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v in the projections: (N*H, K*H, K*HV)."""
        return (
            self.query_heads * self.key_dim,
            self.kv_heads * self.key_dim,
            self.kv_heads * self.value_dim,
        )

    def build(self, dtype: DTypeLike, rngs: nnx.Rngs) -> Attention:
        """The module."""
        return Attention(self, dtype=dtype, rngs=rngs)


class Attention(nnx.Module):
    """Causal self-attention: `y, cache = module(x, positions, cache)`."""

    def __init__(self, config: AttentionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(
            nnx.Linear, param_dtype=dtype, kernel_init=nnx.initializers.normal(0.02), rngs=rngs
        )
        self.config = config
        widths = config.qkv_widths
        makes_keys = config.shares_with is None
        if not makes_keys:
            self.q = linear(config.d_model, widths[0], use_bias=config.qkv_bias)
        elif config.fused:
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
            if makes_keys:
                self.k_norm = config.norm.build(k_width, dtype, rngs)
        if config.sinks:
            self.sink_logits = nnx.Param(jnp.zeros((config.query_heads,), dtype))

    @overload
    def __call__(self, x: Array, positions: Array, cache: Shared) -> tuple[Array, Shared]: ...

    @overload
    def __call__(
        self, x: Array, positions: Array, cache: LayerCache | None = None
    ) -> tuple[Array, LayerCache | None]: ...

    def __call__(
        self, x: Array, positions: Array, cache: LayerCache | Shared | None = None
    ) -> tuple[Array, LayerCache | Shared | None]:
        """Attend the cached tokens and the T new ones, and append the new ones to the cache.

        Args:
          x: (B, T, D).
          positions: (B, T) int32, absolute; a row's new tokens are consecutive, and -1 marks its
            padding on the right.
          cache: the layer's cache, holding each row's tokens before `positions`; None attends x
            alone (training, or scoring a whole text). `Shared` where other layers read the same:
            fresh for the layer that makes keys and values, and what that one returned for them.

        Returns:
          y (B, T, D), and the cache with the new tokens (None if none was given), or `Shared`,
          which its last reader has yet to close.

        Raises:
          ValueError: the layer makes no keys and values, and was not given those of another; or it
            makes them, and was given those of another.
        """
        if not isinstance(cache, Shared):
            y, shared = self(x, positions, Shared(cache))
            return shared.close(y)
        self._check_source(cache)
        if self.config.shares_with is None:
            q, k, v = self.heads(x)
            k, v = (jnp.swapaxes(part, 1, 2) for part in (self.rotate(k, positions), v))
            cache = cache.take(Block(k, v, positions[:, None, :]))
        else:
            q = self.queries(x)
        out = self._attend(q, positions, cache)
        return self.o(out.reshape(*out.shape[:2], -1)), cache

    def _check_source(self, shared: Shared) -> None:
        producer = self.config.shares_with
        if producer is None and shared.new is not None:
            raise ValueError(
                "cache: got the keys and values of another layer; accepted by a layer that makes "
                "its own: its cache, or None"
            )
        if producer is not None and shared.new is None:
            raise ValueError(
                f"cache: got one to write to; accepted by a layer that shares with layer "
                f"{producer}: what that layer returned, a Shared with its keys and values"
            )

    def _attend(self, unrotated: Array, positions: Array, shared: Shared) -> Array:
        """Output (B, T, N, HV) of unrotated queries (B, T, N, H) over what `shared` holds."""
        q, settings = self.rotate(unrotated, positions), self.settings
        if shared.cache is None:
            k, v = shared.record
            return prefill_attention(q, k, v, lengths=shared.count, **settings)
        q_sinks = self.sink_queries(unrotated, positions, shared.cache.sight)
        settings |= {"q_sinks": q_sinks, "new": shared.uncached}
        out, _ = attend(q, shared.cache, positions, **settings)
        return out

    def sink_queries(self, unrotated: Array, positions: Array, sight: Sight) -> Array | None:
        """Queries (B, T, N, H) as a re-indexed cache's first tokens are seen from; None for others.

        `unrotated` are those of `queries`.
        """
        if not sight.reindexed or self.config.rope is None:
            return None
        return self.rotate(unrotated, sight.place(positions))

    @property
    def settings(self) -> dict[str, Any]:
        """What `attend` is to be told beside queries and cache."""
        c = self.config
        return {
            "window": c.window,
            "chunk": c.chunk,
            "sink_logits": self.sink_logits[...] if c.sinks else None,
            "soft_cap": c.soft_cap,
            "scale": c.scale,
        }

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """x (B, T, D) -> normed and rotated q (B, T, N, H), k (B, T, K, H), and v (B, T, K, HV).

        Raises:
          ValueError: the layer shares another's keys and values, and makes none.
        """
        q, k, v = self.heads(x)
        return self.rotate(q, positions), self.rotate(k, positions), v

    def rotate(self, part: Array, positions: Array) -> Array:
        """q or k (B, T, N or K, H) at positions (B, T); as it is where the layer has no rope."""
        rope = self.config.rope
        return part if rope is None else rope(part, positions)

    def queries(self, x: Array) -> Array:
        """x (B, T, D) -> normed q (B, T, N, H), before it is rotated."""
        if self.config.shares_with is None:
            return self.heads(x)[0]
        return self._normed(self.q(x), "q_norm")

    def heads(self, x: Array) -> tuple[Array, Array, Array]:
        """What `project` gives, before it is rotated."""
        c = self.config
        if c.shares_with is not None:
            raise ValueError(
                f"heads: got a layer that reads the keys and values of layer {c.shares_with} and "
                f"makes none; accepted: one without shares_with, or queries"
            )
        if c.fused:
            q_width, k_width, _ = c.qkv_widths
            q, k, v = jnp.split(self.qkv(x), [q_width, q_width + k_width], axis=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        v = v.reshape(*x.shape[:2], c.kv_heads, c.value_dim)
        return self._normed(q, "q_norm"), self._normed(k, "k_norm"), v

    def _normed(self, part: Array, norm: str) -> Array:
        """Projected q or k (B, T, heads * H) -> (B, T, heads, H), through the norm of that name."""
        c = self.config
        if c.qk_norm == "full":
            part = getattr(self, norm)(part)
        part = part.reshape(*part.shape[:2], -1, c.key_dim)
        return getattr(self, norm)(part) if c.qk_norm == "head" else part
