"""Calls of decode attention as kernels see them, and arrays to run them on.

Arrays are made on the device, from a hash of each element's place: a cache of many GB then needs
neither a copy on the host nor temporaries. `oracle` says what must come out.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.ops import decode_attention, latent_decode_attention

DTYPES = {
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
    "int8": jnp.int8,
}
# Entries of a page table behind a row's live pages; any must do.
GARBAGE = (-1, 2**30, -(2**31), 0)
# Pages that no row has.
SPARE_PAGES = 3
# Queries are this wide, so that some keys matter much more than others.
QUERY_SPREAD = 2.0
# Codes of 1: of 8-bit integers, which then hold nearly normal numbers.
INT8_ONE = 32.0

type Operands = dict[str, Any]


@dataclass(frozen=True)
class DecodeShape:
    """One call of decode attention.

    Attributes:
      batch, query_heads, kv_heads: B, N and K.
      key_dim: H; of latents, L.
      length: live slots of all rows, or of each row, or of each row's KV heads.
      value_dim: HV; None for H.
      rope_dim: R of latents, which are key and value at once; 0 where K and V are two arrays.
      capacity: S; None for the longest row's length, rounded up to 8 or to pages.
      codec: dtype of K and V, of `DTYPES`.
      scales: "tensor", "head" or "token" beside 8-bit codes, or None.
      page_size: P, or None for rows of slots.
      window, soft_cap: as in `decode_attention`.
      sinks: whether heads have learned sinks.
      query: dtype of queries and outputs.
    """

    batch: int
    query_heads: int
    kv_heads: int
    key_dim: int
    length: int | tuple[Any, ...]
    value_dim: int | None = None
    rope_dim: int = 0
    capacity: int | None = None
    codec: str = "bf16"
    scales: str | None = None
    page_size: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    query: str = "bf16"

    @property
    def group(self) -> int:
        """G, query heads of a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def columns(self) -> int:
        """HV."""
        return self.value_dim or self.key_dim

    @property
    def scale(self) -> float:
        """Of the scores. Latents are scored as by heads of 128 beside their rope keys."""
        return (self.key_dim if not self.rope_dim else 128 + self.rope_dim) ** -0.5

    @cached_property
    def lengths(self) -> np.ndarray:
        """(B,) or (B, K) int32."""
        given = np.asarray(self.length, np.int32)
        return np.full(self.batch, given) if given.ndim == 0 else given

    @cached_property
    def live(self) -> np.ndarray:
        """(B, K) int32, live slots of each KV head."""
        rows = self.lengths.reshape(self.batch, -1)
        return np.broadcast_to(rows, (self.batch, self.kv_heads))

    @property
    def slots(self) -> int:
        """S, of a row."""
        if self.capacity is not None:
            return self.capacity
        return _round_up(max(1, int(self.live.max())), self.page_size or 8)

    @cached_property
    def pages(self) -> np.ndarray:
        """(B,) pages of each row that hold something."""
        assert self.page_size is not None
        return -(-self.live.max(1) // self.page_size)

    @property
    def seen(self) -> int:
        """Slots that are attended, of all rows and KV heads."""
        window = self.window or self.slots
        return int(np.minimum(self.live, window).sum(dtype=np.int64))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one KV head, its scales included."""
        own = self.key_dim + (self.rope_dim if self.rope_dim else self.columns)
        return own * jnp.dtype(DTYPES[self.codec]).itemsize + 8 * (self.scales == "token")

    @property
    def bytes_per_step(self) -> int:
        """Bytes of the cache that a call has to read: those of the slots that are attended."""
        return self.seen * self.slot_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots, or of all pages."""
        rows = self.batch * self.slots
        if self.page_size is not None:
            rows = (int(self.pages.sum()) + SPARE_PAGES) * self.page_size
        return rows * self.kv_heads * self.slot_bytes

    @property
    def flop_per_step(self) -> int:
        """FLOP of q.k and p.v."""
        return 2 * self.group * self.seen * (self.key_dim + self.rope_dim + self.columns)


def attend(shape: DecodeShape, q: Array, operands: Operands, **how: Any) -> Any:
    """The public function for that shape, over `operands`; `how` says by which implementation."""
    if shape.rope_dim:
        function: Any = latent_decode_attention
    else:
        function, how = decode_attention, {"soft_cap": shape.soft_cap, **how}
    return function(q, **operands, scale=shape.scale, window=shape.window, **how)


def queries(shape: DecodeShape, seed: int = 0) -> Array:
    """q (B, N, H), or for latents q_latent (B, N, L)."""
    size = (shape.batch, shape.query_heads, shape.key_dim)
    return normal(size, DTYPES[shape.query], _seed("q", seed), spread=QUERY_SPREAD)


def operands(shape: DecodeShape, seed: int = 0, *, poisoned: bool = False) -> Operands:
    """All arguments but q; with `poisoned`, whatever is not live is NaN (127 of int8)."""
    arrays: Operands = dict(_arrays(*_arguments(shape, seed, poisoned)))
    arrays["lengths"] = jnp.asarray(shape.lengths)
    if shape.page_size is not None:
        arrays["page_table"] = jnp.asarray(_page_table(shape))
    return arrays


def compile_operands(shape: DecodeShape, *, poisoned: bool = False) -> None:
    """Compile what `operands` and `queries` will run."""
    queries(shape)
    _arrays.lower(*_arguments(shape, 0, poisoned)).compile()


@partial(jax.jit, static_argnames=("size", "dtype", "spread"))
def normal(size: tuple[int, ...], dtype: Any, seed: Array, spread: float = 1.0) -> Array:
    """Numbers that are nearly normal, of that deviation; of int8, as codes of `INT8_ONE`."""
    numbers = _normal(size, seed) * spread
    if dtype == jnp.int8:
        numbers = jnp.clip(jnp.round(numbers * INT8_ONE), -127, 127)
    return numbers.astype(dtype)


def _arguments(
    shape: DecodeShape, seed: int, poisoned: bool
) -> tuple[DecodeShape, Array | None, Array]:
    return shape, jnp.asarray(_alive(shape)) if poisoned else None, jnp.uint32(seed)


@partial(jax.jit, static_argnums=0)
def _arrays(shape: DecodeShape, alive: Array | None, seed: Array) -> Operands:
    """Caches, scales, rope queries and sinks; NaN where `alive` (B or pages, K, S or P) is not."""
    dtype = DTYPES[shape.codec]
    if shape.page_size is None:
        lead: tuple[int, ...] = (shape.batch, shape.kv_heads, shape.slots)
    else:
        lead = (int(shape.pages.sum()) + SPARE_PAGES, shape.kv_heads, shape.page_size)

    def cache(name: str, *width: int) -> Array:
        numbers = normal((*lead, *width), dtype, _seed(name, seed))
        if alive is None:
            return numbers
        dead = jnp.asarray(127 if dtype == jnp.int8 else jnp.nan, dtype)
        return jnp.where(alive[..., None], numbers, dead)

    def scale(name: str) -> Array:
        size = {"tensor": (), "head": lead[1:2], "token": lead}[shape.scales or ""]
        one = 1 / INT8_ONE if shape.codec == "int8" else 1.0
        factors = one * (1 + 0.2 * _normal(size, _seed(name, seed)))
        if alive is None or shape.scales != "token":
            return factors
        return jnp.where(alive, factors, jnp.nan)

    made: Operands = {}
    if shape.rope_dim:
        rows = (shape.batch, shape.query_heads, shape.rope_dim)
        made["q_rope"] = normal(rows, DTYPES[shape.query], _seed("q_rope", seed))
        made["latent"] = cache("k", shape.key_dim)[:, 0]
        made["k_rope"] = cache("v", shape.rope_dim)[:, 0]
    else:
        made |= {"k": cache("k", shape.key_dim), "v": cache("v", shape.columns)}
    if shape.scales is not None:
        made |= {name: scale(name) for name in ("k_scale", "v_scale")}
    if shape.sinks:
        made["sink_logits"] = _normal((shape.query_heads,), _seed("sinks", seed))
    return made


def _page_table(shape: DecodeShape) -> np.ndarray:
    """(B, max_pages): pages in no order, none of them twice, and garbage behind the live ones."""
    assert shape.page_size is not None
    most = shape.slots // shape.page_size
    table = np.resize(np.array(GARBAGE, np.int32), (shape.batch, most))
    order = np.random.default_rng(0).permutation(int(shape.pages.sum()) + SPARE_PAGES)
    starts = np.cumsum(shape.pages) - shape.pages
    for row, (start, many) in enumerate(zip(starts, shape.pages, strict=True)):
        table[row, :many] = order[start : start + many]
    return table


def _alive(shape: DecodeShape) -> np.ndarray:
    """Bool (B, K, S), or of pages (num_pages, K, P)."""
    rows = np.arange(shape.slots) < shape.live[..., None]
    if shape.page_size is None:
        return rows
    cut = rows.reshape(shape.batch, shape.kv_heads, -1, shape.page_size)
    pool = np.zeros(
        (int(shape.pages.sum()) + SPARE_PAGES, shape.kv_heads, shape.page_size), np.bool_
    )
    for row, table in enumerate(_page_table(shape)):
        many = shape.pages[row]
        pool[table[:many]] = np.moveaxis(cut[row, :, :many], 1, 0)
    return pool


def _normal(size: tuple[int, ...], seed: Any) -> Array:
    """Sums of the four bytes of a hash of each element's place, in float32: mean 0, deviation 1."""
    state = jnp.broadcast_to(jnp.asarray(seed, jnp.uint32), size)
    for axis in range(len(size)):
        place = lax.broadcasted_iota(jnp.uint32, size, axis)
        state = _mixed(state ^ (place * jnp.uint32(0x9E3779B1) + jnp.uint32(axis)))
    state = _mixed(state)
    total = sum((state >> jnp.uint32(8 * i)) & jnp.uint32(255) for i in range(4))
    return (jnp.asarray(total).astype(jnp.float32) - 510) / math.sqrt((256**2 - 1) / 3)


def _mixed(x: Array) -> Array:
    """The finalizer of MurmurHash3 (Appleby): every bit depends on every bit."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def _seed(name: str, seed: Any) -> Array:
    """Another for each array."""
    return jnp.uint32(zlib.crc32(name.encode())) + jnp.asarray(seed, jnp.uint32)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
