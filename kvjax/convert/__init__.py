"""Conversion of checkpoints: MHA to GQA and MQA by pooling KV heads."""

from kvjax.convert.pool import METHODS, check_kv_heads, pool_heads, tensor_rng

__all__ = ["METHODS", "check_kv_heads", "pool_heads", "tensor_rng"]
