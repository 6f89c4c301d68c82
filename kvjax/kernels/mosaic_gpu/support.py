"""Which calls the kernels serve, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.kernels.mosaic_gpu.ampere import LIMITS, copied_width
from kvjax.kernels.mosaic_gpu.plan import BLACKWELL, TENSOR_COPIES, Limits, UnitName
from kvjax.kernels.mosaic_gpu.tiles import LARGE, ROWS, swizzle, value_cuts

# 8-bit types, with the type that they are widened to: what the hardware converts in one step.
CODES = {
    jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.float16),
    jnp.dtype(jnp.float8_e5m2): jnp.dtype(jnp.float16),
    jnp.dtype(jnp.int8): jnp.dtype(jnp.bfloat16),
}
NUMBERS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
WIDEST = 256
# Where the first part of the keys is the values, too.
WIDEST_SHARED = 512


def unit_of(capability: tuple[int, int]) -> UnitName | None:
    """What multiplies on a GPU of that compute capability; None where no kernel runs."""
    if capability == (9, 0):
        return "wgmma"
    # sm_120 has tensor copies, too, but less shared memory than the plans take.
    return "mma" if capability[0] == 10 or capability in LIMITS else None


def limits_of(capability: tuple[int, int]) -> Limits:
    """What plans for a GPU of that compute capability keep to."""
    return LIMITS.get(capability, BLACKWELL if capability[0] == 10 else TENSOR_COPIES)


def operand_type(
    capability: tuple[int, int], query: DTypeLike, stored: DTypeLike
) -> jnp.dtype | None:
    """The dtype in which products run; None where none of the units' serves."""
    query, stored = jnp.dtype(query), jnp.dtype(stored)
    if query not in NUMBERS:
        return None
    if capability < (8, 9) and stored in CODES and stored != jnp.int8:
        return None
    if capability < (9, 0) and stored == jnp.int8:
        return jnp.dtype(jnp.float16)
    return CODES.get(stored, query if query == stored else None)


def obstacle(
    capability: tuple[int, int],
    query: DTypeLike,
    stored: DTypeLike,
    key_dims: Sequence[int],
    value_dim: int | None,
    slots: int,
    page_size: int | None,
    token_scales: bool,
) -> str | None:
    """Why no kernel serves a call; None if one does.

    Args:
      capability: of the GPU.
      query, stored: dtypes of queries, and of keys and values.
      key_dims: widths of the parts of keys.
      value_dim: HV; None where the first part of the keys is the values, too.
      slots: S of rows of slots; any number beside a page_size.
      page_size: P, or None.
      token_scales: whether each token has scales of its own.
    """
    if unit_of(capability) is None:
        major, minor = capability
        return (
            f"its kernels are for compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 10.3, "
            f"not {major}.{minor}"
        )
    if jnp.dtype(query) not in NUMBERS:
        return f"it takes q in bf16 or f16, not in {jnp.dtype(query)}"
    if operand_type(capability, query, stored) is None:
        kinds = [kind for kind in (*NUMBERS, *CODES) if operand_type(capability, query, kind)]
        return (
            f"beside q in {jnp.dtype(query)} it takes k and v in {', '.join(map(str, kinds))} on "
            f"this GPU, not in {jnp.dtype(stored)}"
        )
    general = _width_obstacle(jnp.dtype(stored).itemsize, key_dims, value_dim) or _slot_obstacle(
        slots, page_size
    )
    if general is not None or capability not in LIMITS:
        return general
    return _ampere_obstacle(
        capability, jnp.dtype(stored), key_dims, value_dim, slots, page_size, token_scales
    )


def _ampere_obstacle(
    capability: tuple[int, int],
    stored: jnp.dtype,
    key_dims: Sequence[int],
    value_dim: int | None,
    slots: int,
    page_size: int | None,
    token_scales: bool,
) -> str | None:
    if value_dim is None:
        return "it takes no latents before compute capability 9.0"
    if stored.itemsize == 1 and capability != (8, 0) and max(*key_dims, value_dim) > 192:
        return "its memory has no room for 8-bit caches beyond 192 columns"
    if page_size is None:
        return None if slots >= LARGE else f"it takes rows of {LARGE} slots and more, not {slots}"
    if token_scales and page_size % LARGE:
        return f"scales of tokens need pages in multiples of {LARGE} slots, not of {page_size}"
    rows = math.gcd(page_size, LARGE)
    parts = [(0, dim) for dim in key_dims] + list(value_cuts(value_dim))
    if any(copied_width(rows, many, stored, start) is None for start, many in parts):
        return f"pages of {page_size} slots are too small for head dims {[*key_dims, value_dim]}"
    return None


def _width_obstacle(itemsize: int, key_dims: Sequence[int], value_dim: int | None) -> str | None:
    widths = [*key_dims] if value_dim is None else [*key_dims, value_dim]
    most = WIDEST if value_dim is not None else WIDEST_SHARED
    multiple = 32 // itemsize
    if any(swizzle(width * itemsize) is None or width > most for width in widths):
        return f"it takes head dims in multiples of {multiple} up to {most}, not {widths}"
    if (key_dims[0] if value_dim is None else value_dim) < LARGE:
        return f"it takes values of {LARGE} columns and more, not {value_dim}"
    return None


def _slot_obstacle(slots: int, page_size: int | None) -> str | None:
    if page_size is not None:
        if page_size % ROWS:
            return f"it takes pages in multiples of {ROWS} slots, not of {page_size}"
    elif slots % ROWS:
        return f"it takes capacities in multiples of {ROWS} slots, not {slots}"
    return None
