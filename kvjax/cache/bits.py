"""Codes of 1, 2, 4 or 8 bits in bytes, 8-bit floats among them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


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


def to_fp8(x: Array, dtype: DTypeLike) -> Array:
    """The nearest 8-bit float; what is too large becomes the largest finite one."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(dtype)


def fp8_bytes(x: Array) -> Array:
    """8-bit floats as the bytes they are.

    XLA on CPU writes to an array of 8-bit floats by way of all of it in float16.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def numbers(codes: Array, dtype: DTypeLike) -> Array:
    """f32 numbers of codes, of integers or of the bytes of 8-bit floats."""
    return jax.lax.bitcast_convert_type(codes, dtype).astype(jnp.float32)


def grouped(x: Array, group: int) -> Array:
    """(..., n) -> (..., ceil(n / group), group), filled up with zeros."""
    padding = -x.shape[-1] % group
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return padded.reshape(*x.shape[:-1], -1, group)


def _shifts(bits: int) -> Array:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)
