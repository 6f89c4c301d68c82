"""Tiles of channels in 8-bit floats, as FlashMLA packs latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.cache.bits import fp8_bytes, grouped, numbers, to_fp8
from kvjax.cache.protocol import Record

# 448, the largest number of e4m3, is 0.875 * 2**9.
_DTYPE, _LARGEST, _EXPONENT = jnp.float8_e4m3fn, 0.875, 9


@dataclass(frozen=True)
class TiledFp8:
    """Codes in e4m3 with one f32 scale, a power of two, for `tile` channels of a head and token.

    scale = 2 ** ceil(log2(amax / 448)), so that scaling rounds nothing and no code overflows. A
    latent and its rope key take the 656 bytes of FlashMLA at 512 + 64 channels, here as arrays of
    codes, of scales and of rope keys, where FlashMLA has a row of bytes.

    Attributes:
      tile: channels that share a scale; the last tile of a head may be short.
      rope_key: whether keys are rope keys beside latents or tied values; those stay in bf16.
    """

    name: str = "fp8_ds_mla"
    tile: int = 128
    rope_key: bool = False

    def scales(self, kv_heads: int, value_heads: int) -> dict[str, Array]:
        return {}

    def encode(self, record: Record, scales: Mapping[str, Array]) -> dict[str, Array]:
        leaves = {"k": record.k.astype(jnp.bfloat16)} if self.rope_key else {}
        for name in self._tiled:
            x = getattr(record, name)
            tiles = grouped(x.astype(jnp.float32), self.tile)
            scale = _power_of_two(jnp.max(jnp.abs(tiles), axis=-1))
            codes = to_fp8(tiles / scale[..., None], _DTYPE).reshape(*x.shape[:-1], -1)
            leaves[name] = fp8_bytes(codes[..., : x.shape[-1]])
            leaves[f"{name}_scale"] = scale
        return leaves

    def decode(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> Record:
        parts = {"k": leaves["k"]}
        for name in self._tiled:
            codes = leaves[name]
            tiles = grouped(numbers(codes, _DTYPE), self.tile) * leaves[f"{name}_scale"][..., None]
            parts[name] = tiles.reshape(*codes.shape[:-1], -1)[..., : codes.shape[-1]]
        return Record(**parts)

    def operands(self, leaves: Mapping[str, Array], scales: Mapping[str, Array]) -> None:
        return None

    @property
    def _tiled(self) -> tuple[str, ...]:
        return ("v",) if self.rope_key else ("k", "v")


def _power_of_two(most: Array) -> Array:
    """The least power of two that makes `most`, 0 or more, at most 448; 1 for zero.

    What is not finite stays, so that its tile is not either.
    """
    mantissa, exponent = jnp.frexp(most)
    exponent = exponent - _EXPONENT + (mantissa > _LARGEST)
    # Smaller scales would not be normal numbers, and a larger one times 448 would not be finite.
    limits = jnp.finfo(jnp.float32)
    exponent = jnp.clip(exponent, limits.minexp, limits.maxexp - _EXPONENT)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    return jnp.select([most == 0, jnp.isfinite(most)], [jnp.ones_like(most), scale], most)
