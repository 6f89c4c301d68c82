"""Decode attention on GPUs without tensor copies: sm_80, and with less memory sm_86 and sm_89.

A block of one warpgroup takes a stretch of one row's slots for all query heads of one KV head, as
in `decode`: tiles of 64 keys and values, S^T = K Q^T, an online softmax, O^T += V^T P^T, all by
`mma.sync`. The same warps copy (`cp.async`) what comes next into a ring of stages. Keys and values
of a stage are replaced each as soon as they are multiplied, so that all stages but one are always
under way: 64 KiB and more in a multiprocessor for 128 columns in 16 bits, where two blocks have two
stages each.

What follows is counted, or told by the compiler for sm_80; nothing of it is measured.

- Each byte of the live slots' tiles is read from HBM once for each `most_heads` query heads of a
  group (64 of 64 columns, 32 of 128, 16 of 256; further reads find them in L2): a split reads whole
  tiles, up to 63 dead slots at the end of a row among them. Queries are read beside it, and float32
  outputs and LSEs written, which `kvjax.ops` merges.
- The floor is those bytes by the bandwidth of HBM. A multiprocessor's share of an A100's 2,039 GB/s
  (published) is 13.4 bytes a clock: a tile of 128 columns in 16 bits takes 2,450 clocks. For 8
  heads, each of four schedulers issues 219 instructions at most for it (194 for 64 columns, 307 for
  256), 8 barriers among them; 174 more at an edge of what is seen.
- A thread has up to 240 registers, and none is spilled. All copies of rows are 16 bytes wide.

It wins where rows are long and groups small: nothing is repeated for the heads of a group, and
two blocks hide each other's latency. It loses

- for rows of few tiles, whose first copies nothing hides;
- for int8 close to the floor: widening takes 950 instructions a tile of 128 columns, for which HBM
  takes 1,260 clocks;
- for small pages: each is a copy of its own, with a barrier before it; below 16 slots, and beside
  widths that are no multiples of 64, copies may be 8 bytes wide;
- on sm_86 and sm_89 with 256 columns, where one stage has room, and nothing is copied ahead.

Limits:

- Rows have a multiple of 8 slots, and 64 at least. What exceeds them cannot be copied: their last
  tile begins earlier, and what it holds again counts once.
- What is copied at once must have tiles for four warps (`copied_width`): pages of 8 slots serve no
  head dims of 80 or 96, pages of 16 none of 80. A page of 24 is copied as three of 8.
- 8-bit floats need sm_89, whose hardware converts them. int8 is widened to float16 by its bits, as
  the fast conversion to bfloat16 needs sm_90. Scales of tokens are loaded 64 at once: in pages, of
  a multiple of 64 slots. 8-bit caches of 256 columns need the memory of sm_80.
- No latents: of 576 columns only one stage has room beside the queries of 16 heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kvjax.kernels.mosaic_gpu.attending import (
    Softmax,
    add_values,
    clear_unseen,
    nothing_seen,
    token_scales,
    weigh,
    widened,
    write,
    write_nothing,
)
from kvjax.kernels.mosaic_gpu.copying import places
from kvjax.kernels.mosaic_gpu.cp_async import Copies, Counted, CpAsync
from kvjax.kernels.mosaic_gpu.launch import launch
from kvjax.kernels.mosaic_gpu.plan import Limits, Plan
from kvjax.kernels.mosaic_gpu.settings import Inputs, Outputs, Scratch, Settings, Span
from kvjax.kernels.mosaic_gpu.tiles import ROWS, round_up, smem
from kvjax.kernels.mosaic_gpu.units import RESULT

# By compute capability. Registers suffice for two blocks, since threads have 255 at most.
LIMITS = {
    (8, 0): Limits(167_936, sums=4096, pair=8192, pair_of_codes=8192),
    (8, 6): Limits(102_400, sums=4096, pair=8192, pair_of_codes=8192),
    (8, 9): Limits(102_400, sums=4096, pair=8192, pair_of_codes=8192),
}
# A multiple of what is copied at once: 16 bytes by each of 128 threads.
COPIED_BYTES = 2048
# Columns of float32 in a cache line: outputs are written in whole ones.
LINE = 32

# Where slots lie in an array of the cache, and where they go in a stage.
type Place = tuple[tuple[Any, ...], Any]


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
      inputs: q in f16 or bf16; k and v in the same, or beside f16 in int8 or, from sm_89 on, in
        8-bit floats. No latents: v is given.
      plan: of `LIMITS`, with the unit "mma"; q has a multiple of its `heads`.
      scale, soft_cap, window: of the scores, as in `ops.decode_attention`.
      interpret: runs the kernel in Pallas' interpreter for GPUs.
    """
    capacity = inputs.k[0].shape[2]
    if window is None and inputs.page_table is None and capacity % plan.rows:
        # What a last tile holds again, of the one before it, is hidden as if by a window.
        window = capacity
    settings = Settings.of(inputs, plan, interpret is not None, scale, soft_cap, window)
    batch, kv_heads, heads, _ = inputs.q[0].shape

    def block(given: Inputs, outputs: Outputs, scratch: Scratch, counted: Any) -> None:
        copies = CpAsync() if interpret is None else Counted.start(*counted)
        _block(settings, given, outputs, scratch, copies)

    most = plan.stages * sum(_copies_of_tile(settings))
    out, lse = launch(
        block,
        settings,
        inputs,
        [_scratch(settings), () if interpret is None else Counted.scratch(most)],
        {"split": plan.splits, "head": kv_heads * heads // plan.heads, "row": batch},
        columns=round_up(settings.value_dim, LINE),
        interpret=interpret,
    )
    return Outputs(out[..., : settings.value_dim], lse)


def _piece(settings: Settings) -> int:
    """Slots that are copied at once: neither crosses the end of a page, nor of a tile."""
    rows = settings.plan.rows
    return rows if settings.page_size is None else math.gcd(rows, settings.page_size)


def _copies_of_tile(settings: Settings) -> tuple[int, int]:
    """Copies that bring a tile's keys, and its values."""
    pieces = settings.plan.rows // _piece(settings)
    return pieces * len(settings.key_dims), pieces * len(settings.cuts)


def copied_width(rows: int, columns: int, dtype: DTypeLike, start: int = 0) -> int | None:
    """Columns of a swizzle that lets so many rows, and columns from `start` on, be copied at once.

    Tiles of 8 rows by a swizzle are dealt out to four warps, in twos or fours along rows and
    columns. None if no swizzle gives a number of tiles that can be, or threads would have less than
    16 bytes each.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if rows * columns * itemsize % COPIED_BYTES:
        return None
    for width in (128 // itemsize, 64 // itemsize, 32 // itemsize):
        down, across = rows // ROWS, columns // width
        dealt = down % 4 == 0 or across % 4 == 0 or (down % 2 == 0 and across % 2 == 0)
        if dealt and columns % width == 0 and start % width == 0:
            return width
    return None


def _scratch(settings: Settings) -> Scratch:
    """What a block allocates: that of other GPUs less what only tensor copies need."""
    stages, rows, piece = settings.plan.stages, settings.plan.rows, _piece(settings)

    def tiles(start: int, columns: int) -> Any:
        width = copied_width(piece, columns, settings.stored, start)
        assert width is not None, (piece, columns)
        return smem((stages, rows, columns), settings.stored, width)

    return settings.scratch()._replace(
        k=tuple(tiles(0, dim) for dim in settings.key_dims),
        v=tuple(tiles(*cut) for cut in settings.cuts),
        k_scale=None,
        v_scale=None,
        weights=smem((settings.plan.heads, rows), settings.operand),
        out=None,
        q_full=None,
        k_full=None,
        v_full=None,
        k_free=None,
        v_free=None,
    )


def _block(
    settings: Settings, inputs: Inputs, outputs: Outputs, scratch: Scratch, copies: Copies
) -> None:
    """One split of one row, for one KV head's queries or some of them."""
    many = settings.plan.heads
    split, head, row = (lax.axis_index(name) for name in ("split", "head", "row"))
    parts = jnp.int32(inputs.q[0].shape[2] // many)
    kv_head, heads = lax.div(head, parts), pl.ds(lax.rem(head, parts) * many, many)
    span = settings.span(inputs, row, kv_head, split)
    out, lse = (array.at[split, row, kv_head, heads] for array in outputs)
    # The output goes to memory as it is; so few numbers as the LSEs only one by one.
    written = Outputs(out, scratch.lse)

    @pl.when(span.tiles > 0)
    def _live() -> None:
        factor = None if inputs.key_factor is None else inputs.key_factor[kv_head]
        ring = _Ring(settings, inputs, scratch, copies, span, row, kv_head, factor)
        for i in range(settings.plan.stages):
            pl.when(i < span.tiles)(partial(ring.fill, jnp.int32(i)))
        for source, target in zip(inputs.q, scratch.q, strict=True):
            # Too few tiles to be copied as those of the cache are.
            target.transpose((1, 0))[...] = plgpu.load(
                source.at[row, kv_head, heads].transpose((1, 0)),
                layout=plgpu.Layout.MMA_RHS(settings.operand),
                optimized=False,
            )
        seen = lax.fori_loop(0, span.tiles, ring.attend, nothing_seen(settings))
        write(settings, seen, written)

    pl.when(span.tiles == 0)(lambda: write_nothing(settings, written))

    def write_lse(i: Array, _: None) -> None:
        lse[i] = scratch.lse[i]

    lax.fori_loop(0, many, write_lse, None)


@dataclass(frozen=True)
class _Ring:
    """A span's tiles on their way through the stages of a block.

    Keys and values go separate ways: as soon as a stage's keys are multiplied, those that come next
    in it are copied, while its values wait for the weights.
    """

    settings: Settings
    inputs: Inputs
    scratch: Scratch
    copies: Copies
    span: Span
    row: Array
    kv_head: Array
    factor: Array | None

    def fill(self, i: Array) -> None:
        """Begin to copy the span's tile i, into a stage that nothing reads."""
        stage, places = self.settings.stage(i), self._places(i)
        self._copy_keys(stage, places)
        self._copy_values(stage, places)

    def attend(self, i: Array, seen: Softmax) -> Softmax:
        """Take tile i into account, and fill its stage with the next that belongs there."""
        settings, scratch = self.settings, self.scratch
        stages, stage = settings.plan.stages, settings.stage(i)
        first, tile = self._first(i), self._seen_of(i)
        # Now, so that pages are looked up and scales loaded while others are waited for.
        places, held = self._places(i + stages), self._token_scales(i)
        later = self.span.tiles - 1 - i
        # Copies that follow on this tile's keys: its values, and later tiles. On its values: these,
        # and the keys that meanwhile come next in this stage.
        k, v = _copies_of_tile(settings)

        self._wait(later, [n * (k + v) + v for n in range(stages)])
        products = self._products(stage)
        pl.when(later >= stages)(partial(self._copy_keys, stage, places))
        scales = None if held is None else token_scales(*held, products)
        seen = weigh(settings, scratch, tile, first, seen, products, scales, self.factor)

        self._wait(later, [n * (k + v) for n in range(stages)] + [(stages - 1) * (k + v) + k])
        values: Sequence[Any] = [part.at[stage] for part in scratch.v]
        clear = partial(clear_unseen, settings, tile, first, values)
        if settings.coded:
            clear(scratch.wide_v)
            values = scratch.wide_v
        else:
            at_edge = (first + settings.plan.rows > tile.n) | (first < tile.oldest)
            pl.when(at_edge)(partial(clear, values))
        seen = add_values(settings, scratch, seen, values)
        pl.when(later >= stages)(partial(self._copy_values, stage, places))
        return seen

    def _wait(self, later: Array, ahead: Sequence[int]) -> None:
        """Wait for all but the last `ahead[n]` copies, where n tiles come later, or more."""
        for n, many in enumerate(ahead):
            here = later == n if n < len(ahead) - 1 else later >= n
            pl.when(here)(partial(self.copies.wait, many))

    def _products(self, stage: Array) -> Array:
        """Products of a tile's keys with the queries, (rows, heads)."""
        keys: Sequence[Any] = [part.at[stage] for part in self.scratch.k]
        if self.settings.coded:
            for part, wide in zip(keys, self.scratch.wide_k, strict=True):
                wide[...] = widened(self.settings, part)
            keys = self.scratch.wide_k
        products = [
            self.settings.unit(part, q.transpose((1, 0)))
            for part, q in zip(keys, self.scratch.q, strict=True)
        ]
        return sum(products[1:], products[0])

    def _first(self, i: Array) -> Array:
        """The slot at which tile i begins: earlier than its own where it would exceed the row."""
        rows, capacity = self.settings.plan.rows, self.inputs.k[0].shape[2]
        first = (self.span.first + i) * rows
        overhangs = self.settings.page_size is None and capacity % rows
        return jnp.minimum(first, capacity - rows) if overhangs else first

    def _seen_of(self, i: Array) -> Span:
        """The span, of which only slots from tile i on are seen."""
        own = (self.span.first + i) * self.settings.plan.rows
        return self.span._replace(oldest=jnp.maximum(self.span.oldest, own))

    def _places(self, i: Array) -> list[Place]:
        settings, rows = self.settings, self.settings.plan.rows
        if settings.page_size is None:
            return [((self.row, self.kv_head, pl.ds(self._first(i), rows)), pl.ds(0, rows))]
        tile = self.span.first + i
        return places(settings, self.inputs, self.span, tile, self.row, self.kv_head)

    def _token_scales(self, i: Array) -> tuple[Array, Array] | None:
        """Scales of tile i's keys and values, (rows,) each; None if tokens have none."""
        if not self.settings.token_scales:
            return None
        # So few bytes are copied by no warpgroup.
        [(source, _)] = self._places(i)
        key, value = (
            plgpu.load(scales.at[source], layout=RESULT.reduce(1), optimized=False)
            for scales in (self.inputs.k_scale, self.inputs.v_scale)
        )
        return key, value

    def _copy_keys(self, stage: Array, places: Sequence[Place]) -> None:
        for source, target in places:
            for array, tiles in zip(self.inputs.k, self.scratch.k, strict=True):
                self.copies.begin(array.at[source], tiles.at[stage, target])

    def _copy_values(self, stage: Array, places: Sequence[Place]) -> None:
        for source, target in places:
            for (column, many), tiles in zip(self.settings.cuts, self.scratch.v, strict=True):
                columns = self.inputs.v.at[(*source, pl.ds(column, many))]
                self.copies.begin(columns, tiles.at[stage, target])
