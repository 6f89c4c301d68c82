"""The members on which every law is tried. A new record, layout or codec joins by one row here."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.cache import (
    CodecChoice,
    Factors,
    Kivi,
    Latents,
    LayerCache,
    LayoutChoice,
    Paged,
    Record,
    SinkRing,
    Tied,
    View,
    init_layer_cache,
)
from kvjax.cache.codecs import Int4, build_codec
from kvjax.cache.tiled import TiledFp8
from kvjax.nn import (
    Attention,
    AttentionConfig,
    LatentAttentionConfig,
    NormConfig,
    Rope,
    TensorProductAttentionConfig,
    TiedAttentionConfig,
)
from laws import definition

# One set of shapes for all laws, so that each member's steps compile once.
BATCH, CAPACITY, WIDTH, D_MODEL = 2, 13, 6, 16
X = np.random.default_rng(0).normal(size=(BATCH, 32, D_MODEL)).astype(np.float32)

BASE = AttentionConfig(
    d_model=D_MODEL, query_heads=4, kv_heads=2, key_dim=8, value_dim=8, rope=Rope(8, theta=100.0)
)
LATENT = LatentAttentionConfig(
    d_model=D_MODEL,
    query_heads=4,
    latent_rank=12,
    rope_dim=4,
    head_dim=8,
    head_value_dim=6,
    rope=Rope(4, theta=100.0),
    query_rank=10,
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
    "chunked": replace(BASE, chunk=5),
    "latent": LATENT,
    "windowed latent": replace(LATENT, window=5),
    "several latents": replace(LATENT, latent_rank=8, query_rank=None, latents=2),
    "tied": TiedAttentionConfig(
        d_model=D_MODEL, query_heads=4, tied_heads=2, head_dim=8, rope=Rope(4, theta=100.0)
    ),
    "factors": TensorProductAttentionConfig(
        d_model=D_MODEL,
        query_heads=4,
        head_dim=8,
        key_rank=3,
        value_rank=2,
        query_rank=2,
        rope=Rope(8, theta=100.0),
    ),
}
# Of each relative error of what is read back. Of codes that share a scale it is relative to the
# largest number, here twice a typical one.
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
    "fp8_ds_mla": 2**-4,
}
# Of each whether it is endless: it replaces old tokens and is never full. Layouts of one kind are
# named "kind of size". "ring" is for records with a window, or chunks, and for these alone.
LAYOUTS: dict[str, tuple[LayoutChoice, bool]] = {
    "dense": ("dense", False),
    "pages of 1": (Paged(1), False),
    "pages of 4": (Paged(4), False),
    "sinks": (SinkRing(2, 5), True),
    "reindexed sinks": (SinkRing(2, 5, reindexed=True), True),
    "ring": ("auto", True),
}
# Layouts of groups that share a scale along tokens, in caches of their own, with so few exact
# tokens that CAPACITY leaves codes.
GROUPS: dict[str, tuple[LayoutChoice, Kivi, float]] = {
    "groups": ("dense", Kivi(4, group=4, residual=8), 2**-3),
    # Of a group's range half of one of three steps.
    "groups of 2 bits": ("dense", Kivi(2, group=4, residual=8), 1 / 6),
    "pages of 4": (Paged(4), Kivi(4, group=4, residual=8), 2**-3),
    "pages of 8": (Paged(8), Kivi(4, group=4, residual=8), 2**-3),
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


CACHES = {
    f"{layout} {codec}": CacheCase(choice, codec, error, endless)
    for layout, (choice, endless) in LAYOUTS.items()
    for codec, error in CODECS.items()
} | {
    f"{layout} {kivi.name}": CacheCase(choice, kivi, error)
    for layout, (choice, kivi, error) in GROUPS.items()
}


@cache
def build(config: AttentionConfig) -> Attention:
    """A module whose parameters are drawn alike, so that no bias and no norm is idle."""
    module = config.build(jnp.float32, nnx.Rngs(0))
    leaves, treedef = jax.tree.flatten(module)
    rng = np.random.default_rng(1)
    drawn = [rng.normal(0, 0.3, leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.unflatten(treedef, drawn)


def left_behind(module, x, positions) -> tuple[jax.Array, jax.Array]:
    """Keys (B, T, K, H) and values (B, T, K, HV) that tokens leave in a cache."""
    if isinstance(module, Attention):
        return module.project(x, positions)[1:]
    return tuple(jnp.swapaxes(part, 1, 2) for part in module.record(x, positions))


def seen_by_queries(config, cache: LayerCache) -> LayerCache | View:
    """What the module of these settings attends to, of a cache."""
    if isinstance(config, LatentAttentionConfig):
        return Latents(cache)
    if isinstance(config, TiedAttentionConfig):
        return Tied(cache, config.tied_dim)
    return Factors(cache) if isinstance(config, TensorProductAttentionConfig) else cache


@cache
def forward(config: AttentionConfig, layout: LayoutChoice) -> np.ndarray:
    """Outputs (B, CAPACITY, D) of the first CAPACITY tokens of X, by the definition.

    All keys are seen, or what `layout` keeps.
    """
    seen = layout if isinstance(layout, SinkRing) else None
    return definition.forward(build(config), X[:, :CAPACITY], seen)


@dataclass(frozen=True)
class Member:
    """A record in a cache: the product that the laws speak of."""

    attention: AttentionConfig
    cache_case: CacheCase
    # What was compiled and what was filled, so that each is once.
    programs: dict = field(default_factory=dict, compare=False, repr=False)
    filled: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def tolerance(self) -> float:
        """Outputs are of order 1, and keys and values enter them with the codec's error.

        Those of factors with twice that, since they are products of two.
        """
        factors = isinstance(self.attention, TensorProductAttentionConfig)
        return 1e-5 + (10 if factors else 5) * self.cache_case.error

    def anew(self) -> "Member":
        """The same, with nothing compiled."""
        return Member(self.attention, self.cache_case)

    def init(self) -> LayerCache:
        """An empty cache of BATCH rows of CAPACITY tokens."""
        a, case = self.attention, self.cache_case
        return init_layer_cache(
            BATCH,
            CAPACITY,
            kv_heads=a.kv_heads,
            value_heads=a.value_heads,
            key_dim=a.key_dim,
            value_dim=a.value_dim,
            window=a.span,
            layout=case.layout,
            codec=case.codec,
            rope_key=a.rope_key,
        )

    def forward(self) -> np.ndarray:
        """Outputs (B, CAPACITY, D) that the first CAPACITY tokens of X are to have."""
        return forward(self.attention, self.cache_case.layout)

    def run(self, x, positions, cache) -> tuple[np.ndarray, LayerCache]:
        """The module's outputs and the new cache; each kind of cache is compiled for once."""
        module, rest = build(self.attention), (x, positions, cache)
        leaves, treedef = jax.tree.flatten(rest)
        kind = treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if kind not in self.programs:
            # A function of its own, since jax remembers the trace of one that it has seen.
            lowered = jax.jit(lambda module, *rest: module(*rest)).lower(module, *rest)
            self.programs[kind] = lowered.compile()
        y, cache = self.programs[kind](module, *rest)
        return np.asarray(y), cache

    def step(self, start, count, cache) -> tuple[np.ndarray, LayerCache]:
        """Each row's `count` tokens of X from `start`, in one step of 1 or WIDTH; (B, width, D)."""
        width = 1 if np.max(count) <= 1 else WIDTH
        x = np.full((BATCH, width, D_MODEL), 9, np.float32)
        positions = np.full((BATCH, width), -1, np.int32)
        for row, (first, n) in enumerate(zip(start, count, strict=True)):
            x[row, :n] = X[row, first : first + n]
            positions[row, :n] = np.arange(first, first + n)
        return self.run(x, positions, cache)

    def blank(self, tokens: int) -> Record:
        """What `tokens` tokens leave behind, all zero."""
        a = self.attention
        k = jnp.zeros((BATCH, a.kv_heads, tokens, a.key_dim))
        return Record(k, jnp.zeros((BATCH, a.value_heads, tokens, a.value_dim)))

    def fill(self, *lengths: int) -> LayerCache:
        """A cache that holds the first tokens of X, so many of each row."""
        if lengths not in self.filled:
            cache, done = self.init(), np.zeros(BATCH, int)
            while (done < lengths).any():
                count = np.minimum(WIDTH, np.array(lengths) - done)
                _, cache = self.step(done, count, cache)
                done += count
            self.filled[lengths] = cache
        return self.filled[lengths]


class Axes(NamedTuple):
    """The names of a member on the three axes."""

    record: str
    layout: str
    codec: str

    @property
    def kinds(self) -> frozenset[tuple[str, str]]:
        """What it is on each axis, where sizes and spellings of one kind are one."""
        return frozenset(
            {
                ("record", kind_of_record(self.record)),
                ("layout", self.layout.partition(" of ")[0]),
                ("codec", kind_of_codec(self.codec)),
            }
        )

    @property
    def pairs(self) -> frozenset[frozenset]:
        """Every two of the three."""
        return frozenset(map(frozenset, combinations(self.kinds, 2)))

    def member(self) -> Member:
        return Member(RECORDS[self.record], CACHES[f"{self.layout} {self.codec}"])


def kind_of_record(record: str) -> str:
    """To a cache, norms and soft caps leave what GQA leaves, and windows change no latent.

    Ties, factors and several latents are alike: keys and values have heads of their own numbers.
    """
    if record in ("several latents", "tied", "factors"):
        return "uneven"
    if record.startswith(("norm", "capped")):
        return "gqa"
    return "latent" if record.endswith("latent") else record


def kind_of_codec(codec: str) -> str:
    """Tiles of channels are one kind, of 4 bits or 8."""
    if codec.startswith("kivi"):
        return "Kivi"
    built = build_codec(codec, 8, 8)
    return "tiles" if isinstance(built, Int4 | TiledFp8) else type(built).__name__


def product() -> list[Axes]:
    """MHA, GQA and MQA in every cache; other records in a few of each layout.

    One with a rope key is in 16 bits, too, and in the codec that leaves the key in these. A record
    with a window or chunks is in every ring, and in such layouts as mask it.
    """
    plain, few = ("gqa", "mha", "mqa"), ("f32", "int8", "int4")
    beside_rope = (*few, "bf16", "fp8_ds_mla")
    every = []
    for record, config in RECORDS.items():
        for layout, (choice, _) in LAYOUTS.items():
            turns = layout == "ring"
            if turns and config.span is None:
                continue
            if config.span is not None and isinstance(choice, SinkRing):
                continue
            wide = record in plain or (turns and record == "windowed")
            some = beside_rope if config.rope_key else few
            every += [Axes(record, layout, codec) for codec in (CODECS if wide else some)]
        if record in (*plain, "narrow values", "latent"):
            every += [Axes(record, layout, kivi.name) for layout, (_, kivi, _) in GROUPS.items()]
    return every


def pairwise(every: Iterable[Axes]) -> list[Axes]:
    """Some of them, in which every pair of kinds is that is in any, and every name."""

    def covers(axes: Axes) -> frozenset:
        return axes.pairs | {("name", name) for name in axes}

    every = list(every)
    missing, chosen = frozenset().union(*map(covers, every)), []
    while missing:
        # The first of those that add most.
        best = max(every, key=lambda axes: len(covers(axes) & missing))
        chosen.append(best)
        missing -= covers(best)
    return chosen
