"""Codecs: how a record is encoded into arrays, and read back.

A codec is a frozen dataclass with `encode(record, scales) -> leaves` and `decode(leaves, scales) ->
(k, v)`, where `leaves` is a dict of arrays whose third axis is the token and `scales` a dict of
constants. Layouts only compute slots, so that every codec works in each of them. Byte arithmetic
and spellings live in `kvjax.sizing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kvjax import sizing
from kvjax.cache.bits import fp8_bytes, grouped, numbers, pack, to_fp8, unpack
from kvjax.cache.protocol import Record
from kvjax.cache.tiled import TiledFp8

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
_FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}

type Leaves = dict[str, Array]


class Codec(Protocol):
    """How records are encoded; hashable, hence static under jit."""

    @property
    def name(self) -> str: ...

    def scales(self, kv_heads: int, value_heads: int) -> Leaves:
        """Constants that encode and decode take; a cache holds them beside its leaves.

        `kv_heads` are those of keys.
        """
        ...

    def encode(self, record: Record, scales: Mapping[str, Array]) -> Leaves:
        """Arrays (B, K, T, ...) of a record's T tokens; each token by itself."""
        ...

    def decode(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> Record:
        """Keys and values, in a float type that products take."""
        ...

    def operands(self, leaves: Leaves, scales: Leaves) -> Leaves | None:
        """Arguments k, v, and scales if any, of `ops.decode_attention`, which then reads the leaves
        in place; None where only `decode` serves.
        """
        ...


@dataclass(frozen=True)
class Cast:
    """Stores keys and values as they are, in a float type wide enough to need no scales."""

    name: str

    def scales(self, kv_heads: int, value_heads: int) -> Leaves:
        return {}

    def encode(self, record: Record, scales: Mapping[str, Array]) -> Leaves:
        return {name: x.astype(DTYPES[self.name]) for name, x in record._asdict().items()}

    def decode(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> Record:
        return Record(leaves["k"], leaves["v"])

    def operands(self, leaves: Leaves, scales: Leaves) -> Leaves:
        return leaves


@dataclass(frozen=True)
class StaticFp8:
    """8-bit floats with one scale for a tensor, or for each KV head.

    A number x is stored as x / scale, clipped to the largest finite one: no input becomes NaN.
    The scales are 1 unless calibrated (`kvjax.engine.calibrate`).

    Attributes:
      format: "fp8_e4m3" or "fp8_e5m2".
      per_head: scales (K,) instead of ().
    """

    name: str
    format: str
    per_head: bool = False

    @property
    def dtype(self) -> DTypeLike:
        """Of the stored numbers."""
        return _FP8[self.format]

    @property
    def largest(self) -> float:
        """The format's largest finite number."""
        return float(jnp.finfo(self.dtype).max)

    def scales(self, kv_heads: int, value_heads: int) -> Leaves:
        heads = {"k_scale": kv_heads, "v_scale": value_heads}
        return {
            name: jnp.ones((many,) if self.per_head else (), jnp.float32)
            for name, many in heads.items()
        }

    def encode(self, record: Record, scales: Mapping[str, Array]) -> Leaves:
        return {
            name: fp8_bytes(to_fp8(x / self._factor(scales, name), self.dtype))
            for name, x in record._asdict().items()
        }

    def decode(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> Record:
        return Record(
            *(numbers(leaves[name], self.dtype) * self._factor(scales, name) for name in ("k", "v"))
        )

    def operands(self, leaves: Leaves, scales: Leaves) -> Leaves:
        return {**_typed(leaves, self.dtype), **scales}

    def _factor(self, scales: Mapping[str, Array], name: str) -> Array:
        scale = scales[f"{name}_scale"]
        return scale[:, None, None] if self.per_head else scale


@dataclass(frozen=True)
class TokenScaled:
    """Codes of 8 bits with one f32 scale for each KV head and token: fp8, or int8 up to 127."""

    name: str
    dtype: DTypeLike
    largest: float

    def scales(self, kv_heads: int, value_heads: int) -> Leaves:
        return {}

    def encode(self, record: Record, scales: Mapping[str, Array]) -> Leaves:
        leaves: Leaves = {}
        for name, x in record._asdict().items():
            wide = x.astype(jnp.float32)
            scale = _scale(wide, self.largest)
            leaves[name] = self._codes(wide / scale[..., None])
            leaves[f"{name}_scale"] = scale
        return leaves

    def decode(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> Record:
        return Record(
            *(
                numbers(leaves[name], self.dtype) * leaves[f"{name}_scale"][..., None]
                for name in ("k", "v")
            )
        )

    def operands(self, leaves: Leaves, scales: Leaves) -> Leaves:
        return {**leaves, **_typed(leaves, self.dtype)}

    def _codes(self, x: Array) -> Array:
        if jnp.issubdtype(self.dtype, jnp.integer):
            return jnp.clip(jnp.round(x), -self.largest, self.largest).astype(self.dtype)
        return fp8_bytes(to_fp8(x, self.dtype))


@dataclass(frozen=True)
class Int4:
    """Codes from -7 to 7, two a byte, with one fp16 scale for `group` channels of a head and token.

    The low nibble is the even channel; an odd number of channels ends in half a byte.
    """

    name: str = "int4"
    group: int = 32
    key_dim: int = 0
    value_dim: int = 0

    def scales(self, kv_heads: int, value_heads: int) -> Leaves:
        return {}

    def encode(self, record: Record, scales: Mapping[str, Array]) -> Leaves:
        leaves: Leaves = {}
        for name, x in record._asdict().items():
            groups = grouped(x.astype(jnp.float32), self.group)
            scale = _half(_scale(groups, 7.0))
            codes = jnp.clip(jnp.round(groups / scale.astype(jnp.float32)[..., None]), -7, 7)
            codes = codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
            leaves[name] = pack_nibbles(codes.astype(jnp.int8))
            leaves[f"{name}_scale"] = scale
        return leaves

    def decode(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> Record:
        parts = []
        for name, dim in (("k", self.key_dim), ("v", self.value_dim)):
            codes = grouped(unpack_nibbles(leaves[name], dim).astype(jnp.float32), self.group)
            values = codes * leaves[f"{name}_scale"].astype(jnp.float32)[..., None]
            parts.append(values.reshape(*values.shape[:-2], -1)[..., :dim])
        return Record(*parts)

    def operands(self, leaves: Leaves, scales: Leaves) -> None:
        return None


def _typed(leaves: Leaves, dtype: DTypeLike) -> Leaves:
    """The codes k and v as what they stand for, of 8-bit floats or integers."""
    return {name: jax.lax.bitcast_convert_type(leaves[name], dtype) for name in ("k", "v")}


def pack_nibbles(codes: Array) -> Array:
    """int8 (..., n) from -8 to 7 -> uint8 (..., ceil(n / 2)); the low nibble is the even one."""
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return pack((padded & 0xF).astype(jnp.uint8), 4)


def unpack_nibbles(packed: Array, n: int) -> Array:
    """The n codes that `pack_nibbles` packed, as int8."""
    # Shifted up and down again, bit 3 becomes the sign.
    return (unpack(packed, 4)[..., :n].astype(jnp.int8) << 4) >> 4


def codecs(key_dim: int = 0, value_dim: int = 0, *, rope_key: bool = False) -> dict[str, Codec]:
    """By name, the codecs that caches of any layout can hold, for heads of these widths.

    `rope_key`: whether keys are rope keys beside latents or tied values; tiled codecs keep those
    wider.
    """
    return {
        **{cast: Cast(cast) for cast in DTYPES},
        **{fp8: StaticFp8(fp8, fp8) for fp8 in _FP8},
        "fp8_e4m3_head": StaticFp8("fp8_e4m3_head", "fp8_e4m3", per_head=True),
        "fp8_e4m3_token": TokenScaled("fp8_e4m3_token", jnp.float8_e4m3fn, 448.0),
        "int8": TokenScaled("int8", jnp.int8, 127.0),
        "int4": Int4(key_dim=key_dim, value_dim=value_dim),
        "fp8_ds_mla": TiledFp8(rope_key=rope_key),
    }


def build_codec(
    name: str, key_dim: int = 0, value_dim: int = 0, *, rope_key: bool = False
) -> Codec:
    """The codec of that name, as `codecs` has it; ValueError for one no cache can hold."""
    canonical = sizing.codec(name).name
    known = codecs(key_dim, value_dim, rope_key=rope_key)
    if canonical not in known:
        raise ValueError(
            f"codec={name!r}: caches can hold {', '.join(known)}; dense and paged ones also kivi2, "
            "kivi4"
        )
    return known[canonical]


def plain_codec(name: str) -> str:
    """The name of a codec that stores numbers as they are; ValueError for any other."""
    canonical = sizing.codec(name).name
    if canonical not in DTYPES:
        raise ValueError(f"codec={name!r}: accepted here are {', '.join(DTYPES)}")
    return canonical


def constants(
    codec: Codec, kv_heads: int, value_heads: int, scales: Mapping[str, Array] | None
) -> Leaves:
    """A codec's own constants, with `scales` in place of those that they name.

    Raises:
      ValueError: for scales that the codec has not, or has in another shape.
    """
    own = codec.scales(kv_heads, value_heads)
    for name, scale in (scales or {}).items():
        if name not in own:
            raise ValueError(
                f"scales: got {name}; accepted with {codec.name}: {', '.join(own) or 'none'}"
            )
        if scale.shape != own[name].shape:
            raise ValueError(
                f"scales: got {name} of shape {list(scale.shape)}; accepted: "
                f"{list(own[name].shape)}"
            )
    return {**own, **(scales or {})}


def empty_leaves(
    codec: Codec,
    batch: int,
    slots: int,
    kv_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> Leaves:
    """A codec's arrays for `slots` slots, all zero."""
    k = jnp.zeros((batch, kv_heads, 1, key_dim))
    v = jnp.zeros((batch, value_heads, 1, value_dim))
    shapes = jax.eval_shape(codec.encode, Record(k, v), codec.scales(kv_heads, value_heads))
    # One buffer a leaf: a buffer shared by two leaves could not be donated.
    return {
        name: jnp.zeros((*leaf.shape[:2], slots, *leaf.shape[3:]), leaf.dtype)
        for name, leaf in shapes.items()
    }


def _scale(x: Array, largest: float) -> Array:
    """What makes the largest number of the last axis `largest`; 1 where all are zero."""
    most = jnp.max(jnp.abs(x), axis=-1)
    return jnp.where(most > 0, most / largest, 1.0)


def _half(scale: Array) -> Array:
    """In fp16, at least its smallest and at most its largest number."""
    limits = jnp.finfo(jnp.float16)
    return jnp.clip(scale, limits.smallest_subnormal, limits.max).astype(jnp.float16)
