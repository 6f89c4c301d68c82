"""Latent attention: MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1) and GLA (arXiv:2505.21487)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache import Block, Latents, LayerCache, Record
from kvjax.nn.norm import NormConfig
from kvjax.nn.rope import Rope
from kvjax.nn.shared import Shared
from kvjax.ops import attend, merge, prefill_attention


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Settings of one layer of latent attention.

    Attributes:
      d_model: D, width of the residual stream.
      query_heads: N.
      latent_rank: L, channels of the latent that all heads' keys and values are made of.
      rope_dim: R, channels of the rotated key that heads share, and of their queries for it.
      head_dim: H, channels of a head's key that are not rotated; its key has H + R.
      head_value_dim: HV, channels of a head's value.
      rope: over the R channels of all rotated keys.
      query_rank: channels that queries are made by way of; None for none.
      query_bias, latent_bias, out_bias: whether the projections of x to queries, or to what these
        are made by way of, to latent and rope key, and of outputs carry biases.
      norm: of the latent, and of what queries are made by way of.
      latent_norm: whether the latent is normed.
      window: keys each query sees, its own included; None for all.
      scale: factor of the scores; None for (H + R) ** -0.5.
      rope_heads: rotated keys of a token, which divide N; query head n reads key
        n // (N / rope_heads). DeepSeek's models have one, models that were converted by partial
        RoPE (arXiv:2502.14837) one for each KV head that they had.
      latents: of a token, of L channels and with a norm each, which divide N; query head n reads
        latent n // (N / latents). One is MLA, several are grouped latent attention (GLA,
        arXiv:2505.21487), of which shards of a model can hold one each.
    """

    d_model: int
    query_heads: int
    latent_rank: int
    rope_dim: int
    head_dim: int
    head_value_dim: int
    rope: Rope
    query_rank: int | None = None
    query_bias: bool = False
    latent_bias: bool = False
    out_bias: bool = False
    norm: NormConfig = NormConfig()
    latent_norm: bool = True
    window: int | None = None
    scale: float | None = None
    rope_heads: int = 1
    latents: int = 1

    # What a cache keeps of a token as its keys: its rope keys, side by side.
    kv_heads = 1
    rope_key = True
    # Settings of other attention that there is nothing like here.
    shares_with = chunk = soft_cap = None

    def __post_init__(self) -> None:
        for name in ("rope_heads", "latents"):
            many = getattr(self, name)
            if many < 1 or self.query_heads % many:
                raise ValueError(
                    f"{name}: got {many}; accepted: a divisor of {self.query_heads} query heads"
                )
        if self.rope.width != self.key_dim:
            raise ValueError(
                f"rope: got one of {self.rope.width} channels; accepted: {self.key_dim}, those of "
                f"all rotated keys"
            )

    @property
    def key_dim(self) -> int:
        """Rope channels of a token, R for each of its rotated keys: the key that a cache keeps."""
        return self.rope_heads * self.rope_dim

    @property
    def value_heads(self) -> int:
        """Latents of a token: the heads of the values that a cache keeps."""
        return self.latents

    @property
    def value_dim(self) -> int:
        """L, the value that a cache keeps."""
        return self.latent_rank

    @property
    def span(self) -> int | None:
        """The most keys that a query sees; None for all."""
        return self.window

    @property
    def factor(self) -> float:
        """Of the scores."""
        width = self.head_dim + self.rope_dim
        return width**-0.5 if self.scale is None else self.scale

    def build(self, dtype: DTypeLike, rngs: nnx.Rngs) -> LatentAttention:
        """The module."""
        return LatentAttention(self, dtype=dtype, rngs=rngs)


class LatentAttention(nnx.Module):
    """Causal self-attention over latents: `y, cache = module(x, positions, cache)`.

    Over a cache it is absorbed: queries are turned into the latents' space (`k_up`), scored against
    latents as they lie, and what is read there is turned into values (`v_up`), so that neither keys
    nor values of heads are made of what is cached. New tokens among themselves, without a cache or
    several at a time, are attended as heads with keys and values of their own, which takes fewer
    products for each score: H + R + HV in place of 2 L + R.
    """

    def __init__(self, config: LatentAttentionConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        linear = partial(nnx.Linear, param_dtype=dtype, kernel_init=normal, rngs=rngs)
        c = self.config = config
        q_width = c.query_heads * (c.head_dim + c.rope_dim)
        if c.query_rank is None:
            self.q = linear(c.d_model, q_width, use_bias=c.query_bias)
        else:
            self.q_down = linear(c.d_model, c.query_rank, use_bias=c.query_bias)
            self.q_norm = c.norm.build(c.query_rank, dtype, rngs)
            self.q_up = linear(c.query_rank, q_width, use_bias=False)
        down_width = c.latents * c.latent_rank + c.key_dim
        self.kv_down = linear(c.d_model, down_width, use_bias=c.latent_bias)
        if c.latent_norm:
            norms = [c.norm.build(c.latent_rank, dtype, rngs) for _ in range(c.latents)]
            self.kv_norm = norms[0] if c.latents == 1 else nnx.List(norms)
        heads, rank = c.query_heads, c.latent_rank
        self.k_up = nnx.Param(normal(rngs.params(), (heads, c.head_dim, rank), dtype))
        self.v_up = nnx.Param(normal(rngs.params(), (heads, rank, c.head_value_dim), dtype))
        self.o = linear(c.query_heads * c.head_value_dim, c.d_model, use_bias=c.out_bias)

    def __call__(
        self, x: Array, positions: Array, cache: LayerCache | None = None
    ) -> tuple[Array, LayerCache | None]:
        """Attend the cached tokens and the T new ones, and append the new ones to the cache.

        Args:
          x: (B, T, D).
          positions: (B, T) int32, absolute; a row's new tokens are consecutive, and -1 marks its
            padding on the right.
          cache: the layer's cache, whose keys are rope keys and whose values are latents; None
            attends x alone.

        Returns:
          y (B, T, D), and the cache with the new tokens, None if none was given.
        """
        q, unrotated = self._queries(x)
        q_rope = self.config.rope(unrotated, positions)
        new = Block(*self.record(x, positions), positions[:, None])
        shared = Shared(cache).take(new)
        if shared.cache is None:
            out, _ = self._among_themselves(q, q_rope, shared)
        elif not shared.uncached:
            out, _ = self._over_latents(q, q_rope, unrotated, positions, shared.cache)
        elif shared.cache.sight.window is not None:
            # What the layout drops counts among the new tokens, too.
            out, _ = self._over_latents(q, q_rope, unrotated, positions, shared.cache, (new,))
        else:
            parts = (
                self._over_latents(q, q_rope, unrotated, positions, shared.cache),
                self._among_themselves(q, q_rope, shared),
            )
            out, _ = merge(*zip(*parts, strict=True))
        y = self.o(out.astype(x.dtype).reshape(*out.shape[:2], -1))
        return shared.close(y)

    def _queries(self, x: Array) -> tuple[Array, Array]:
        """x (B, T, D) -> q (B, T, N, H), and unrotated queries of all a token's rope channels.

        The latter lie where the key lies that their head reads, and are 0 for the other keys.
        """
        c = self.config
        q = self.q(x) if c.query_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q = q.reshape(*x.shape[:2], c.query_heads, -1)
        return q[..., : c.head_dim], self._among_rope_heads(q[..., c.head_dim :])

    def _among_rope_heads(self, q_rope: Array) -> Array:
        """(B, T, N, R) -> (B, T, N, rope_heads * R).

        Rotated together are channels i and i + half: of all rope keys as of one, so that first come
        all heads' first halves.
        """
        c = self.config
        if c.rope_heads == 1:
            return q_rope
        halves = q_rope.reshape(*q_rope.shape[:3], 2, 1, -1)
        return jnp.where(self._reads, halves, 0).reshape(*q_rope.shape[:3], -1)

    def _own_rope_head(self, k_rope: Array) -> Array:
        """Rope keys (B, T, N or 1, rope_heads * R) -> what each query head reads, (B, T, N, R)."""
        halves = k_rope.reshape(*k_rope.shape[:3], 2, self.config.rope_heads, -1)
        own = jnp.where(self._reads, halves, 0).sum(axis=-2)
        return own.reshape(*own.shape[:3], -1)

    @property
    def _reads(self) -> Array:
        """(N, 1, rope_heads, 1) bool: which rope key each query head reads."""
        c = self.config
        own = jnp.arange(c.query_heads) // (c.query_heads // c.rope_heads)
        return (own[:, None] == jnp.arange(c.rope_heads))[:, None, :, None]

    def record(self, x: Array, positions: Array) -> Record:
        """What tokens leave behind, of x (B, T, D).

        Returns:
          k (B, 1, T, key_dim), the rotated rope keys, and v (B, latents, T, L).
        """
        c = self.config
        flat, k_rope = jnp.split(self.kv_down(x), [c.latents * c.latent_rank], axis=-1)
        latents = jnp.split(flat, c.latents, axis=-1)
        if c.latent_norm:
            norms: Any = [self.kv_norm] if c.latents == 1 else self.kv_norm
            latents = [norm(latent) for norm, latent in zip(norms, latents, strict=True)]
        k_rope = c.rope(k_rope[:, :, None], positions)[:, :, 0]
        return Record(k_rope[:, None], jnp.stack(latents, axis=1))

    def project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Heads of their own: q and k (B, T, N, H + R) and v (B, T, N, HV), of x (B, T, D)."""
        q, q_rope = self._queries(x)
        k, v = (jnp.swapaxes(part, 1, 2) for part in self.expand(self.record(x, positions)))
        return self._whole_queries(q, self.config.rope(q_rope, positions)), k, v

    def _whole_queries(self, q: Array, q_rope: Array) -> Array:
        """(B, T, N, H) and rotated (B, T, N, rope_heads * R) -> (B, T, N, H + R)."""
        return jnp.concatenate([q, self._own_rope_head(q_rope)], axis=-1)

    def expand(self, record: Record) -> Record:
        """What `record` gives -> keys (B, N, T, H + R) and values (B, N, T, HV)."""
        # Of each latent the heads that read it. Keys may have no channel that is not rotated.
        heads, latents = self.config.query_heads, self.config.latents
        k_up, v_up = (
            up[...].reshape(latents, heads // latents, *up.shape[1:])
            for up in (self.k_up, self.v_up)
        )
        k = jnp.einsum("bjtl,jghl->bjgth", record.v, k_up)
        v = jnp.einsum("bjtl,jglv->bjgtv", record.v, v_up)
        k, v = (part.reshape(len(part), heads, *part.shape[3:]) for part in (k, v))
        k_rope = jnp.swapaxes(self._own_rope_head(jnp.swapaxes(record.k, 1, 2)), 1, 2)
        return Record(jnp.concatenate([k, k_rope], axis=-1), v)

    def _among_themselves(self, q: Array, q_rope: Array, shared: Shared) -> tuple[Array, Array]:
        """Output (B, T, N, HV) and LSE (B, T, N) over the new tokens alone, as heads."""
        k, v = self.expand(shared.record)
        return prefill_attention(
            self._whole_queries(q, q_rope),
            k,
            v,
            lengths=shared.count,
            window=self.config.window,
            scale=self.config.factor,
            return_lse=True,
        )

    def _over_latents(
        self,
        q: Array,
        q_rope: Array,
        unrotated: Array,
        positions: Array,
        cache: LayerCache,
        new: Sequence[Block] = (),
    ) -> tuple[Array, Array]:
        """Output (B, T, N, HV) and LSE (B, T, N) over what is cached, and `new`, absorbed."""
        absorbed = jnp.einsum("btnh,nhl->btnl", q, self.k_up[...])
        settings: dict[str, Any] = {"window": self.config.window, "scale": self.config.factor}
        if cache.sight.reindexed:
            placed = self.config.rope(unrotated, cache.sight.place(positions))
            settings["q_sinks"] = jnp.concatenate([absorbed, placed], axis=-1)
        out, lse = attend(
            jnp.concatenate([absorbed, q_rope], axis=-1),
            Latents(cache),
            positions,
            new=[Latents.read(block) for block in new],
            **settings,
        )
        return jnp.einsum("btnl,nlv->btnv", out, self.v_up[...]), lse
