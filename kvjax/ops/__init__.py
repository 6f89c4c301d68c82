"""Attention over caches and chunks in plain JAX, each function with its reference beside it."""

from kvjax.ops.attend import attend
from kvjax.ops.decode import decode_attention
from kvjax.ops.merge import merge
from kvjax.ops.prefill import prefill_attention

__all__ = ["attend", "decode_attention", "merge", "prefill_attention"]
