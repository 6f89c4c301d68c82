"""Decode attention over latents (MLA, absorbed) for many heads, 64 to a block, on sm_90.

A latent is a token's key, beside its rope key, and its value. A block of two warpgroups holds a
tile of 64 slots once, as halves of the latents' columns and rope keys, and 64 heads' queries:

    leader    S = Q K^T over all columns, online softmax, weights P;  O_0 += P V_0, the first half
    follower  copies tiles (TMA) into the stages;                     O_1 += P V_1, the second half

Heads are the products' 64 rows here: the softmax goes along rows, and stays within four lanes.
Weights, and what sums shrink by, pass through shared memory. The sums, 64 x 512 in float32, take
half of a multiprocessor's registers: hence two warpgroups, whose threads may have 255 each.

What that costs for latents of 512 and rope keys of 64 columns in 16 bits. It is counted, or told by
the compiler; nothing of it is measured.

- Each live slot is 1,152 bytes, read from HBM once: blocks that share a row's tiles, two for 128
  heads, are neighbours in the grid, and the later one finds them in L2. Beside that, a split of 128
  heads reads 147,456 bytes of queries and writes 262,656 of outputs and LSEs, as much as 356 slots.
- Each live slot takes 2 (2 L + R) = 2,176 FLOP a head: 242 FLOP/B for 128 heads, above the ridge of
  an H200 (206) and below that of an H100 (295). Memory and matrix units are close as bounds.
- A block's tile takes the matrix units 2,176 clocks, at 4,096 FLOP a clock, and its softmax adds to
  that: it overlaps with copies alone. A third stage, for products of the next tile beside it, does
  not fit: two take 230,400 of 232,448 bytes. S is bound by shared memory, too, from which both of
  its operands come, 4 KB for 32 clocks.
- L2 gives each tile once to each block, for 128 heads twice what HBM does. A multicast to both
  blocks as a cluster would halve that; it is not done, since no simulation sees whether one block
  copies over what the other still reads.
- A thread has 249 to 255 registers, and none is spilled. Of 64 slots, the leader's loop takes 699
  instructions and the follower's 186, beside those of a tile at a row's edge.

It should win over `decode` from 17 heads on: that one takes a block, and reads each tile once more,
for each 16 of them. It loses below: 64 heads are multiplied whether they are there or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.mosaic_gpu.attending import LOG2_E, LOWEST, exponents
from kvjax.kernels.mosaic_gpu.copying import places
from kvjax.kernels.mosaic_gpu.launch import launch
from kvjax.kernels.mosaic_gpu.plan import Plan
from kvjax.kernels.mosaic_gpu.settings import Inputs, Outputs, Settings, Span
from kvjax.kernels.mosaic_gpu.tiles import LARGE, smem
from kvjax.kernels.mosaic_gpu.units import RESULT, Wgmma

# Columns of the values are halved between two warpgroups.
HALVES = 2
LEADER, FOLLOWER = range(HALVES)
PER_HEAD = RESULT.reduce(1)


class Scratch(NamedTuple):
    """Shared memory of a block, and its barriers. Keys are in parts: half a latent, half, rope.

    Attributes:
      q: for each part, (heads, columns). k: for each part, (stages, rows, columns).
      weights: (heads, rows), of the tile in hand.
      factor: (heads,), what sums so far shrink by with it; in the end, 1 / the sum of weights.
      q_full: completed by copies; so are k_full, of each part.
      k_free: by the leader, when it has read a stage.
      weights_full: by the leader, of weights and factor. weights_free: by the follower.
    """

    q: tuple[Any, ...]
    k: tuple[Any, ...]
    weights: Any
    factor: Any
    q_full: Any
    k_full: tuple[Any, ...]
    k_free: Any
    weights_full: Any
    weights_free: Any


class Seen(NamedTuple):
    """The leader's softmax over the tiles so far, in powers of 2.

    shift and total are (heads,), the largest exponent and the sum of weights; sums (heads, L / 2).
    """

    shift: Array
    total: Array
    sums: Array


def decode(
    inputs: Inputs,
    plan: Plan,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Outputs:
    """Outputs and LSEs of each split, to be merged. See `Outputs`.

    Args:
      inputs: of one KV head, with two parts of keys, (B, 1, S, L) with L in multiples of 128 up to
        512 and (B, 1, S, R), or pages of them, and no v; all in f16, or all in bf16.
      plan: of `make_latent_plan`; q has a multiple of its `heads`.
      scale, soft_cap, window: of the scores, as in `ops.decode_attention`.
      interpret: runs the kernel in Pallas' interpreter for GPUs. The plan's unit "mma" then reads
        operands as its race detector sees.
    """
    batch, _, heads, latent = inputs.q[0].shape
    settings = Settings.of(inputs, plan, interpret is not None, scale, soft_cap, window)
    return launch(
        partial(_block, settings),
        settings,
        inputs,
        [_scratch(settings)],
        # Blocks that read the same tiles run side by side.
        {"split": plan.splits, "row": batch, "part": heads // plan.heads},
        columns=latent,
        interpret=interpret,
        warpgroups=HALVES,
        # Of reductions across warps, of which there are none.
        reduction_scratch_bytes=0,
    )


def _parts(settings: Settings) -> tuple[tuple[int, Any], ...]:
    """For each part of keys as it is held: which of the inputs' it is of, and its columns."""
    latent, rope = settings.key_dims
    half = latent // HALVES
    return *((0, pl.ds(i * half, half)) for i in range(HALVES)), (1, pl.ds(0, rope))


def _scratch(settings: Settings) -> Scratch:
    """What a block allocates."""
    stages, rows, heads = settings.plan.stages, settings.plan.rows, settings.plan.heads
    copies = 1 if settings.page_size is None else rows // math.gcd(rows, settings.page_size)
    widths = [columns.size for _, columns in _parts(settings)]
    return Scratch(
        q=tuple(smem((heads, width), settings.operand) for width in widths),
        k=tuple(smem((stages, rows, width), settings.stored) for width in widths),
        weights=smem((heads, rows), settings.operand),
        factor=plgpu.SMEM((heads,), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=len(widths)),
        k_full=tuple(plgpu.Barrier(num_arrivals=copies, num_barriers=stages) for _ in widths),
        k_free=plgpu.Barrier(num_barriers=stages),
        weights_full=plgpu.Barrier(),
        weights_free=plgpu.Barrier(),
    )


def _block(settings: Settings, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> None:
    """One split of one row, for some of its heads."""
    many = settings.plan.heads
    split, row, part = (lax.axis_index(name) for name in ("split", "row", "part"))
    heads = pl.ds(part * many, many)
    span = settings.span(inputs, row, 0, split)
    warpgroup, at = lax.axis_index("warpgroup"), (split, row, 0, heads)

    def write(half: int, sums: Array) -> None:
        _, columns = _parts(settings)[half]
        outputs.out.at[(*at, columns)][...] = sums

    def write_lse(lse: Array) -> None:
        outputs.lse.at[at][...] = lse

    @pl.when((warpgroup == LEADER) & (span.tiles > 0))
    def _lead() -> None:
        sums, lse = _lead_tiles(settings, scratch, span)
        write(LEADER, sums)
        write_lse(lse)

    @pl.when((warpgroup == FOLLOWER) & (span.tiles > 0))
    def _follow() -> None:
        for (source, columns), target in zip(_parts(settings), scratch.q, strict=True):
            queries = inputs.q[source].at[row, 0, heads, columns]
            plgpu.copy_gmem_to_smem(queries, target, scratch.q_full)
        write(FOLLOWER, _follow_tiles(settings, inputs, scratch, span, row))

    @pl.when((warpgroup == LEADER) & (span.tiles == 0))
    def _empty() -> None:
        write_lse(_per_head(settings, -jnp.inf))


def _lead_tiles(settings: Settings, scratch: Scratch, span: Span) -> tuple[Array, Array]:
    """The first half of outputs, and LSEs, of a span."""
    start = Seen(_per_head(settings, LOWEST), _per_head(settings, 0.0), _no_sums(settings))
    plgpu.barrier_wait(scratch.q_full)
    seen = lax.fori_loop(
        0, span.tiles, lambda i, seen: _lead_tile(settings, scratch, span, i, seen), start
    )
    plgpu.barrier_wait(scratch.weights_free)
    _publish(scratch, 1 / seen.total)
    sums = seen.sums * _along_columns(1 / seen.total, seen.sums)
    return sums, (seen.shift + jnp.log2(seen.total)) * (1 / LOG2_E)


def _lead_tile(settings: Settings, scratch: Scratch, span: Span, i: Array, seen: Seen) -> Seen:
    """Take tile i of a span into account."""
    stage, first = settings.stage(i), (span.first + i) * settings.plan.rows
    products = _products(settings, scratch, stage)
    live = _live(settings, span, first, products.shape, 1)
    powers = jnp.where(live, exponents(settings, products), LOWEST)
    shift = jnp.maximum(seen.shift, powers.max(axis=1))
    decay = jnp.exp2(seen.shift - shift)
    weights = jnp.where(live, jnp.exp2(powers - _along_columns(shift, powers)), 0.0)
    total = seen.total * decay + weights.sum(axis=1)
    pl.when(i > 0)(lambda: plgpu.barrier_wait(scratch.weights_free))
    scratch.weights[...] = weights.astype(settings.operand)
    _publish(scratch, decay)
    sums = seen.sums * _along_columns(decay, seen.sums)
    sums = _add_values(settings, scratch, span, i, LEADER, sums)
    plgpu.barrier_arrive(scratch.k_free.at[stage])
    return Seen(shift, total, sums)


def _publish(scratch: Scratch, factor: Array) -> None:
    """Give the follower a factor of its sums, and the weights that were stored before."""
    scratch.factor[...] = factor
    # The unit reads weights past the caches.
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.weights_full)


def _products(settings: Settings, scratch: Scratch, stage: Array) -> Array:
    """Products of the queries with a tile's keys, (heads, rows), begun as parts arrive."""

    def parts() -> Iterator[tuple[Any, Any]]:
        for q, keys, full in zip(scratch.q, scratch.k, scratch.k_full, strict=True):
            plgpu.barrier_wait(full.at[stage])
            yield q, keys.at[stage].transpose((1, 0))

    zero = jnp.zeros((settings.plan.heads, settings.plan.rows), jnp.float32)
    return _add(settings, plgpu.layout_cast(zero, RESULT), parts())


def _follow_tiles(
    settings: Settings, inputs: Inputs, scratch: Scratch, span: Span, row: Array
) -> Array:
    """Copy a span's tiles, and give the second half of its outputs."""
    stages = settings.plan.stages

    def shrunk(sums: Array) -> Array:
        plgpu.barrier_wait(scratch.weights_full)
        return sums * _along_columns(plgpu.load(scratch.factor, layout=PER_HEAD), sums)

    def copier(i: Array) -> Callable[[], None]:
        found = places(settings, inputs, span, span.first + i, row, jnp.int32(0))
        return lambda: _copy(settings, inputs, scratch, found, settings.stage(i))

    def follow_tile(i: Array, sums: Array) -> Array:
        # First, so that pages are looked up while weights are waited for.
        copy = copier(i + stages)
        sums = _add_values(settings, scratch, span, i, FOLLOWER, shrunk(sums))
        plgpu.barrier_arrive(scratch.weights_free)
        plgpu.barrier_wait(scratch.k_free.at[settings.stage(i)])
        pl.when(i + stages < span.tiles)(copy)
        return sums

    lax.fori_loop(0, jnp.minimum(span.tiles, stages), lambda i, _: copier(i)(), None)
    return shrunk(lax.fori_loop(0, span.tiles, follow_tile, _no_sums(settings)))


def _copy(
    settings: Settings,
    inputs: Inputs,
    scratch: Scratch,
    places: list[tuple[tuple[Any, ...], Any]],
    stage: Array,
) -> None:
    """Copy a tile from its places to a stage, in the order in which its parts are read."""
    parts = zip(_parts(settings), scratch.k, scratch.k_full, strict=True)
    for (array, columns), tiles, full in parts:
        for source, target in places:
            plgpu.copy_gmem_to_smem(
                inputs.k[array].at[(*source, columns)], tiles.at[stage, target], full.at[stage]
            )


def _add_values(
    settings: Settings, scratch: Scratch, span: Span, i: Array, half: int, sums: Array
) -> Array:
    """Add one half of tile i's weighted values, rows that are not seen being 0.

    A weight of 0 does not silence a dead slot that holds NaN or inf.
    """
    rows, first = settings.plan.rows, (span.first + i) * settings.plan.rows
    values = scratch.k[half].at[settings.stage(i)]

    @pl.when((first + rows > span.n) | (first < span.oldest))
    def _rewrite() -> None:
        live = _live(settings, span, first, (rows, LARGE), 0)
        for column in range(0, values.shape[1], LARGE):
            part = values.at[:, pl.ds(column, LARGE)]
            old = plgpu.load(part, layout=RESULT)
            part[...] = jnp.where(live, old, jnp.zeros((), settings.stored))
        plgpu.commit_smem()

    sums = _add(settings, sums, [(scratch.weights, values)])
    if settings.unit.reads_generic:
        # The warps read the tile: their reads come before the next copy, which goes another way.
        plgpu.commit_smem()
    return sums


def _add(settings: Settings, sums: Array, products: Iterable[tuple[Any, Any]]) -> Array:
    """sums + a @ b of all products; in place where not interpreted, which the registers need."""
    if not isinstance(settings.unit, Wgmma):
        return sum((settings.unit(a, b) for a, b in products), sums)

    def multiply(place: Any) -> None:
        for a, b in products:
            plgpu.wgmma(place, a, b)

    return pl.run_state(multiply)(plgpu.ACC.init(sums))


def _live(settings: Settings, span: Span, first: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Bool, whether the slots along an axis, of a tile that begins at `first`, are seen."""
    slot = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=RESULT)
    live = slot < span.n - first
    return live if settings.window is None else live & (slot >= span.oldest - first)


def _no_sums(settings: Settings) -> Array:
    shape = settings.plan.heads, settings.value_dim // HALVES
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), RESULT)


def _per_head(settings: Settings, value: float) -> Array:
    return plgpu.layout_cast(jnp.full((settings.plan.heads,), value, jnp.float32), PER_HEAD)


def _along_columns(per_head: Array, like: Array) -> Array:
    """(heads,) repeated for every column of `like` (heads, columns)."""
    return lax.broadcast_in_dim(per_head, like.shape, [0])
