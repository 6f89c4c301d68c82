"""One layer's decode step over its cache: the newest token is written, then attends to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import sizing
from kvjax.bench import machine, result
from kvjax.bench.bandwidth import ARRAY_BYTES, Bandwidth, probes
from kvjax.bench.case import check_sizes
from kvjax.bench.timing import interleave, time_calls
from kvjax.cache import LayerCache, Paged, Record, SinkRing, init_layer_cache
from kvjax.cache.spelling import read_layout
from kvjax.ops import attend

# Tokens that a cache is filled with at a time.
_FILL = 1024


@dataclass(frozen=True)
class CacheCase:
    """B rows of `length` tokens, the newest included, in a cache that has room for just these.

    Attributes:
      batch: B.
      query_heads, kv_heads, head_dim: N, K and H.
      length: tokens a row has seen.
      layout: as `kvjax generate` spells it.
      codec: a name of `kvjax.sizing.CODECS`.
      window: of the layer; None for none.
    """

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    length: int
    layout: str = "dense"
    codec: str = "bf16"
    window: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self.batch, self.length, self.length)
        object.__setattr__(self, "codec", sizing.codec(self.codec).name)
        _ = self.layer, read_layout(self.layout)  # which check the heads, and the spelling

    @property
    def layer(self) -> sizing.LayerSpec:
        layout = read_layout(self.layout)
        window = self.window
        if isinstance(layout, SinkRing):
            window = min(layout.slots, window or layout.slots)
        return sizing.LayerSpec(
            self.query_heads, self.kv_heads, self.head_dim, self.head_dim, window=window
        )

    def cache_bytes(self) -> sizing.CacheBytes:
        """Of the layer's cache, full."""
        layout = read_layout(self.layout)
        page_size = layout.page_size if isinstance(layout, Paged) else None
        spec = sizing.ModelSpec("one layer", self.query_heads * self.head_dim, (self.layer,))
        return spec.cache_bytes(self.length, self.batch, self.codec, page_size=page_size)

    @property
    def flop_per_step(self) -> int:
        """FLOP of the products of the queries with K, and of the weights with V."""
        return self.batch * self.layer.attention_flop(self.length)

    def filled(self, seed: int = 0) -> LayerCache:
        """The cache with random records of all tokens but the newest."""
        cache = init_layer_cache(
            self.batch,
            self.length,
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            window=self.window,
            layout=read_layout(self.layout),
            codec=self.codec,
        )
        draw = np.random.default_rng(seed)
        shape = (self.batch, self.kv_heads, _FILL, self.head_dim)
        for start in range(0, self.length - 1, _FILL):
            new = Record(*(jnp.asarray(draw.standard_normal(shape, np.float32)) for _ in "kv"))
            count = min(_FILL, self.length - 1 - start)
            cache = _append(cache, new, jnp.full((self.batch,), count, jnp.int32))
        return cache


class Steps:
    """A sampler of decode steps, all of the same token: each forgets it again."""

    def __init__(self, case: CacheCase, seed: int = 0):
        draw = np.random.default_rng(seed)

        def normal(heads: int, *tokens: int) -> Array:
            shape = (case.batch, *tokens, heads, case.head_dim)
            return jnp.asarray(draw.standard_normal(shape, np.float32))

        self._cache = case.filled(seed)
        self._q = normal(case.query_heads, 1)
        self._new = Record(*(normal(case.kv_heads, 1).swapaxes(1, 2) for _ in "kv"))
        self._window = case.window

    def __call__(self, calls: int) -> float:
        seconds = time_calls(self.step, calls)
        self._cache.check()
        return seconds

    def step(self) -> Array:
        """Output (B, 1, N, H) of the newest token."""
        out, self._cache = _step(self._q, self._new, self._cache, window=self._window)
        return out


@partial(jax.jit, donate_argnames="cache")
def _append(cache: LayerCache, new: Record, count: Array) -> LayerCache:
    return cache.append(new, count)


@partial(jax.jit, donate_argnames="cache", static_argnames="window")
def _step(q: Array, new: Record, cache: LayerCache, window: int | None) -> tuple[Array, LayerCache]:
    before = cache.n
    cache = cache.append(new, jnp.ones_like(before))
    out, _ = attend(q, cache, before[:, None], window=window)
    # Not a rollback, which rings refuse: the next step writes the same token to the same slot.
    return out, replace(cache, n=before)  # type: ignore[type-var]


def measure(
    cases: Iterable[CacheCase],
    *,
    rounds: int = 7,
    seed: int = 0,
    array_bytes: int = ARRAY_BYTES,
    on_round: Callable[[int], Any] | None = None,
) -> dict[str, Any]:
    """Time the step of every case, all of them in turn in each round; all are in memory at once.

    Args:
      cases: what to run.
      rounds: samples of each.
      seed: of the numbers and the orders.
      array_bytes: size of the arrays that the machine's bandwidth is measured on.
      on_round: called with 1 after each round.

    Returns:
      As `result.collect`. The bytes of a row are the `read_per_step` of sizing.

    Raises:
      ValueError: for caches that cannot be, or do not fit the memory.
    """
    cases = tuple(cases)
    needed = sum(case.cache_bytes().allocated for case in cases)
    machine.check_memory(needed + 3 * array_bytes, "the caches of all cases")
    moves = probes(array_bytes)
    steps = {case: Steps(case, seed) for case in cases}
    timings = interleave({**steps, **moves}, rounds, seed=seed, on_round=on_round)
    bandwidth = Bandwidth.of(moves, timings)
    rows = [
        result.row(
            "kvjax",
            asdict(case),
            case.cache_bytes().read_per_step,
            case.flop_per_step,
            timings[case],
            bandwidth,
        )
        for case in cases
    ]
    return result.collect("cached attention", rows, bandwidth, {"rounds": rounds, "seed": seed})
