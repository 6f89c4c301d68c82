"""Tiles in shared memory, as the matrix units and the copy engine (TMA) both take them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

# Rows of the smaller operand of a product, and rows that a swizzle repeats over.
ROWS = 8
# Rows of the larger operand that a warpgroup multiplies at once.
LARGE = 64


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def swizzle(row_bytes: int) -> int | None:
    """The widest swizzle, in bytes, that a row of so many bytes is made of; None for none."""
    return next((width for width in (128, 64, 32) if row_bytes % width == 0), None)


def column_step(dtype: DTypeLike, row: int) -> int:
    """Columns that are read at a time of tiles with rows of `row` elements: whole swizzles."""
    itemsize = jnp.dtype(dtype).itemsize
    return max(LARGE, (swizzle(row * itemsize) or 0) // itemsize)


def transforms(dtype: DTypeLike, row: int) -> tuple[Any, Any]:
    """How an array with rows of `row` elements lies in shared memory.

    Both operands of a product need the same: `row` may be that of the other one.
    """
    itemsize = jnp.dtype(dtype).itemsize
    width = swizzle(row * itemsize)
    assert width is not None, (dtype, row)
    # Any, since mypy takes both classes for abstract.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((ROWS, width // itemsize)), swizzling(width)


def smem(shape: tuple[int, ...], dtype: DTypeLike, row: int | None = None) -> Any:
    """Scratch of that shape in shared memory, tiled for rows of `row` elements, or of its own."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(dtype, row or shape[-1]))


def value_cuts(value_dim: int) -> tuple[tuple[int, int], ...]:
    """Columns (first, many) in which values are loaded.

    The values' columns are the larger operand's rows, which come in multiples of 64. What is left
    beyond them is loaded as the last 64, some of them a second time: from L2, since both copies
    follow each other.
    """
    whole = value_dim // LARGE * LARGE
    rest = ((value_dim - LARGE, LARGE),) if value_dim % LARGE else ()
    return ((0, whole), *rest)
