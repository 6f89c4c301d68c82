"""Conversion of checkpoints: MHA to GQA and MQA by pooling KV heads, and back to MHA."""

from kvjax.convert.compare import Comparison
from kvjax.convert.gqa import to_gqa, to_mha
from kvjax.convert.pool import METHODS, check_kv_heads, pool_heads, tensor_rng
from kvjax.convert.report import ConversionReport

__all__ = [
    "METHODS",
    "Comparison",
    "ConversionReport",
    "check_kv_heads",
    "pool_heads",
    "tensor_rng",
    "to_gqa",
    "to_mha",
]
