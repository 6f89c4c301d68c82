"""Grouped tied attention (GTA; Zadouri et al. 2025, arXiv:2505.21487)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache import Block, LayerCache, Record, Tied, with_rope_keys
from kvjax.nn.rope import Rope
from kvjax.nn.shared import Shared
from kvjax.ops import attend, prefill_attention


@dataclass(frozen=True)
class TiedAttentionConfig:
    """Settings of one layer of tied attention.

    Attributes:
      d_model: D, width of the residual stream.
      query_heads: N.
      tied_heads: K, heads that are keys and values at once; K divides N, and query head n reads
        head n // (N / K). One is a tied MQA, N a tied MHA.
      head_dim: H, channels of a head.
      rope: over the R channels of the rotated key that all heads share, R = rope.width; the paper
        has R = H / 2. Keys are the first H - R channels of a head and, behind them, that key.
      qkv_bias, out_bias: whether the projections carry biases.
      window: keys each query sees, its own included; None for all.
      scale: factor of the scores; None for H ** -0.5.
    """

    d_model: int
    query_heads: int
    tied_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    scale: float | None = None

    # What a cache keeps of a token as its keys: the rotated key.
    kv_heads = 1
    rope_key = True
    # Settings of other attention that there is nothing like here.
    shares_with = chunk = soft_cap = None

    def __post_init__(self) -> None:
        if self.tied_heads < 1 or self.query_heads % self.tied_heads:
            raise ValueError(
                f"tied_heads: got {self.tied_heads}; accepted: a divisor of {self.query_heads} "
                f"query heads"
            )
        if not 0 < self.rope.width < self.head_dim:
            raise ValueError(
                f"rope: got one of {self.rope.width} channels; accepted: fewer than the "
                f"{self.head_dim} of a head, which keys have in all"
            )

    @property
    def key_dim(self) -> int:
        """R, the key that a cache keeps."""
        return self.rope.width

    @property
    def value_heads(self) -> int:
        """K, heads of values that a cache keeps."""
        return self.tied_heads

    @property
    def value_dim(self) -> int:
        """H, the value that a cache keeps."""
        return self.head_dim

    @property
    def tied_dim(self) -> int:
        """Channels of a value that are its key, too: H - R."""
        return self.head_dim - self.rope.width

    @property
    def span(self) -> int | None:
        """The most keys that a query sees; None for all."""
        return self.window

    def build(self, dtype: DTypeLike, rngs: nnx.Rngs) -> TiedAttention:
        """The module."""
        return TiedAttention(self, dtype=dtype, rngs=rngs)


class TiedAttention(nnx.Module):
    """Causal self-attention with tied keys and values: `y, cache = module(x, positions, cache)`.

    A token leaves K H + R numbers behind, about half of GQA's. Keys are made of them block by
    block, where attention reads them.
    """

    def __init__(self, config: TiedAttentionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(
            nnx.Linear, param_dtype=dtype, kernel_init=nnx.initializers.normal(0.02), rngs=rngs
        )
        c = self.config = config
        width = c.query_heads * c.head_dim
        self.q = linear(c.d_model, width, use_bias=c.qkv_bias)
        self.kv = linear(c.d_model, c.tied_heads * c.head_dim, use_bias=c.qkv_bias)
        self.k_rope = linear(c.d_model, c.key_dim, use_bias=c.qkv_bias)
        self.o = linear(width, c.d_model, use_bias=c.out_bias)

    def __call__(
        self, x: Array, positions: Array, cache: LayerCache | None = None
    ) -> tuple[Array, LayerCache | None]:
        """Attend the cached tokens and the T new ones, and append the new ones to the cache.

        Args:
          x: (B, T, D).
          positions: (B, T) int32, absolute; a row's new tokens are consecutive, and -1 marks its
            padding on the right.
          cache: the layer's cache, whose keys are the rotated keys and whose values are tied; None
            attends x alone.

        Returns:
          y (B, T, D), and the cache with the new tokens, None if none was given.
        """
        q = self.q(x).reshape(*x.shape[:2], self.config.query_heads, -1)
        new = Block(*self.record(x, positions), positions[:, None])
        shared = Shared(cache).take(new)
        out = self._attend(q, positions, shared)
        return shared.close(self.o(out.reshape(*out.shape[:2], -1)))

    def _attend(self, unrotated: Array, positions: Array, shared: Shared) -> Array:
        """Output (B, T, N, H) of unrotated queries (B, T, N, H) over what `shared` holds."""
        c = self.config
        q = self._rotate(unrotated, positions)
        settings: dict[str, Any] = {"window": c.window, "scale": c.scale}
        if shared.cache is None:
            assert shared.new is not None
            k, v, _ = with_rope_keys(shared.new, c.tied_dim)
            return prefill_attention(q, k, v, lengths=shared.count, **settings)
        view, sight = Tied(shared.cache, c.tied_dim), shared.cache.sight
        if sight.reindexed:
            settings["q_sinks"] = self._rotate(unrotated, sight.place(positions))
        new = [view.read(block) for block in shared.uncached]
        return attend(q, view, positions, new=new, **settings)[0]

    def _rotate(self, q: Array, positions: Array) -> Array:
        """Queries (B, T, N, H), of which the last R channels turn to their positions (B, T)."""
        plain, rope = jnp.split(q, [self.config.tied_dim], axis=-1)
        return jnp.concatenate([plain, self.config.rope(rope, positions)], axis=-1)

    def record(self, x: Array, positions: Array) -> Record:
        """What tokens leave behind: x (B, T, D) -> k (B, 1, T, R), rotated, and v (B, K, T, H)."""
        k_rope = self.config.rope(self.k_rope(x)[:, :, None], positions)
        tied = self.kv(x).reshape(*x.shape[:2], self.config.tied_heads, -1)
        return Record(*(jnp.swapaxes(part, 1, 2) for part in (k_rope, tied)))

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """x (B, T, D) -> q (B, T, N, H), k and v (B, T, K, H), rotated."""
        q = self.q(x).reshape(*x.shape[:2], self.config.query_heads, -1)
        new = Block(*self.record(x, positions), positions[:, None])
        k, v, _ = with_rope_keys(new, self.config.tied_dim)
        return self._rotate(q, positions), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
