"""How a decode kernel divides its work: heads of a block, tiles in flight, splits of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.kernels.mosaic_gpu.tiles import LARGE, ROWS, round_up, value_cuts

type UnitName = Literal["wgmma", "mma"]

# Shared memory of a multiprocessor (sm_90, sm_100), and what the system takes for each block.
SHARED_BYTES = 233_472
SYSTEM_BYTES = 1_024
# What barriers and sums over rows take beside arrays, each of which begins at such a multiple.
SPARE_BYTES = 2_304
ALIGNMENT = 1_024
# More tiles in flight than this hide no more latency.
MOST_STAGES = 6
# Time of filling the stages, in tiles.
FILL_COST = 4


@dataclass(frozen=True)
class Plan:
    """Static choices of one call; hashable.

    Attributes:
      unit: what multiplies, of `units.UNITS`.
      heads: query heads of a block, filled up to a multiple of 8.
      splits: parts of each row, taken by blocks of their own and merged afterwards.
      stages: tiles in flight.
      residents: blocks meant to share a multiprocessor.
      rows: cache slots of a tile.
    """

    unit: UnitName
    heads: int
    splits: int
    stages: int
    residents: int = 1
    rows: int = LARGE


@dataclass(frozen=True)
class Shape:
    """What a plan depends on.

    Attributes:
      batch, kv_heads, group: B, K and G.
      key_dims: widths of the parts of keys; one but for latents.
      value_dim: HV; 0 where the first part of the keys is the values, too.
      slots: the most of a row that may have to be read: its capacity, or its window.
      operand: dtype of queries and weights, in which products run.
      stored: dtype of keys and values.
      token_scales: whether each token has scales of its own.
    """

    batch: int
    kv_heads: int
    group: int
    key_dims: tuple[int, ...]
    value_dim: int
    slots: int
    operand: DTypeLike
    stored: DTypeLike
    token_scales: bool = False

    @property
    def widest(self) -> int:
        """Columns of values that are summed up, or of keys in 8 bits that are held."""
        return max(self.value_dim, *self.key_dims)

    @property
    def coded(self) -> bool:
        """Whether keys and values are 8-bit codes."""
        return jnp.dtype(self.stored).itemsize == 1


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has for blocks of a kernel.

    Attributes:
      shared_bytes: its shared memory.
      sums: heads times columns of values, of a block, for which its registers suffice.
      pair: heads times columns of values and slots of a tile, of each of two blocks.
      pair_of_codes: the same, of 8-bit caches.
      heads: of a block, at most.
    """

    shared_bytes: int
    sums: int
    pair: int
    pair_of_codes: int
    heads: int = 64


TENSOR_COPIES = Limits(SHARED_BYTES, sums=8192, pair=3072, pair_of_codes=2560)
# With `mma`, operands take registers, too.
BLACKWELL = Limits(SHARED_BYTES, sums=8192, pair=2560, pair_of_codes=2560, heads=32)


def make_plan(
    shape: Shape, unit: UnitName, multiprocessors: int, limits: Limits = TENSOR_COPIES
) -> Plan:
    """The plan for a GPU with so many multiprocessors."""
    parts = -(-shape.group // most_heads(shape, limits))
    heads = round_up(-(-shape.group // parts), ROWS)
    # Two blocks hide each other's latency, where registers and shared memory suffice for both.
    residents = 2 if two_fit(shape, heads, limits) else 1
    stages = most_stages(shape, unit, heads, residents, limits)
    if stages < 2 and residents == 2:
        residents, stages = 1, most_stages(shape, unit, heads, 1, limits)
    blocks = shape.batch * shape.kv_heads * parts
    tiles, places = -(-shape.slots // LARGE), residents * multiprocessors
    splits = choose_splits(blocks, tiles, places, split_cost(shape, heads))
    return Plan(unit, heads, splits, stages, residents)


def make_latent_plan(shape: Shape, multiprocessors: int) -> Plan | None:
    """The plan of `latent.decode` on sm_90; None where `decode` serves better, or alone.

    Its blocks have 64 heads, and each of two warpgroups sums up half of a latent's columns.
    """
    latent = shape.key_dims[0]
    latents = shape.kv_heads == 1 and len(shape.key_dims) == 2 and not shape.value_dim
    fits = latents and not shape.coded and latent % (2 * LARGE) == 0 and latent <= 512
    if not fits or shape.group <= most_heads(shape, TENSOR_COPIES):
        return None
    itemsize = jnp.dtype(shape.stored).itemsize
    stage = LARGE * sum(shape.key_dims) * itemsize
    fixed = stage + LARGE * (LARGE * itemsize + 4)
    stages = min((SHARED_BYTES - SYSTEM_BYTES - SPARE_BYTES - fixed) // stage, MOST_STAGES)
    blocks, tiles = shape.batch * -(-shape.group // LARGE), -(-shape.slots // LARGE)
    splits = choose_splits(blocks, tiles, multiprocessors, split_cost(shape, LARGE))
    return None if stages < 2 else Plan("wgmma", LARGE, splits, stages)


def most_heads(shape: Shape, limits: Limits) -> int:
    """Query heads of a block for which sums and scores fit into registers."""
    most = (n for n in (64, 32, 16) if n <= limits.heads and n * shape.widest <= limits.sums)
    return next(most, ROWS)


def two_fit(shape: Shape, heads: int, limits: Limits) -> bool:
    """Whether the registers of a multiprocessor suffice for two blocks."""
    most = limits.pair_of_codes if shape.coded else limits.pair
    return shape.widest <= 256 >> shape.coded and heads * (shape.widest + LARGE) <= most


def most_stages(shape: Shape, unit: UnitName, heads: int, residents: int, limits: Limits) -> int:
    """Tiles that fit into shared memory beside everything else."""
    fixed, stage = shared_bytes(shape, unit, heads)
    room = limits.shared_bytes // residents - SYSTEM_BYTES - SPARE_BYTES
    return min((room - fixed) // stage, MOST_STAGES)


def shared_bytes(shape: Shape, unit: UnitName, heads: int) -> tuple[int, int]:
    """Bytes of shared memory that a block takes once, and for each of its stages."""
    operand, stored = (jnp.dtype(dtype).itemsize for dtype in (shape.operand, shape.stored))
    keys, values = shape.key_dims, shape.value_dim or shape.key_dims[0]
    cuts = [many for _, many in value_cuts(shape.value_dim)] if shape.value_dim else []
    once = [heads * dim * operand for dim in (*keys, LARGE)] + [heads * values * 4, heads * 4]
    if shape.coded:
        widened = cuts + (list(keys) if unit == "mma" else [])
        once += [LARGE * columns * operand for columns in widened]
    # Each array begins at a multiple; stages of keys and values are multiples themselves.
    fixed = sum(round_up(array, ALIGNMENT) for array in once)
    scales = 2 * LARGE * 4 * shape.token_scales
    fixed += 2 * (ALIGNMENT - LARGE * 4) * shape.token_scales
    return fixed, LARGE * (sum(keys) + sum(cuts)) * stored + scales


def split_cost(shape: Shape, heads: int) -> int:
    """Time of a split beside that of its tiles, in tiles.

    The stages have to be filled; and its part is written, and read again to be merged.
    """
    part = 2 * heads * (shape.value_dim or shape.key_dims[0]) * 4
    stored = jnp.dtype(shape.stored).itemsize
    return FILL_COST + part // (LARGE * (sum(shape.key_dims) + shape.value_dim) * stored)


def choose_splits(pairs: int, tiles: int, places: int, cost: int) -> int:
    """Parts into which each of `pairs` rows of `tiles` tiles is split, on `places` blocks at once.

    Time goes in waves of blocks, each as long as a split takes, `cost` more than its tiles; of
    equally fast ones, the fewest.
    """

    def time(splits: int) -> int:
        waves = -(-pairs * splits // places)
        return waves * (-(-tiles // splits) + cost)

    # Beyond four waves, more splits only cost more.
    most = max(1, min(tiles, -(-4 * places // pairs)))
    return min(range(1, most + 1), key=time)
