"""Caches of tied keys and values, as attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.cache.protocol import Block
from kvjax.cache.view import View, with_rope_keys


@dataclass(frozen=True)
class Tied(View):
    """A cache whose keys are rope keys (B, 1, S, R) and whose values (B, K, S, H) are keys, too.

    A head's key is the first `width` channels of its value, and behind them the rope key that all
    heads share (GTA, arXiv:2505.21487).
    """

    width: int

    def read(self, block: Block) -> Block:
        """A block as queries see it: k (B, K, C, width + R)."""
        return with_rope_keys(block, self.width)
