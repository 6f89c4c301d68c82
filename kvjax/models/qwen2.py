"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and none on the output projection."""

from kvjax.models import llama
from kvjax.models.family import Family
from kvjax.nn import DecoderConfig
from kvjax.sizing import ModelSpec


def decoder(config: dict, spec: ModelSpec) -> DecoderConfig:
    return llama.with_attention(llama.decoder(config, spec), qkv_bias=True)


FAMILY = Family("qwen2", decoder, llama.TENSORS)
