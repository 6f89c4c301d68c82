"""Attention over caches and chunks, each function with its reference beside it."""

from kvjax.ops.attend import attend
from kvjax.ops.blockwise import over_slots, slot_positions, sum_over_blocks
from kvjax.ops.decode import decode_attention
from kvjax.ops.latent import latent_decode_attention
from kvjax.ops.mass import attention_mass
from kvjax.ops.merge import merge
from kvjax.ops.prefill import prefill_attention

__all__ = [
    "attend",
    "attention_mass",
    "decode_attention",
    "latent_decode_attention",
    "merge",
    "over_slots",
    "prefill_attention",
    "slot_positions",
    "sum_over_blocks",
]
