"""Families in which every layer attends to all keys with K and V of one width."""

from dataclasses import replace

from kvjax.sizing.config import Count
from kvjax.sizing.families.family import GPT_NAMES, Family, sizes

_GPT2 = Family(sizes(768, 12, 12, GPT_NAMES), kv_heads=None, head_dim=None)
_GPT_NEOX = Family(sizes(6144, 44, 64), kv_heads=None, head_dim=None)

FAMILIES = {
    "gemma": Family(
        sizes(3072, 28, 16),
        kv_heads=Count("num_key_value_heads", absent=16),
        head_dim=Count("head_dim", absent=256),
    ),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    # Checkpoints of the two families above after their KV heads were pooled, which transformers'
    # own classes cannot express.
    "kvjax_gpt2": replace(_GPT2, kv_heads=Count("num_key_value_heads")),
    "kvjax_gpt_neox": replace(_GPT_NEOX, kv_heads=Count("num_key_value_heads")),
    "llama": Family(sizes(4096, 32, 32)),
    "olmo2": Family(sizes(4096, 32, 32)),
}
