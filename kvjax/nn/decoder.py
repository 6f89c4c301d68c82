"""A decoder-only transformer built of the attention modules here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from kvjax.cache import (
    Cache,
    CodecChoice,
    LayerCache,
    LayoutChoice,
    PerLayer,
    Scales,
    init_layer_cache,
)
from kvjax.nn.mlp import MlpConfig
from kvjax.nn.moe import MoeConfig
from kvjax.nn.norm import NormConfig
from kvjax.nn.shared import Shared
from kvjax.nn.sharing import AnyAttentionConfig, check_sharing, producers_of, span_of_readers

type Positions = Literal["all", "last"]
type FeedForward = MlpConfig | MoeConfig


@dataclass(frozen=True)
class DecoderConfig:
    """Settings of a decoder; frozen and hashable, so that it is static under jit.

    Attributes:
      vocab_size, d_model: V and D.
      attention: one entry per layer; some may share the keys and values of others (`nn.sharing`).
      mlp: settings of the feed-forward layers, each of which may be a mixture of experts; shared by
        all layers, or a tuple with one entry per layer.
      norm: settings shared by all layers.
      pre_norm, post_norm: norm of each sub-layer's input (Llama), of its output (OLMo-2), or both.
      parallel_residual: attention and MLP both read the layer's input (GPT-NeoX).
      shared_norm: with `parallel_residual`, they read it through one norm (Cohere).
      max_positions: rows of the learned position table (GPT-2); None for none.
      embed_scale: factor of the token embeddings (Gemma); None for 1.
      residual_scale: factor of what each sub-layer adds (MiniCPM); None for 1.
      tied: logits use the embedding table.
      logit_scale: factor of the logits (Cohere); None for 1.
      logit_cap: logits become logit_cap * tanh(logit / logit_cap) (Gemma-2); None for no cap.
      source: the config.json that the decoder was read from, as JSON text; written back on save.
    """

    vocab_size: int
    d_model: int
    attention: tuple[AnyAttentionConfig, ...]
    mlp: FeedForward | tuple[FeedForward, ...]
    norm: NormConfig = NormConfig()
    pre_norm: bool = True
    post_norm: bool = False
    parallel_residual: bool = False
    shared_norm: bool = False
    max_positions: int | None = None
    embed_scale: float | None = None
    residual_scale: float | None = None
    tied: bool = False
    logit_scale: float | None = None
    logit_cap: float | None = None
    source: str = "{}"

    def __post_init__(self) -> None:
        if self.shared_norm and not (self.pre_norm and self.parallel_residual):
            raise ValueError(
                "shared_norm: got True; accepted: False, or True with pre_norm and "
                "parallel_residual"
            )
        if len(self.feed_forward) != len(self.attention):
            raise ValueError(
                f"mlp: got {len(self.feed_forward)} entries; accepted: one for all layers, or a "
                f"tuple of {len(self.attention)}"
            )
        check_sharing(self.attention)

    @property
    def feed_forward(self) -> tuple[FeedForward, ...]:
        """Of each layer, the settings of its feed-forward layer."""
        return self.mlp if isinstance(self.mlp, tuple) else (self.mlp,) * len(self.attention)

    @property
    def producers(self) -> tuple[int, ...]:
        """Of each layer, the index of the one that makes its keys and values; mostly its own."""
        return producers_of(self.attention)

    @property
    def cached(self) -> tuple[int, ...]:
        """Indices of the layers that make keys and values; a cache has an entry for each."""
        return tuple(sorted(set(self.producers)))


class Layer(nnx.Module):
    """Attention and MLP, each with its residual connection."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: AnyAttentionConfig,
        mlp: FeedForward,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.attention = attention.build(dtype, rngs)
        self.mlp = mlp.build(config.d_model, dtype, rngs)
        if config.pre_norm:
            self.attention_norm = config.norm.build(config.d_model, dtype, rngs)
        if config.pre_norm and not config.shared_norm:
            self.mlp_norm = config.norm.build(config.d_model, dtype, rngs)
        if config.post_norm:
            self.attention_post_norm = config.norm.build(config.d_model, dtype, rngs)
            self.mlp_post_norm = config.norm.build(config.d_model, dtype, rngs)

    def __call__(
        self, x: Array, positions: Array, cache: LayerCache | Shared | None
    ) -> tuple[Array, LayerCache | Shared | None]:
        pre, post = self.config.pre_norm, self.config.post_norm
        normed = self.attention_norm(x) if pre else x
        attention: Any = self.attention  # either kind; only one of them takes what is shared
        attended, cache = attention(normed, positions, cache)
        if post:
            attended = self.attention_post_norm(attended)
        attended = self._scaled(attended)
        if not self.config.shared_norm:
            hidden = x if self.config.parallel_residual else x + attended
            normed = self.mlp_norm(hidden) if pre else hidden
        mixed = self.mlp(normed)
        if post:
            mixed = self.mlp_post_norm(mixed)
        return x + attended + self._scaled(mixed), cache

    def _scaled(self, added: Array) -> Array:
        """What a sub-layer adds, (B, T, D)."""
        scale = self.config.residual_scale
        return added if scale is None else added * jnp.asarray(scale, added.dtype)


def _embedding(rows: int, width: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Embed:
    table = nnx.Embed(
        rows, width, param_dtype=dtype, embedding_init=nnx.initializers.normal(0.02), rngs=rngs
    )
    # nnx.Embed computes in the dtype it was built with; None lets the table's own decide.
    table.dtype = None
    return table


class Decoder(nnx.Module):
    """`logits, cache = model(tokens, cache)`.

    A pytree: pass it to `jax.jit` as an argument (never `nnx.jit`, which returns the weights as
    fresh outputs of every step).
    """

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.config = config
        self.embed = _embedding(config.vocab_size, config.d_model, dtype, rngs)
        if config.max_positions is not None:
            self.positions = _embedding(config.max_positions, config.d_model, dtype, rngs)
        self.layers = nnx.List(
            [
                Layer(config, attention, mlp, dtype, rngs)
                for attention, mlp in zip(config.attention, config.feed_forward, strict=True)
            ]
        )
        self.norm = config.norm.build(config.d_model, dtype, rngs)
        if not config.tied:
            self.head = nnx.Linear(
                config.d_model,
                config.vocab_size,
                use_bias=False,
                param_dtype=dtype,
                kernel_init=normal,
                rngs=rngs,
            )

    @overload
    def __call__(
        self,
        tokens: Array,
        cache: None = None,
        *,
        count: Array | None = ...,
        logits: Positions = ...,
    ) -> tuple[Array, None]: ...

    @overload
    def __call__(
        self, tokens: Array, cache: Cache, *, count: Array | None = ..., logits: Positions = ...
    ) -> tuple[Array, Cache]: ...

    def __call__(
        self,
        tokens: Array,
        cache: Cache | None = None,
        *,
        count: Array | None = None,
        logits: Positions = "all",
    ) -> tuple[Array, Cache | None]:
        """Run the T new tokens of each row, after those that its cache holds.

        Args:
          tokens: (B, T) int32, right-padded.
          cache: from `init_cache`, or None for a forward pass over the tokens alone.
          count: (B,) int32, the real tokens of each row; None means all T.
          logits: "all" positions, or only the "last" real one of each row.

        Returns:
          logits (B, T, V), or (B, V) for "last", in float32; and the cache, which now holds
          the tokens too. Logits at padding are meaningless.

        Raises:
          ValueError: the cache is of another batch, or more tokens than learned positions.
        """
        hidden, cache = self.hidden(tokens, cache, count=count)
        if logits == "last":
            ends = jnp.full(len(tokens), tokens.shape[1]) if count is None else count
            last = jnp.maximum(ends - 1, 0)[:, None, None]
            hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
        return self.unembed(hidden), cache

    def hidden(
        self,
        tokens: Array,
        cache: Cache | None = None,
        *,
        count: Array | None = None,
        remat: bool = False,
    ) -> tuple[Array, Cache | None]:
        """The final normed hidden states (B, T, D), before the output head.

        `remat`: a backward pass stores each layer's input alone and computes the rest again.
        """
        self._check(tokens, cache)
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        start = jnp.zeros((tokens.shape[0],), jnp.int32) if cache is None else cache.n
        real = True if count is None else steps < count[:, None]
        positions = jnp.where(real, start[:, None] + steps, -1)
        x = self.embed(tokens)
        if self.config.embed_scale is not None:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        if self.config.max_positions is not None:
            x = x + self.positions(jnp.maximum(positions, 0))
        run: Callable[..., tuple[Array, Any]] = (
            jax.checkpoint(Layer.__call__) if remat else Layer.__call__
        )
        producers, cached = self.config.producers, self.config.cached
        last_reader = {producer: i for i, producer in enumerate(producers)}
        held: dict[int, Any] = dict.fromkeys(cached)
        if cache is not None:
            held = dict(zip(cached, cache.layers, strict=True))
        for i, (layer, producer) in enumerate(zip(self.layers, producers, strict=True)):
            is_shared = last_reader[producer] > producer
            if is_shared and i == producer:
                held[i] = Shared(held[i])
            x, held[producer] = run(layer, x, positions, held[producer])
            if is_shared and i == last_reader[producer]:
                x, held[producer] = held[producer].close(x)
        return self.norm(x), None if cache is None else Cache(tuple(held[i] for i in cached))

    def unembed(self, hidden: Array) -> Array:
        """Hidden states (..., D) -> logits (..., V) in float32."""
        c = self.config
        logits = (self.embed.attend if c.tied else self.head)(hidden).astype(jnp.float32)
        if c.logit_scale is not None:
            logits = logits * c.logit_scale
        return logits if c.logit_cap is None else c.logit_cap * jnp.tanh(logits / c.logit_cap)

    def _check(self, tokens: Array, cache: Cache | None) -> None:
        batch, length = tokens.shape
        limit = self.config.max_positions
        if cache is not None and len(cache.n) != batch:
            raise ValueError(f"tokens has {batch} rows, the cache {len(cache.n)}")
        if cache is None and limit is not None and length > limit:
            raise ValueError(f"{length} tokens exceed the model's {limit} learned positions")

    def init_cache(
        self,
        batch: int,
        capacity: int,
        layout: PerLayer[LayoutChoice] = "auto",
        codec: PerLayer[CodecChoice] = "bf16",
        *,
        scales: Scales | None = None,
    ) -> Cache:
        """An empty cache for `batch` rows of up to `capacity` tokens.

        Layers that share keys and values have one layer cache, with the slots that the one of them
        that sees the most needs.

        Args:
          batch, capacity: B, and tokens a row.
          layout, codec: as in `kvjax.cache.init_layer_cache`, for every layer; or a sequence with
            one for each layer that makes keys and values (`DecoderConfig.cached`).
          scales: calibrated ones, for the layers whose codec is the one that they are for; layers
            in codecs without constant scales have no use for them.

        Raises:
          ValueError: for an unknown layout or codec, a sequence of another length, a capacity
            past the learned positions, or scales of another codec or model.
        """
        limit = self.config.max_positions
        if limit is not None and capacity > limit:
            raise ValueError(f"capacity={capacity} exceeds the model's {limit} learned positions")
        choices = zip(
            self.config.cached,
            self._for_each("layout", layout),
            self._for_each("codec", codec),
            strict=True,
        )
        layers = (self._init_layer(batch, capacity, *choice, scales) for choice in choices)
        return Cache(tuple(layers))

    def _init_layer(
        self,
        batch: int,
        capacity: int,
        index: int,
        layout: LayoutChoice,
        codec: CodecChoice,
        scales: Scales | None,
    ) -> LayerCache:
        """The cache of what the layer at `index` leaves behind, for all layers that read it."""
        a = self.config.attention[index]
        heads = a.kv_heads, a.value_heads
        return init_layer_cache(
            batch,
            capacity,
            kv_heads=a.kv_heads,
            value_heads=a.value_heads,
            key_dim=a.key_dim,
            value_dim=a.value_dim,
            rope_key=a.rope_key,
            window=span_of_readers(self.config.attention, index),
            layout=layout,
            codec=codec,
            scales=None if scales is None else scales.of_layer(index, codec, *heads),
        )

    def _for_each(self, name: str, choice: PerLayer[Any]) -> tuple[Any, ...]:
        """One choice for each entry of the cache."""
        cached = self.config.cached
        if isinstance(choice, str) or not isinstance(choice, Sequence):
            return (choice,) * len(cached)
        if len(choice) != len(cached):
            several = len(cached) < len(self.config.attention)
            which = f" that make keys and values ({', '.join(map(str, cached))})" if several else ""
            raise ValueError(
                f"{name}: got {len(choice)} entries; accepted: one for all layers, or a sequence "
                f"of {len(cached)}, for the layers{which}"
            )
        return tuple(choice)
