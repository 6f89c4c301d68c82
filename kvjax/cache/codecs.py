"""Codecs: how a record is encoded into arrays, and read back.

A codec is a frozen dataclass with `encode(record) -> leaves` and `decode(leaves) -> (k, v)`, where
`leaves` is a dict of arrays whose third axis is the token. Layouts only compute slots, so that
every codec works in each of them. Byte arithmetic and spellings live in `kvjax.sizing`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax import sizing
from kvjax.cache.protocol import Record

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


@dataclass(frozen=True)
class Cast:
    """Stores keys and values as they are, in a float type wide enough to need no scales."""

    name: str

    def encode(self, record: Record) -> dict[str, Array]:
        return {name: x.astype(DTYPES[self.name]) for name, x in record._asdict().items()}

    def decode(self, leaves: dict[str, Array]) -> tuple[Array, Array]:
        return leaves["k"], leaves["v"]


def build_codec(name: str) -> Cast:
    """The codec of that name; ValueError for one that no cache can hold yet."""
    canonical = sizing.codec(name).name
    if canonical not in DTYPES:
        raise ValueError(f"codec={name!r}: caches can hold {', '.join(DTYPES)}")
    return Cast(canonical)
