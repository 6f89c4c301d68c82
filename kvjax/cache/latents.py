"""Caches of latents, as attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from kvjax.cache.protocol import Block
from kvjax.cache.view import View, with_rope_keys


@dataclass(frozen=True)
class Latents(View):
    """A cache whose keys are rope keys (B, 1, S, R) and whose values latents (B, K, S, L).

    To queries in a latent's space a token's key is its latent and its rope key, side by side, and
    its value the latent (MLA, arXiv:2405.04434, with one latent; GLA, arXiv:2505.21487, with
    several). Any cache serves: layouts and codecs see two arrays like any other two.
    """

    def operands(self) -> dict[str, Array] | None:
        """Arguments of `ops.latent_decode_attention` that read the cache in place, if it can."""
        arrays = self.cache.operands()
        if arrays is None or "k_scale" in arrays or arrays["v"].shape[1] > 1:
            return None
        rest = {name: array for name, array in arrays.items() if name not in ("k", "v")}
        return {"latent": arrays["v"][:, 0], "k_rope": arrays["k"][:, 0], **rest}

    @staticmethod
    def read(block: Block) -> Block:
        """A block of rope keys and latents, as queries see it: k (B, K, C, L + R)."""
        return with_rope_keys(block, block.v.shape[-1])
