"""Caches of factors, as attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.cache.protocol import Block
from kvjax.cache.view import View


@dataclass(frozen=True)
class Factors(View):
    """A cache whose keys and values are factors of those of N heads (TPA, arXiv:2501.06425).

    Its keys are (B, R_K, S, N + H): for each rank a factor over heads and, behind it, one over
    channels, whose products add up to R_K times the keys of all heads. Values (B, R_V, S, N + HV)
    likewise. `ops.attend` scores and weighs them as they lie.
    """

    def read(self, block: Block) -> Block:
        """The block as it is; ValueError where ranks hold tokens of their own."""
        if block.pos.shape[1] > 1:
            raise ValueError(
                f"cache: got one in which each of {block.pos.shape[1]} ranks keeps tokens of its "
                f"own; accepted: all ranks of a token kept, or none"
            )
        return block
