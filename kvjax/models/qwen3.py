"""Qwen3: Llama with an RMSNorm of each head's query and key."""

from kvjax.models import llama
from kvjax.models.family import Family, Tensor
from kvjax.nn import DecoderConfig
from kvjax.sizing import ModelSpec

QK_NORMS = tuple(
    Tensor(
        f"model.layers.{{i}}.self_attn.{part}_norm.weight",
        f"layers.{{i}}.attention.{part}_norm.scale",
    )
    for part in "qk"
)


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    return llama.with_attention(llama.decoder(config, spec), qk_norm="head")


FAMILY = Family("qwen3", decoder, (*llama.TENSORS, *QK_NORMS))
