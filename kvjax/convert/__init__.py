"""Conversion of checkpoints: to GQA and MQA by pooling KV heads, back to MHA, and to MLA."""

from kvjax.convert.compare import Comparison
from kvjax.convert.gqa import to_gqa, to_mha
from kvjax.convert.mla import WAYS, Mha2Mla, MlaReport, TransMla, mla_ranks, to_mla
from kvjax.convert.pool import METHODS, check_kv_heads, pool_heads, tensor_rng
from kvjax.convert.report import ConversionReport

__all__ = [
    "METHODS",
    "WAYS",
    "Comparison",
    "ConversionReport",
    "Mha2Mla",
    "MlaReport",
    "TransMla",
    "check_kv_heads",
    "mla_ranks",
    "pool_heads",
    "tensor_rng",
    "to_gqa",
    "to_mha",
    "to_mla",
]
