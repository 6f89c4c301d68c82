"""Codes of 1, 2, 4 or 8 bits in bytes."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def pack(codes: Array, bits: int) -> Array:
    """uint8 (..., n) below 2**bits -> uint8 (..., n * bits / 8), which must be whole.

    The first code of a byte is in its lowest bits.
    """
    a_byte = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, a_byte) << _shifts(bits)
    return jnp.bitwise_or.reduce(parts, axis=-1)


def unpack(packed: Array, bits: int) -> Array:
    """The codes (..., n * 8 / bits) of bytes (..., n), as uint8."""
    parts = (packed[..., None] >> _shifts(bits)) & jnp.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _shifts(bits: int) -> Array:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)
