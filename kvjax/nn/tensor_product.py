"""Tensor product attention (TPA; Zhang et al. 2025, arXiv:2501.06425)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache import Block, Factors, LayerCache, Record
from kvjax.nn.rope import Rope
from kvjax.nn.shared import Shared
from kvjax.ops import attend, prefill_attention


@dataclass(frozen=True)
class TensorProductAttentionConfig:
    """Settings of one layer of tensor product attention.

    Attributes:
      d_model: D, width of the residual stream.
      query_heads: N, heads of queries, and of the keys and values that factors stand for.
      head_dim: H, channels of a head.
      key_rank, value_rank: R_K and R_V, pairs of factors that keys and values are the mean of.
      query_rank: R_Q, pairs that queries are the mean of; None for queries without factors (the
        paper's KV-only form).
      contextual: whether the factors over heads are made of each token. If not they are parameters:
        with those of `fixed_heads` it is MHA, GQA or MQA.
      rope: over the factors over channels of queries and keys, or None.
      window: keys each query sees, its own included; None for all.
      scale: factor of the scores; None for H ** -0.5.
    """

    d_model: int
    query_heads: int
    head_dim: int
    key_rank: int
    value_rank: int
    query_rank: int | None = None
    contextual: bool = True
    rope: Rope | None = None
    window: int | None = None
    scale: float | None = None

    # What a cache keeps are factors, and none of them a rope key.
    rope_key = False
    # Settings of other attention that there is nothing like here.
    shares_with = chunk = soft_cap = None

    def __post_init__(self) -> None:
        for name in ("key_rank", "value_rank", "query_rank"):
            rank = getattr(self, name)
            if rank is not None and rank < 1:
                raise ValueError(f"{name}: got {rank}; accepted: 1 and more")

    @property
    def kv_heads(self) -> int:
        """R_K: to a cache, a rank is a head."""
        return self.key_rank

    @property
    def value_heads(self) -> int:
        """R_V."""
        return self.value_rank

    @property
    def key_dim(self) -> int:
        """N + H, a factor over heads and one over channels: the key that a cache keeps."""
        return self.query_heads + self.head_dim

    @property
    def value_dim(self) -> int:
        """N + H, the value that a cache keeps."""
        return self.query_heads + self.head_dim

    @property
    def span(self) -> int | None:
        """The most keys that a query sees; None for all."""
        return self.window

    def build(self, dtype: DTypeLike, rngs: nnx.Rngs) -> TensorProductAttention:
        """The module."""
        return TensorProductAttention(self, dtype=dtype, rngs=rngs)


class FactorPairs(nnx.Module):
    """x (B, T, D) -> factors a (B, T, R, N) over heads and b (B, T, R, H) over channels."""

    def __init__(
        self, config: TensorProductAttentionConfig, rank: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        init = nnx.initializers.xavier_uniform()
        linear = partial(
            nnx.Linear,
            config.d_model,
            use_bias=False,
            param_dtype=dtype,
            kernel_init=init,
            rngs=rngs,
        )
        self.rank = rank
        if config.contextual:
            self.a = linear(rank * config.query_heads)
        else:
            self.heads = nnx.Param(init(rngs.params(), (rank, config.query_heads), dtype))
        self.b = linear(rank * config.head_dim)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        shape = (*x.shape[:2], self.rank, -1)
        b = self.b(x).reshape(shape)
        if hasattr(self, "a"):
            return self.a(x).reshape(shape), b
        heads = self.heads[...].astype(b.dtype)
        return jnp.broadcast_to(heads, (*b.shape[:3], heads.shape[-1])), b


class TensorProductAttention(nnx.Module):
    """Causal self-attention of factors: `y, cache = module(x, positions, cache)`.

    A token leaves (R_K + R_V) (N + H) numbers behind, keys' factors rotated. Over a cache neither
    keys nor values are made of them: scores and outputs are products with factors as they lie.
    """

    def __init__(self, config: TensorProductAttentionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        linear = partial(
            nnx.Linear,
            use_bias=False,
            param_dtype=dtype,
            kernel_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        pairs = partial(FactorPairs, config, dtype=dtype, rngs=rngs)
        c = self.config = config
        width = c.query_heads * c.head_dim
        # Queries themselves, or their factors.
        self.q: Any = linear(c.d_model, width) if c.query_rank is None else pairs(c.query_rank)
        self.k, self.v = pairs(c.key_rank), pairs(c.value_rank)
        self.o = linear(width, c.d_model)

    def __call__(
        self, x: Array, positions: Array, cache: LayerCache | None = None
    ) -> tuple[Array, LayerCache | None]:
        """Attend the cached tokens and the T new ones, and append the new ones to the cache.

        Args:
          x: (B, T, D).
          positions: (B, T) int32, absolute; a row's new tokens are consecutive, and -1 marks its
            padding on the right.
          cache: the layer's cache, whose keys and values are factors; None attends x alone.

        Returns:
          y (B, T, D), and the cache with the new tokens, None if none was given.
        """
        shared = Shared(cache).take(Block(*self.record(x, positions), positions[:, None]))
        out = self._attend(x, positions, shared)
        return shared.close(self.o(out.reshape(*out.shape[:2], -1)))

    def _attend(self, x: Array, positions: Array, shared: Shared) -> Array:
        """Output (B, T, N, H) of the queries of x over what `shared` holds."""
        q, c = self.queries(x, positions), self.config
        settings: dict[str, Any] = {"window": c.window, "scale": c.scale}
        if shared.cache is None:
            k, v = (self.expand(part) for part in shared.record)
            return prefill_attention(q, k, v, lengths=shared.count, **settings)
        sight = shared.cache.sight
        if sight.reindexed and c.rope is not None:
            settings["q_sinks"] = self.queries(x, sight.place(positions))
        return attend(q, Factors(shared.cache), positions, new=shared.uncached, **settings)[0]

    def queries(self, x: Array, positions: Array) -> Array:
        """x (B, T, D) -> rotated q (B, T, N, H)."""
        if self.config.query_rank is None:
            q = self.q(x).reshape(*x.shape[:2], self.config.query_heads, -1)
            return self._rotate(q, positions)
        a, b = self.q(x)
        return jnp.einsum("btrn,btrh->btnh", a, self._rotate(b, positions)) / a.shape[2]

    def _rotate(self, part: Array, positions: Array) -> Array:
        rope = self.config.rope
        return part if rope is None else rope(part, positions)

    def record(self, x: Array, positions: Array) -> Record:
        """What tokens leave behind: x (B, T, D) -> k (B, R_K, T, N + H) and v (B, R_V, T, N + H).

        Of each rank the factor over heads and, behind it, that over channels.
        """
        a, b = self.k(x)
        pairs = ((a, self._rotate(b, positions)), self.v(x))
        return Record(*(jnp.swapaxes(side_by_side(*pair), 1, 2) for pair in pairs))

    def expand(self, factors: Array) -> Array:
        """Factors (B, R, T, N + H) -> keys or values of all heads, (B, N, T, H)."""
        a, b = jnp.split(factors, [self.config.query_heads], axis=-1)
        return jnp.einsum("brtn,brth->bnth", a, b) / factors.shape[1]

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Heads of their own: q, k and v (B, T, N, H), rotated, of x (B, T, D)."""
        k, v = (jnp.swapaxes(self.expand(part), 1, 2) for part in self.record(x, positions))
        return self.queries(x, positions), k, v


def side_by_side(a: Array, b: Array) -> Array:
    """Factors (..., N) and (..., H) -> (..., N + H) with the same product.

    One is multiplied and the other divided by a power of two, which loses nothing, so that the
    largest numbers of both are alike: a codec then has one scale for both and needs no second.
    """
    exponents = (
        jnp.frexp(jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32))[1] for x in (a, b)
    )
    of_a, of_b = exponents
    factor = jnp.ldexp(jnp.float32(1), (of_b - of_a) // 2)
    # The product does not depend on it, and so no gradient needs to pass through it.
    factor = jax.lax.stop_gradient(factor).astype(a.dtype)
    return jnp.concatenate([a * factor, b / factor], axis=-1)


def fixed_heads(query_heads: int, kv_heads: int) -> Array:
    """Factors over heads (K, N) that make of each rank a KV head of GQA, read by its N / K queries.

    K = N is MHA and K = 1 is MQA (arXiv:2501.06425). They are K or 0, since pairs are averaged.

    Raises:
      ValueError: K does not divide N.
    """
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"kv_heads: got {kv_heads}; accepted: a divisor of {query_heads}")
    group = jnp.arange(query_heads) // (query_heads // kv_heads)
    return kv_heads * (group == jnp.arange(kv_heads)[:, None]).astype(jnp.float32)
