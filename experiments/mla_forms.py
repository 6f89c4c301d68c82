"""Forms of attention in a decode step: what each keeps, what it multiplies, and the step itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kvjax import sizing
from kvjax.cache import Block, LayerCache, Record, init_layer_cache
from kvjax.nn import (
    AttentionConfig,
    LatentAttention,
    LatentAttentionConfig,
    Rope,
    TiedAttentionConfig,
)
from kvjax.ops import attend
from kvjax.sizing.roofline import SOFTMAX_FLOP, Work

# Widths of DeepSeek-V3's heads (arXiv:2412.19437, section 4.2), which all forms have here.
HEAD, LATENT, ROPE = 128, 512, 64
# Width of the stream that the steps are timed on: narrow, so that attention is most of the time.
D_MODEL = 64

# module, x (B, 1, D), positions (B, 1), cache -> y (B, 1, D), cache
type Step = Callable[[Any, Array, Array, Any], tuple[Array, Any]]
# module, B, S, key -> a cache that is full but for one token a row
type Filled = Callable[[Any, int, int, Array], Any]


def random_records(module: Any, batch: int, slots: int, key: Array) -> LayerCache:
    """A cache of the module's records in f32."""
    c = module.config
    return _full(batch, slots, key, c.kv_heads, c.key_dim, c.value_heads, c.value_dim)


def expanded_records(module: LatentAttention, batch: int, slots: int, key: Array) -> LayerCache:
    """A cache of heads' keys and values, made of what `random_records` gives."""
    latents = random_records(module, batch, slots, key)
    k, v = module.expand(Record(**latents.leaves))
    heads, width = k.shape[1], k.shape[3]
    made = _full(batch, slots, key, heads, width, heads, v.shape[3])
    return replace(made, leaves={"k": k, "v": v})


def _full(
    batch: int,
    slots: int,
    key: Array,
    kv_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
) -> Any:
    """A cache of random numbers, one token short of full."""
    cache: Any = init_layer_cache(
        batch,
        slots,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        value_heads=value_heads,
        codec="f32",
    )
    keys = dict(zip("kv", jax.random.split(key), strict=True))
    leaves = {
        name: jax.random.normal(keys[name], leaf.shape) for name, leaf in cache.leaves.items()
    }
    return replace(cache, leaves=leaves, n=jnp.full_like(cache.n, slots - 1))


def as_it_is(module: Any, x: Array, positions: Array, cache: Any) -> tuple[Array, Any]:
    """The module's own step."""
    return module(x, positions, cache)


def expanding(
    module: LatentAttention, x: Array, positions: Array, cache: LayerCache
) -> tuple[Array, LayerCache]:
    """A step that makes heads' keys and values of latents, of one block at a time."""
    cache = cache.append(module.record(x, positions), jnp.ones_like(cache.n))

    class Expanded:
        """The cache as heads read it."""

        sight, blocks, first_block = cache.sight, cache.blocks, cache.first_block

        def operands(self) -> None:
            return None

        def block(self, i: Array) -> Block:
            kept = cache.block(i)
            return Block(*module.expand(Record(kept.k, kept.v)), kept.pos)

    return _attended(module, x, positions, Expanded()), cache


def over_heads(
    module: LatentAttention, x: Array, positions: Array, cache: LayerCache
) -> tuple[Array, LayerCache]:
    """A step over a cache of heads' keys and values."""
    _, k, v = module.project(x, positions)
    new = Record(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
    cache = cache.append(new, jnp.ones_like(cache.n))
    return _attended(module, x, positions, cache), cache


def _attended(module: LatentAttention, x: Array, positions: Array, cache: Any) -> Array:
    """Output (B, 1, D) of the new token's heads over a cache of heads."""
    q, _, _ = module.project(x, positions)
    out, _ = attend(q, cache, positions, scale=module.config.factor)
    return module.o(out.reshape(*out.shape[:2], -1))


@dataclass(frozen=True)
class Form:
    """One way of N heads to keep and to attend.

    Attributes:
      layer: what a token leaves behind.
      config: of the module that takes the step.
      heads: what is attended; None for `layer` as it lies.
      expands: whether each step makes heads' keys and values of all that is kept.
      step: as the module takes it.
      filled: the cache that the step is taken over.
    """

    layer: sizing.LayerSpec
    config: AttentionConfig | LatentAttentionConfig | TiedAttentionConfig
    heads: sizing.LayerSpec | None = None
    expands: bool = False
    step: Step = as_it_is
    filled: Filled = random_records

    @property
    def lifting(self) -> int:
        """Parameters that keys and values of heads are made with, of latents: L N (H + HV)."""
        layer = self.layer
        if layer.kind != "latent":
            return 0
        widths = layer.key_dim - layer.rope_dim + layer.value_dim
        return layer.latent_rank * layer.query_heads * widths

    def bytes_read(self, rows: int, codec: str = "bf16") -> int:
        """Bytes of one sequence's cache."""
        return self.layer.record_bytes(rows, sizing.codec(codec))

    def attention_flop(self, rows: int) -> int:
        """FLOP of q·k and p·v of one new token over `rows` records."""
        return (self.heads or self.layer).decode_flop(rows)

    def expansion_flop(self, rows: int) -> int:
        """FLOP that make heads' keys and values of `rows` records, where each step does that."""
        return 2 * self.lifting * rows if self.expands else 0

    def flop(self, rows: int) -> int:
        """FLOP that come with the records."""
        return self.attention_flop(rows) + self.expansion_flop(rows)

    @property
    def absorption_flop(self) -> int:
        """FLOP of the new token's queries and outputs with `lifting`, where they are absorbed."""
        return 0 if self.expands else 2 * self.lifting

    @property
    def intensity(self) -> float:
        """FLOP/B of a long cache in bf16."""
        return self.flop(1) / self.bytes_read(1)

    def work(self, batch: int, rows: int) -> Work:
        """Of a step in bf16, from queries to outputs of heads, `lifting` included."""
        scores = batch * self.layer.query_heads * rows
        return Work(
            memory_bytes=batch * self.bytes_read(rows) + 2 * self.lifting,
            matrix_flop=batch * (self.flop(rows) + self.absorption_flop),
            vector_flop=SOFTMAX_FLOP * scores,
            exponentials=scores,
        )

    @cached_property
    def shape(self) -> Any:
        """The module without its numbers."""
        return nnx.eval_shape(self.build)

    def build(self) -> Any:
        """The module in f32; forms of one config get the same numbers."""
        return self.config.build(jnp.float32, nnx.Rngs(0))


def forms(heads: int) -> dict[str, Form]:
    """All of them with so many query heads, a multiple of 8."""
    latent = sizing.LayerSpec(
        heads, 1, HEAD + ROPE, HEAD, kind="latent", latent_rank=LATENT, rope_dim=ROPE
    )
    expanded = sizing.LayerSpec(heads, heads, HEAD + ROPE, HEAD)
    mla = LatentAttentionConfig(
        d_model=D_MODEL,
        query_heads=heads,
        latent_rank=LATENT,
        rope_dim=ROPE,
        head_dim=HEAD,
        head_value_dim=HEAD,
        rope=Rope(ROPE),
    )
    return {
        "MHA": _attention(heads, heads),
        "GQA-8": _attention(heads, 8),
        "MQA": _attention(heads, 1),
        "MLA, absorbed": Form(latent, mla),
        "MLA, expanded at each step": Form(
            latent, mla, heads=expanded, expands=True, step=expanding
        ),
        "MLA, expanded in the cache": Form(expanded, mla, step=over_heads, filled=expanded_records),
        "GLA-2": Form(
            replace(latent, kv_heads=2, latent_rank=2 * HEAD),
            replace(mla, latents=2, latent_rank=2 * HEAD),
        ),
        "GTA-4": Form(
            sizing.LayerSpec(heads, 4, HEAD, HEAD, kind="tied", rope_dim=HEAD // 2),
            TiedAttentionConfig(D_MODEL, heads, 4, HEAD, rope=Rope(HEAD // 2)),
        ),
    }


def _attention(heads: int, kv_heads: int) -> Form:
    config = AttentionConfig(D_MODEL, heads, kv_heads, HEAD, HEAD, rope=Rope(HEAD))
    return Form(sizing.LayerSpec(heads, kv_heads, HEAD, HEAD), config)
