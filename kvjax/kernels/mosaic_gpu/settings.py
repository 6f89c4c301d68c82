"""What a decode kernel is made of: its static settings, arrays, and shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kvjax.kernels.mosaic_gpu.plan import Plan
from kvjax.kernels.mosaic_gpu.tiles import smem, value_cuts
from kvjax.kernels.mosaic_gpu.units import INTERPRETED, UNITS, Unit


class Inputs(NamedTuple):
    """Arrays of a call; those that are None take no part.

    Attributes:
      q: for each part of the keys, (B, K, heads, H): each KV head's query heads, filled up.
      k: parts whose scores add up, each (B, K, S, H), or pages (num_pages, K, P, H).
      v: (B, K, S, HV) or pages; None where the first part of the keys is the values, too.
      lengths: (B, K) or (B, 1) int32.
      page_table: (B, max_pages) int32.
      key_factor: (K,) float32, of the scores.
      k_scale, v_scale: (B, K, S) float32, or in pages (num_pages, K, P).
    """

    q: tuple[Any, ...]
    k: tuple[Any, ...]
    v: Any
    lengths: Any
    page_table: Any = None
    key_factor: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Outputs(NamedTuple):
    """out (splits, B, K, heads, HV) and lse (splits, B, K, heads), float32, natural log.

    Of a split without a live slot, `out` is never written and `lse` is -inf.
    """

    out: Any
    lse: Any


class Scratch(NamedTuple):
    """Shared memory of a block, and its barriers.

    Attributes:
      q: for each part, (heads, H). k: for each part, (stages, rows, H).
      v: for each of `value_cuts`, (stages, rows, columns); none where keys are the values.
      k_scale, v_scale: (stages, rows), or None.
      wide_k, wide_v: 8-bit codes in the products' type, (rows, columns); none where not needed.
      weights: (heads, rows). out: (heads, HV). lse: (heads,).
      q_full, k_full, v_full: completed by copies. k_free, v_free: by the reader of a stage.
    """

    q: tuple[Any, ...]
    k: tuple[Any, ...]
    v: tuple[Any, ...]
    k_scale: Any
    v_scale: Any
    wide_k: tuple[Any, ...]
    wide_v: tuple[Any, ...]
    weights: Any
    out: Any
    lse: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any


class Span(NamedTuple):
    """The `tiles` tiles that a block takes, from tile `first` on, of a row of n live slots.

    Slots from `oldest` on are seen.
    """

    n: Array
    oldest: Array
    first: Array
    tiles: Array


@dataclass(frozen=True)
class Settings:
    """All that is static in a kernel.

    Attributes:
      plan: how work is divided.
      unit: what multiplies.
      scale: factor of the scores.
      soft_cap, window: as in `ops.decode_attention`.
      key_dims: widths of the parts of keys.
      value_dim: HV.
      shared: whether the first part of the keys is the values, too.
      capacity: S, slots of a row.
      page_size: P, or None for rows of slots.
      num_pages: of the pool.
      operand: dtype of queries and weights, in which products run.
      stored: dtype of keys and values.
      token_scales: whether each token has scales of its own.
    """

    plan: Plan
    unit: Unit
    scale: float
    soft_cap: float | None
    window: int | None
    key_dims: tuple[int, ...]
    value_dim: int
    shared: bool
    capacity: int
    page_size: int | None
    num_pages: int
    operand: DTypeLike
    stored: DTypeLike
    token_scales: bool

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        plan: Plan,
        interpreted: bool,
        scale: float,
        soft_cap: float | None,
        window: int | None,
    ) -> Settings:
        """Those of a call with these arrays."""
        keys, table = inputs.k[0], inputs.page_table
        return cls(
            plan=plan,
            unit=(INTERPRETED if interpreted else UNITS)[plan.unit],
            scale=scale,
            soft_cap=soft_cap,
            window=window,
            key_dims=tuple(part.shape[-1] for part in inputs.k),
            value_dim=(keys if inputs.v is None else inputs.v).shape[-1],
            shared=inputs.v is None,
            capacity=keys.shape[2] * (1 if table is None else table.shape[1]),
            page_size=None if table is None else keys.shape[2],
            num_pages=len(keys),
            operand=inputs.q[0].dtype,
            stored=keys.dtype,
            token_scales=inputs.k_scale is not None,
        )

    @property
    def coded(self) -> bool:
        """Whether keys and values are 8-bit codes, which are widened before products."""
        return jnp.dtype(self.stored).itemsize == 1

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Columns (first, many) of values, as they are loaded, multiplied and summed up."""
        return value_cuts(self.value_dim)

    def stage(self, i: Array) -> Array:
        """Where a span's tile i is held."""
        return lax.rem(i, jnp.int32(self.plan.stages))

    def span(self, inputs: Inputs, row: Array, kv_head: Array | int, split: Array) -> Span:
        """The tiles of one split of a row's KV head."""
        n = inputs.lengths[row, kv_head if inputs.lengths.shape[1] > 1 else 0]
        n = jnp.minimum(n, self.capacity)
        rows, splits = jnp.int32(self.plan.rows), jnp.int32(self.plan.splits)
        oldest = jnp.int32(0) if self.window is None else jnp.maximum(n - self.window, 0)
        begin, end = lax.div(oldest, rows), lax.div(n + rows - 1, rows)
        many = lax.div(end - begin + splits - 1, splits)
        first = begin + split * many
        return Span(n, oldest, first, jnp.clip(end - first, 0, many))

    def scratch(self) -> Scratch:
        """What a block allocates."""
        stages, rows, heads = self.plan.stages, self.plan.rows, self.plan.heads
        copies = 1 if self.page_size is None else rows // math.gcd(rows, self.page_size)
        scales = plgpu.SMEM((stages, rows), jnp.float32) if self.token_scales else None
        own = () if self.shared else self.cuts
        # Both operands of a product are tiled alike: weights like values, queries like keys.
        values = self.value_dim
        k_copies = copies * (len(self.key_dims) + 2 * self.token_scales)
        return Scratch(
            q=tuple(smem((heads, dim), self.operand) for dim in self.key_dims),
            k=tuple(smem((stages, rows, dim), self.stored) for dim in self.key_dims),
            v=tuple(smem((stages, rows, many), self.stored, values) for _, many in own),
            k_scale=scales,
            v_scale=scales,
            wide_k=tuple(
                smem((rows, dim), self.operand)
                for dim in self.key_dims
                if self.coded and not self.unit.takes_registers
            ),
            wide_v=tuple(smem((rows, many), self.operand, values) for _, many in own if self.coded),
            weights=smem((heads, rows), self.operand, values),
            out=smem((heads, values), jnp.float32),
            lse=plgpu.SMEM((heads,), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=len(self.key_dims)),
            k_full=plgpu.Barrier(num_arrivals=k_copies, num_barriers=stages),
            v_full=None
            if self.shared
            else plgpu.Barrier(num_arrivals=copies * len(own), num_barriers=stages),
            k_free=plgpu.Barrier(num_barriers=stages),
            v_free=None if self.shared else plgpu.Barrier(num_barriers=stages),
        )
