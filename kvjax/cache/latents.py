"""Caches of latents, as attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from kvjax.cache.layouts import Sight
from kvjax.cache.protocol import Block, LayerCache


@dataclass(frozen=True)
class Latents:
    """A cache whose keys are rope keys (B, 1, S, R) and whose values latents (B, 1, S, L).

    To queries in the latents' space a token's key is its latent and its rope key, side by side, and
    its value the latent (MLA, arXiv:2405.04434). Any cache serves: layouts and codecs see two
    arrays like any other two.
    """

    cache: LayerCache

    @property
    def sight(self) -> Sight:
        """Of the cache."""
        return self.cache.sight

    def blocks(self) -> Array:
        """Of the cache."""
        return self.cache.blocks()

    def first_block(self, oldest: Array) -> Array:
        """Of the cache."""
        return self.cache.first_block(oldest)

    def block(self, i: Array) -> Block:
        """Block i as queries see it: k (B, 1, C, L + R) and v (B, 1, C, L)."""
        return self.read(self.cache.block(i))

    def operands(self) -> dict[str, Array] | None:
        """Arguments of `ops.latent_decode_attention` that read the cache in place, if it can."""
        arrays = self.cache.operands()
        if arrays is None or "k_scale" in arrays:
            return None
        rest = {name: array for name, array in arrays.items() if name not in ("k", "v")}
        return {"latent": arrays["v"][:, 0], "k_rope": arrays["k"][:, 0], **rest}

    @staticmethod
    def read(block: Block) -> Block:
        """A block of rope keys and latents, as queries see it."""
        k, latent = (part.astype(jnp.promote_types(block.k, block.v)) for part in block[:2])
        return Block(jnp.concatenate([latent, k], axis=-1), block.v, block.pos)
