"""The members on which every law is tried. A new record, layout or codec joins by one row here."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import (
    CodecChoice,
    Dense,
    Kivi,
    LayerCache,
    LayoutChoice,
    Paged,
    Record,
    Sight,
    SinkRing,
    SlotCache,
    init_layer_cache,
)
from kvjax.nn import Attention, AttentionConfig, NormConfig, Rope

# One set of shapes for all laws, so that each member's steps compile once.
BATCH, CAPACITY, WIDTH, D_MODEL = 2, 13, 6, 16
X = np.random.default_rng(0).normal(size=(BATCH, 32, D_MODEL)).astype(np.float32)

BASE = AttentionConfig(
    d_model=D_MODEL, query_heads=4, kv_heads=2, key_dim=8, value_dim=8, rope=Rope(8, theta=100.0)
)
RECORDS = {
    "gqa": BASE,
    "mha": replace(BASE, kv_heads=4),
    "mqa": replace(BASE, kv_heads=1, fused=True, qkv_bias=True, out_bias=True),
    "narrow values": replace(BASE, value_dim=4),
    "norm per head": replace(BASE, qk_norm="head", rope=Rope(4, theta=100.0)),
    "norm at full width": replace(BASE, qk_norm="full", norm=NormConfig(eps=0.1)),
    "capped": replace(BASE, soft_cap=0.5, scale=1.0, rope=None),
    "windowed": replace(BASE, window=5),
}


@dataclass(frozen=True)
class CacheCase:
    """A layout and a codec; `error` bounds the relative error of what is read back.

    `endless`: the layout replaces old tokens and is never full.
    """

    layout: LayoutChoice
    codec: CodecChoice
    error: float = 0.0
    endless: bool = False


# Of codes that share a scale the error is relative to the largest number, here twice a typical one.
CODECS = {
    "f32": 0.0,
    "bf16": 2**-8,
    "f16": 2**-11,
    "fp8_e4m3": 2**-4,
    "fp8_e5m2": 2**-3,
    "fp8_e4m3_head": 2**-4,
    "fp8_e4m3_token": 2**-4,
    "int8": 2**-7,
    "int4": 2**-3,
}
LAYOUTS: dict[str, tuple[LayoutChoice, bool]] = {
    "dense": ("dense", False),
    "pages of 1": (Paged(1), False),
    "pages of 4": (Paged(4), False),
    "sinks": (SinkRing(2, 5), True),
}
CACHES = {
    f"{layout} {codec}": CacheCase(choice, codec, error, endless)
    for layout, (choice, endless) in LAYOUTS.items()
    for codec, error in CODECS.items()
}
# In a cache of its own, with so few exact tokens that CAPACITY leaves codes.
CACHES["groups kivi4"] = CacheCase("dense", Kivi(4, group=4, residual=8), 2**-3)
RING = {
    f"ring {codec}": CacheCase("auto", codec, error, endless=True)
    for codec, error in CODECS.items()
}


@cache
def build(config: AttentionConfig) -> Attention:
    """A module whose parameters are drawn alike, so that no bias and no norm is idle."""
    module = Attention(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    leaves, treedef = jax.tree.flatten(module)
    rng = np.random.default_rng(1)
    drawn = [rng.normal(0, 0.3, leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(treedef, drawn)


@dataclass(frozen=True)
class Hidden:
    """The dense layout, of which queries see what another keeps."""

    slots: int
    sight: Sight

    def __getattr__(self, name):
        return getattr(Dense(self.slots), name)


def hiding(cache: SlotCache, sight: Sight) -> SlotCache:
    return replace(cache, layout=Hidden(cache.layout.slots, sight))


@jax.jit
def compiled(module, x, positions, cache):
    return module(x, positions, cache)


@dataclass(frozen=True)
class Member:
    """A record in a cache: the product that the laws speak of."""

    attention: AttentionConfig
    cache_case: CacheCase

    @property
    def tolerance(self) -> float:
        """Outputs are of order 1, and keys and values enter them with the codec's error."""
        return 1e-5 + 5 * self.cache_case.error

    def init(self, **changes) -> LayerCache:
        """An empty cache of BATCH rows of CAPACITY tokens."""
        settings = {
            "kv_heads": self.attention.kv_heads,
            "key_dim": self.attention.key_dim,
            "value_dim": self.attention.value_dim,
            "window": self.attention.window,
            "layout": self.cache_case.layout,
            "codec": self.cache_case.codec,
        }
        return init_layer_cache(BATCH, CAPACITY, **(settings | changes))

    def forward(self) -> np.ndarray:
        """Outputs (B, CAPACITY, D) of the first CAPACITY tokens of X, all keys being kept.

        Without a cache; or, where a layout keeps less than the module sees, in a dense one of which
        the others are hidden.
        """
        positions = np.broadcast_to(np.arange(CAPACITY, dtype=np.int32), (BATCH, CAPACITY))
        cache = None
        if (sight := self.init().sight).sink_tokens:
            cache = hiding(self.init(layout="dense", codec="f32"), sight)
        return np.asarray(compiled(build(self.attention), X[:, :CAPACITY], positions, cache)[0])

    def step(self, start, count, cache) -> tuple[np.ndarray, LayerCache]:
        """Each row's `count` tokens of X from `start`, in one step of 1 or WIDTH; (B, width, D)."""
        width = 1 if np.max(count) <= 1 else WIDTH
        x = np.full((BATCH, width, D_MODEL), 9, np.float32)
        positions = np.full((BATCH, width), -1, np.int32)
        for row, (first, n) in enumerate(zip(start, count, strict=True)):
            x[row, :n] = X[row, first : first + n]
            positions[row, :n] = np.arange(first, first + n)
        y, cache = compiled(build(self.attention), x, positions, cache)
        return np.asarray(y), cache

    def blank(self, tokens: int) -> Record:
        """What `tokens` tokens leave behind, all zero."""
        a = self.attention
        k, v = (jnp.zeros((BATCH, a.kv_heads, tokens, dim)) for dim in (a.key_dim, a.value_dim))
        return Record(k, v)

    def fill(self, *lengths: int) -> LayerCache:
        """A cache that holds the first tokens of X, so many of each row."""
        cache, done = self.init(), np.zeros(BATCH, int)
        while (done < lengths).any():
            count = np.minimum(WIDTH, np.array(lengths) - done)
            _, cache = self.step(done, count, cache)
            done += count
        return cache


def members() -> list:
    """Every pair; by default each record and each cache with the plainest of the other."""
    every = [
        *(
            (record, case)
            for record in RECORDS
            for case in CACHES
            if RECORDS[record].window is None
        ),
        *(("windowed", case) for case in RING),
        *(("windowed", f"dense {codec}") for codec in CODECS),
    ]
    quick = {("gqa", f"dense {codec}") for codec in CODECS}
    quick |= {(record, "dense f32") for record in RECORDS}
    quick |= {("gqa", f"{layout} f32") for layout in LAYOUTS}
    quick |= {("mqa", "pages of 4 int8"), ("mha", "sinks int4"), ("gqa", "pages of 1 bf16")}
    quick |= {("gqa", "groups kivi4"), ("narrow values", "groups kivi4")}
    quick |= {("windowed", "ring f32"), ("windowed", "ring fp8_e4m3_token")}
    return [
        pytest.param(
            Member(RECORDS[record], (CACHES | RING)[case]),
            id=f"{record}, {case}",
            marks=() if (record, case) in quick else pytest.mark.slow,
        )
        for record, case in every
    ]


@pytest.fixture(params=members())
def member(request) -> Member:
    return request.param


@pytest.fixture(params=[name for name in CACHES if name.endswith(" f32") or "dense" in name])
def cache_case(request) -> CacheCase:
    return CACHES[request.param]
