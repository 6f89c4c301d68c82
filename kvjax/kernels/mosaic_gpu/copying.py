"""The copying warpgroup: it keeps the stages filled with tiles of the cache (TMA)."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.mosaic_gpu.settings import Inputs, Scratch, Settings, Span


def copy_tiles(
    settings: Settings, inputs: Inputs, scratch: Scratch, span: Span, row: Array, kv_head: Array
) -> None:
    """Copy a span's tiles, each as soon as its stage is free; return when all were read."""
    stages = settings.plan.stages

    def copy_tile(i: Array, _: None) -> None:
        stage = settings.stage(i)
        # Before the wait, so that pages are looked up while it lasts.
        found = places(settings, inputs, span, span.first + i, row, kv_head)

        def wait_for(free: Any) -> None:
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))

        wait_for(scratch.k_free)
        keys = [*zip(inputs.k, scratch.k, strict=True)]
        if settings.token_scales:
            keys += [(inputs.k_scale, scratch.k_scale), (inputs.v_scale, scratch.v_scale)]
        for source, target in found:
            for array, tiles in keys:
                plgpu.copy_gmem_to_smem(
                    array.at[source], tiles.at[stage, target], scratch.k_full.at[stage]
                )
        if settings.shared:
            return
        wait_for(scratch.v_free)
        for source, target in found:
            for (column, many), tiles in zip(settings.cuts, scratch.v, strict=True):
                plgpu.copy_gmem_to_smem(
                    inputs.v.at[(*source, pl.ds(column, many))],
                    tiles.at[stage, target],
                    scratch.v_full.at[stage],
                )

    def drain(i: Array, _: None) -> None:
        for free in (scratch.k_free, scratch.v_free):
            if free is not None:
                plgpu.barrier_wait(free.at[settings.stage(i)])

    lax.fori_loop(0, span.tiles, copy_tile, None)
    lax.fori_loop(jnp.maximum(span.tiles - stages, 0), span.tiles, drain, None)


def places(
    settings: Settings, inputs: Inputs, span: Span, tile: Array, row: Array, kv_head: Array
) -> list[tuple[tuple[Any, ...], Any]]:
    """Where the slots of a tile lie in the cache, and where they go in a stage."""
    rows, size = settings.plan.rows, settings.page_size
    if size is None:
        return [((row, kv_head, pl.ds(tile * rows, rows)), pl.ds(0, rows))]
    # Neither crosses the end of a page, nor of a tile.
    piece = math.gcd(size, rows)
    found = []
    for offset in range(0, rows, piece):
        slot = tile * rows + offset
        page = _page(settings, inputs, span, row, lax.div(slot, jnp.int32(size)))
        begin = pl.multiple_of(lax.rem(slot, jnp.int32(size)), piece) if size > piece else 0
        found.append(((page, kv_head, pl.ds(begin, piece)), pl.ds(offset, piece)))
    return found


def _page(settings: Settings, inputs: Inputs, span: Span, row: Array, entry: Array) -> Array:
    """The page of a table's entry; beyond the last live one, that one again."""
    last = lax.div(span.n - 1, jnp.int32(settings.page_size))
    page = inputs.page_table[row, jnp.minimum(entry, last)]
    return jnp.clip(page, 0, settings.num_pages - 1)
