"""The multiplying warpgroup: an online softmax over the tiles of a span."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.mosaic_gpu.settings import Outputs, Scratch, Settings, Span
from kvjax.kernels.mosaic_gpu.tiles import column_step
from kvjax.kernels.mosaic_gpu.units import RESULT, TRANSPOSED

LOG2_E = math.log2(math.e)
# Stands for -inf where a difference of two would be NaN.
LOWEST = -1e30
# Smaller scales would overflow as divisors; what they scale is 0 beside all else.
LEAST_SCALE = 1e-30


class Softmax(NamedTuple):
    """The softmax over the tiles so far, in powers of 2.

    Attributes:
      shift: (heads,), the largest exponent.
      total: (rows, heads), sums of weights, of each row of the tiles by itself until the end.
      weighted: for each of `Settings.cuts`, (columns, heads), sums of weighted values.
    """

    shift: Array
    total: Array
    weighted: tuple[Array, ...]


class TokenScales(NamedTuple):
    """Scales of a tile's tokens, each (rows, heads).

    A value is its scale times its code. The codes' weights are 2^(score + log2 scale): at most 1
    like any other, whatever the scales, where weights times scales could underflow. Sums of the
    scores' own weights take 1 / scale of them.

    Attributes:
      key: factor of products.
      down: the values' scales, as exponents.
      up: their inverse.
    """

    key: Array
    down: Array
    up: Array


def attend_tiles(settings: Settings, scratch: Scratch, span: Span, factor: Array | None) -> Softmax:
    """The softmax over a span's tiles, its scores times `factor`."""
    start = nothing_seen(settings)
    plgpu.barrier_wait(scratch.q_full)
    return lax.fori_loop(
        0, span.tiles, lambda i, seen: _step(settings, scratch, span, factor, i, seen), start
    )


def nothing_seen(settings: Settings) -> Softmax:
    """The softmax over no tile."""
    heads = settings.plan.heads

    def zeros(*shape: int) -> Array:
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), RESULT)

    return Softmax(
        plgpu.layout_cast(jnp.full((heads,), LOWEST, jnp.float32), RESULT.reduce(0)),
        zeros(settings.plan.rows, heads),
        tuple(zeros(many, heads) for _, many in settings.cuts),
    )


def _step(
    settings: Settings, scratch: Scratch, span: Span, factor: Array | None, i: Array, seen: Softmax
) -> Softmax:
    """Take tile i of a span into account."""
    stage, first = settings.stage(i), (span.first + i) * settings.plan.rows
    plgpu.barrier_wait(scratch.k_full.at[stage])
    products = _products(settings, scratch, stage)
    scales = None
    if settings.token_scales:
        both = (scratch.k_scale.at[stage], scratch.v_scale.at[stage])
        key, value = (plgpu.load(part, layout=RESULT.reduce(1)) for part in both)
        scales = token_scales(key, value, products)
    if not settings.shared:
        _release(settings, scratch.k_free.at[stage])
    seen = weigh(settings, scratch, span, first, seen, products, scales, factor)
    values = _values(settings, scratch, span, stage, first)
    # Of the weights, and of values that were rewritten: the units read them past the caches.
    plgpu.commit_smem()
    seen = add_values(settings, scratch, seen, values)
    _release(settings, (scratch.k_free if settings.shared else scratch.v_free).at[stage])
    return seen


def weigh(
    settings: Settings,
    scratch: Scratch,
    span: Span,
    first: Array,
    seen: Softmax,
    products: Array,
    scales: TokenScales | None,
    factor: Array | None,
) -> Softmax:
    """Take the products of a tile that begins at slot `first` into account, but not yet its values.

    Their weights are left in shared memory.
    """
    if scales is None:
        powers = exponents(settings, products, factor)
    else:
        powers = exponents(settings, products * scales.key, factor) + scales.down
    live = _live(settings, span, first, settings.plan.heads)
    powers = jnp.where(live, powers, LOWEST)
    shift = jnp.maximum(seen.shift, powers.max(axis=0))
    decay = jnp.exp2(seen.shift - shift)
    weights = jnp.where(live, jnp.exp2(powers - along_rows(shift, powers)), 0.0)
    total = seen.total * along_rows(decay, weights)
    total += weights if scales is None else weights * scales.up
    kept = tuple(sums * along_rows(decay, sums) for sums in seen.weighted)
    scratch.weights.transpose((1, 0))[...] = plgpu.layout_cast(
        weights.astype(settings.operand), TRANSPOSED
    )
    return Softmax(shift, total, kept)


def add_values(
    settings: Settings, scratch: Scratch, seen: Softmax, values: Sequence[Any]
) -> Softmax:
    """Add a tile's values, (rows, columns) for each of `Settings.cuts`, by weights as left."""
    weighted = tuple(
        sums + settings.unit(part.transpose((1, 0)), scratch.weights.transpose((1, 0)))
        for sums, part in zip(seen.weighted, values, strict=True)
    )
    return seen._replace(weighted=weighted)


def _products(settings: Settings, scratch: Scratch, stage: Array) -> Array:
    """Products of a tile's keys with the queries, (rows, heads)."""
    keys: list[Any] = [part.at[stage] for part in scratch.k]
    if settings.coded:
        keys = [widened(settings, part) for part in keys]
    if scratch.wide_k:
        for part, wide in zip(keys, scratch.wide_k, strict=True):
            wide[...] = part
        plgpu.commit_smem()
        keys = list(scratch.wide_k)
    products = [
        settings.unit(part, q.transpose((1, 0))) for part, q in zip(keys, scratch.q, strict=True)
    ]
    return sum(products[1:], products[0])


def exponents(settings: Settings, products: Array, factor: Array | None = None) -> Array:
    """Scores of products, to the base of 2."""
    scale = settings.scale if factor is None else settings.scale * factor
    if settings.soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / settings.soft_cap)) * (settings.soft_cap * LOG2_E)


def token_scales(key: Array, value: Array, like: Array) -> TokenScales:
    """The scales of a tile's tokens, (rows,) each, in the shape of `like`."""
    # NaN, of a dead slot, compares with nothing.
    value = jnp.where(value >= LEAST_SCALE, value, LEAST_SCALE)
    parts = key, jnp.log2(value), 1 / value
    return TokenScales(*(lax.broadcast_in_dim(part, like.shape, [0]) for part in parts))


def _live(settings: Settings, span: Span, first: Array, columns: int) -> Array:
    """Bool (rows, columns), whether the slots of a tile that begins at `first` are seen."""
    slot = plgpu.broadcasted_iota(jnp.int32, (settings.plan.rows, columns), 0, layout=RESULT)
    live = slot < span.n - first
    return live if settings.window is None else live & (slot >= span.oldest - first)


def _values(
    settings: Settings, scratch: Scratch, span: Span, stage: Array, first: Array
) -> Sequence[Any]:
    """The values of a tile as operands, rows that are not seen being 0.

    A weight of 0 does not silence a dead slot that holds NaN or inf.
    """
    if settings.shared:
        parts = [scratch.k[0].at[stage]]
    else:
        plgpu.barrier_wait(scratch.v_full.at[stage])
        parts = [part.at[stage] for part in scratch.v]
    if settings.coded:
        clear_unseen(settings, span, first, parts, scratch.wide_v)
        return scratch.wide_v
    at_edge = (first + settings.plan.rows > span.n) | (first < span.oldest)
    pl.when(at_edge)(lambda: clear_unseen(settings, span, first, parts, parts))
    return parts


def clear_unseen(
    settings: Settings, span: Span, first: Array, parts: Sequence[Any], targets: Sequence[Any]
) -> None:
    """Write a tile's values to `targets` as operands, rows that are not seen being 0."""
    step = column_step(settings.stored, settings.value_dim)
    for source, target in zip(parts, targets, strict=True):
        for column in range(0, source.shape[1], step):
            columns = pl.ds(column, step)
            old = source.at[:, columns]
            old = widened(settings, old) if settings.coded else plgpu.load(old, layout=RESULT)
            seen = _live(settings, span, first, step)
            target.at[:, columns][...] = jnp.where(seen, old, jnp.zeros((), settings.operand))


def widened(settings: Settings, codes: Any) -> Array:
    """8-bit codes (rows, columns) in the products' type, as a large operand in registers."""
    narrow = plgpu.load(codes, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    slow = (narrow.dtype, settings.operand) == (jnp.int8, jnp.float16)
    wide = _half(narrow) if slow else narrow.astype(settings.operand)
    return plgpu.layout_cast(wide, RESULT)


def _half(codes: Array) -> Array:
    """int8 in float16, by its bits: 0x6400 + n is 1024 + n, for n up to 1023."""
    biased = lax.bitcast_convert_type(codes, jnp.uint8) ^ jnp.uint8(0x80)
    bits = biased.astype(jnp.uint16) | jnp.uint16(0x6400)
    return lax.bitcast_convert_type(bits, jnp.float16) - jnp.float16(1024 + 128)


def _release(settings: Settings, free: Any) -> None:
    """Tell the copying warpgroup that a stage has been read."""
    if settings.coded or settings.unit.reads_generic:
        # The warps read it: their reads come before the next copy, which goes another way.
        plgpu.commit_smem()
    plgpu.barrier_arrive(free)


def write(settings: Settings, seen: Softmax, scratch: Scratch | Outputs) -> None:
    """Divide by the sums of weights, and leave output and LSE in those of `scratch`."""
    total = seen.total.sum(axis=0)
    for (column, many), sums in zip(settings.cuts, seen.weighted, strict=True):
        out = sums / along_rows(total, sums)
        scratch.out.at[:, pl.ds(column, many)].transpose((1, 0))[...] = plgpu.layout_cast(
            out, TRANSPOSED
        )
    scratch.lse[...] = (seen.shift + jnp.log2(total)) * (1 / LOG2_E)


def write_nothing(settings: Settings, scratch: Scratch | Outputs) -> None:
    """Leave the LSE of a split without a live slot in that of `scratch`."""
    nothing = jnp.full((settings.plan.heads,), -jnp.inf, jnp.float32)
    scratch.lse[...] = plgpu.layout_cast(nothing, RESULT.reduce(0))


def along_rows(columns: Array, like: Array) -> Array:
    """(heads,) repeated for every row of `like` (rows, heads)."""
    return lax.broadcast_in_dim(columns, like.shape, [1])
